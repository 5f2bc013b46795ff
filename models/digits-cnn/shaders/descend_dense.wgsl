// The step of the dense layer, and the metrics' sums.
//
// A workgroup has 16 rows of the weights (row 256 stands for the bias: the weights of an input that is always 1)
// and parts the images among 16 invocations a row; their sums meet in shared memory, in one order.

struct Settings { rate: f32, momentum: f32, units: f32 }

const INPUTS = 256u;
const CLASSES = 10u;
const ROW4 = 3u;
const SHARE = 16u; // invocations that share a row
const OF_BIAS = 2560u; // where the bias's velocity begins

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> second: array<f32>; // [units][256]
@group(0) @binding(2) var<storage, read> errors: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> weight: array<f32>;
@group(0) @binding(4) var<storage, read_write> bias: array<f32>;
@group(0) @binding(5) var<storage, read_write> velocity: array<f32>;
@group(0) @binding(6) var<storage, read_write> metrics: array<f32>;

var<workgroup> parts: array<vec4<f32>, 768>; // [SHARE][rows][ROW4]

fn descent(at: u32, sum: f32) -> f32 {
  let speed = settings.momentum * velocity[at] + sum / settings.units;
  velocity[at] = speed;
  return settings.rate * speed;
}

@compute @workgroup_size(16, 16)
fn descend_dense(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_id) local: vec3<u32>) {
  let k = group.x * 16u + local.x;
  let units = u32(settings.units);
  var a = vec4<f32>();
  var b = vec4<f32>();
  var c = vec4<f32>();
  if (k <= INPUTS) {
    for (var e = local.y; e < units; e += SHARE) {
      var value = 1.0;
      if (k < INPUTS) {
        value = second[e * INPUTS + k];
      }
      a += value * errors[e * ROW4];
      b += value * errors[e * ROW4 + 1u];
      c += value * errors[e * ROW4 + 2u];
    }
  }
  let mine = (local.y * 16u + local.x) * ROW4;
  parts[mine] = a;
  parts[mine + 1u] = b;
  parts[mine + 2u] = c;
  workgroupBarrier();
  if (local.y >= ROW4 || k > INPUTS) {
    return;
  }
  var sum = vec4<f32>();
  for (var s = 0u; s < SHARE; s++) {
    sum += parts[(s * 16u + local.x) * ROW4 + local.y];
  }
  let first = local.y * 4u;
  for (var i = 0u; i < min(4u, CLASSES - first); i++) {
    if (k < INPUTS) {
      weight[k * CLASSES + first + i] -= descent(k * CLASSES + first + i, sum[i]);
    } else {
      bias[first + i] -= descent(OF_BIAS + first + i, sum[i]);
    }
  }
  if (k == INPUTS && local.y == 2u) {
    metrics[0] = sum.z;
    metrics[1] = sum.w;
  }
}
