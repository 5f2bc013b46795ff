// The gradients of the second convolution's sums: what the dense layer passes back goes to the one of each square
// that was greatest, and nothing to the others, nor to any where ReLU was off.

struct Settings { rate: f32, momentum: f32, units: f32 }

const PLACES = 16u;
const SIDE = 4u;
const CLASSES = 10u;
const ROW4 = 3u;

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> errors: array<vec4<f32>>; // [units][3]
@group(0) @binding(2) var<storage, read> weight: array<f32>; // [256][10]
@group(0) @binding(3) var<storage, read> second: array<vec4<f32>>; // [units][16][4]
@group(0) @binding(4) var<storage, read> chosen: array<vec4<u32>>;
@group(0) @binding(5) var<storage, read_write> spread: array<vec4<f32>>; // [units][8][8][4]

fn back(image: u32, k: u32) -> f32 {
  let at = k * CLASSES;
  let a = errors[image * ROW4];
  let b = errors[image * ROW4 + 1u];
  let c = errors[image * ROW4 + 2u];
  return dot(a, vec4<f32>(weight[at], weight[at + 1u], weight[at + 2u], weight[at + 3u]))
    + dot(b, vec4<f32>(weight[at + 4u], weight[at + 5u], weight[at + 6u], weight[at + 7u]))
    + c.x * weight[at + 8u] + c.y * weight[at + 9u];
}

@compute @workgroup_size(64)
fn spread_back(@builtin(global_invocation_id) id: vec3<u32>) {
  let image = id.x / (PLACES * 4u);
  if (image >= u32(settings.units)) {
    return;
  }
  let channels = id.x % 4u;
  let place = id.x / 4u % PLACES;
  let k = (place * 4u + channels) * 4u;
  let passed = vec4<f32>(back(image, k), back(image, k + 1u), back(image, k + 2u), back(image, k + 3u));
  let error = select(vec4<f32>(), passed, second[id.x] > vec4<f32>());
  let which = chosen[id.x];
  let row = (image * 64u + place / SIDE * 2u * 8u + place % SIDE * 2u) * 4u + channels;
  spread[row] = select(vec4<f32>(), error, which == vec4<u32>(0u));
  spread[row + 4u] = select(vec4<f32>(), error, which == vec4<u32>(1u));
  spread[row + 32u] = select(vec4<f32>(), error, which == vec4<u32>(2u));
  spread[row + 36u] = select(vec4<f32>(), error, which == vec4<u32>(3u));
}
