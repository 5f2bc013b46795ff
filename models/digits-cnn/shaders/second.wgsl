// The second layer: 5 x 5 convolution of 8 channels to 16, the maximum of each 2 x 2 square, ReLU.
//
// An invocation makes one place of [4][4], eight of the channels: four sums of eight, in registers.

struct Settings { rate: f32, momentum: f32, units: f32 }

const PLACES = 16u;
const SIDE = 4u;
const ROW = 24u; // vectors of a row of `first`: 12 places of two
const INPUTS = 288u; // vectors of one example in `first`
const TAPS = 5u;

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> first: array<vec4<f32>>; // [units][144][2]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>; // [5][5][8][4]
@group(0) @binding(3) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> second: array<vec4<f32>>; // [units][16][4]
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
  second[at] = max(best, vec4<f32>());
  chosen[at] = which;
}

@compute @workgroup_size(64)
fn forward(@builtin(global_invocation_id) id: vec3<u32>) {
  let half = id.x % 2u;
  let place = id.x / 2u % PLACES;
  let image = id.x / (2u * PLACES);
  if (image >= u32(settings.units)) {
    return;
  }
  let window = image * INPUTS + place / SIDE * 2u * ROW + place % SIDE * 4u;
  let channels = half * 2u;
  var a0 = bias[channels]; var a1 = bias[channels + 1u];
  var b0 = a0; var b1 = a1;
  var c0 = a0; var c1 = a1;
  var d0 = a0; var d1 = a1;
  for (var y = 0u; y < TAPS; y++) {
    for (var k = 0u; k < TAPS * 2u; k++) { // along a row of taps, four inputs a turn
      let input = window + y * ROW + k;
      let a = first[input];
      let b = first[input + 2u];
      let c = first[input + ROW];
      let d = first[input + ROW + 2u];
      for (var i = 0u; i < 4u; i++) {
        let at = ((y * TAPS * 2u + k) * 4u + i) * 4u + channels;
        let w0 = weight[at];
        let w1 = weight[at + 1u];
        a0 += a[i] * w0; a1 += a[i] * w1;
        b0 += b[i] * w0; b1 += b[i] * w1;
        c0 += c[i] * w0; c1 += c[i] * w1;
        d0 += d[i] * w0; d1 += d[i] * w1;
      }
    }
  }
  let at = (image * PLACES + place) * 4u + channels;
  keep(at, a0, b0, c0, d0);
  keep(at + 1u, a1, b1, c1, d1);
}
