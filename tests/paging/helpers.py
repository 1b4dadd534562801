"""A prompt, and allocators that have seen it: what the tests of the page manager share."""

from jaxpaged.paging import PageAllocator

PROMPT = list(range(100, 120))  # 5 pages of 4


def make_pages(num_pages=21, **options) -> PageAllocator:
    """A prefix cache with pages of 4."""
    return PageAllocator(num_pages, 4, prefix_caching=True, **options)


def add_committed(pages, seq_id, tokens, **options):
    """Adds a sequence and commits all of its tokens; returns how many were hit."""
    num_prefix = pages.add(seq_id, tokens, **options)
    pages.commit(seq_id, tokens)
    return num_prefix


def state_of(pages: PageAllocator, *seq_ids):
    """What a refused verb must not change."""
    sequences = {i: (pages.seq_len(i), pages.page_ids(i).tolist()) for i in seq_ids if i in pages}
    return sequences, pages.stats(), pages.num_free_pages
