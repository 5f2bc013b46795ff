// hidden = max(0, bias + images * weights): [units][784] times [784][128].
//
// An invocation computes 8 images x 8 units in registers, four pixels a turn; no shared memory, since software
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
  let row = id.y * 8u;
  if (row >= units) {
    return;
  }
  let last = units - 1u;
  let at0 = row * PIXELS4;
  let at1 = min(row + 1u, last) * PIXELS4;
  let at2 = min(row + 2u, last) * PIXELS4;
  let at3 = min(row + 3u, last) * PIXELS4;
  let at4 = min(row + 4u, last) * PIXELS4;
  let at5 = min(row + 5u, last) * PIXELS4;
  let at6 = min(row + 6u, last) * PIXELS4;
  let at7 = min(row + 7u, last) * PIXELS4;
  var l0 = bias[column]; var r0 = bias[column + 1u];
  var l1 = l0; var r1 = r0;
  var l2 = l0; var r2 = r0;
  var l3 = l0; var r3 = r0;
  var l4 = l0; var r4 = r0;
  var l5 = l0; var r5 = r0;
  var l6 = l0; var r6 = r0;
  var l7 = l0; var r7 = r0;
  for (var k = 0u; k < PIXELS4; k++) {
    let base = k * 4u * HIDDEN4 + column;
    let second = base + HIDDEN4;
    let third = second + HIDDEN4;
    let fourth = third + HIDDEN4;
    // A matrix's columns are the weights of one pixel: left * x is the sum over four pixels.
    let left = mat4x4<f32>(weight[base], weight[second], weight[third], weight[fourth]);
    let right = mat4x4<f32>(weight[base + 1u], weight[second + 1u], weight[third + 1u], weight[fourth + 1u]);
    let x0 = images[at0 + k];
    l0 += left * x0; r0 += right * x0;
    let x1 = images[at1 + k];
    l1 += left * x1; r1 += right * x1;
    let x2 = images[at2 + k];
    l2 += left * x2; r2 += right * x2;
    let x3 = images[at3 + k];
    l3 += left * x3; r3 += right * x3;
    let x4 = images[at4 + k];
    l4 += left * x4; r4 += right * x4;
    let x5 = images[at5 + k];
    l5 += left * x5; r5 += right * x5;
    let x6 = images[at6 + k];
    l6 += left * x6; r6 += right * x6;
    let x7 = images[at7 + k];
    l7 += left * x7; r7 += right * x7;
  }
  store(row, units, column, l0, r0);
  store(row + 1u, units, column, l1, r1);
  store(row + 2u, units, column, l2, r2);
  store(row + 3u, units, column, l3, r3);
  store(row + 4u, units, column, l4, r4);
  store(row + 5u, units, column, l5, r5);
  store(row + 6u, units, column, l6, r6);
  store(row + 7u, units, column, l7, r7);
}
