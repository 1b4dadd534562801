"""Counts and snapshots of a `PageAllocator`, made from its parts. Each costs a pass over the pool."""

import numpy as np

from jaxpaged.paging import records
from jaxpaged.paging.prefix_cache import PrefixCache
from jaxpaged.paging.records import PageStats, PoolSnapshot, SharingStats
from jaxpaged.paging.reservations import Reservations
from jaxpaged.paging.sequences import Sequences
from jaxpaged.paging.tables import Rows


def count_pages(sequences: Sequences, reservations: Reservations, prefix: PrefixCache) -> PageStats:
    """Count pages, sequences and tokens."""
    pool, tables, rows = sequences.pool, sequences.tables, sequences.all_rows()
    num_usable, num_tokens = pool.num_pages - 1, int(sequences.num_tokens[rows].sum())
    num_passed = sum(int(table.num_passed[rows].sum()) for table in tables)
    return PageStats(
        num_usable_pages=num_usable,
        num_used_pages=num_usable - pool.num_free_pages,
        num_shared_pages=pool.num_shared_pages(),
        num_unshared_pages=sum(int(table.num_pages[rows].sum()) for table in tables) - num_passed,
        num_sequences=len(sequences),
        num_tokens=num_tokens,
        page_size=sequences.page_size,
        num_cached_pages=pool.num_cached_pages,
        num_reserved_pages=reservations.num_pages,
        num_swapped_sequences=len(sequences.swapped),
        num_hit_tokens=prefix.num_hit_tokens,
        num_missed_tokens=prefix.num_missed_tokens,
        num_evictions=prefix.index.num_evictions,
        num_pinned_pages=prefix.pins.num_pages(),
        num_stored_tokens=len(tables) * num_tokens - num_passed * sequences.page_size,
    )


def count_shared(sequences: Sequences, rows: Rows) -> SharingStats:
    """Count what the sequences of these rows hold together, and would without sharing."""
    held = np.concatenate([table.entries(rows)[2] for table in sequences.tables])
    held = held[held > 0]
    return SharingStats(num_unshared_pages=len(held), num_held_pages=len(np.unique(held)))


def take_snapshot(sequences: Sequences) -> PoolSnapshot:
    """Return who holds what, page by page, in arrays of their own."""
    pool, size, rows = sequences.pool, sequences.page_size, sequences.all_rows()
    num_pages = pool.num_pages
    owner, fill = np.full(num_pages, -1, np.int32), np.zeros(num_pages, np.int32)
    ref_count, indexed = np.zeros(num_pages, np.int32), pool.are_indexed(np.arange(num_pages))
    fill[indexed] = size
    for table in sequences.tables:
        places, indices, page_ids = table.entries(rows)
        owner[page_ids[::-1]] = places[::-1]  # so that the first one stays
        ref_count += np.bincount(page_ids, minlength=num_pages).astype(np.int32)
        tokens = sequences.num_tokens[rows][places] - indices * size
        np.maximum.at(fill, page_ids, np.minimum(tokens, size).astype(np.int32))
    state = np.select(
        [ref_count > 1, ref_count == 1, pool.all_ref_counts() > 0, indexed],
        [records.SHARED, records.USED, records.PINNED, records.CACHED],
        records.FREE,
    ).astype(np.uint8)
    owner[0], ref_count[0], fill[0], state[0] = -1, 0, 0, records.NULL
    return PoolSnapshot(
        owner=owner,
        ref_count=ref_count,
        state=state,
        fill=fill,
        seq_ids=tuple(sequences.row_of_seq),
        page_size=size,
    )
