"""Each operation of the interpreter against Pallas's own interpreter, or numpy where Pallas does not emit it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxpaged.inspect import ttir
from tests.inspect.ttir_kernels import call_from_text, evaluate_text, pallas, struct

RNG = np.random.default_rng(7)
X = jnp.asarray(RNG.uniform(-3, 3, (8, 32)), jnp.float32)
POSITIVE = jnp.abs(X) + 0.1
WITH_NAN = X.at[0, :5].set(jnp.nan)
EDGES = [np.inf, -np.inf, 1e20, -1e20, 0.5, -0.5, 2.5, 255.5]
WIDE = jnp.asarray(np.concatenate([RNG.uniform(-300, 300, 120), EDGES]), jnp.float32)
TOLERANCE = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 3e-3}


def check(functions, *arrays, tolerance=0.0):
    """One kernel that applies every function to the arrays equals what Pallas's interpreter makes of it."""

    def kernel(*refs):
        inputs = [ref[...] for ref in refs[: len(arrays)]]
        for f, output in zip(functions, refs[len(arrays) :], strict=True):
            output[...] = f(*inputs)

    shapes = [jax.eval_shape(f, *arrays) for f in functions]
    result = ttir.run_function(pallas(kernel, shapes), *arrays)
    assert result.problems == []
    expected = pallas(kernel, shapes, interpret=True)(*arrays)
    for got, want in zip(result.outputs, expected, strict=True):
        assert got.dtype == want.dtype
        got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


def slow_but(one, names):
    """Parameters, of which one is tested by default: each compiles a kernel of many functions."""
    return [name if name == one else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.mark.parametrize("dtype", slow_but("bfloat16", TOLERANCE))
def test_float_functions_equal_pallas(dtype):
    names = "abs neg ceil floor exp exp2 expm1 sin cos tanh sign square"
    check([getattr(lax, name) for name in names.split()], X.astype(dtype), tolerance=TOLERANCE[dtype])
    check([lax.log, lax.log1p, lax.sqrt, lax.rsqrt], POSITIVE.astype(dtype), tolerance=TOLERANCE[dtype])


MATH = {
    **{name: getattr(np, name) for name in ("ceil", "cos", "exp", "exp2", "expm1", "floor", "log", "log1p", "log2")},
    **{name: getattr(np, name) for name in ("sin", "sqrt", "tanh")},
    "absf": np.abs,
    "rsqrt": lambda x: 1 / np.sqrt(x),
}


@pytest.mark.parametrize("name", MATH)
def test_math_functions_from_text_equal_numpy(name):
    x = np.linspace(-3 if name == "absf" else 0.1, 3, 8, dtype=np.float32)
    out, _ = evaluate_text(f"%out = math.{name} %in0 : tensor<8xf32>", np.float32, x)
    np.testing.assert_allclose(out, MATH[name](x), rtol=1e-6)


def test_math_function_of_16_bits_rounds_once():
    x = np.array([17, 22, 31, 35, 41, 55, 58, 66], np.float16)
    body = "%h = arith.truncf %in0 : tensor<8xf32> to tensor<8xf16>\n%y = math.rsqrt %h : tensor<8xf16>\n"
    out, _ = evaluate_text(f"{body}%out = arith.extf %y : tensor<8xf16> to tensor<8xf32>", np.float32, x.astype("f4"))
    np.testing.assert_array_equal(out, (1 / np.sqrt(x.astype(np.float64))).astype(np.float16))
    assert (out != 1 / np.sqrt(x)).any()  # which rounds twice


def test_float_binary_functions_equal_pallas():
    functions = [lax.add, lax.sub, lax.mul, lax.div, lax.rem, jnp.maximum, jnp.minimum]
    functions += [lambda x, y: x**3 * y**-2, lambda x, y: jnp.where(x > y, x, y)]
    check(functions, X, POSITIVE, tolerance=1e-6)


def test_float_comparisons_equal_pallas():
    functions = [lambda x, y, f=f: f(x, y).astype(jnp.int32) for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)]
    check(functions, WITH_NAN, X)
    check(functions, X, X)


def as_int32(f, x, y):
    return f(x, y).astype(jnp.int32)


def to(dtype, x):
    return x.astype(dtype)


INTS = ("int8", "int16", "int32", "uint8", "uint16", "uint32")


