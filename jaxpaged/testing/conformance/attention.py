"""`AttentionConformance`: what any backend of `paged_attention` must pass."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.config import AttentionConfig
from jaxpaged.ops.attention.merge import merge_attention
from jaxpaged.testing.cases import Case
from jaxpaged.testing.conformance.batches import (
    PROGRAMS,
    SPLIT,
    WHOLE,
    WILD_ENTRIES,
    Options,
    draw,
    first_tokens,
    with_entries_past_the_last_page,
    with_keys,
    with_negative_logits,
    with_pages_permuted,
    with_poison,
    with_rows,
    without_pages_before,
)
from jaxpaged.testing.conformance.calls import (
    CONFIGURATIONS,
    attend,
    gradients,
    jit,
    lower_strictly,
    prepare,
    slow,
    with_config,
)
from jaxpaged.testing.conformance.grid import CONFIGS, GRID, build, name_of
from jaxpaged.testing.gradients import assert_gradient_close, expected_gradients
from jaxpaged.testing.oracle import assert_attention_close, oracle

_RAGGED = [name for name, program in PROGRAMS.items() if program.is_ragged]
_DECODE = [name for name in PROGRAMS if name not in _RAGGED]
_LENGTHS = ((0, 3, 16, 5, 41, 70), (0, 3, 9, 1, 12, 7))  # of KV and query tokens, within every program
_IN_X64 = ("decode_int8", "ragged")  # what of the programs a short run compiles for 64-bit types
_OTHERS = tuple(CONFIGURATIONS)[1:]
_WIDE = np.int32(2**31 - 1)
_NO_SINK = np.full(4, -np.inf, np.float32)


def _with(option: str) -> list[str]:
    """Programs that have an option."""
    return [name for name, program in PROGRAMS.items() if option in (*program.drawn, *dict(program.static))]


@functools.lru_cache(maxsize=64)
def _drawn(name: str, seed: int) -> tuple[Case, Options, tuple[np.ndarray, np.ndarray]]:
    """A batch of a program, its options, and what the oracle says: the same for all backends."""
    case, options = draw(PROGRAMS[name], seed)
    return case, options, oracle(case, **options)


class AttentionConformance:
    """What any backend of `paged_attention` must pass; a subclass in a test module names the backend.

    Attributes:
        backend: Name under which it is registered. What it cannot run, by its own `why_unsupported`, it must refuse
            with that reason.
    """

    backend: str

    def attend(self, case: Case, options: Options, *, config: AttentionConfig | None = None):
        """Output and log-sum-exp."""
        return attend(self.backend, case, with_config(self.backend, case, options, config))

    def check(self, case: Case, options: Options, expected=None, *, config: AttentionConfig | None = None):
        """The answer has the right types and is the oracle's, which `expected` is if it is known."""
        out, lse = self.attend(case, options, config=config)
        assert (out.shape, out.dtype) == (case.q.shape, case.q.dtype)
        assert (lse.shape, lse.dtype) == (case.q.shape[:2], jnp.float32)
        _assert_close((out, lse), oracle(case, **options) if expected is None else expected)
        return out, lse

    @pytest.mark.parametrize("seeds", [range(8), *slow(range(8, 84))], ids=["few", "many"])
    @pytest.mark.parametrize(
        ("name", "configuration"),
        [
            *((name, "default") for name in PROGRAMS),
            *((name, "x64") for name in _IN_X64),
            *slow(*((name, "x64") for name in PROGRAMS if name not in _IN_X64)),
        ],
    )
    def test_drawn_batches_equal_oracle(self, name, seeds, configuration):
        """Any lengths, tables, windows, trees and values, through one compiled program of each kind."""
        with CONFIGURATIONS[configuration]():
            for seed in seeds:
                case, options, expected = _drawn(name, seed)
                try:
                    self.check(case, options, expected, config=PROGRAMS[name].config)
                except AssertionError as error:
                    error.add_note(f"seed {seed}, seq_lens {case.seq_lens}, cu_q_lens {case.cu_q_lens}")
                    raise

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_strict_promotion_refuses_nothing(self, name):
        """A user may forbid JAX to promote dtypes or ranks."""
        case, options = draw(PROGRAMS[name], 0, _LENGTHS)
        options = with_config(self.backend, case, options, PROGRAMS[name].config)
        lower_strictly(*prepare(self.backend, case, options))

    @pytest.mark.slow
    @pytest.mark.parametrize("configuration", ["default", "x64"])
    @pytest.mark.parametrize("index", range(len(GRID)), ids=map(name_of, GRID))
    def test_each_option_beside_every_other_equals_oracle(self, index, configuration):
        """A grid that holds each pair of values of all options, dtypes and sizes."""
        case, options, expected = build(index)
        with CONFIGURATIONS[configuration]():
            out, lse = self.attend(case, options, config=CONFIGS[GRID[index]["config"]])
        assert (out.dtype, lse.dtype) == (case.q.dtype, jnp.float32)
        _assert_close((out, lse), expected)

    @pytest.mark.slow
    @pytest.mark.parametrize("index", range(len(GRID)), ids=map(name_of, GRID))
    def test_strict_promotion_refuses_no_option_beside_another(self, index):
        """The same grid where JAX may not promote dtypes or ranks."""
        case, options, _ = build(index)
        options = with_config(self.backend, case, options, CONFIGS[GRID[index]["config"]])
        lower_strictly(*prepare(self.backend, case, options))

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_slots_of_nobody_do_not_matter(self, name):
        """Past the end of a sequence, in pages of nobody and of the null page, in values and in scales."""
        case, options = draw(PROGRAMS[name], 1, _LENGTHS)
        rng = np.random.default_rng(0)
        poisoned = [with_poison(case, poison, rng) for poison in (0, 1e30, -np.inf, np.inf, np.nan)]
        self._check_same_bits(name, poisoned, options)

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_entries_past_the_last_page_are_not_followed(self, name):
        """They may hold anything: the null page, a negative number, the largest one."""
        case, options = draw(PROGRAMS[name], 2, _LENGTHS)
        self._check_same_bits(name, [with_entries_past_the_last_page(case, x) for x in (0, *WILD_ENTRIES)], options)

    @pytest.mark.parametrize("name", _with("sliding_window"))
    def test_pages_before_the_window_are_not_followed(self, name):
        """Their pages may be somebody else's by now, their entries anything."""
        case, options = draw(PROGRAMS[name], 3, _LENGTHS, sliding_window=np.int32(10))
        self._check_same_bits(name, [case, without_pages_before(case, 10)], options)

    @pytest.mark.slow
    @pytest.mark.parametrize("window", [1, 16, 50])
    @pytest.mark.parametrize("name", ["decode_bfloat16", "ragged"])
    def test_a_static_window_is_the_traced_one(self, name, window):
        """Whether a window's size is part of the program or an array does not change a bit."""
        case, options = draw(PROGRAMS[name], 14, _LENGTHS, sliding_window=np.int32(window))
        traced = self.attend(case, options, config=PROGRAMS[name].config)
        static = self.attend(case, options | {"sliding_window": window}, config=PROGRAMS[name].config)
        _assert_same_bits(static, traced)

    @pytest.mark.parametrize("name", PROGRAMS)
    def test_pages_may_lie_anywhere(self, name):
        """Where its pages lie does not change a bit of a sequence's answer."""
        case, options = draw(PROGRAMS[name], 4, _LENGTHS)
        self._check_same_bits(name, [case, with_pages_permuted(case, np.random.default_rng(0))], options)

    def _check_same_bits(self, name: str, cases: list[Case], options: Options) -> None:
        first, *others = (self.attend(case, options, config=PROGRAMS[name].config) for case in cases)
        for other in others:
            _assert_same_bits(other, first)

    @pytest.mark.parametrize("config", [None, *slow(SPLIT, WHOLE)], ids=["own", "split", "whole"])
    @pytest.mark.parametrize("name", PROGRAMS)
    def test_a_sequence_has_its_answer_in_any_batch(self, name, config):
        """Alone, among others, in another order; in batch-invariant mode to the bit."""
        case, options = draw(PROGRAMS[name], 5, _LENGTHS)
        config = config or PROGRAMS[name].config
        taken = with_config(self.backend, case, options, config).get("config")
        whole = _by_row(case, self.attend(case, options, config=config))
        for rows in ((4,), (5, 0, 4), (5, 4, 3, 2, 1, 0)):
            other, its_options = with_rows(case, options, rows)
            parts = _by_row(other, self.attend(other, its_options, config=config))
            for row, actual in zip(rows, parts, strict=False):
                if taken is not None and taken.is_batch_invariant:
                    _assert_same_bits(actual, whole[row])
                else:
                    _assert_close(actual, whole[row])

    @pytest.mark.parametrize("name", [name for name in _RAGGED if name not in _with("tree_mask")])
    def test_a_prompt_in_chunks_has_the_answer_of_the_whole(self, name):
        """What is new in a step and what was there before does not change a token's answer."""
        seq_lens = (50, 40, 0, 9, 1, 30)
        case, options = draw(PROGRAMS[name], 6, (seq_lens, seq_lens))
        whole = _by_row(case, self.attend(case, options, config=PROGRAMS[name].config))
        for num_new in ((7, 39, 0, 9, 1, 2), (1, 20, 0, 3, 1, 30)):
            chunk = _with_last_queries(case, num_new)
            for row, actual in enumerate(_by_row(chunk, self.attend(chunk, options, config=PROGRAMS[name].config))):
                _assert_close(actual, [x[len(x) - num_new[row] :] for x in whole[row]])

    @pytest.mark.parametrize("name", [name for name in _DECODE if name not in _with("alibi_slopes")])
    def test_two_parts_of_the_keys_merge_to_the_whole(self, name):
        """Output and log-sum-exp over two parts of the keys merge to those over all."""
        case, options = draw(PROGRAMS[name], 7, _LENGTHS)
        options |= {"sliding_window": _WIDE} if "sliding_window" in options else {}
        first = options | ({"sinks": _NO_SINK} if "sinks" in options else {})  # they count once
        whole = self.attend(case, options, config=PROGRAMS[name].config)
        for column in (1, 5):
            a = self.attend(with_keys(case, slice(0, column)), first, config=PROGRAMS[name].config)
            b = self.attend(with_keys(case, slice(column, None)), options, config=PROGRAMS[name].config)
            # A sequence whose keys all lie in the first part counts its sinks there.
            live = np.asarray(case.seq_lens > column * case.k_pages.shape[3])
            merged = [np.asarray(x)[live] for x in merge_attention(*a, *b)]
            _assert_close(merged, [np.asarray(x)[live] for x in whole])

    @pytest.mark.parametrize("name", _with("sinks"))
    def test_logits_of_minus_100_equal_oracle(self, name):
        """Also in rows that see nothing of the first keys that others of their tile see."""
        program = PROGRAMS[name]
        # All tokens of two prompts are new, so that keys before the window, or beside a path of the tree, fill tiles.
        prompts = (program.num_tokens - 10, 10, 0, 0, 0, 0)
        lengths = (prompts, prompts) if program.is_ragged else _LENGTHS
        case, options = draw(program, 8, lengths, sliding_window=np.int32(4))
        case = with_negative_logits(case)
        options["sinks"] = np.full(4, -1e4, np.float32)
        if "alibi_slopes" in options:
            options["alibi_slopes"] *= 0
        if "tree_mask" in options:  # each draft sees none of the others
            options["tree_mask"][:] = np.arange(options["tree_mask"].shape[1]) == _index_in_sequence(case)[:, None]
        _, lse = self.check(case, options, config=program.config)
        assert np.median(lse[np.isfinite(lse)]) < -88  # e^-88 is no normal number of float32

    @pytest.mark.parametrize("name", ["decode_int8"])
    def test_soft_cap_of_logits_of_ten_thousand_equals_oracle(self, name):
        """The cap of a large logit is the cap, not NaN."""
        case, options = draw(PROGRAMS[name], 9, _LENGTHS, sliding_window=_WIDE)
        case = dataclasses.replace(case, q=case.q * np.float32(1e4))
        _, lse = self.check(case, options, config=PROGRAMS[name].config)
        assert np.max(lse) > 29

    @pytest.mark.parametrize("name", _with("sinks"))
    def test_sinks_count_once_however_the_keys_are_cut(self, name):
        """Sinks as heavy as the keys together: counted with each piece, they would halve the output again."""
        case, options = draw(PROGRAMS[name], 10, ((70,) * 6, (5,) * 6), sinks=np.full(4, np.log(70), np.float32))
        case = dataclasses.replace(case, q=case.q * 0)
        self.check(case, options, config=PROGRAMS[name].config)

    @pytest.mark.parametrize("dtype", ["int8", *slow("float8_e4m3fn", "float8_e5m2")])
    def test_a_quantised_cache_is_attended_to_as_what_it_gives_back(self, dtype):
        """Written, measured and quantised by `KVCache`: the answer is the oracle's over what `gather` returns."""
        program = dataclasses.replace(PROGRAMS["decode_int8"], dtype=dtype)
        case, options = draw(program, 11, _LENGTHS)
        self.check(_in_a_written_cache(case), options, config=program.config)

    @pytest.mark.parametrize("configuration", ["default", *slow(*_OTHERS)])
    @pytest.mark.parametrize("name", ["ragged", *slow(*(name for name in PROGRAMS if name != "ragged"))])
    def test_gradients_equal_float64(self, name, configuration):
        """`jax.grad` of output and log-sum-exp, by all floating arguments.

        From float32 queries: in 16 bits the rounding of the output shows where a gradient nearly cancels.
        """
        program = PROGRAMS[name]
        wide = {"dtype": "float32"} if program.q_dtype is None else {"q_dtype": "float32"}
        case, options = draw(dataclasses.replace(program, **wide), 12, _LENGTHS)
        with CONFIGURATIONS[configuration]():
            actual = gradients(self.backend, case, with_config(self.backend, case, options, program.config))
        for argument, expected in expected_gradients(case, **options).items():
            if argument in actual:
                assert_gradient_close(actual[argument], expected, case.q.dtype)

    @pytest.mark.parametrize("argument", ["k_pages", "v_pages", "k_scale", "v_scale"])
    def test_gradients_of_quantised_pages_are_refused_by_name(self, argument):
        """Stored values change in steps: their derivative would be a lie."""
        case, options = draw(PROGRAMS["ragged_float8"], 13, _LENGTHS)
        with pytest.raises(NotImplementedError, match=f"`{argument}` has no derivative in paged_attention: quantised"):
            gradients(self.backend, case, options, of=(argument,))


