// The first layer: 5 x 5 convolution of the image to 8 channels, the maximum of each 2 x 2 square, ReLU.
//
// An invocation makes one place of [12][12], all channels: four sums of eight channels, in registers.

struct Settings { rate: f32, momentum: f32, units: f32 }

const PLACES = 144u;
const SIDE = 12u;
const ROW = 28u; // pixels of an image's row
const TAPS = 5u;

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> images: array<f32>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>; // [5][5][2]
@group(0) @binding(3) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> first: array<vec4<f32>>; // [units][144][2]
@group(0) @binding(5) var<storage, read_write> chosen: array<vec4<u32>>; // which of the square's four, 0 to 3

// The greatest of four, and which; of equals the first, as on the CPU.
fn keep(at: u32, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) {
  var best = a;
  var which = vec4<u32>();
  which = select(which, vec4<u32>(1u), b > best);
  best = select(best, b, b > best);
  which = select(which, vec4<u32>(2u), c > best);
  best = select(best, c, c > best);
  which = select(which, vec4<u32>(3u), d > best);
  best = select(best, d, d > best);
  first[at] = max(best, vec4<f32>());
  chosen[at] = which;
}

@compute @workgroup_size(64)
fn forward(@builtin(global_invocation_id) id: vec3<u32>) {
  let image = id.x / PLACES;
  if (image >= u32(settings.units)) {
    return;
  }
  let place = id.x % PLACES;
  let window = image * ROW * ROW + place / SIDE * 2u * ROW + place % SIDE * 2u;
  var a0 = bias[0]; var a1 = bias[1];
  var b0 = a0; var b1 = a1;
  var c0 = a0; var c1 = a1;
  var d0 = a0; var d1 = a1;
  for (var y = 0u; y < TAPS; y++) {
    let row = window + y * ROW;
    for (var x = 0u; x < TAPS; x++) {
      let tap = (y * TAPS + x) * 2u;
      let w0 = weight[tap];
      let w1 = weight[tap + 1u];
      let a = images[row + x];
      let b = images[row + x + 1u];
      let c = images[row + x + ROW];
      let d = images[row + x + ROW + 1u];
      a0 += a * w0; a1 += a * w1;
      b0 += b * w0; b1 += b * w1;
      c0 += c * w0; c1 += c * w1;
      d0 += d * w0; d1 += d * w1;
    }
  }
  keep(id.x * 2u, a0, b0, c0, d0);
  keep(id.x * 2u + 1u, a1, b1, c1, d1);
}
