// The step of the first convolution. A workgroup has one row of its taps, the first one its bias too; 64
// invocations part the places of all images, and their sums meet in shared memory, in one order.

struct Settings { rate: f32, momentum: f32, units: f32 }

const PLACES = 144u;
const SIDE = 12u;
const ROW = 28u;
const TAPS = 5u;
const SHARE = 64u;
const SUMS = 12u; // vectors of an invocation: five taps of two, and the bias
const OF_BIAS = 50u; // where the bias's velocity begins

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> images: array<f32>;
@group(0) @binding(2) var<storage, read> first_error: array<vec4<f32>>; // [units][144][2]
@group(0) @binding(3) var<storage, read> chosen: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read_write> weight: array<vec4<f32>>; // [5][5][2]
@group(0) @binding(5) var<storage, read_write> bias: array<vec4<f32>>;
@group(0) @binding(6) var<storage, read_write> velocity: array<vec4<f32>>;

var<workgroup> parts: array<vec4<f32>, 768>; // [SHARE][SUMS]

fn descent(at: u32, sum: vec4<f32>) -> vec4<f32> {
  let speed = settings.momentum * velocity[at] + sum / settings.units;
  velocity[at] = speed;
  return settings.rate * speed;
}

// The pixels under one tap of four channels' windows.
fn pixels(windows: vec4<u32>, across: u32) -> vec4<f32> {
  let at = windows + across;
  return vec4<f32>(images[at.x], images[at.y], images[at.z], images[at.w]);
}

@compute @workgroup_size(64)
fn descend_first(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) mine: u32) {
  let down = group.x;
  let all = u32(settings.units) * PLACES;
  var l0 = vec4<f32>(); var r0 = vec4<f32>();
  var l1 = vec4<f32>(); var r1 = vec4<f32>();
  var l2 = vec4<f32>(); var r2 = vec4<f32>();
  var l3 = vec4<f32>(); var r3 = vec4<f32>();
  var l4 = vec4<f32>(); var r4 = vec4<f32>();
  var lb = vec4<f32>(); var rb = vec4<f32>();
  for (var i = mine; i < all; i += SHARE) {
    let place = i % PLACES;
    let corner = i / PLACES * ROW * ROW + (place / SIDE * 2u + down) * ROW + place % SIDE * 2u;
    let l = first_error[i * 2u];
    let r = first_error[i * 2u + 1u];
    let left = corner + (chosen[i * 2u] & vec4<u32>(1u)) + (chosen[i * 2u] >> vec4<u32>(1u)) * ROW;
    let right = corner + (chosen[i * 2u + 1u] & vec4<u32>(1u)) + (chosen[i * 2u + 1u] >> vec4<u32>(1u)) * ROW;
    l0 += l * pixels(left, 0u); r0 += r * pixels(right, 0u);
    l1 += l * pixels(left, 1u); r1 += r * pixels(right, 1u);
    l2 += l * pixels(left, 2u); r2 += r * pixels(right, 2u);
    l3 += l * pixels(left, 3u); r3 += r * pixels(right, 3u);
    l4 += l * pixels(left, 4u); r4 += r * pixels(right, 4u);
    lb += l; rb += r;
  }
  let at = mine * SUMS;
  parts[at] = l0; parts[at + 1u] = r0;
  parts[at + 2u] = l1; parts[at + 3u] = r1;
  parts[at + 4u] = l2; parts[at + 5u] = r2;
  parts[at + 6u] = l3; parts[at + 7u] = r3;
  parts[at + 8u] = l4; parts[at + 9u] = r4;
  parts[at + 10u] = lb; parts[at + 11u] = rb;
  workgroupBarrier();
  if (mine >= SUMS) {
    return;
  }
  var sum = vec4<f32>();
  for (var s = 0u; s < SHARE; s++) {
    sum += parts[s * SUMS + mine];
  }
  if (mine < 2u * TAPS) {
    let vector = down * TAPS * 2u + mine;
    weight[vector] -= descent(vector, sum);
  } else if (down == 0u) {
    bias[mine - 10u] -= descent(OF_BIAS + mine - 10u, sum);
  }
}
