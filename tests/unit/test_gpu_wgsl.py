"""What is read from WGSL before a driver sees it: workgroup sizes and storage."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from covey_participant.runtime.gpu.wgsl import EntryPoint, entry_points
from covey_participant.runtime.gpu.wgsl_types import WgslError


def storage(declarations: str, body: str = "use(v);") -> int:
    """Bytes of workgroup memory of a kernel with this body."""
    found = entry_points(f"{declarations} @compute @workgroup_size(1) fn main() {{ {body} }}")["main"]
    assert isinstance(found, EntryPoint), found
    return found.storage


def wrong(source: str) -> str:
    """The words of what is wrong, with the module or with `main`."""
    try:
        found = entry_points(source)["main"]
    except WgslError as error:
        return str(error)
    assert isinstance(found, WgslError), found
    return str(found)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("f32", 4),
        ("f16", 2),
        ("vec2<f32>", 8),
        ("vec3f", 12),
        ("vec4<u32>", 16),
        ("vec4h", 8),
        ("mat2x2<f32>", 16),
        ("mat4x3<f32>", 64),
        ("mat3x4f", 48),
        ("atomic<u32>", 4),
        ("array<f32, 256>", 1024),
        ("array<vec3<f32>, 2>", 32),
        ("array<array<f32, 17>, 16>", 1088),
        ("array<vec4<f32>,4>", 64),
        ("array<f32, 0x10u * 4>", 256),
        ("array<f32, (1u << 4) + 2 * 3 - 2>", 80),
        ("array<f32, TILE * TILE>", 1024),
        ("array<Row, 2>", 128),
        ("Pair", 32),
        ("array<Pair, 3>", 96),
        ("array<f32, u32(min(TILE, 4))>", 16),
    ],
)
def test_sizes_follow_the_specification(kind: str, size: int) -> None:
    """The sizes are those of the specification's table."""
    declarations = (
        "const TILE: u32 = HALF * 2; const HALF = 8u; alias Row = array<f32, TILE>;"
        f"struct Pair {{ a: vec3<f32>, @align(4) b: u32, c: f32 }} var<workgroup> v: {kind};"
    )

    assert storage(declarations) == size


def test_only_what_a_kernel_reaches_counts() -> None:
    """A variable counts for the kernels that use it, through functions too."""
    source = """
        var<workgroup> near: array<f32, 10>;
        var<workgroup> far: array<f32, 20>;
        var<workgroup> never: array<f32, 1000>; // far: not in a comment
        fn helper() -> f32 { return far[0]; }
        /* block /* nested */ never */
        @compute @workgroup_size(8, 4, 2) fn one() { near[0] = helper(); }
        @workgroup_size(64) @compute fn two() { near[0] = 1.0; }
        fn not_a_kernel() { never[0] = 1.0; }
        @fragment fn picture() -> @location(0) vec4<f32> { return vec4<f32>(); }
    """

    assert entry_points(source) == {"one": EntryPoint((8, 4, 2), 120), "two": EntryPoint((64, 1, 1), 40)}


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("@compute @workgroup_size(N) fn main() {}", "'N' isn't a constant"),
        ("@compute fn main() {}", "one to three numbers"),
        ("@compute @workgroup_size(1, 1, 1, 1) fn main() {}", "one to three numbers"),
        ("@compute @workgroup_size(0) fn main() {}", "at least 1"),
        ("const A = B; const B = A; @compute @workgroup_size(A) fn main() {}", "refers to itself"),
        ("const A = 1 / 0; @compute @workgroup_size(A) fn main() {}", "divided by zero"),
        ("const A = 1u << 40; @compute @workgroup_size(A) fn main() {}", "shifted by 40"),
        ("var<workgroup> v: array<f32>; @compute @workgroup_size(1) fn main() { use(v); }", "fixed length"),
        ("var<workgroup> v: S; @compute @workgroup_size(1) fn main() { use(v); }", "'S' isn't known"),
        (
            "struct S { a: S } var<workgroup> v: S; @compute @workgroup_size(1) fn main() { use(v); }",
            "too deeply",
        ),
        ("var<workgroup, read_write> v: f32; @compute @workgroup_size(1) fn main() {}", "isn't understood"),
        ("@compute @workgroup_size(1) fn main() {", "isn't closed"),
        ("/* /* */ @compute @workgroup_size(1) fn main() {}", "doesn't end"),
        ("@compute @workgroup_size(1) fn main() {} garbage", "doesn't end"),
        ("fn a\0() {}", "NUL"),
        ("hidden var<workgroup> v: f32; @compute @workgroup_size(1) fn main() {}", "isn't a declaration"),
    ],
)
def test_what_is_not_known_is_said(source: str, words: str) -> None:
    """A kernel whose size or storage can't be worked out says why."""
    assert words in wrong(source)


def test_a_line_comment_ends_where_wgsl_says() -> None:
    """Every line break of WGSL ends a comment, so that nothing hides behind one that isn't a newline."""
    for end in "\n\v\f\r\x85\u2028\u2029":
        assert storage(f"// comment{end}var<workgroup> v: array<f32, 100>;") == 400
    assert storage("\u200evar\u200f<workgroup>\x85v: array<f32, 100>;") == 400


def test_hostile_declarations_take_no_time() -> None:
    """Doubling chains of types and constants are worked out once each."""
    constants = "const c0 = 1;" + "".join(f"const c{i} = c{i - 1} + c{i - 1};" for i in range(1, 20))
    structs = "struct s0 { a: f32 }" + "".join(
        f"struct s{i} {{ a: s{i - 1}, b: s{i - 1} }}" for i in range(1, 20)
    )
    started = time.monotonic()

    assert storage(f"{constants} var<workgroup> v: array<f32, c19>;") == 4 << 19
    assert storage(f"{structs} var<workgroup> v: s19;") == 4 << 19
    assert "too deeply" in wrong(f"@compute @workgroup_size({'(' * 10000}1{')' * 10000}) fn main() {{}}")
    assert "words" in wrong("a " * 250_000)
    assert time.monotonic() - started < 10


@given(st.text(alphabet='(){}[]<>;,:=@/*\n fnvarconststruct123u"workgroup_size', max_size=200))
def test_any_text_gives_entry_points_or_an_error(text: str) -> None:
    """No text crashes the reader."""
    try:
        entry_points(text)
    except WgslError as error:
        found = str(error)
    else:
        found = "read"

    assert found
