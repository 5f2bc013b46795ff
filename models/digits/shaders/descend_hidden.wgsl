// The hidden weights' step: the gradient, [784][units] times [units][128], is used where it is summed and never
// stored. An invocation has 8 pixels x 8 units in registers.

struct Settings { rate: f32, momentum: f32, units: f32 }

const PIXELS4 = 196u;
const HIDDEN4 = 32u;

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> images: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> back: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read_write> weight: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> velocity: array<vec4<f32>>;

fn descend(at: u32, gradient: vec4<f32>) {
  let speed = settings.momentum * velocity[at] + gradient;
  velocity[at] = speed;
  weight[at] -= settings.rate * speed;
}

@compute @workgroup_size(8, 8)
fn descend_hidden(@builtin(global_invocation_id) id: vec3<u32>) {
  let column = id.x * 2u;
  let pixels = id.y * 2u;
  if (pixels >= PIXELS4) {
    return;
  }
  let units = u32(settings.units);
  var l0 = vec4<f32>(); var r0 = vec4<f32>();
  var l1 = vec4<f32>(); var r1 = vec4<f32>();
  var l2 = vec4<f32>(); var r2 = vec4<f32>();
  var l3 = vec4<f32>(); var r3 = vec4<f32>();
  var l4 = vec4<f32>(); var r4 = vec4<f32>();
  var l5 = vec4<f32>(); var r5 = vec4<f32>();
  var l6 = vec4<f32>(); var r6 = vec4<f32>();
  var l7 = vec4<f32>(); var r7 = vec4<f32>();
  for (var e = 0u; e < units; e++) {
    let x = images[e * PIXELS4 + pixels];
    let y = images[e * PIXELS4 + pixels + 1u];
    let l = back[e * HIDDEN4 + column];
    let r = back[e * HIDDEN4 + column + 1u];
    l0 += x.x * l; r0 += x.x * r;
    l1 += x.y * l; r1 += x.y * r;
    l2 += x.z * l; r2 += x.z * r;
    l3 += x.w * l; r3 += x.w * r;
    l4 += y.x * l; r4 += y.x * r;
    l5 += y.y * l; r5 += y.y * r;
    l6 += y.z * l; r6 += y.z * r;
    l7 += y.w * l; r7 += y.w * r;
  }
  let scale = 1.0 / settings.units;
  let at = pixels * 4u * HIDDEN4 + column;
  descend(at, l0 * scale);
  descend(at + 1u, r0 * scale);
  descend(at + HIDDEN4, l1 * scale);
  descend(at + HIDDEN4 + 1u, r1 * scale);
  descend(at + 2u * HIDDEN4, l2 * scale);
  descend(at + 2u * HIDDEN4 + 1u, r2 * scale);
  descend(at + 3u * HIDDEN4, l3 * scale);
  descend(at + 3u * HIDDEN4 + 1u, r3 * scale);
  descend(at + 4u * HIDDEN4, l4 * scale);
  descend(at + 4u * HIDDEN4 + 1u, r4 * scale);
  descend(at + 5u * HIDDEN4, l5 * scale);
  descend(at + 5u * HIDDEN4 + 1u, r5 * scale);
  descend(at + 6u * HIDDEN4, l6 * scale);
  descend(at + 6u * HIDDEN4 + 1u, r6 * scale);
  descend(at + 7u * HIDDEN4, l7 * scale);
  descend(at + 7u * HIDDEN4 + 1u, r7 * scale);
}
