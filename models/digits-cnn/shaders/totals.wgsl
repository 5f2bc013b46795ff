// The metrics' sums of an evaluation: loss and hits stand at the end of each row of errors.

struct Settings { rate: f32, momentum: f32, units: f32 }

const SHARE = 64u;

@group(0) @binding(0) var<uniform> settings: Settings;
@group(0) @binding(1) var<storage, read> errors: array<vec4<f32>>;
@group(0) @binding(2) var<storage, read_write> metrics: array<f32>;

var<workgroup> parts: array<vec2<f32>, 64>;

@compute @workgroup_size(64)
fn totals(@builtin(local_invocation_index) mine: u32) {
  let units = u32(settings.units);
  var sum = vec2<f32>();
  for (var e = mine; e < units; e += SHARE) {
    sum += errors[e * 3u + 2u].zw;
  }
  parts[mine] = sum;
  workgroupBarrier();
  if (mine == 0u) {
    for (var s = 1u; s < SHARE; s++) {
      sum += parts[s];
    }
    metrics[0] = sum.x;
    metrics[1] = sum.y;
  }
}
