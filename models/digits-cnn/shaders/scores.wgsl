// Scores of each image, its loss, whether it was a hit, and the gradient of its scores.
// One invocation an image.
//
// A row of `errors` has twelve values: the gradient of the ten scores (probability - target), the loss, and 1
// for a hit. So one sum over the rows gives the gradient of the output's bias and both metrics.

struct Settings { rate: f32, momentum: f32, units: f32 }

const INPUTS = 256u; // of the dense layer
const CLASSES = 10u;
const ROW4 = 3u; // vectors of a row of errors

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> second: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<f32>;
@group(0) @binding(3) var<storage, read> bias: array<f32>;
@group(0) @binding(4) var<storage, read> labels: array<u32>;
@group(0) @binding(5) var<storage, read_write> errors: array<vec4<f32>>;

// A row of errors; the last two of its values may be anything.
struct Row { a: vec4<f32>, b: vec4<f32>, c: vec4<f32> }

fn weights_of(k: u32) -> Row {
  let at = k * CLASSES;
  return Row(
    vec4<f32>(weight[at], weight[at + 1u], weight[at + 2u], weight[at + 3u]),
    vec4<f32>(weight[at + 4u], weight[at + 5u], weight[at + 6u], weight[at + 7u]),
    vec4<f32>(weight[at + 8u], weight[at + 9u], 0.0, 0.0));
}

fn is_label(label: u32, first: u32) -> vec4<f32> {
  let classes = vec4<u32>(first, first + 1u, first + 2u, first + 3u);
  return select(vec4<f32>(), vec4<f32>(1.0), classes == vec4<u32>(label));
}

fn score(image: u32) -> Row {
  var s = Row(
    vec4<f32>(bias[0], bias[1], bias[2], bias[3]),
    vec4<f32>(bias[4], bias[5], bias[6], bias[7]),
    vec4<f32>(bias[8], bias[9], 0.0, 0.0));
  for (var k = 0u; k < INPUTS; k++) {
    let value = second[image * INPUTS + k];
    let w = weights_of(k);
    s.a += value * w.a;
    s.b += value * w.b;
    s.c += value * w.c;
  }
  let four = max(s.a, s.b);
  let highest = max(max(max(four.x, four.y), max(four.z, four.w)), max(s.c.x, s.c.y));
  let a = exp(s.a - highest);
  let b = exp(s.b - highest);
  let c = exp(s.c.xy - highest);
  let total = dot(a, vec4<f32>(1.0)) + dot(b, vec4<f32>(1.0)) + c.x + c.y;
  let label = labels[image];
  let at_a = is_label(label, 0u);
  let at_b = is_label(label, 4u);
  let at_c = is_label(label, 8u).xy;
  let of_label = dot(s.a, at_a) + dot(s.b, at_b) + dot(s.c.xy, at_c);
  let loss = highest + log(total) - of_label;
  // A hit as on the CPU: the label is the first of the highest scores.
  var best = 9u;
  if (s.c.x == highest) { best = 8u; }
  for (var i = 4u; i > 0u; i--) { if (s.b[i - 1u] == highest) { best = 3u + i; } }
  for (var i = 4u; i > 0u; i--) { if (s.a[i - 1u] == highest) { best = i - 1u; } }
  let hit = select(0.0, 1.0, best == label);
  return Row(a / total - at_a, b / total - at_b, vec4<f32>(c / total - at_c, loss, hit));
}

@compute @workgroup_size(32)
fn scores(@builtin(global_invocation_id) id: vec3<u32>) {
  let image = id.x;
  if (image < u32(settings.units)) {
    let row = score(image);
    errors[image * ROW4] = row.a;
    errors[image * ROW4 + 1u] = row.b;
    errors[image * ROW4 + 2u] = row.c;
  }
}
