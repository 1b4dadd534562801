"""What the operations of Triton IR mean, on numpy: those that the kernels of this package use, and their kin.

Integers wrap at the width of their type, shifts and casts follow PTX, and an f32 dot that allows TF32 gets its operands
truncated, as tensor cores do. An operation that is not in `HANDLERS` is refused by its name.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxpaged.inspect.ttir.decode import IRType, Op, UnsupportedOp
from jaxpaged.inspect.ttir.memory import bits

if TYPE_CHECKING:
    from jaxpaged.inspect.ttir.machine import Machine


def _signed(x, width: int):
    """See an integer operand in two's complement: i1 is 0 or -1."""
    return -x.astype(np.int8) if width == 1 else x


def _unsigned(x, width: int):
    return x.astype(np.uint8) if width == 1 else bits(x)


def _wrap(x, t: IRType):
    """Reduce an integer result to the width of its type."""
    return (x.astype(np.int8) & 1).astype(bool) if t.width == 1 else x.astype(t.dtype)


def _shift(function: Callable, overflow: Callable):
    """Make a shift that gives `overflow(x)` from the width on, as PTX defines."""

    def shifted(x, amount):
        amount, limit = bits(amount), x.dtype.itemsize * 8
        small = np.minimum(amount, limit - 1).astype(x.dtype)
        return np.where(amount < limit, function(x, small), overflow(x))

    return shifted


