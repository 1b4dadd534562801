"""Every verb of PageAllocator, in any order, against a plain dictionary of token lists.

The model tracks contents, not counts: a device in small (`model.Device`) does what the allocator decides, so that a
wrong page shows as a wrong token. Tokens are few, so that prompts begin alike.
"""

import copy
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from jaxpaged.config import NULL_PAGE
from jaxpaged.paging import Key, OutOfPagesError, PageAllocator, PageGroup, sequences
from jaxpaged.paging.digests import as_bytes, hash_pages
from tests.paging.model import STALE, Device, content

HYBRID, WINDOWED = [PageGroup("all"), PageGroup("near", 3)], [PageGroup("near", 4)]
KINDS = {
    "plain": {},
    "hybrid": {"groups": HYBRID},
    "cached": {"prefix_caching": True, "record_events": True},
    "partial": {"prefix_caching": True, "partial_hits": True},
    "offload": {"prefix_caching": True, "offload": True},
    "cached hybrid": {"prefix_caching": True, "groups": HYBRID, "record_events": True},
    "cached windowed": {"prefix_caching": True, "groups": WINDOWED},
    "offload hybrid": {"prefix_caching": True, "groups": HYBRID, "offload": True},
}
KEYS = ((), (), (), (Key("adapter", "x"),), (Key("image", b"i", 2), Key("tenant", 7)))
DOCUMENTS = ([0] * 24, [0] * 7 + [1] * 17, [0, 1] * 12)
TOKENS = st.builds(
    lambda document, length, tail: document[:length] + tail,
    st.sampled_from(DOCUMENTS),
    st.integers(0, 24),
    st.lists(st.integers(0, 2), max_size=2),
)
RARELY = st.integers(0, 7).map(lambda n: n == 7)


