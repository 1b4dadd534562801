import dataclasses

import numpy as np
import pytest

from jaxpaged.engine.request import check_token_ids
from jaxpaged.engine.sampling.params import SamplingParams

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("error", "change", "text"),
    [
        (ValueError, {"max_new_tokens": 0}, "`max_new_tokens` must be at least 1; got 0."),
        (ValueError, {"min_new_tokens": -1}, "`min_new_tokens` must be from 0 to `max_new_tokens`; got -1."),
        (ValueError, {"min_new_tokens": 9, "max_new_tokens": 8}, "`min_new_tokens` must be from 0 to"),
        (ValueError, {"temperature": NAN}, "`temperature` must be finite and not negative; got nan."),
        (ValueError, {"temperature": -0.1}, "`temperature` must be finite"),
        (TypeError, {"temperature": "hot"}, "`temperature` must be a number; got 'hot'."),
        (ValueError, {"top_k": -1}, "`top_k` must be 0"),
        (TypeError, {"top_k": 1.5}, "`top_k` must be an integer; got 1.5."),
        (ValueError, {"top_p": 0.0}, "`top_p` must be above 0 and at most 1; got 0.0."),
        (ValueError, {"min_p": 1.1}, "`min_p` must be from 0"),
        (ValueError, {"min_p": NAN}, "`min_p` must be from 0"),
        (ValueError, {"repetition_penalty": 0.0}, "`repetition_penalty` must be from 1e-6"),
        (TypeError, {"repetition_penalty": None}, "`repetition_penalty` must be a number; got None."),
        (ValueError, {"presence_penalty": INF}, "`presence_penalty` must be from -1e6"),
        (ValueError, {"frequency_penalty": NAN}, "`frequency_penalty` must be from -1e6"),
        (ValueError, {"seed": 2**32}, "`seed` must fit 32 bits"),
        (ValueError, {"n": 0}, "`n` must be at least 1"),
        (TypeError, {"n": True}, "`n` must be an integer; got True."),
        (ValueError, {"num_logprobs": -1}, "`num_logprobs` must be None, or 0 or more; got -1."),
        (TypeError, {"prompt_logprobs": "all"}, "`prompt_logprobs` must be an integer; got 'all'."),
        (ValueError, {"stop_token_ids": (-1,)}, "`stop_token_ids` must name tokens from 0 to 99; got -1."),
        (TypeError, {"stop_token_ids": ("a",)}, "`stop_token_ids` must be an integer; got 'a'."),
        (ValueError, {"logit_bias": {100: 1.0}}, "`logit_bias` must name tokens from 0 to 99; got 100."),
        (ValueError, {"logit_bias": {1: INF}}, "`logit_bias` must add finite numbers or -inf; got inf for token 1."),
        (ValueError, {"logit_bias": [(1, 2.0), (1, 3.0)]}, "`logit_bias` must name each token once; got [1, 1]."),
        (TypeError, {"logit_bias": {1: "x"}}, "`logit_bias` must be a number; got 'x'."),
        (TypeError, {"logit_bias": (3, 4)}, "`logit_bias` must be pairs (token id, number) or a mapping; got 3 in it."),
        (ValueError, {"stop": ("a", "")}, "`stop` must hold no empty string"),
        (TypeError, {"stop": 5}, "`stop` must be a string or strings; got 5."),
        (TypeError, {"include_stop": 1}, "`include_stop` must be True or False; got 1."),
    ],
)
def test_check_names_each_bad_value(error, change, text):
    with pytest.raises(error) as caught:
        SamplingParams(**change).check(vocab_size=100)
    assert text in str(caught.value)


def test_check_token_ids_without_a_vocabulary_takes_what_an_int32_holds():
    assert check_token_ids([np.int64(2**31 - 1)], None) == (2**31 - 1,)
    with pytest.raises(ValueError, match=r"`prompt_token_ids\[1\]` must be from 0 to vocab_size - 1 = 2147483647; got"):
        check_token_ids([0, 2**31], None)


def test_sampling_params_freezes_what_it_is_given_and_stays_hashable():
    params = SamplingParams(
        logit_bias={3: 1.0, 5: -INF}, stop="END", stop_token_ids=[np.int32(7)], temperature=np.float32(0.5)
    )
    params.check(vocab_size=8)
    assert params.logit_bias == ((3, 1.0), (5, -INF))
    assert params.stop == ("END",)
    assert params.stop_token_ids == (7,)
    same = SamplingParams(logit_bias=[[3, 1.0], [5, -INF]], stop=["END"], stop_token_ids=(7,), temperature=0.5)
    assert params == same
    assert hash(params) == hash(same)
    assert dataclasses.replace(params, n=2).logit_bias == params.logit_bias


def test_has_penalties_and_has_filters_of_defaults_are_false_and_of_each_change_true():
    plain = SamplingParams()
    assert not plain.has_penalties
    assert not plain.has_filters
    for change in ({"repetition_penalty": 1.1}, {"presence_penalty": -1.0}, {"frequency_penalty": 0.1}):
        assert SamplingParams(**change).has_penalties
    for change in ({"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}):
        assert SamplingParams(**change).has_filters


def test_of_sample_counts_seeds_up_and_wraps():
    params = SamplingParams(seed=2**32 - 1, n=3, temperature=1.0)
    assert [params.of_sample(i).seed for i in range(3)] == [2**32 - 1, 0, 1]
    assert params.of_sample(2) == SamplingParams(seed=1, temperature=1.0)
