"""One thread at a time is inside the page manager."""

import operator
import threading

import pytest

from jaxpaged.paging import PageAllocator


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [
        ("add", ("b", 1)), ("append", ("a",)), ("free", ("a",)), ("prefix.explain", ([1],)), ("prefix.match", ([1],)),
        ("can_allocate", (1,)), ("num_pages_needed", ("a",)), ("page_ids", ("a",)), ("seq_len", ("a",)),
        ("sharing", (["a"],)), ("stats", ()), ("snapshot", ()), ("prefix.forget", ([1],)),
    ],
)  # fmt: skip
def test_call_from_a_second_thread_inside_a_verb_raises(verb, arguments):
    pages, inside, done = PageAllocator(8, 4), threading.Event(), threading.Event()

    class Slow:
        def __index__(self):
            inside.set()
            done.wait(10)
            return 2

    pages.add("a", 1)
    first = threading.Thread(target=lambda: pages.append("a", Slow()))
    first.start()
    inside.wait(10)
    try:
        with pytest.raises(
            RuntimeError, match=rf"^`{verb.split('.')[-1]}` was called while another thread was inside the page"
        ):
            operator.attrgetter(verb)(pages)(*arguments)
    finally:
        done.set()
        first.join()
    assert pages.seq_len("a") == 3
