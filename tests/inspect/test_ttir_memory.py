"""Faults put into small kernels, each of which the interpreter must name, and clean kernels that it must let pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxpaged.inspect import ttir
from tests.inspect.ttir_kernels import ROWS, call_from_text, kinds, lowered_call, pallas, struct


def gather(x_ref, i_ref, o_ref):
    o_ref[...] = x_ref[i_ref[...]]


def test_gather_out_of_bounds_raises_with_the_place():
    with pytest.raises(
        ttir.KernelFault, match=r"out-of-bounds: kernel gather, tt.load at .*x_ref float32\[8, 8\]"
    ) as fault:
        ttir.run_function(pallas(gather, struct(4, 8)), ROWS, jnp.array([0, 3, 8, 2]))
    event = fault.value.event
    assert (event.kernel, event.program, event.index, event.count) == ("gather", (0, 0, 0), (8, 0), 8)
    assert event.operand == "x_ref float32[8, 8]"
    assert event.op.startswith("tt.load at test_ttir_memory.py:")
    assert event.detail == "read of flat elements 64 to 71 of 64 by 8 of 32 active lanes"


def test_gather_with_a_negative_index_raises():
    with pytest.raises(
        ttir.KernelFault, match=r"element \[-1, 0\], 8 element\(s\): read of flat elements -8 to -1 of 64"
    ):
        ttir.run_function(pallas(gather, struct(2, 8)), ROWS, jnp.array([1, -1]))


def test_store_out_of_bounds_raises_unless_the_lane_is_off():
    def kernel(size, x_ref, o_ref):
        i = jnp.arange(8) + 4
        plgpu.store(o_ref.at[i], x_ref[0, :], mask=i < size)

    clean = ttir.run_function(pallas(functools.partial(kernel, 8), struct(8)), ROWS)
    assert kinds(clean) == ["unwritten"]
    np.testing.assert_array_equal(clean.outputs[4:], ROWS[0, :4])
    with pytest.raises(ttir.KernelFault, match=r"tt.store.*o_ref float32\[8\], element \[8\], 1 elem.*: write of"):
        ttir.run_function(pallas(functools.partial(kernel, 9), struct(8)), ROWS)


OFFSET_LOAD = """
    %c = arith.constant OFFSET : i64
    %a = tt.addptr %p0, %c : !tt.ptr<i8>, i64
    %b = tt.bitcast %a : !tt.ptr<i8> -> !tt.ptr<i32>
    %v = tt.load %b : !tt.ptr<i32>
    tt.store %p2, %v : !tt.ptr<i32>"""


def offset_load(offset, **options):
    """Reads four bytes at an offset into the first of two operands of 8 bytes."""
    text = OFFSET_LOAD.replace("OFFSET", str(offset))
    call = call_from_text(text, [((8,), np.int8)] * 2, [((1,), np.int32)])
    x = np.arange(8, dtype=np.int8)
    return ttir.run(call, x, -x, **options)


def test_access_of_another_width_reads_the_bytes_and_checks_each():
    [out] = offset_load(4)
    assert out[0] == int.from_bytes(bytes([4, 5, 6, 7]), "little")
    marks = np.arange(8) == 6
    events = list(offset_load(4, uninitialised={0: marks}).report.events.values())
    assert [(event.kind, event.index, event.count) for event in events] == [("uninitialised-read", (6,), 1)]
    assert offset_load(0, uninitialised={0: marks}).report.problems == []


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (1, r"misaligned.*p0 int8\[8\], element \[1\].*read of 4 bytes"),
        (8, r"out-of-bounds.*p0 int8\[8\], element \[8\]"),  # not the second operand, wherever that lies
        (6, r"out-of-bounds.*p0 int8\[8\]"),
        (-4, r"out-of-bounds.*p0 int8\[8\], element \[-4\]"),
        (1 << 50, "pointer to no operand"),
    ],
)
def test_access_at_a_wrong_offset_raises(offset, message):
    with pytest.raises(ttir.KernelFault, match=message):
        offset_load(offset)


def test_offset_of_32_bits_counts_elements_and_does_not_wrap():
    body = f"""
        %c = arith.constant {1 << 30} : i32
        %a = tt.addptr %p0, %c : !tt.ptr<i32>, i32
        %v = tt.load %a : !tt.ptr<i32>
        tt.store %p1, %v : !tt.ptr<i32>"""
    with pytest.raises(ttir.KernelFault, match=r"out-of-bounds.*p0 int32\[4\], element \[1073741824\]"):
        ttir.run(call_from_text(body, [((4,), np.int32)], [((1,), np.int32)]), np.zeros(4, np.int32))


def test_output_block_that_nobody_writes_is_reported():
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[i, :] = x_ref[i, :]

    result = ttir.run_function(pallas(kernel, struct(8, 8), grid=(6,)), ROWS)
    [event] = result.runs[0].report.events.values()
    assert (event.kind, event.operand, event.index, event.count) == ("unwritten", "o_ref float32[8, 8]", (6, 0), 16)
    assert np.isnan(result.outputs[6:]).all()
    np.testing.assert_array_equal(result.outputs[:6], ROWS[:6])


def test_two_writers_of_an_element_race():
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[i // 2, :] = x_ref[i, :]

    call = lowered_call(kernel, struct(4, 8), ROWS, grid=(8,))
    [event] = ttir.run(call, ROWS).report.events.values()
    assert (event.kind, event.program, event.index, event.count) == ("race", (1, 0, 0), (0, 0), 32)
    assert event.detail.startswith("write after write tt.store at ")
    assert event.detail.endswith("program (0, 0, 0)")
    assert {change.split(":")[0] for change in ttir.cross_check(call, ROWS)} == {
        "grid order reversed",
        "grid order shuffled",
    }


def test_programs_of_a_grid_are_each_run_once_with_x_fastest():
    def kernel(o_ref):
        i, j, k = (pl.program_id(axis) for axis in range(3))
        o_ref[i, j, k] = (i * 10 + j) * 10 + k
        o_ref[0, 0, 0] = 0

    call = lowered_call(kernel, struct(4, 2, 8, dtype=jnp.int32), grid=(4, 2, 8))
    result = ttir.run(call)
    i, j, k = np.indices((4, 2, 8))
    np.testing.assert_array_equal(result[0].ravel()[1:], (i * 100 + j * 10 + k).ravel()[1:])
    [event] = result.report.of_kind("race")
    assert (event.program, event.count) == ((1, 0, 0), 4 * 2 * 8 - 1)


def test_number_of_programs_is_that_of_the_axis():
    body = "%n = tt.get_num_programs y : i32\ntt.store %p0, %n : !tt.ptr<i32>"
    [out] = ttir.run(call_from_text(body, [], [((1,), np.int32)], grid=(2, 3, 4)))
    assert out.tolist() == [3]


@pytest.mark.parametrize("order", ["sequential", "reverse", 0, 1])
def test_reader_and_writer_of_an_element_race_in_any_order(order):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[i, :] = x_ref[(i + 1) % 8, :] + 1

    result = ttir.run_function(
        pallas(kernel, struct(8, 8), grid=(8,), input_output_aliases={0: 0}), ROWS, grid_order=order
    )
    assert set(kinds(result)) == {"race"}
    assert sum(event.count for event in result.runs[0].report.events.values()) == 64  # another program reads each row


def test_writer_races_with_an_earlier_reader_whatever_it_read_itself():
    def kernel(x_ref, o_ref):
        first = x_ref[0, :]  # every program reads row 0, the last one writes it

        @pl.when(pl.program_id(0) == 3)
        def _():
            o_ref[0, :] = first + 1

    result = ttir.run_function(pallas(kernel, struct(8, 8), grid=(4,), input_output_aliases={0: 0}), ROWS)
    [event] = result.runs[0].report.events.values()
    assert (event.kind, event.program) == ("race", (3, 0, 0))
    assert event.detail.startswith("write after read tt.load at ")
    assert event.detail.endswith("program (2, 0, 0)")


def test_update_in_place_of_rows_of_ones_own_is_clean():
    def kernel(x_ref, o_ref):
        i, j = pl.program_id(0), pl.program_id(1)
        o_ref[i, pl.ds(4 * j, 4)] = x_ref[i, pl.ds(4 * j, 4)] + 1

    f = pallas(kernel, struct(8, 8), grid=(8, 2), input_output_aliases={0: 0})
    result = ttir.run_function(f, ROWS, grid_order=3)
    assert kinds(result) == []
    np.testing.assert_array_equal(result.outputs, ROWS + 1)


def test_read_of_an_output_before_it_is_written_is_reported():
    def kernel(x_ref, o_ref):
        o_ref[...] += x_ref[...]

    result = ttir.run_function(pallas(kernel, struct(8, 8)), ROWS)
    assert kinds(result) == ["uninitialised-read"]
    assert np.isnan(result.outputs).all()


def test_read_of_marked_elements_is_reported_and_of_written_ones_not():
    def kernel(x_ref, o_ref):
        o_ref[0, :] = x_ref[1, :]
        plgpu.debug_barrier()
        o_ref[1, :] = o_ref[0, :] + o_ref[2, :]

    marks = np.ones((8, 1), bool)
    marks[1] = False
    f = pallas(kernel, struct(8, 8), input_output_aliases={0: 0})
    result = ttir.run_function(f, ROWS, uninitialised={"kernel": {0: marks}})
    [event] = result.runs[0].report.events.values()
    assert (event.kind, event.index, event.count) == ("uninitialised-read", (2, 0), 8)


def test_load_whose_result_is_not_used_does_not_count():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    call = lowered_call(kernel, struct(8, 8), ROWS)
    assert call.ir.count("tt.load") == 2  # Pallas loads what it overwrites, and Triton deletes that
    report = ttir.run(call, ROWS).report
    assert report.problems == []
    assert (report.traffic["in0"].loaded, report.traffic["out0"].loaded) == (256, 0)


@pytest.mark.parametrize(("volatile", "loaded"), [("false", 0), ("true", 4)])
def test_load_whose_result_is_not_used_counts_if_volatile(volatile, loaded):
    text = f"%v = tt.load %p0 {{isVolatile = {volatile}}} : !tt.ptr<i32>"
    report = ttir.run(call_from_text(text, [((1,), np.int32)], []), np.ones(1, np.int32)).report
    assert report.traffic["p0"].loaded == loaded


def test_lanes_of_one_store_that_disagree_are_reported():
    def kernel(scale, x_ref, o_ref):
        o_ref[jnp.arange(8) // 2] = x_ref[0, :] * scale

    assert kinds(ttir.run_function(pallas(functools.partial(kernel, 1), struct(4)), ROWS)) == ["store-lane-conflict"]
    assert kinds(ttir.run_function(pallas(functools.partial(kernel, 0), struct(4)), ROWS)) == []


def test_write_to_an_input_that_no_output_shares_is_reported():
    def kernel(x_ref, o_ref):
        x_ref[0, :] = jnp.zeros(8)
        o_ref[...] = jnp.zeros((8, 8))

    assert kinds(ttir.run_function(pallas(kernel, struct(8, 8)), ROWS)) == ["write-to-input"]


@pytest.mark.parametrize("with_barrier", [True, False])
def test_read_of_what_the_program_wrote_is_a_hazard_without_barrier(with_barrier):
    def kernel(x_ref, o_ref):
        i = pl.program_id(0)
        o_ref[i, :] = x_ref[i, :]
        if with_barrier:
            plgpu.debug_barrier()
        o_ref[i, :] = o_ref[i, :] * 2

    result = ttir.run_function(pallas(kernel, struct(8, 8), grid=(8,)), ROWS)
    assert kinds(result) == ([] if with_barrier else ["read-after-own-write"])
    assert result.problems == []
    assert len(result.runs[0].report.hazards) == (not with_barrier)


def test_cross_check_finds_undefined_lanes_in_a_maximum_that_drops_nan():
    def kernel(other, x_ref, o_ref):
        row = plgpu.load(x_ref.at[0, :], mask=jnp.arange(8) < 5, other=other)
        o_ref[...] = jnp.max(row) * jnp.ones(8)

    changes = ttir.cross_check(lowered_call(functools.partial(kernel, None), struct(8), ROWS), ROWS)
    assert changes == ["undefined elements 100: 8 element(s) of output 0 change"]
    assert ttir.cross_check(lowered_call(functools.partial(kernel, -np.inf), struct(8), ROWS), ROWS) == []


def test_cross_check_takes_equal_nan_for_equal():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...]

    assert ttir.cross_check(lowered_call(kernel, struct(8, 8), ROWS), ROWS.at[0, 0].set(jnp.nan)) == []


def test_report_counts_bytes_of_active_lanes_with_repeats():
    def kernel(x_ref, w_ref, o_ref):
        i = pl.program_id(0)
        total = jax.lax.fori_loop(0, 3, lambda _, t: t + w_ref[...], jnp.zeros(8))
        o_ref[i, :] = plgpu.load(x_ref.at[i, :], mask=jnp.arange(8) < 6, other=0) + total

    result = ttir.run_function(pallas(kernel, struct(8, 8), grid=(8,)), ROWS, jnp.ones(8))
    report = result.runs[0].report
    traffic = {name: (t.loaded, t.stored) for name, t in report.traffic.items()}
    assert traffic == {"x_ref": (8 * 6 * 4, 0), "w_ref": (8 * 3 * 32, 0), "o_ref": (0, 256)}
    assert str(report).splitlines()[:2] == ["kernel, grid (8, 1, 1)", "  x_ref: loaded 192 B, stored 0 B"]
    np.testing.assert_array_equal(result.outputs, np.where(np.arange(8) < 6, ROWS, 0) + 3)


@pytest.mark.parametrize(("poison", "value"), [(True, np.nan), (False, 0), (3.5, 3.5)])
def test_poison_fills_what_nobody_wrote_and_lanes_that_are_off(poison, value):
    def kernel(x_ref, o_ref):
        o_ref[0, :] = plgpu.load(x_ref.at[0, :], mask=jnp.arange(8) < 5)

    call = lowered_call(kernel, struct(2, 8), ROWS)
    [out] = ttir.run(call, ROWS, poison=poison)
    np.testing.assert_array_equal(out[1], np.full(8, value))
    np.testing.assert_array_equal(out[0], np.where(np.arange(8) < 5, ROWS[0], value))


def test_poison_of_integers_is_no_small_number():
    def kernel(x_ref, o_ref):
        o_ref[0] = x_ref[0]

    [out] = ttir.run(lowered_call(kernel, struct(2, dtype=jnp.int32), jnp.arange(2)), np.arange(2, dtype=np.int32))
    assert out.tolist() == [0, 0x5A5A5A5A]
