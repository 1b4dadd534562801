"""Every verb of PageAllocator, in any order, against a plain dictionary of token lists.

The model tracks contents, not counts: a pool of slots on which the allocator's page copies are executed and its slot
mappings written, so that a wrong page shows as a wrong token.
"""

from collections import Counter
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import OutOfPagesError, PageAllocator, tables

STALE = -1


class AllocatorMachine(RuleBasedStateMachine):
    """Tokens are serial numbers, so no two in the machine's life are equal."""

    seq_ids = Bundle("seq_ids")

    @initialize(num_usable=st.integers(1, 24), page_size=st.integers(1, 5))
    def make_pool(self, num_usable, page_size):
        with mock.patch.object(tables, "_MIN_ROWS", 2):  # so that the flat array is collected and the rows double
            self.pages = PageAllocator(num_usable + 1, page_size)
        self.page_size = page_size
        self.slots = np.full((num_usable + 1) * page_size, STALE)
        self.tokens: dict[int, list[int]] = {}
        self.next_id = 0
        self.next_token = 0

    # The model: what lies where, and what each verb should take

    def new_tokens(self, count):
        self.next_token += count
        return list(range(self.next_token - count, self.next_token))

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def run_copies(self, copies):
        by_page = self.slots.reshape(-1, self.page_size)
        for src, dst in copies:
            by_page[dst] = by_page[src]

    def write_last(self, seq_id, count):
        slots = self.pages.slot_mapping([seq_id], [count])
        assert slots.dtype == np.int32
        self.slots[slots] = self.tokens[seq_id][len(self.tokens[seq_id]) - count :]

    def num_owners(self):
        return Counter(page_id for seq_id in self.tokens for page_id in self.pages.page_ids(seq_id).tolist())

    def pages_for(self, num_tokens):
        return (num_tokens + self.page_size - 1) // self.page_size

    def append_cost(self, seq_id, count):
        length = len(self.tokens[seq_id])
        fills_shared = count > 0 and length % self.page_size > 0
        fills_shared = fills_shared and self.num_owners()[int(self.pages.page_ids(seq_id)[-1])] > 1
        return self.pages_for(length + count) - self.pages_for(length) + fills_shared

    def state(self):
        """All that the allocator can be asked, and the order in which it would hand out its pages."""
        sequences = {i: (self.pages.seq_len(i), tuple(self.pages.page_ids(i).tolist())) for i in self.tokens}
        pool = self.pages._pool
        return sequences, self.pages.stats(), pool._free[pool._top :].tolist(), pool.all_ref_counts().tolist()

    # The verbs

    @rule(target=seq_ids, count=st.integers(0, 40), as_list=st.booleans())
    def add(self, count, as_list):
        seq_id, free, needed = self.new_id(), self.pages.num_free_pages, self.pages_for(count)
        tokens = self.new_tokens(count)
        before = self.state()
        assert self.pages.can_allocate(count) == (needed <= free)
        if needed > free:
            with pytest.raises(OutOfPagesError) as refused:
                self.pages.add(seq_id, count)
            assert (refused.value.needed, refused.value.free) == (needed, free)
            assert self.state() == before
            assert seq_id not in self.pages
            return multiple()
        assert self.pages.add(seq_id, tokens if as_list else count) == 0
        assert self.pages.num_free_pages == free - needed
        self.tokens[seq_id] = tokens
        self.write_last(seq_id, count)
        return seq_id

    @rule(seq_id=seq_ids, count=st.one_of(st.integers(0, 3), st.integers(0, 30)))
    def append(self, seq_id, count):
        free, needed = self.pages.num_free_pages, self.append_cost(seq_id, count)
        assert self.pages.num_pages_needed(seq_id, count) == needed
        before = self.state()
        if needed > free:
            with pytest.raises(OutOfPagesError) as refused:
                self.pages.append(seq_id, count)
            assert (refused.value.needed, refused.value.free) == (needed, free)
            assert self.state() == before
            return
        copies = self.pages.append(seq_id, count)
        assert self.pages.num_free_pages == free - needed
        self.run_copies(copies)
        self.tokens[seq_id] += self.new_tokens(count)
        self.write_last(seq_id, count)

    @rule(target=seq_ids, parent_id=seq_ids)
    def fork(self, parent_id):
        child_id, free = self.new_id(), self.pages.num_free_pages
        self.pages.fork(parent_id, child_id)
        assert self.pages.num_free_pages == free
        self.tokens[child_id] = list(self.tokens[parent_id])
        return child_id

    @rule(seq_id=seq_ids, data=st.data())
    def truncate(self, seq_id, data):
        kept = data.draw(st.integers(0, len(self.tokens[seq_id])))
        self.pages.truncate(seq_id, kept)
        del self.tokens[seq_id][kept:]

    @rule(seq_id=consumes(seq_ids))
    def free(self, seq_id):
        self.pages.free(seq_id)
        del self.tokens[seq_id]
        assert seq_id not in self.pages

    @rule(seq_id=seq_ids, count=st.integers(-3, -1))
    def refuse_misuse(self, seq_id, count):
        before = self.state()
        length = len(self.tokens[seq_id])
        unknown = self.next_id + 1
        for call in (
            lambda: self.pages.add(seq_id, 1),
            lambda: self.pages.add(unknown, count),
            lambda: self.pages.append(seq_id, count),
            lambda: self.pages.append(unknown),
            lambda: self.pages.fork(seq_id, seq_id),
            lambda: self.pages.fork(unknown, seq_id),
            lambda: self.pages.truncate(seq_id, length + 1),
            lambda: self.pages.truncate(seq_id, count),
            lambda: self.pages.free(unknown),
            lambda: self.pages.slot_mapping([seq_id], [length + 1]),
            lambda: self.pages.page_table([seq_id], count),
        ):
            with pytest.raises(ValueError, match="must be"):
                call()
            assert self.state() == before

    # What holds after every step

    @invariant()
    def page_tables_reconstruct_every_sequence(self):
        extra = 2
        width = max([len(self.pages.page_ids(i)) for i in self.tokens], default=1) + extra
        table = self.pages.page_table(list(self.tokens), width)
        for row, (seq_id, tokens) in zip(table, self.tokens.items(), strict=True):
            assert self.pages.seq_len(seq_id) == len(tokens)
            read = self.slots.reshape(-1, self.page_size)[row].ravel()[: len(tokens)]
            assert read.tolist() == tokens
            assert (row[self.pages_for(len(tokens)) :] == NULL_PAGE).all()

    @invariant()
    def slot_mapping_of_all_is_each_sequence_in_turn(self):
        counts = [len(tokens) // 2 for tokens in self.tokens.values()]
        packed = self.slots[self.pages.slot_mapping(list(self.tokens), counts)].tolist()
        expected = [
            t for tokens, n in zip(self.tokens.values(), counts, strict=True) for t in tokens[len(tokens) - n :]
        ]
        assert packed == expected

    @invariant()
    def every_page_is_free_or_live_or_null(self):
        owners = self.num_owners()
        pool = self.pages._pool
        free = pool._free[pool._top :].tolist()
        assert len(set(free)) == len(free) == self.pages.num_free_pages
        assert sorted([NULL_PAGE, *free, *owners]) == list(range(self.pages.num_pages))
        assert [pool.ref_count(page_id) for page_id in range(pool.num_pages)] == [
            owners[page_id] for page_id in range(pool.num_pages)
        ]

    @invariant()
    def no_page_is_writable_by_two(self):
        writable = Counter()
        for seq_id, tokens in self.tokens.items():
            page_ids = self.pages.page_ids(seq_id).tolist()
            assert len(set(page_ids)) == len(page_ids)
            # A sequence writes into its partial last page when an append of one token costs nothing.
            if len(tokens) % self.page_size and self.pages.num_pages_needed(seq_id, 1) == 0:
                writable[page_ids[-1]] += 1
        owners = self.num_owners()
        assert all(count == 1 and owners[page_id] == 1 for page_id, count in writable.items())

    @invariant()
    def stats_count_the_model(self):
        owners = self.num_owners()
        stats = self.pages.stats()
        assert stats.num_used_pages == len(owners)
        assert stats.num_free_pages == self.pages.num_free_pages
        assert stats.num_shared_pages == sum(count > 1 for count in owners.values())
        assert stats.num_unshared_pages == sum(owners.values())
        assert stats.num_tokens == sum(map(len, self.tokens.values()))
        assert stats.num_sequences == len(self.tokens)


TestAllocatorMachine = AllocatorMachine.TestCase
TestAllocatorMachine.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