@pytest.mark.parametrize("dtype", slow_but("int32", INTS))
def test_integers_equal_pallas(dtype):
    info = np.iinfo(dtype)
    x = jnp.asarray(RNG.integers(info.min, info.max, (8, 32), endpoint=True), dtype)
    y = jnp.asarray(RNG.integers(1, 100, (8, 32)), dtype)
    amount = jnp.asarray(RNG.integers(0, info.bits, (8, 32)), dtype)
    functions = [lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, jnp.floor_divide, jnp.mod]
    functions += [lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor, jnp.true_divide]
    functions += [functools.partial(as_int32, f) for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge)]
    check(functions, x, y)
    check([lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic], x, amount)
    targets = [t for t in (*INTS, "float32", "bfloat16", "float16") if t != dtype]
    check([lax.bitwise_not, jnp.negative, *(functools.partial(to, t) for t in targets)], x)


@pytest.mark.parametrize("source", slow_but("float32", TOLERANCE))
def test_floats_to_integers_saturate_as_in_pallas(source):
    check([functools.partial(to, dtype) for dtype in INTS], WIDE.astype(source))


@pytest.mark.parametrize("dtype", slow_but("float8_e4m3fn", ["float8_e4m3fn", "float8_e5m2"]))
def test_float8_equals_pallas_and_saturates(dtype):
    functions = [functools.partial(to, dtype)]
    check(functions, X)
    check(functions, X.astype(jnp.bfloat16))
    check([functools.partial(to, "float32")], X.astype(dtype))
    limit = float(jnp.finfo(dtype).max)

    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...].astype(dtype)

    outputs = ttir.run_function(pallas(kernel, struct(4, dtype=dtype)), jnp.array([1e6, -1e6, np.nan, 2.0])).outputs
    np.testing.assert_array_equal(np.asarray(outputs).astype(np.float32), [limit, -limit, np.nan, 2.0])


def test_reductions_and_shapes_equal_pallas():
    reductions = (jnp.sum, jnp.max, jnp.min, jnp.argmax, jnp.argmin)
    functions = [functools.partial(reduction, axis=axis) for reduction in reductions for axis in (0, 1)]
    functions += [
        jnp.sum,
        lambda x: x.reshape(4, 2, 32).transpose(2, 0, 1),
        lambda x: lax.bitcast_convert_type(x, jnp.int32),
        lambda x: jnp.clip(x, -1, 1),
        lambda x: x + lax.broadcasted_iota(jnp.float32, x.shape, 1),
    ]
    check(functions, X, tolerance=1e-5)


def dot(a, b, **options):
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), **options)


def test_dots_equal_pallas():
    a, b = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((32, 64), (64, 16)))
    check(
        [functools.partial(dot, precision="highest"), lambda a, b: dot(b.T, a.T, precision="highest")],
        a,
        b,
        tolerance=2e-5,
    )
    for dtype in ("bfloat16", "float16", "float8_e4m3fn"):
        f = functools.partial(dot, preferred_element_type=jnp.float32)
        check([f], a.astype(dtype), b.astype(dtype), tolerance=2e-5)


def test_dot_that_allows_tf32_is_truncated_and_no_other():
    a, b = (jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in ((32, 64), (64, 16)))

    def product(precision, a, b):
        def kernel(a_ref, b_ref, o_ref):
            o_ref[...] = dot(a_ref[...], b_ref[...], precision=precision, preferred_element_type=jnp.float32)

        return np.asarray(ttir.run_function(pallas(kernel, struct(32, 16)), a, b).outputs)

    def error(precision, a, b):
        return np.abs(product(precision, a, b) - np.asarray(a, np.float64) @ np.asarray(b, np.float64)).max()

    assert error("highest", a, b) < 1e-5
    assert 1e-3 < error(None, a, b) < 5e-2
    assert error(None, *(jnp.round(x * 16) / 16 for x in (a, b))) < 1e-5  # whose last 13 bits are zero
    assert error(None, a.astype(jnp.float16), b.astype(jnp.float16)) < 1e-5
    odd = np.array(a)
    odd[0, 0], odd.view(np.uint32)[1, 0] = np.inf, 0x7F800001  # a NaN that would be an infinity without its last bits
    np.testing.assert_array_equal(product(None, odd, np.abs(b))[:2], [[np.inf] * 16, [np.nan] * 16])


def test_dot_adds_to_its_accumulator():
    body = """
        %a = arith.constant dense<2.0> : tensor<16x16xf32>
        %c = arith.constant dense<5.0> : tensor<16x16xf32>
        %d = tt.dot %a, %a, %c : tensor<16x16xf32> * tensor<16x16xf32> -> tensor<16x16xf32>
        %p = tt.splat %p0 : !tt.ptr<f32> -> tensor<16x16x!tt.ptr<f32>>
        tt.store %p, %d : tensor<16x16x!tt.ptr<f32>>"""
    [out] = ttir.run(call_from_text(body, [], [((1,), np.float32)]))
    assert out.tolist() == [16 * 4 + 5]


