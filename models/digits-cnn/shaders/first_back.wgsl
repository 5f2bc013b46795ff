// What the second convolution passes back to the first layer, 0 where its ReLU was off.
//
// An invocation makes one place of [12][12] for four images, all eight channels. Images past the end are computed
// from the last one and not stored.

struct Settings { rate: f32, momentum: f32, units: f32 }

const PLACES = 144u;
const SIDE = 12u;
const SUMS = 8u; // rows and columns of the second convolution's sums
const TAPS = 5u;
const SUM4 = 256u; // vectors of one image in `spread`

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> spread: array<vec4<f32>>; // [units][8][8][4]
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>; // [5][5][8][4]
@group(0) @binding(3) var<storage, read> first: array<vec4<f32>>; // [units][144][2]
@group(0) @binding(4) var<storage, read_write> first_error: array<vec4<f32>>;

fn four(error: vec4<f32>, a: vec4<f32>, b: vec4<f32>, c: vec4<f32>, d: vec4<f32>) -> vec4<f32> {
  return vec4<f32>(dot(error, a), dot(error, b), dot(error, c), dot(error, d));
}

fn store(image: u32, place: u32, left: vec4<f32>, right: vec4<f32>) {
  if (image < u32(settings.units)) {
    let at = (image * PLACES + place) * 2u;
    first_error[at] = select(vec4<f32>(), left, first[at] > vec4<f32>());
    first_error[at + 1u] = select(vec4<f32>(), right, first[at + 1u] > vec4<f32>());
  }
}

@compute @workgroup_size(64)
fn back(@builtin(global_invocation_id) id: vec3<u32>) {
  let image = id.x / PLACES * 4u;
  let units = u32(settings.units);
  if (image >= units) {
    return;
  }
  let place = id.x % PLACES;
  let y = place / SIDE;
  let x = place % SIDE;
  let at0 = image * SUM4;
  let at1 = min(image + 1u, units - 1u) * SUM4;
  let at2 = min(image + 2u, units - 1u) * SUM4;
  let at3 = min(image + 3u, units - 1u) * SUM4;
  var l0 = vec4<f32>(); var r0 = vec4<f32>();
  var l1 = vec4<f32>(); var r1 = vec4<f32>();
  var l2 = vec4<f32>(); var r2 = vec4<f32>();
  var l3 = vec4<f32>(); var r3 = vec4<f32>();
  // Sums whose window holds this place: those at (y - down, x - across).
  for (var down = max(y, SUMS - 1u) - (SUMS - 1u); down < min(TAPS, y + 1u); down++) {
    for (var across = max(x, SUMS - 1u) - (SUMS - 1u); across < min(TAPS, x + 1u); across++) {
      let sum = ((y - down) * SUMS + x - across) * 4u;
      let tap = (down * TAPS + across) * 32u;
      for (var q = 0u; q < 4u; q++) {
        let e0 = spread[at0 + sum + q];
        let e1 = spread[at1 + sum + q];
        let e2 = spread[at2 + sum + q];
        let e3 = spread[at3 + sum + q];
        var a = weight[tap + q];
        var b = weight[tap + 4u + q];
        var c = weight[tap + 8u + q];
        var d = weight[tap + 12u + q];
        l0 += four(e0, a, b, c, d);
        l1 += four(e1, a, b, c, d);
        l2 += four(e2, a, b, c, d);
        l3 += four(e3, a, b, c, d);
        a = weight[tap + 16u + q];
        b = weight[tap + 20u + q];
        c = weight[tap + 24u + q];
        d = weight[tap + 28u + q];
        r0 += four(e0, a, b, c, d);
        r1 += four(e1, a, b, c, d);
        r2 += four(e2, a, b, c, d);
        r3 += four(e3, a, b, c, d);
      }
    }
  }
  store(image, place, l0, r0);
  store(image + 1u, place, l1, r1);
  store(image + 2u, place, l2, r2);
  store(image + 3u, place, l3, r3);
}
