"""Which requests can never run."""

import pytest

from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.paging import OutOfPagesError, PageAllocator

CONFIG = SchedulerConfig(max_num_seqs=2, max_step_tokens=8, max_model_len=40)


def test_check_request_takes_what_fits_and_refuses_one_token_more():
    pages = PageAllocator(9, 4)  # 8 pages for 32 tokens; the last of a request is never stored
    CONFIG.check_request(1, 33, pages)
    message = r"`prompt` of 1 tokens with up to 33 new ones, in pages of 4, needs 9 pages; 8 are"
    with pytest.raises(OutOfPagesError, match=message):
        CONFIG.check_request(1, 34, pages)
    ample = PageAllocator(99, 4)
    CONFIG.check_request(39, 40, ample)
    with pytest.raises(ValueError, match="shorter than the context of 40 tokens.* got 40 tokens"):
        CONFIG.check_request(40, 40, ample)
    with pytest.raises(ValueError, match="must hold at least one token; got none"):
        CONFIG.check_request(0, 1, ample)


def test_limits_may_be_1_and_only_that_of_waiting_may_be_none():
    SchedulerConfig(max_num_seqs=1, max_step_tokens=1, max_model_len=1, max_num_waiting=1).check()
    with pytest.raises(TypeError, match="`max_model_len` must be an integer >= 1; got None"):
        SchedulerConfig(max_model_len=None).check()
