// The step of the second convolution. A workgroup has one tap (the last one the bias): 4 vectors of channels out,
// 8 channels in, and 16 invocations that part the images; their sums meet in shared memory, in one order.

struct Settings { rate: f32, momentum: f32, units: f32 }

const TAPS = 5u;
const SUMS = 8u; // rows and columns of the convolution's sums
const SUM4 = 256u; // vectors of one image in `spread`
const INPUTS = 288u; // vectors of one image in `first`
const ROW = 24u;
const SHARE = 16u;
const BIAS = 25u; // the workgroup that has it
const OF_BIAS = 800u; // where its velocity begins

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> first: array<vec4<f32>>; // [units][144][2]
@group(0) @binding(2) var<storage, read> spread: array<vec4<f32>>; // [units][8][8][4]
@group(0) @binding(3) var<storage, read_write> weight: array<vec4<f32>>; // [5][5][8][4]
@group(0) @binding(4) var<storage, read_write> bias: array<vec4<f32>>;
@group(0) @binding(5) var<storage, read_write> velocity: array<vec4<f32>>;

var<workgroup> parts: array<vec4<f32>, 512>; // [SHARE][8 channels in][4 vectors of channels out]

fn descent(at: u32, sum: vec4<f32>) -> vec4<f32> {
  let speed = settings.momentum * velocity[at] + sum / settings.units;
  velocity[at] = speed;
  return settings.rate * speed;
}

@compute @workgroup_size(4, 16)
fn descend_second(
  @builtin(workgroup_id) group: vec3<u32>,
  @builtin(local_invocation_id) local: vec3<u32>,
  @builtin(local_invocation_index) mine: u32,
) {
  let units = u32(settings.units);
  let tap = group.x;
  let corner = min(tap, BIAS - 1u) / TAPS * ROW + min(tap, BIAS - 1u) % TAPS * 2u;
  let is_bias = tap == BIAS;
  var s0 = vec4<f32>(); var s1 = vec4<f32>();
  var s2 = vec4<f32>(); var s3 = vec4<f32>();
  var s4 = vec4<f32>(); var s5 = vec4<f32>();
  var s6 = vec4<f32>(); var s7 = vec4<f32>();
  for (var e = local.y; e < units; e += SHARE) {
    for (var place = 0u; place < SUMS * SUMS; place++) {
      let error = spread[e * SUM4 + place * 4u + local.x];
      if (is_bias) {
        s0 += error;
      } else {
        let at = e * INPUTS + corner + place / SUMS * ROW + place % SUMS * 2u;
        let a = first[at];
        let b = first[at + 1u];
        s0 += a.x * error; s1 += a.y * error;
        s2 += a.z * error; s3 += a.w * error;
        s4 += b.x * error; s5 += b.y * error;
        s6 += b.z * error; s7 += b.w * error;
      }
    }
  }
  let at = local.y * 32u + local.x;
  parts[at] = s0; parts[at + 4u] = s1;
  parts[at + 8u] = s2; parts[at + 12u] = s3;
  parts[at + 16u] = s4; parts[at + 20u] = s5;
  parts[at + 24u] = s6; parts[at + 28u] = s7;
  workgroupBarrier();
  if (mine >= 32u) {
    return;
  }
  var sum = vec4<f32>();
  for (var s = 0u; s < SHARE; s++) {
    sum += parts[s * 32u + mine];
  }
  if (!is_bias) {
    let vector = tap * 32u + mine;
    weight[vector] -= descent(vector, sum);
  } else if (mine < 4u) {
    bias[mine] -= descent(OF_BIAS + mine, sum);
  }
}
