"""The arrays of a sampling step: what each request asks for in its row, padding that means nothing."""

import jax
import numpy as np
import pytest

from jaxpaged.engine.request import SamplingParams
from jaxpaged.engine.sampling_batch import PAD, SamplingFeatures, features_of, make_sampling_batch
from tests.engine.sampling_oracle import Row, random_rows


def test_make_sampling_batch_of_plain_greedy_requests_is_none():
    rows = [Row(SamplingParams(top_k=4, top_p=0.5, seed=3, stop_token_ids=(1,)))] * 3  # filters of no draw
    assert make_sampling_batch(rows, 4) is None
    assert make_sampling_batch(rows, 4, features=SamplingFeatures(draws=True)).temperature.tolist() == [0] * 4


def test_make_sampling_batch_puts_each_request_in_its_row():
    rows = [
        Row(SamplingParams(temperature=0.5, top_k=2**40, top_p=0.25, min_p=0.125, seed=2**32 - 1), (4, 5), [6]),
        Row(SamplingParams(top_k=3, top_p=0.5, frequency_penalty=2.0, logit_bias={9: -1.5}), (7, 8, 9), [1, 2]),
        Row(SamplingParams(min_new_tokens=3, stop_token_ids=(3, 4, 5), num_logprobs=3), (7,), [1]),
        Row(SamplingParams(min_new_tokens=1, stop_token_ids=(3, 4, 5), num_logprobs=0), (7,), [1]),
    ]
    batch = make_sampling_batch(rows, 8, num_pending=[0, 0, 1, 0])
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
    assert penalties.token_ids.tolist() == [[PAD] * 8, [7, 8, 9, 1, 2, PAD, PAD, PAD], *[[PAD] * 8] * 6]
    assert penalties.num_prompt[1] == 3
    assert penalties.frequency.tolist() == [0, 2, *[0] * 6]
    assert penalties.repetition.tolist() == [1] * 8
    assert all(x.dtype in (np.int32, np.uint32, np.float32) for x in jax.tree.leaves(batch))


def test_features_of_requests_are_those_of_each_joined():
    rows = random_rows(np.random.default_rng(0), 20, 50)
    joined = SamplingFeatures()
    for row in rows:
        joined |= features_of([row])
    assert features_of(rows) == joined
    assert features_of([]) == SamplingFeatures()
    assert joined == SamplingFeatures(
        draws=True, filters=True, history_width=64, num_biases=8, num_stops=4, num_logprobs=4
    )


def test_make_sampling_batch_of_the_same_features_is_one_program():
    """Tree and shapes are a function of features and rows, so that a jitted step compiles once for each."""
    features = SamplingFeatures(draws=True, filters=True, history_width=64, num_biases=8, num_stops=4, num_logprobs=4)

    def signature(seed: int) -> tuple:
        rows = random_rows(np.random.default_rng(seed), 5, 50)
        leaves, tree = jax.tree.flatten(make_sampling_batch(rows, 8, features=features))
        return tree, [(x.shape, x.dtype) for x in leaves]

    assert signature(0) == signature(1) == signature(2)


def test_make_sampling_batch_of_too_little_room_raises():
    row = Row(SamplingParams(temperature=1.0))
    with pytest.raises(ValueError, match="`num_rows` must be at least the number of requests, 3; got 2."):
        make_sampling_batch([row] * 3, 2)
    with pytest.raises(ValueError, match="`features` must cover .*draws=True.*; got .*draws=False"):
        make_sampling_batch([row], 1, features=SamplingFeatures(filters=True))