_INTEGER_OPS: dict[str, tuple[Callable, Callable]] = {  # the function, and how it sees its operands
    "arith.addi": (np.add, _signed),
    "arith.subi": (np.subtract, _signed),
    "arith.muli": (np.multiply, _signed),
    "arith.andi": (np.bitwise_and, _signed),
    "arith.ori": (np.bitwise_or, _signed),
    "arith.xori": (np.bitwise_xor, _signed),
    "arith.maxsi": (np.maximum, _signed),
    "arith.minsi": (np.minimum, _signed),
    "arith.maxui": (np.maximum, _unsigned),
    "arith.minui": (np.minimum, _unsigned),
    "arith.shli": (_shift(np.left_shift, np.zeros_like), _signed),
    "arith.shrsi": (_shift(np.right_shift, lambda x: np.where(x < 0, -1, 0).astype(x.dtype)), _signed),
    "arith.shrui": (_shift(np.right_shift, np.zeros_like), _unsigned),
    "arith.divsi": (lambda x, y: (x - np.fmod(x, y)) // y, _signed),
    "arith.remsi": (np.fmod, _signed),
    "arith.divui": (np.floor_divide, _unsigned),
    "arith.remui": (np.remainder, _unsigned),
}


def _integer_op(op: Op, machine: "Machine", x, y):
    function, view = _INTEGER_OPS[op.name]
    if op.name.startswith(("arith.div", "arith.rem")) and not np.all(y):
        machine.memory.note("division-by-zero", op)
        y = np.where(y == 0, np.ones_like(y), y)
    return _wrap(function(view(x, op.target.width), view(y, op.target.width)), op.target)


_COMPARE_INTS = [np.equal, np.not_equal, *2 * [np.less, np.less_equal, np.greater, np.greater_equal]]
_COMPARE_FLOATS = [None, np.equal, np.greater, np.greater_equal, np.less, np.less_equal, np.not_equal]


def _compare_ints(op: Op, machine: "Machine", x, y):
    predicate, width = op.attributes["predicate"], op.source.width  # eq, ne, slt..sge, ult..uge
    view = _signed if predicate < 6 else _unsigned
    return _COMPARE_INTS[predicate](view(x, width), view(y, width))


def _compare_floats(op: Op, machine: "Machine", x, y):
    predicate = op.attributes["predicate"]  # false, oeq..one, ord, ueq..une, uno, true
    unordered = np.isnan(x) | np.isnan(y)
    if predicate in (0, 7, 14, 15):
        return {0: unordered & False, 7: ~unordered, 14: unordered, 15: unordered | True}[predicate]
    compare = _COMPARE_FLOATS[predicate % 7]
    assert compare is not None
    return compare(x, y) | unordered if predicate > 7 else compare(x, y) & ~unordered


_PURE_OPS: dict[str, Callable] = {  # of the operands' values alone
    "arith.addf": np.add,
    "arith.subf": np.subtract,
    "arith.mulf": np.multiply,
    "arith.divf": np.divide,
    "arith.remf": np.fmod,
    "arith.negf": np.negative,
    "arith.maxnumf": np.fmax,
    "arith.minnumf": np.fmin,
    "arith.maximumf": np.maximum,
    "arith.minimumf": np.minimum,
    "arith.select": lambda condition, x, y: np.where(condition, x, y)[()],
}


def _float_to_int(x, t: IRType, low: int, high: int):
    """Saturate, with NaN to zero, as the conversions of a GPU do."""
    x = np.trunc(np.nan_to_num(np.asarray(x, np.float64), nan=0, posinf=np.inf, neginf=-np.inf))
    inside = (x > low) & (x < high)
    storage = np.dtype(f"{'i' if low else 'u'}{t.dtype.itemsize}")
    limit = np.where(x <= low, storage.type(low), storage.type(high))
    return _wrap(np.where(inside, np.where(inside, x, 0).astype(storage), limit), t)


def _float_to_float(x, t: IRType):
    """Saturate in a cast to 8 bits, as `cvt.rn.satfinite` does; XLA's gives NaN or infinity."""
    x = x.astype(np.float32)
    if t.width == 8:
        limit = np.float32(jnp.finfo(t.dtype).max)
        x = np.where(np.isnan(x), x, np.clip(x, -limit, limit))
    return x.astype(t.dtype)


def _bitcast(x, s: IRType, t: IRType):
    same = t.kind == "ptr" or s.dtype == t.dtype
    return x if same else np.ascontiguousarray(x).view(t.dtype).reshape(np.shape(x))[()]


_CONVERSIONS: dict[str, Callable[[Any, IRType, IRType], Any]] = {  # of the operand, its type and the result's
    "arith.extsi": lambda x, s, t: _wrap(_signed(x, s.width), t),
    "arith.trunci": lambda x, s, t: _wrap(_signed(x, s.width), t),
    "arith.extui": lambda x, s, t: _wrap(_unsigned(x, s.width), t),
    "arith.sitofp": lambda x, s, t: _signed(x, s.width).astype(t.dtype),
    "arith.uitofp": lambda x, s, t: _unsigned(x, s.width).astype(t.dtype),
    "arith.fptosi": lambda x, s, t: _float_to_int(x, t, -1 << t.width - 1, (1 << t.width - 1) - 1),
    "arith.fptoui": lambda x, s, t: _float_to_int(x, t, 0, (1 << t.width) - 1),
    "arith.extf": lambda x, s, t: x.astype(t.dtype),
    "arith.truncf": lambda x, s, t: x.astype(t.dtype),
    "tt.fp_to_fp": lambda x, s, t: _float_to_float(x, t),
    "arith.bitcast": _bitcast,
    "tt.bitcast": _bitcast,
    "tt.splat": lambda x, s, t: np.broadcast_to(x, t.shape),
    "tt.broadcast": lambda x, s, t: np.broadcast_to(x, t.shape),
    "tt.reshape": lambda x, s, t: np.reshape(x, t.shape),
}


def _conversion(op: Op, machine: "Machine", x):
    if op.attributes.get("rounding", 1) != 1 or op.attributes.get("allow_reorder"):
        raise UnsupportedOp(f"{op} with {op.attributes}")
    return _CONVERSIONS[op.name](x, op.source, op.target)


# Names in the dialect `math`, and in libdevice between "__nv_" and the "f" of float32.
_FLOAT_FUNCTIONS: dict[str, Callable] = {
    "absf": np.fabs,
    "ceil": np.ceil,
    "cos": np.cos,
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fabs": np.fabs,
    "floor": np.floor,
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "sqrt": np.sqrt,
    "tanh": np.tanh,
}


def _float_function(op: Op, machine: "Machine", x):
    """Execute a function of floats; 16-bit ones are computed in float32."""
    name = op.attributes.get("symbol", op.name).removeprefix("math.").removeprefix("__nv_")
    function = _FLOAT_FUNCTIONS.get(name) or _FLOAT_FUNCTIONS.get(name.removesuffix("f"))
    if function is None:
        raise UnsupportedOp(f"{op}: function {name}")
    return function(x.astype(np.float32)).astype(op.target.dtype)


def _load(op: Op, machine: "Machine", pointer, *rest):
    mask, other = (*rest, None, None)[:2]
    return machine.memory.load(op, pointer, mask, other)


def _store(op: Op, machine: "Machine", pointer, value, mask=None):
    machine.memory.store(op, pointer, value, mask)


def _to_tf32(x: np.ndarray) -> np.ndarray:
    """Drop 13 bits of float32."""
    return np.where(np.isfinite(x), (bits(np.ascontiguousarray(x)) & np.uint32(0xFFFFE000)).view(np.float32), x)


def _dot(op: Op, machine: "Machine", a, b, accumulator):
    if op.source.kind == "int":
        raise UnsupportedOp(f"{op} of integers")
    a, b = a.astype(np.float32), b.astype(np.float32)
    if op.source.width == 32 and op.attributes["inputPrecision"] == 0:
        a, b = _to_tf32(a), _to_tf32(b)
    return (accumulator.astype(np.float32) + np.matmul(a, b)).astype(accumulator.dtype)


def _reduce(op: Op, machine: "Machine", *inputs):
    """Combine the two halves of the axis until one element is left; its size is a power of two."""
    parts = [np.moveaxis(x, op.attributes["axis"], 0) for x in inputs]
    while (half := len(parts[0]) // 2) > 0:
        parts = machine.run_region(op.regions[0], [p[:half] for p in parts] + [p[half:] for p in parts])
    return tuple(part[0] for part in parts)


def _for_loop(op: Op, machine: "Machine", lower, upper, step, *carried):
    for i in range(int(lower), int(upper), int(step)):
        carried = machine.run_region(op.regions[0], [lower.dtype.type(i), *carried])
    return tuple(carried)


def _if_else(op: Op, machine: "Machine", condition):
    region = op.regions[0 if condition else 1]
    return tuple(machine.run_region(region, [])) if region.ops else ()


HANDLERS: dict[str, Callable] = {
    **dict.fromkeys(_INTEGER_OPS, _integer_op),
    **{name: lambda op, machine, *values: _PURE_OPS[op.name](*values) for name in _PURE_OPS},
    **dict.fromkeys(_CONVERSIONS, _conversion),
    **{f"math.{name}": _float_function for name in _FLOAT_FUNCTIONS},
    "tt.extern_elementwise": _float_function,
    "arith.cmpi": _compare_ints,
    "arith.cmpf": _compare_floats,
    "arith.constant": lambda op, machine: op.attributes["value"],
    "tt.expand_dims": lambda op, machine, x: np.expand_dims(x, op.attributes["axis"]),
    "tt.trans": lambda op, machine, x: np.transpose(x, op.attributes["order"]),
    "tt.make_range": lambda op, machine: np.arange(op.attributes["start"], op.attributes["end"], dtype=np.int32),
    "tt.get_program_id": lambda op, machine: np.int32(machine.program_id[op.attributes["axis"]]),
    "tt.get_num_programs": lambda op, machine: np.int32(machine.grid[op.attributes["axis"]]),
    "tt.addptr": lambda op, machine, pointer, offset: pointer + offset.astype(np.int64) * op.source.dtype.itemsize,
    "tt.load": _load,
    "tt.store": _store,
    "gpu.barrier": lambda op, machine: machine.memory.barrier(),
    "tt.dot": _dot,
    "tt.reduce": _reduce,
    "scf.for": _for_loop,
    "scf.if": _if_else,
}
"""By name, a function of the operation, the machine and the operands' values; it returns the result or their tuple."""