class AllocatorMachine(RuleBasedStateMachine):
    """`tokens` and `keys` are the model: what each sequence should read, wherever it lies."""

    seq_ids = Bundle("seq_ids")
    kind = "plain"
    num_steps = 0

    @initialize(
        num_usable=st.one_of(st.integers(8, 40), st.integers(1, 24)),
        page_size=st.integers(1, 4),
        max_pages=st.sampled_from([None, None, 6]),
    )
    def make_pool(self, num_usable, page_size, max_pages):
        with mock.patch.object(sequences, "_MIN_ROWS", 2):  # so that the flat array is collected and the rows double
            self.pages = PageAllocator(num_usable + 1, page_size, max_pages_per_seq=max_pages, **KINDS[self.kind])
        self.max_tokens = max_pages * page_size if max_pages else 10**6
        self.page_size = page_size
        self.device = Device(self.pages)
        self.tokens: dict[int, list[int]] = {}
        self.keys: dict[int, tuple[Key, ...]] = {}
        self.swapped: dict[int, list] = {}
        self.promised: dict[int, int] = {}
        self.pins: dict[bytes, int] = {}  # when they expire
        self.num_hit = self.num_missed = 0
        self.mirror: set[bytes] = set()  # what a router that follows the events believes
        self.saved = None
        self.next_id = 0

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def live(self):
        return [seq_id for seq_id in self.tokens if seq_id not in self.swapped]

    def pages_for(self, num_tokens):
        return (num_tokens + self.page_size - 1) // self.page_size

    def state(self):
        """All that the allocator can be asked, and the order in which it would hand out its pages."""
        pool, prefix = self.pages._pool, self.pages.prefix
        sequences = {
            i: (self.pages.seq_len(i), [self.pages.page_ids(i, group=g.name).tolist() for g in self.pages.groups])
            for i in self.live()
        }
        found = prefix.index.table.digests[pool.indexed_pages()].tolist()
        pinned = prefix.pins.page_ids().tolist()
        order = pool.uncached_pages().tolist(), pool.cached_pages().tolist()
        return sequences, self.pages.stats(), order, pool.all_ref_counts().tolist(), found, pinned

    def expected_hit(self, tokens, keys):
        """Tokens of full pages that should be found, by trying every length."""
        if not self.pages.prefix_caching:
            return 0
        found = {digest for digest, _ in self.device.indexed().values()}
        tags, size = self.pages.prefix.index.tags, self.page_size
        chain = self.chain(tokens, keys)
        for n in range(max(0, len(tokens) - 1) // size, 0, -1):
            hit = all(
                as_bytes(chain[i] ^ np.array([tag, 0], np.uint64)) in found
                for group, tag in zip(self.pages.groups, tags, strict=True)
                for i in range(group.num_passed_pages(n * size, size), n)
            )
            if hit:
                return n * size
        return 0

    def chain(self, tokens, keys):
        root = self.pages.prefix.index.root
        return hash_pages(np.array(tokens, np.int32), self.page_size, parent=root, keys=keys)

    def last_digest(self, tokens, keys):
        """The digest of a prompt's last full page, by which a pin is known."""
        chain = self.chain(tokens, keys)
        return as_bytes(chain[-1]) if len(chain) else self.pages.prefix.index.root

    def refused(self, error, call, **attributes):
        before = self.state()
        with pytest.raises(error) as refusal:
            call()
        assert {name: getattr(refusal.value, name) for name in attributes} == attributes
        assert self.state() == before

    def refused_for_pages(self, refusal, before, *, needed=range(1, 1000), free=range(1000)):
        """A refusal changed nothing, and says numbers among these."""
        assert refusal.needed > refusal.free
        assert refusal.needed in needed
        assert refusal.free in free
        assert self.state() == before

    # The verbs

    @rule(
        target=seq_ids,
        tokens=TOKENS,
        keys=st.sampled_from(KEYS),
        as_count=st.sampled_from([False, False, True]),
        commits=st.booleans(),
    )
    def add(self, tokens, keys, as_count, commits):
        seq_id, free = self.new_id(), self.pages.num_free_pages
        argument = len(tokens) if as_count else tokens
        host = self.device if "offload" in self.kind else None
        fits = self.pages.can_allocate(argument, keys=keys, host=host)
        hit = 0 if as_count else self.expected_hit(tokens, keys)
        if len(tokens) > self.max_tokens:
            assert not fits
            self.refused(ValueError, lambda: self.pages.add(seq_id, argument, keys=keys, host=host))
            return multiple()
        found = self.pages.prefix.match(tokens, keys=keys) if not as_count else 0
        try:
            before = self.state()
            num_prefix = self.pages.add(seq_id, argument, keys=keys, host=host)
        except OutOfPagesError as refusal:
            assert not fits
            needed = len(self.pages.groups) * self.pages_for(len(tokens))
            hits = 0 if as_count else needed if host else len(self.pages.groups) * self.pages_for(hit)
            self.refused_for_pages(refusal, before, needed=range(needed - hits, needed + 1), free=[free])
            assert seq_id not in self.pages
            return multiple()
        assert fits
        assert num_prefix < len(tokens) or not tokens
        if host is None:
            assert num_prefix == found
            assert hit <= num_prefix <= (hit if not self.pages.prefix_caching else hit + self.page_size - 1)
            assert num_prefix == hit or self.pages.prefix.index.partial_hits is not None
        if not self.pages.prefix_caching:
            assert self.pages.num_free_pages == free - len(self.pages.groups) * self.pages_for(len(tokens))
        self.tokens[seq_id], self.keys[seq_id] = tokens, keys
        if not as_count and self.pages.prefix_caching:
            self.num_hit, self.num_missed = self.num_hit + num_prefix, self.num_missed + len(tokens) - num_prefix
        self.device.move()
        self.device.write(seq_id, tokens, num_prefix, keys)
        if commits:
            self.pages.commit(seq_id, tokens)
        return seq_id

    @rule(target=seq_ids, tokens=TOKENS, keys=st.sampled_from(KEYS), chunk=st.integers(1, 9))
    def add_chunk(self, tokens, keys, chunk):
        """A prompt of which only the hits and a chunk are added; `append` makes room for the rest."""
        if len(tokens) > self.max_tokens:
            return multiple()
        seq_id, before = self.new_id(), self.state()
        found = self.pages.prefix.match(tokens, keys=keys)
        fits = self.pages.can_allocate(tokens, keys=keys, chunk=chunk)
        try:
            num_prefix = self.pages.add(seq_id, tokens, keys=keys, chunk=chunk)
        except OutOfPagesError as refusal:
            assert not fits
            self.refused_for_pages(refusal, before, free=[self.pages.num_free_pages])
            return multiple()
        assert fits
        assert num_prefix == found
        assert self.pages.seq_len(seq_id) == min(len(tokens), found + chunk)
        if self.pages.prefix_caching:
            self.num_hit, self.num_missed = self.num_hit + num_prefix, self.num_missed + len(tokens) - num_prefix
        self.tokens[seq_id], self.keys[seq_id] = tokens[: found + chunk], keys
        self.device.move()
        self.device.write(seq_id, self.tokens[seq_id], num_prefix, keys)
        return seq_id

    @rule(really=RARELY)
    def go_on_with_a_copy(self, really):
        """A snapshot of the allocator decides as it would have."""
        if not really:
            return
        before = self.state()
        copied = copy.deepcopy(self.pages)
        for seq_id in list(self.pages.snapshot().seq_ids):
            self.pages.free(seq_id)  # which would show in a copy that shares an array with it
        self.pages = self.device.pages = copied
        assert self.state() == before

    @rule(
        seq_id=seq_ids,
        new=st.one_of(st.lists(st.just(0), max_size=9), st.lists(st.integers(0, 1), max_size=9)),
        num_left=st.one_of(st.none(), st.integers(0, 9)),
    )
    def append(self, seq_id, new, num_left):
        """`num_left` tokens are not computed yet; None does not say."""
        if seq_id in self.swapped:
            return
        tokens, free = self.tokens[seq_id], self.pages.num_free_pages
        computed = len(tokens) - min(num_left or 0, len(tokens))
        options = {} if num_left is None else {"num_computed": computed}
        needed = self.pages.num_pages_needed(seq_id, len(new), **options)
        if len(tokens) + len(new) > self.max_tokens:
            self.refused(ValueError, lambda: self.pages.append(seq_id, len(new), **options))
            return
        row = self.pages._sequences.row(seq_id)
        available = free + self.pages._reservations.of(row)
        if needed > available:
            assert len(tokens) + len(new) > self.promised.get(seq_id, 0)
            attributes = {"needed": needed, "free": available}
            self.refused(OutOfPagesError, lambda: self.pages.append(seq_id, len(new), **options), **attributes)
            return
        passed = self.num_passed(seq_id)
        copies = self.pages.append(seq_id, len(new), **options)
        self.check_passed(seq_id, passed, computed)
        self.grow(seq_id, new, copies)

    def num_passed(self, seq_id):
        """Of each group, the pages of a sequence that its window has passed."""
        return [self.pages.page_ids(seq_id, group=group.name).tolist().count(0) for group in self.pages.groups]

    def check_passed(self, seq_id, before, num_computed):
        due = [group.num_passed_pages(num_computed, self.page_size) for group in self.pages.groups]
        assert self.num_passed(seq_id) == [max(pair) for pair in zip(before, due, strict=True)]

    def grow(self, seq_id, new, copies):
        self.device.move(copies)
        start = len(self.tokens[seq_id])
        self.tokens[seq_id] = self.tokens[seq_id] + new
        self.device.write(seq_id, self.tokens[seq_id], start, self.keys[seq_id])

    @rule(data=st.data())
    def append_many(self, data):
        chosen = data.draw(st.lists(st.sampled_from(self.live()), unique=True)) if self.live() else []
        news = [data.draw(st.lists(st.integers(0, 1), max_size=3)) for _ in chosen]
        counts = [len(new) for new in news]
        if any(len(self.tokens[i]) + n > self.max_tokens for i, n in zip(chosen, counts, strict=True)):
            self.refused(ValueError, lambda: self.pages.append_many(chosen, counts))
            return
        lengths = [len(self.tokens[i]) for i in chosen]
        computed = data.draw(st.one_of(st.none(), st.tuples(*(st.integers(max(0, n - 5), n) for n in lengths))))
        each = sum(self.pages.num_pages_needed(i, n) for i, n in zip(chosen, counts, strict=True))
        before, passed = self.state(), [self.num_passed(seq_id) for seq_id in chosen]
        if computed is not None:
            each = 1000  # what windows free is another number then
        try:
            copies = self.pages.append_many(chosen, counts, num_computed=computed)
        except OutOfPagesError as refusal:
            assert each > self.pages.num_free_pages or len(self.pages.groups) > 1
            free, promised = self.pages.num_free_pages, self.pages.stats().num_reserved_pages
            most = (
                1000 if self.pages._sequences.windowed else each + 1
            )  # the last of some forks written in turn needs no copy
            self.refused_for_pages(refusal, before, needed=range(most), free=range(free, free + promised + 1))
            return
        self.device.move(copies)
        for seq_id, *facts in zip(chosen, passed, computed or lengths, strict=True):
            self.check_passed(seq_id, *facts)
        for seq_id, new in zip(chosen, news, strict=True):
            self.grow(seq_id, new, [])

    @rule(target=seq_ids, seq_id=seq_ids, commits=st.booleans())
    def add_again(self, seq_id, commits):
        """Another prompt of the same tokens: what is not committed yet is computed twice."""
        return self.add(self.tokens[seq_id], self.keys[seq_id], False, commits)

    @rule(seq_id=seq_ids, data=st.data())
    def commit(self, seq_id, data):
        if seq_id in self.swapped:
            return
        tokens = self.tokens[seq_id]
        committed = tokens[: data.draw(st.one_of(st.just(len(tokens)), st.integers(0, len(tokens))))]
        free = self.pages.num_free_pages
        self.pages.commit(seq_id, committed)
        assert self.pages.num_free_pages >= free
        if self.pages.prefix_caching and self.pages.groups[0].sliding_window is None:
            held = {c for _, c in self.device.indexed().values()}
            for end in range(self.page_size, len(committed) + 1, self.page_size):
                assert content(0, tokens, end - 1, self.keys[seq_id]) in held

    @rule(target=seq_ids, parent_id=seq_ids)
    def fork(self, parent_id):
        if parent_id in self.swapped:
            return multiple()
        child_id, free = self.new_id(), self.pages.num_free_pages
        reserves = self.pages._reservations.length.get(self.pages._sequences.row(parent_id), 0) > 0
        before = self.state()
        try:
            self.pages.fork(parent_id, child_id)
        except OutOfPagesError as refusal:
            assert reserves  # the promise has to cover the copy of the last page
            self.refused_for_pages(refusal, before, needed=range(len(self.pages.groups) + 1), free=[free])
            return multiple()
        assert self.pages.num_free_pages == free or reserves
        self.tokens[child_id], self.keys[child_id] = list(self.tokens[parent_id]), self.keys[parent_id]
        return child_id

    @rule(seq_id=seq_ids, data=st.data())
    def truncate(self, seq_id, data):
        if seq_id in self.swapped:
            return
        kept = data.draw(st.integers(0, len(self.tokens[seq_id])))
        row = self.pages._sequences.row(seq_id)
        gone = any(
            table.num_passed.item(row) > group.num_passed_pages(kept, self.page_size)
            for group, table in zip(self.pages.groups, self.pages._sequences.tables, strict=True)
        )
        assert self.pages.can_truncate(seq_id, kept) == (not gone)
        if gone:
            self.refused(ValueError, lambda: self.pages.truncate(seq_id, kept))
            return
        self.pages.truncate(seq_id, kept)
        self.promised.pop(seq_id, None)  # what shared pages do not give back is not promised again
        self.tokens[seq_id] = self.tokens[seq_id][:kept]

    @rule(seq_id=consumes(seq_ids))
    def free(self, seq_id):
        self.pages.free(seq_id)
        assert seq_id not in self.pages
        for record in (self.tokens, self.keys, self.swapped, self.promised):
            record.pop(seq_id, None)

    @rule(seq_id=seq_ids, count=st.integers(0, 12))
    def reserve(self, seq_id, count):
        if seq_id in self.swapped or len(self.tokens[seq_id]) + count > self.max_tokens:
            return
        row = self.pages._sequences.row(seq_id)
        available = self.pages.num_free_pages + self.pages._reservations.of(row)
        needed = range(1000) if self.pages._sequences.windowed else [self.pages.num_pages_needed(seq_id, count)]
        before = self.state()
        try:
            self.pages.reserve(seq_id, count)
        except OutOfPagesError as refusal:
            self.refused_for_pages(refusal, before, needed=needed, free=[available])
            return
        self.promised[seq_id] = len(self.tokens[seq_id]) + count

    @rule(seq_id=seq_ids, data=st.data())
    def advance(self, seq_id, data):
        if seq_id not in self.swapped:
            self.pages.advance(seq_id, data.draw(st.integers(0, len(self.tokens[seq_id]))))

    @rule(seq_id=seq_ids)
    def swap_out_or_in(self, seq_id):
        if seq_id not in self.swapped:
            page_ids = self.pages.swap_out(seq_id)
            self.swapped[seq_id] = self.device.export_pages(page_ids.tolist())
            self.promised.pop(seq_id, None)
            return
        needed, free = len(self.swapped[seq_id]), self.pages.num_free_pages
        if needed > free:
            self.refused(OutOfPagesError, lambda: self.pages.swap_in(seq_id), needed=needed, free=free)
            return
        page_ids = self.pages.swap_in(seq_id)
        self.device.move()
        self.device.import_pages(page_ids.tolist(), self.swapped.pop(seq_id))

    @rule(tokens=TOKENS, keys=st.sampled_from(KEYS), expires_at=st.integers(1, 3))
    def pin(self, tokens, keys, expires_at):
        before = self.state()
        try:
            num_pinned = self.pages.prefix.pin(tokens, keys=keys, expires_at=expires_at)
        except OutOfPagesError as refusal:
            self.refused_for_pages(refusal, before, free=[self.pages.num_free_pages])
            return
        assert num_pinned <= len(tokens)
        if self.pages.prefix_caching and len(tokens) >= self.page_size:
            self.pins[self.last_digest(tokens, keys)] = expires_at

    @rule(tokens=TOKENS, keys=st.sampled_from(KEYS))
    def unpin(self, tokens, keys):
        if not self.pages.prefix_caching or self.last_digest(tokens, keys) not in self.pins:
            self.refused(ValueError, lambda: self.pages.prefix.unpin(tokens, keys=keys))
            return
        self.pages.prefix.unpin(tokens, keys=keys)
        del self.pins[self.last_digest(tokens, keys)]

    @rule(now=st.integers(0, 3))
    def expire(self, now):
        self.pages.prefix.expire(now)
        self.pins = {name: expires_at for name, expires_at in self.pins.items() if expires_at > now}

    @rule(really=RARELY)
    def reset(self, really):
        if not really:
            return
        self.pages.prefix.reset()
        self.pins.clear()
        assert self.pages.stats().num_cached_pages == 0

    @rule(seq_id=seq_ids, data=st.data(), really=RARELY)
    def lose_pages(self, seq_id, data, really):
        """An import failed: what the sequence's pages hold from some token on is worth nothing."""
        if seq_id in self.swapped or not really:
            return
        valid = data.draw(st.integers(0, len(self.tokens[seq_id])))
        first = valid // self.page_size
        lost = set()
        for group in self.pages.groups:
            lost.update(self.pages.page_ids(seq_id, group=group.name)[first:].tolist())
        lost.discard(NULL_PAGE)
        before = self.state()
        try:
            affected = self.pages.invalidate(seq_id, valid)
        except OutOfPagesError as refusal:
            assert self.pages._sequences.windowed
            self.refused_for_pages(refusal, before, free=[self.pages.num_free_pages])
            return
        self.device.move()  # what was evicted for the pages of windows
        self.lose(lost)
        for other in affected:
            for group in self.pages.groups:  # what the first token to compute sees is there
                page_ids = self.pages.page_ids(other, group=group.name)
                num_passed = np.count_nonzero(page_ids == NULL_PAGE)
                assert other != seq_id or num_passed <= group.num_passed_pages(valid, self.page_size)
            self.device.write(other, self.tokens[other], 0, self.keys[other])

    def lose(self, page_ids):
        """These pages hold nothing any more, and pins of them have ended."""
        for page_id in page_ids:
            self.device.slots[page_id] = [STALE] * self.page_size
        if self.pages.prefix_caching:
            self.pins = {name: at for name, at in self.pins.items() if name in self.pages.prefix.pins}

    @rule(data=st.data(), really=RARELY)
    def forget(self, data, really):
        """An import failed: those who hold these pages compute them anew."""
        if not really:
            return
        lost = data.draw(st.sets(st.integers(1, self.pages.num_pages - 1), max_size=3))
        self.pages.prefix.forget(np.array(sorted(lost), np.int32))
        held = {i: [self.pages.page_ids(i, group=g.name).tolist() for g in self.pages.groups] for i in self.live()}
        for seq_id in [i for i, groups in held.items() if any(lost & set(page_ids) for page_ids in groups)]:
            self.device.write(seq_id, self.tokens[seq_id], 0, self.keys[seq_id])
        kept = set(self.pages._pool.indexed_pages().tolist())
        assert not lost & kept
        self.lose(lost - {page_id for groups in held.values() for page_ids in groups for page_id in page_ids})

    @rule(tokens=TOKENS, keys=st.sampled_from(KEYS))
    def find(self, tokens, keys):
        for index, group in enumerate(self.pages.groups):
            found = self.pages.prefix.find(tokens, keys=keys, group=group.name)
            assert len(found) == len(tokens) // self.page_size
            ends = range(self.page_size, len(tokens) + 1, self.page_size)
            held = {c: page_id for page_id, (_, c) in self.device.indexed().items()}
            expected = [held.get(content(index, tokens, end - 1, keys), NULL_PAGE) for end in ends]
            assert found.tolist() == expected

    @rule(tokens=TOKENS, keys=st.sampled_from(KEYS))
    def explain(self, tokens, keys):
        before, said = self.state(), self.pages.prefix.explain(tokens, keys=keys)
        assert len(said) == self.pages_for(len(tokens))
        num_hit, in_part = divmod(self.pages.prefix.match(tokens, keys=keys), self.page_size)
        assert [page.hit for page in said] == [i < num_hit for i in range(len(said))]
        assert [page.hit for page in said] == [page.reason.startswith("hit:") for page in said]
        assert any(page.reason.startswith("hit in part") for page in said) == (in_part > 0)
        if self.pages.prefix_caching:
            full = len(tokens) // self.page_size
            assert all(page.reason.startswith("not full") for page in said[full:] if "in part" not in page.reason)
            found = {digest for digest, _ in self.device.indexed().values()}
            for page in said[:full]:
                digests = [
                    as_bytes(self.pages.prefix.index.tagged(self.chain(tokens, keys)[[page.page_index]], group))
                    for group in range(len(self.pages.groups))
                ]
                if page.reason.startswith(("never seen", "evicted", "cached without", "not cached")):
                    assert any(digest not in found for digest in digests)
                if page.reason.startswith("holds the last token"):
                    assert (page.page_index + 1) * self.page_size == len(tokens)
        assert self.state() == before

    @rule()
    def save_or_adopt(self):
        if self.saved is None:
            saved = self.pages.prefix.cached_pages()
            self.saved = saved, self.device.export_pages(saved.page_ids.tolist())
            return
        (saved, block), self.saved = self.saved, None
        if not self.pages.prefix_caching:
            return
        free = self.pages.num_free_pages
        page_ids = self.pages.prefix.adopt(saved)
        assert self.pages.num_free_pages == free
        taken = np.flatnonzero(page_ids)
        self.device.import_pages(page_ids[taken].tolist(), [block[i] for i in taken])

    @rule(seq_id=seq_ids, count=st.integers(-3, -1))
    def refuse_misuse(self, seq_id, count):
        pages, unknown = self.pages, self.next_id + 1
        calls = [
            lambda: pages.add(seq_id, 1),
            lambda: pages.add(unknown, count),
            lambda: pages.append(seq_id, count),
            lambda: pages.append(unknown),
            lambda: pages.append_many([seq_id, unknown]),
            lambda: pages.append_many([seq_id, seq_id]),
            lambda: pages.append_many([seq_id], [count]),
            lambda: pages.fork(seq_id, seq_id),
            lambda: pages.fork(unknown, seq_id),
            lambda: pages.truncate(seq_id, count),
            lambda: pages.truncate(seq_id, len(self.tokens[seq_id]) + 1),
            lambda: pages.commit(seq_id, [0] * (len(self.tokens[seq_id]) + 1)),
            lambda: pages.commit(unknown, []),
            lambda: pages.reserve(seq_id, count),
            lambda: pages.advance(seq_id, len(self.tokens[seq_id]) + 1),
            lambda: pages.free(unknown),
            lambda: pages.swap_out(unknown),
            lambda: pages.swap_in(unknown),
            lambda: pages.invalidate(unknown, 0),
            lambda: pages.prefix.unpin([7] * 9),
            lambda: pages.slot_mapping([seq_id], [len(self.tokens[seq_id]) + 1], group=pages.groups[0].name),
            lambda: pages.page_table([seq_id], count, group=pages.groups[0].name),
        ]
        if seq_id in self.swapped:
            calls += [lambda: pages.fork(seq_id, unknown), lambda: pages.swap_out(seq_id), lambda: pages.append(seq_id)]
        for call in calls:
            self.refused(ValueError, call)

    # What holds after every step

    @invariant()
    def count_steps(self):
        type(self).num_steps += 1

    @invariant()
    def page_tables_reconstruct_every_sequence(self):
        width = max([self.pages_for(len(self.tokens[i])) for i in self.live()], default=1) + 2
        for index, group in enumerate(self.pages.groups):
            table = self.pages.page_table(self.live(), width, group=group.name)
            for row, seq_id in zip(table.tolist(), self.live(), strict=True):
                tokens = self.tokens[seq_id]
                assert self.pages.seq_len(seq_id) == len(tokens)
                used = self.pages_for(len(tokens))
                num_passed = row[:used].count(NULL_PAGE)
                assert not any(row[:num_passed])
                assert not any(row[used:])
                assert num_passed <= group.num_passed_pages(len(tokens), self.page_size)
                for position in range(num_passed * self.page_size, len(tokens)):
                    held = self.device.slots[row[position // self.page_size]][position % self.page_size]
                    assert held == content(index, tokens, position, self.keys[seq_id])

    @invariant()
    def tables_and_counts_of_all_groups_agree(self):
        width = max([1, *(self.pages_for(len(self.tokens[i])) for i in self.live())])
        tables = self.pages.page_tables(self.live(), width)
        for table, group in zip(tables, self.pages.groups, strict=True):
            assert table.tolist() == self.pages.page_table(self.live(), width, group=group.name).tolist()
        for row, seq_id in enumerate(self.live()):
            assert self.pages.num_held_pages(seq_id) == np.count_nonzero(tables[:, row])
        for seq_id, held in self.swapped.items():
            assert self.pages.num_held_pages(seq_id) == len(held)

    @invariant()
    def every_page_is_plain_or_cached_or_live_or_null(self):
        owners, pool = self.device.owners(self.live()), self.pages._pool
        plain, cached = pool.uncached_pages().tolist(), pool.cached_pages().tolist()
        assert sorted([NULL_PAGE, *plain, *cached, *owners]) == list(range(self.pages.num_pages))
        assert [owners[page_id] for page_id in range(pool.num_pages)] == pool.all_ref_counts().tolist()
        assert [pool.ref_count(page_id) for page_id in range(pool.num_pages)] == pool.all_ref_counts().tolist()
        assert set(cached) == set(pool.indexed_pages().tolist()) - set(owners)

    @invariant()
    def no_page_is_writable_by_two(self):
        owners, kept = self.device.owners(self.live()), set(self.pages._pool.indexed_pages().tolist())
        for seq_id in self.live():
            if len(self.tokens[seq_id]) % self.page_size:
                copies = self.pages._sequences.append_cost(self.pages._sequences.row(seq_id), 1, 0).copies_last
                for group, copying in zip(self.pages.groups, copies, strict=True):
                    last = self.pages.page_ids(seq_id, group=group.name).item(-1)
                    assert copying == (owners[last] > 1 or last in kept)

    @invariant()
    def pages_that_can_be_hit_hold_what_their_digest_says(self):
        index = self.pages.prefix.index
        indexed = self.device.indexed()
        for page_id, (digest, (group, tokens, keys)) in indexed.items():
            assert as_bytes(index.table.digests[page_id]) == digest
            assert index.table.find(index.table.digests[[page_id]]).tolist() == [page_id]
            start = len(tokens) - self.page_size
            expected = [content(group, list(tokens), start + i, keys) for i in range(self.page_size)]
            assert self.device.slots[page_id] == expected
        found = {digest for digest, _ in indexed.values()} | index.roots
        for page_id, (_, (group, _, _)) in indexed.items():
            if self.pages.groups[group].sliding_window is None:
                assert as_bytes(index.table.parents[page_id]) in found  # a child never outlives its parent

    @invariant()
    def promises_can_be_kept(self):
        reserved = sum(self.pages._reservations.of(self.pages._sequences.row(i)) for i in self.live())
        assert self.pages.stats().num_reserved_pages == reserved
        assert self.pages.num_free_pages == self.pages._pool.num_free_pages - reserved >= 0
        for seq_id in self.live():  # nobody is promised more than it could use
            row = self.pages._sequences.row(seq_id)
            left = max(0, self.pages._reservations.length.get(row, 0) - len(self.tokens[seq_id]))
            taken = self.pages._sequences.append_cost(row, left, 0).taken
            assert self.pages._reservations.of(row) <= taken
        for seq_id, limit in self.promised.items():
            if limit > (length := len(self.tokens[seq_id])):
                row = self.pages._sequences.row(seq_id)
                available = self.pages.num_free_pages + self.pages._reservations.of(row)
                assert self.pages.num_pages_needed(seq_id, limit - length) <= available

    @invariant()
    def events_tell_what_can_be_hit(self):
        if not self.pages.prefix_caching or self.pages.prefix.index.events is None:
            return
        for event in self.pages.prefix.take_events():
            if event.kind == "stored":
                self.mirror.add(event.digest)
            elif event.kind == "removed":
                self.mirror.remove(event.digest)
            else:
                self.mirror.clear()
        assert self.mirror == {digest for digest, _ in self.device.indexed().values()}

    @invariant()
    def stats_count_the_model(self):
        owners = self.device.owners(self.live())
        stats = self.pages.stats()
        assert stats.num_used_pages == len(owners)
        assert stats.num_shared_pages == sum(count > 1 for count in owners.values())
        assert (stats.num_hit_tokens, stats.num_missed_tokens) == (self.num_hit, self.num_missed)
        held = self.device.owners(self.live(), pins=False)
        assert stats.num_unshared_pages == sum(held.values())
        assert stats.num_pinned_pages == len(owners) - len(held)
        assert stats.num_saved_pages >= 0
        assert 0 <= stats.occupancy <= 1
        sharing = self.pages.sharing(self.live())
        assert sharing.num_saved_pages == stats.num_saved_pages
        assert stats.num_tokens == sum(len(self.tokens[i]) for i in self.live())
        assert (stats.num_sequences, stats.num_swapped_sequences) == (len(self.live()), len(self.swapped))


@pytest.mark.parametrize("num_examples", [9, pytest.param(27, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_allocator_against_the_model(request, kind, num_examples):
    """In CI 10,000 steps over all kinds; with `--soak` a million."""
    soak = request.config.getoption("--soak")
    machine = type("Machine", (AllocatorMachine,), {"kind": kind, "num_steps": 0})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=2_800 if soak else num_examples,
            stateful_step_count=60,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
            derandomize=not soak,
        ),
    )
    assert machine.num_steps >= (125_000 if soak else 46 * num_examples)