def test_loops_and_branches_equal_pallas():
    def kernel(x_ref, n_ref, o_ref):
        x = lax.fori_loop(n_ref[0], n_ref[1], lambda i, c: c * 1.1 + i, x_ref[...])
        o_ref[...] = lax.switch(n_ref[2], [lambda x: x, lambda x: x * 2, lambda x: x - 1], x)

    interpreted = jax.jit(pallas(kernel, struct(8, 32), interpret=True))
    for start, end, branch in ((2, 7, 0), (2, 7, 1), (2, 7, 2), (3, 3, 1)):
        args = X, jnp.array([start, end, branch])
        out = ttir.run_function(pallas(kernel, struct(8, 32)), *args).outputs
        np.testing.assert_allclose(out, interpreted(*args), rtol=1e-5, atol=1e-5)


NUMBERS = np.array([-7, -1, 0, 1, 2, 7, 100, -128], np.int32)
OTHERS = np.array([2, -2, 3, 1, -3, 4, 7, 3], np.int32)
UNSIGNED = NUMBERS.view("u4"), OTHERS.view("u4")


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("divsi", np.trunc(NUMBERS / OTHERS)),
        ("remsi", np.fmod(NUMBERS, OTHERS)),
        ("maxui", np.maximum(*UNSIGNED)),
        ("minui", np.minimum(*UNSIGNED)),
        ("divui", UNSIGNED[0] // UNSIGNED[1]),
        ("remui", UNSIGNED[0] % UNSIGNED[1]),
        ("addi", NUMBERS + OTHERS),
    ],
)
def test_integer_ops_from_text_equal_numpy(op, want):
    out, events = evaluate_text(f"%out = arith.{op} %in0, %in1 : tensor<8xi32>", np.int32, NUMBERS, OTHERS)
    np.testing.assert_array_equal(out, np.asarray(want).astype(np.int64).astype(np.int32))
    assert events == []


@pytest.mark.parametrize(
    ("op", "amount", "want"),
    [
        ("shli", 31, NUMBERS << 31),
        ("shli", 32, NUMBERS * 0),
        ("shrui", 1, (NUMBERS.view("u4") >> 1).view("i4")),
        ("shrui", 40, NUMBERS * 0),
        ("shrsi", 32, np.where(NUMBERS < 0, -1, 0)),
        ("shrsi", 1, NUMBERS >> 1),
    ],
)
def test_shifts_by_the_width_or_more_are_as_in_ptx(op, amount, want):
    body = f"%out = arith.{op} %in0, %in1 : tensor<8xi32>"
    out, _ = evaluate_text(body, np.int32, NUMBERS, np.full(8, amount, np.int32))
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize("op", ["divsi", "remui"])
def test_division_by_zero_is_a_hazard(op):
    zero = np.array([1, 1, 0, 1, 1, 1, 1, 1], np.int32)
    _, events = evaluate_text(f"%out = arith.{op} %in0, %in1 : tensor<8xi32>", np.int32, NUMBERS, zero)
    assert events == ["division-by-zero"]


BOOLEANS = (
    "%b = arith.cmpi slt, %in0, %in1 : tensor<8xi32>\n%t = arith.constant dense<true> : tensor<8xi1>\n"
    "{}\n%out = arith.{} : tensor<8xi1> to tensor<8xi32>"
)


@pytest.mark.parametrize(
    ("body", "convert", "want"),
    [
        ("", "extsi %b", -(NUMBERS < OTHERS).astype(int)),
        ("", "extui %b", NUMBERS < OTHERS),
        ("%c = arith.cmpi slt, %b, %t : tensor<8xi1>", "extui %c", NUMBERS * 0),  # true is -1
        ("%c = arith.cmpi slt, %t, %b : tensor<8xi1>", "extui %c", NUMBERS >= OTHERS),
        ("%c = arith.cmpi ult, %b, %t : tensor<8xi1>", "extui %c", NUMBERS >= OTHERS),
        ("%c = arith.addi %b, %t : tensor<8xi1>", "extui %c", NUMBERS >= OTHERS),  # addition of bits is xor
    ],
)
def test_booleans_are_integers_of_one_bit(body, convert, want):
    out, _ = evaluate_text(BOOLEANS.format(body, convert), np.int32, NUMBERS, OTHERS)
    np.testing.assert_array_equal(out, want)


COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


