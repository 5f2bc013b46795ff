// hidden = max(0, bias + images * weights): [units][784] times [784][128].
//
// An invocation computes 4 images x 8 units in registers, four pixels a turn; no shared memory, since software
// adapters gain nothing by it. Images past the end are computed from the last one and not stored.

struct Settings { rate: f32, momentum: f32, units: f32 }

const PIXELS4 = 196u; // vectors of a row of pixels
const HIDDEN4 = 32u;

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> images: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read> weight: array<vec4<f32>>;
@group(0) @binding(3) var<storage, read> bias: array<vec4<f32>>;
@group(0) @binding(4) var<storage, read_write> hidden: array<vec4<f32>>;

fn store(row: u32, units: u32, column: u32, left: vec4<f32>, right: vec4<f32>) {
  if (row < units) {
    hidden[row * HIDDEN4 + column] = max(left, vec4<f32>());
    hidden[row * HIDDEN4 + column + 1u] = max(right, vec4<f32>());
  }
}

@compute @workgroup_size(8, 8)
fn forward(@builtin(global_invocation_id) id: vec3<u32>) {
  let units = u32(settings.units);
  let column = id.x * 2u;
  let row = id.y * 4u;
  if (row >= units) {
    return;
  }
  let last = units - 1u;
  let at0 = row * PIXELS4;
  let at1 = min(row + 1u, last) * PIXELS4;
  let at2 = min(row + 2u, last) * PIXELS4;
  let at3 = min(row + 3u, last) * PIXELS4;
  var l0 = bias[column];
  var r0 = bias[column + 1u];
  var l1 = l0; var r1 = r0;
  var l2 = l0; var r2 = r0;
  var l3 = l0; var r3 = r0;
  for (var k = 0u; k < PIXELS4; k++) {
    let x0 = images[at0 + k];
    let x1 = images[at1 + k];
    let x2 = images[at2 + k];
    let x3 = images[at3 + k];
    let base = k * 4u * HIDDEN4 + column;
    var l = weight[base];
    var r = weight[base + 1u];
    l0 += x0.x * l; r0 += x0.x * r;
    l1 += x1.x * l; r1 += x1.x * r;
    l2 += x2.x * l; r2 += x2.x * r;
    l3 += x3.x * l; r3 += x3.x * r;
    l = weight[base + HIDDEN4];
    r = weight[base + HIDDEN4 + 1u];
    l0 += x0.y * l; r0 += x0.y * r;
    l1 += x1.y * l; r1 += x1.y * r;
    l2 += x2.y * l; r2 += x2.y * r;
    l3 += x3.y * l; r3 += x3.y * r;
    l = weight[base + 2u * HIDDEN4];
    r = weight[base + 2u * HIDDEN4 + 1u];
    l0 += x0.z * l; r0 += x0.z * r;
    l1 += x1.z * l; r1 += x1.z * r;
    l2 += x2.z * l; r2 += x2.z * r;
    l3 += x3.z * l; r3 += x3.z * r;
    l = weight[base + 3u * HIDDEN4];
    r = weight[base + 3u * HIDDEN4 + 1u];
    l0 += x0.w * l; r0 += x0.w * r;
    l1 += x1.w * l; r1 += x1.w * r;
    l2 += x2.w * l; r2 += x2.w * r;
    l3 += x3.w * l; r3 += x3.w * r;
  }
  store(row, units, column, l0, r0);
  store(row + 1u, units, column, l1, r1);
  store(row + 2u, units, column, l2, r2);
  store(row + 3u, units, column, l3, r3);
}
