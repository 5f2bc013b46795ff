// The step of everything but the hidden weights, and the metrics' sums.
//
// A workgroup has 16 rows of the output's weights (row 128 stands for its bias: the weights of a hidden unit that
// is always 1) and parts the images among 16 invocations a row; their sums meet in shared memory, in one order.

struct Settings { rate: f32, momentum: f32, units: f32 }

const HIDDEN = 128u;
const CLASSES = 10u;
const ROW4 = 3u;
const SHARE = 16u; // invocations that share a row
// Where the velocities of the three tensors begin.
const OF_OUTPUT_BIAS = 1280u;
const OF_HIDDEN_BIAS = 1290u;

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> hidden: array<f32>;
@group(0) @binding(2) var<storage, read> errors: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> back: array<f32>;
@group(0) @binding(4) var<storage, read_write> weight: array<f32>;
@group(0) @binding(5) var<storage, read_write> bias: array<f32>;
@group(0) @binding(6) var<storage, read_write> hidden_bias: array<f32>;
@group(0) @binding(7) var<storage, read_write> velocity: array<f32>;
@group(0) @binding(8) var<storage, read_write> metrics: array<f32>;

var<workgroup> parts: array<vec4<f32>, 768>; // [SHARE][rows][ROW4]

// What the weight moves by.
fn descent(at: u32, sum: f32) -> f32 {
  let speed = settings.momentum * velocity[at] + sum / settings.units;
  velocity[at] = speed;
  return settings.rate * speed;
}

@compute @workgroup_size(16, 16)
fn descend_output(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
  let k = group.x * 16u + local.x;
  let units = u32(settings.units);
  var a = vec4<f32>();
  var b = vec4<f32>();
  var c = vec4<f32>();
  if (k < HIDDEN) {
    for (var e = local.y; e < units; e += SHARE) {
      let value = hidden[e * HIDDEN + k];
      a += value * errors[e * ROW4];
      b += value * errors[e * ROW4 + 1u];
      c += vec4<f32>(value * errors[e * ROW4 + 2u].xy, back[e * HIDDEN + k], 0.0);
    }
  } else if (k == HIDDEN) {
    for (var e = local.y; e < units; e += SHARE) {
      a += errors[e * ROW4];
      b += errors[e * ROW4 + 1u];
      c += errors[e * ROW4 + 2u];
    }
  }
  let mine = (local.y * 16u + local.x) * ROW4;
  parts[mine] = a;
  parts[mine + 1u] = b;
  parts[mine + 2u] = c;
  workgroupBarrier();
  if (local.y >= ROW4 || k > HIDDEN) {
    return;
  }
  var sum = vec4<f32>();
  for (var s = 0u; s < SHARE; s++) {
    sum += parts[(s * 16u + local.x) * ROW4 + local.y];
  }
  let first = local.y * 4u;
  let count = min(4u, CLASSES - first);
  if (k < HIDDEN) {
    for (var i = 0u; i < count; i++) {
      let at = k * CLASSES + first + i;
      weight[at] -= descent(at, sum[i]);
    }
    if (local.y == 2u) {
      hidden_bias[k] -= descent(OF_HIDDEN_BIAS + k, sum.z);
    }
  } else {
    for (var i = 0u; i < count; i++) {
      bias[first + i] -= descent(OF_OUTPUT_BIAS + first + i, sum[i]);
    }
    if (local.y == 2u) {
      metrics[0] = sum.z;
      metrics[1] = sum.w;
    }
  }
}
