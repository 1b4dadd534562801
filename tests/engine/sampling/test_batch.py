"""The arrays of a sampling step: what each request asks for in its row, padding that means nothing."""

import dataclasses

import jax
import numpy as np
import pytest

from jaxpaged.engine.sampling.batch import PAD, SamplingFeatures, features_of, make_sampling_batch
from jaxpaged.engine.sampling.params import SamplingParams, SamplingRow
from tests.engine.sampling.sampling_oracle import Row, make_batch, random_rows


def test_make_sampling_batch_of_plain_greedy_requests_is_none():
    rows = [Row(SamplingParams(top_k=4, top_p=0.5, seed=3, stop_token_ids=(1,)))] * 3  # filters of no draw
    assert make_batch(rows, 4) is None
    assert make_batch(rows, 4, features=SamplingFeatures(draws=True)).temperature.tolist() == [0] * 4


def test_make_sampling_batch_puts_each_request_in_its_row():
    rows = [
        Row(SamplingParams(temperature=0.5, top_k=2**40, top_p=0.25, min_p=0.125, seed=2**32 - 1), (4, 5), [6]),
        Row(SamplingParams(top_k=3, top_p=0.5, frequency_penalty=2.0, logit_bias={9: -1.5}), (7, 8, 9), [1, 2]),
        Row(SamplingParams(min_new_tokens=3, stop_token_ids=(3, 4, 5), num_logprobs=3), (7,), [1], num_pending=1),
        Row(SamplingParams(min_new_tokens=1, stop_token_ids=(3, 4, 5), num_logprobs=0), (7,), [1]),
    ]
    batch = make_batch(rows, 8)
    assert batch.position.tolist() == [3, 5, 3, 2, 0, 0, 0, 0]
    assert batch.temperature.tolist() == [0.5, *[0] * 7]
    assert batch.seed.tolist() == [2**32 - 1, *[0] * 7]
    assert batch.top_k.tolist() == [2**31 - 1, *[0] * 7]  # the second is greedy
    assert batch.top_p.tolist() == [0.25, *[1] * 7]
    assert batch.min_p.tolist() == [0.125, *[0] * 7]
    assert batch.bias_ids.tolist() == [[PAD], [9], *[[PAD]] * 6]
    assert batch.bias_values.tolist() == [[0], [-1.5], *[[0]] * 6]
    assert batch.stop_ids.tolist() == [*[[PAD] * 4] * 2, [3, 4, 5, PAD], *[[PAD] * 4] * 5]
    assert batch.min_position.tolist() == [2, 3, 4, 2, 0, 0, 0, 0]
    assert batch.num_logprobs == 4
    penalties = batch.penalties
    assert penalties.seat.tolist() == [PAD, 1, *[PAD] * 6]
    assert penalties.counted.tolist() == [PAD] * 8
    assert penalties.recent.shape == (8, 0)
    assert penalties.frequency.tolist() == [0, 2, *[0] * 6]
    assert penalties.repetition.tolist() == [1] * 8
    assert all(x.dtype in (np.int32, np.uint32, np.float32) for x in jax.tree.leaves(batch))


def test_features_of_requests_are_those_of_each_joined():
    rows = random_rows(np.random.default_rng(0), 20, 50)
    joined = SamplingFeatures()
    for row in rows:
        joined |= features_of([row.in_seat(0)])
    assert features_of([row.in_seat(0) for row in rows]) == joined
    assert features_of([]) == SamplingFeatures()
    assert joined == SamplingFeatures(
        draws=True, filters=True, penalties=True, num_biases=8, num_stops=4, num_logprobs=4
    )


def test_make_sampling_batch_of_the_same_features_is_one_program():
    """Tree and shapes are a function of features and rows, so that a jitted step compiles once for each."""
    features = SamplingFeatures(draws=True, filters=True, penalties=True, num_biases=8, num_stops=4, num_logprobs=4)

    def signature(seed: int) -> tuple:
        rows = random_rows(np.random.default_rng(seed), 5, 50)
        leaves, tree = jax.tree.flatten(make_batch(rows, 8, features=features))
        return tree, [(x.shape, x.dtype) for x in leaves]

    assert signature(0) == signature(1) == signature(2)


def test_make_sampling_batch_of_too_little_room_raises():
    row = Row(SamplingParams(temperature=1.0))
    with pytest.raises(ValueError, match="`num_rows` must be at least the number of rows to sample, 3; got 2."):
        make_batch([row] * 3, 2)
    with pytest.raises(ValueError, match="`features` must cover .*draws=True.*; got .*draws=False"):
        make_batch([row], 1, features=SamplingFeatures(filters=True))


def test_rung_is_one_of_few_programs_that_can_do_it():
    rng = np.random.default_rng(0)
    each = [features_of([row.in_seat(0)]) for row in random_rows(rng, 200, 50)]
    for features in each:
        rung = features.rung
        assert rung | features == rung == rung.rung
        assert (rung.num_logprobs is None) == (features.num_logprobs is None)  # nobody pays for them who has not asked
    plain = {dataclasses.replace(f.rung, num_logprobs=None) for f in each}
    assert len(plain) <= 4 < len(set(each))


def test_drafts_are_rows_whose_recent_tokens_the_counts_lack():
    params = SamplingParams(presence_penalty=1.0)
    rows = [SamplingRow(params, 2, 5, 3, (), False), SamplingRow(params, 2, 6, 3, (9,), False)]
    penalties = make_sampling_batch([*rows, SamplingRow(params, 1, 4, 0, (), True)], 4).penalties
    assert penalties.seat.tolist() == [3, 3, 0, PAD]
    assert penalties.recent.tolist() == [[PAD], [9], [PAD], [PAD]]
    assert penalties.counted.tolist() == [PAD, PAD, 0, PAD]