@pytest.mark.parametrize("predicate", [sign + name for sign in "su" for name in COMPARISONS])
def test_integer_predicates_equal_numpy(predicate):
    body = f"%c = arith.cmpi {predicate}, %in0, %in1 : tensor<8xi32>\n"
    body += "%out = arith.extui %c : tensor<8xi1> to tensor<8xi32>"
    values = UNSIGNED if predicate[0] == "u" else (NUMBERS, OTHERS)
    out, _ = evaluate_text(body, np.int32, NUMBERS, OTHERS)
    np.testing.assert_array_equal(out, COMPARISONS[predicate[1:]](*values))


FLOATS = np.array([1, 2, np.nan, np.nan, -1, 0, 5, 5], np.float32)
FLOATS2 = np.array([2, 1, 1, np.nan, -1, np.nan, 5, 4], np.float32)
UNORDERED = np.isnan(FLOATS) | np.isnan(FLOATS2)


@pytest.mark.parametrize(
    ("predicate", "want"),
    [
        ("false", UNORDERED & False),
        ("true", UNORDERED | True),
        ("ord", ~UNORDERED),
        ("uno", UNORDERED),
        ("one", (FLOATS != FLOATS2) & ~UNORDERED),
        ("une", FLOATS != FLOATS2),
        ("oeq", FLOATS == FLOATS2),
        ("ueq", (FLOATS == FLOATS2) | UNORDERED),
        *((f"o{name}", f(FLOATS, FLOATS2)) for name, f in COMPARISONS.items()),
        *((f"u{name}", f(FLOATS, FLOATS2) | UNORDERED) for name, f in COMPARISONS.items()),
    ],
)
def test_float_predicates_with_nan_equal_numpy(predicate, want):
    body = f"%c = arith.cmpf {predicate}, %in0, %in1 : tensor<8xf32>\n"
    body += "%out = arith.extui %c : tensor<8xi1> to tensor<8xi32>"
    np.testing.assert_array_equal(evaluate_text(body, np.int32, FLOATS, FLOATS2)[0], want)


@pytest.mark.parametrize(
    ("op", "want"),
    [
        ("maxnumf", np.fmax(FLOATS, FLOATS2)),
        ("minnumf", np.fmin(FLOATS, FLOATS2)),
        ("maximumf", np.maximum(FLOATS, FLOATS2)),
        ("minimumf", np.minimum(FLOATS, FLOATS2)),
    ],
)
def test_maxima_keep_or_drop_nan(op, want):
    out, _ = evaluate_text(f"%out = arith.{op} %in0, %in1 : tensor<8xf32>", np.float32, FLOATS, FLOATS2)
    np.testing.assert_array_equal(out, want)


@pytest.mark.parametrize(
    ("body", "name"),
    [
        ('%h = "tt.histogram"(%m) : (tensor<4xi32>) -> tensor<4xi32>', "tt.histogram"),
        ("%d = arith.sitofp %m : tensor<4xi32> to tensor<4xf64>", "f64"),
        ("%q = tt.atomic_rmw add, acq_rel, gpu, %p0, %one, %t : (!tt.ptr<i32>, i32, i1) -> i32", "tt.atomic_rmw"),
    ],
)
def test_operation_that_is_not_known_is_refused_by_name(body, name):
    start = "%m = tt.make_range {end = 4 : i32, start = 0 : i32} : tensor<4xi32>\n"
    start += "%one = arith.constant 1 : i32\n%t = arith.constant true\n"
    with pytest.raises(ttir.UnsupportedOp, match=name):
        call_from_text(start + body, [], [((1,), np.int32)])


def test_function_dot_and_cast_that_are_not_known_are_refused_by_name():
    body = '%out = tt.extern_elementwise %in0 {libname = "", libpath = "", pure = true, symbol = "__nv_erff"}'
    with pytest.raises(ttir.UnsupportedOp, match="tt.extern_elementwise: function erff"):
        evaluate_text(f"{body} : (tensor<8xf32>) -> tensor<8xf32>", np.float32, FLOATS)
    body = "%h = tt.fp_to_fp %in0, rounding = rtz : tensor<8xf32> -> tensor<8xf16>\n"
    body += "%out = arith.extf %h : tensor<8xf16> to tensor<8xf32>"
    with pytest.raises(ttir.UnsupportedOp, match="tt.fp_to_fp with"):
        evaluate_text(body, np.float32, FLOATS)
    a, b = (jnp.asarray(RNG.integers(-9, 9, shape), jnp.int8) for shape in ((32, 64), (64, 16)))

    def kernel(a_ref, b_ref, o_ref):
        o_ref[...] = dot(a_ref[...], b_ref[...], preferred_element_type=jnp.int32)

    with pytest.raises(ttir.UnsupportedOp, match="tt.dot .* of integers"):
        ttir.run_function(pallas(kernel, struct(32, 16, dtype=jnp.int32)), a, b)