def _index_in_sequence(case: Case) -> np.ndarray:
    """Of each packed query token, its place among the new ones of its sequence."""
    starts = first_tokens(case)
    token = np.arange(len(case.q))
    return token - starts[np.searchsorted(starts, token, side="right") - 1]


def _with_last_queries(case: Case, num_new: tuple[int, ...]) -> Case:
    """The same sequences, of which only the last tokens are new."""
    ends = first_tokens(case)[1:]
    tokens = np.concatenate([np.arange(end - num, end) for end, num in zip(ends, num_new, strict=True)])
    q = case.q[np.pad(tokens, (0, len(case.q) - len(tokens)))]
    return dataclasses.replace(case, q=q, cu_q_lens=np.cumsum([0, *num_new], dtype=np.int32))


def _in_a_written_cache(case: Case) -> Case:
    """The same sequences as a `KVCache` of the same shape stores them, and as it gives them back."""
    num_layers, num_pages, num_kv_heads, page_size, head_dim = case.k_pages.shape
    width = case.page_table.shape[1] * page_size
    slots = (case.page_table[:, :, None] * page_size + np.arange(page_size)).reshape(-1, width)
    live = np.arange(width) < case.seq_lens[:, None]

    @jit
    def write_and_gather(k, v, slots, page_table, seq_lens):
        cache = KVCache.create(
            num_layers=num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype=case.k_pages.dtype,
        )
        cache = cache.write(case.layer, k, v, slots)
        return cache, cache.gather(case.layer, page_table, seq_lens)

    k, v = (np.concatenate(dense).astype(np.float32) for dense in (case.dense_k, case.dense_v))
    cache, (dense_k, dense_v) = write_and_gather(k, v, slots[live].astype(np.int32), case.page_table, case.seq_lens)
    return dataclasses.replace(
        case,
        **{name: np.asarray(getattr(cache, name)) for name in ("k_pages", "v_pages", "k_scale", "v_scale")},
        dense_k=[np.asarray(x)[:n] for x, n in zip(dense_k, case.seq_lens, strict=True)],
        dense_v=[np.asarray(x)[:n] for x, n in zip(dense_v, case.seq_lens, strict=True)],
    )


def _by_row(case: Case, result) -> list[list[np.ndarray]]:
    """Output and log-sum-exp of each sequence's tokens."""
    return [[np.asarray(x)[a:b] for x in result] for a, b in itertools.pairwise(first_tokens(case))]


def _assert_lse_close(actual, expected) -> None:
    """As tightly as in float32, and -inf only where that is expected: products of 16-bit numbers are exact."""
    np.testing.assert_allclose(np.asarray(actual), np.asarray(expected), rtol=2e-5, atol=2e-5)


def _assert_close(actual, expected) -> None:
    assert_attention_close(actual[0], np.asarray(expected[0], np.float64))
    _assert_lse_close(actual[1], expected[1])


def _assert_same_bits(actual, expected) -> None:
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(x, np.float32), np.asarray(y, np.float32))
