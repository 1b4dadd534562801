"""Every verb of SwapSpace, in any order, against plain dictionaries; bytes of its file are flipped in between."""

import tempfile
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from jaxpaged.paging import OutOfPagesError
from jaxpaged.paging.store.swap import SwapSpace
from tests.paging.store.blocks import assert_same_bits, make_block

SEQ_IDS = st.sampled_from("abcde")
DIGEST_LISTS = st.lists(st.integers(0, 12).map(lambda n: bytes([n] * 16)), max_size=6)
DAMAGED = None


class SwapMachine(RuleBasedStateMachine):
    """In the model a page is the seed of its content, or `DAMAGED`."""

    @initialize(
        num_host=st.integers(0, 5),
        num_file=st.integers(0, 5),
        dtype=st.sampled_from(["float32", "bfloat16", "int8", "float8_e4m3fn"]),
    )
    def make_space(self, num_host, num_file, dtype):
        self.num_pages = max(1, num_host + num_file)
        self.num_host = self.num_pages - num_file
        file = "" if num_file == 0 else self.make_path()
        self.space = SwapSpace(self.num_host, file=file or None, num_file_pages=num_file)
        self.dtype = dtype
        self.sequences: dict[str, list] = {}
        self.prefixes: OrderedDict[bytes, int | None] = OrderedDict()
        self.num_evicted = self.num_lost = 0
        self.next_seed = 0

    def make_path(self):
        self.directory = tempfile.TemporaryDirectory()
        return self.directory.name + "/swap.pages"

    def teardown(self):
        if hasattr(self, "space"):
            self.space.close()
        if hasattr(self, "directory"):
            self.directory.cleanup()

    # The model

    def block(self, seeds):
        pages = [make_block(1, self.dtype, seed=seed, scales=self.dtype == "int8") for seed in seeds]
        empty = make_block(0, self.dtype, scales=self.dtype == "int8")
        return {name: np.concatenate([x, *(page[name] for page in pages)], axis=1) for name, x in empty.items()}

    def new_seeds(self, count):
        self.next_seed += count
        return list(range(self.next_seed - count, self.next_seed))

    def make_room(self, count):
        while self.num_pages - sum(map(len, self.sequences.values())) - len(self.prefixes) < count:
            self.prefixes.popitem(last=False)
            self.num_evicted += 1

    def num_free(self):
        return self.num_pages - sum(map(len, self.sequences.values()))

    # The verbs

    @rule(seq_id=SEQ_IDS, count=st.integers(0, 6))
    def put_sequence(self, seq_id, count):
        seeds, free = self.new_seeds(count), self.num_free()
        if seq_id in self.sequences:
            with pytest.raises(ValueError, match="not here"):
                self.space.put_sequence(seq_id, self.block(seeds))
        elif count > free:
            with pytest.raises(OutOfPagesError) as refused:
                self.space.put_sequence(seq_id, self.block(seeds))
            assert (refused.value.needed, refused.value.free) == (count, free)
        else:
            self.space.put_sequence(seq_id, self.block(seeds))
            self.make_room(count)
            self.sequences[seq_id] = seeds

    @rule(seq_id=SEQ_IDS)
    def take_sequence(self, seq_id):
        if seq_id not in self.sequences:
            with pytest.raises(ValueError, match="that is here"):
                self.space.take_sequence(seq_id)
            return
        seeds = self.sequences.pop(seq_id)
        self.num_lost += seeds.count(DAMAGED)
        valid = seeds[: seeds.index(DAMAGED)] if DAMAGED in seeds else seeds
        assert_same_bits(self.space.take_sequence(seq_id), self.block(valid))

    @rule(seq_id=SEQ_IDS)
    def drop(self, seq_id):
        if self.sequences.pop(seq_id, None) is not None:
            self.space.drop(seq_id)

    @rule(digests=DIGEST_LISTS)
    def put_pages(self, digests):
        """A digest's content is its first byte."""
        block = self.block([1000 + digest[0] for digest in digests])
        new = set(digests) - self.prefixes.keys()
        room = self.num_free() - len(self.prefixes.keys() & set(digests))
        if len(new) > room:
            with pytest.raises(OutOfPagesError) as refused:
                self.space.put_pages(digests, block)
            assert (refused.value.needed, refused.value.free) == (len(new), room)
            return
        self.space.put_pages(digests, block)
        for digest in self.prefixes.keys() & set(digests):
            self.prefixes.move_to_end(digest)
        self.make_room(len(new))
        for digest in digests:
            self.prefixes.setdefault(digest, 1000 + digest[0])
            self.prefixes.move_to_end(digest)

    @rule(digests=DIGEST_LISTS)
    def get_pages(self, digests):
        seeds = [self.prefixes.get(digest, DAMAGED) for digest in digests]
        got, found = self.space.get_pages(digests)
        assert found.tolist() == [seed is not DAMAGED for seed in seeds]
        if got or found.any():
            assert_same_bits(got, self.block([seed for seed in seeds if seed is not DAMAGED]))
        for digest in set(digests) & self.prefixes.keys():
            if self.prefixes[digest] is DAMAGED:
                del self.prefixes[digest]
                self.num_lost += 1
        for digest in reversed(digests):
            if digest in self.prefixes:
                self.prefixes.move_to_end(digest)

    @rule(digests=DIGEST_LISTS)
    def drop_pages(self, digests):
        self.space.drop_pages(digests)
        for digest in digests:
            self.prefixes.pop(digest, None)

    @rule(data=st.data())
    def flip_a_byte_in_the_file(self, data):
        """Past the interface: through the map, at a page of somebody's."""
        file = self.space._store._file
        owners = [(self.sequences[i], n, p) for i, ps in self.space._sequences.items() for n, p in enumerate(ps)]
        owners += [(self.prefixes, digest, place) for digest, place in self.space._prefixes.items()]
        owners = [(pages, key, place) for pages, key, place in owners if place >= self.num_host]
        if not owners:
            return
        pages, key, place = data.draw(st.sampled_from(owners))
        if pages[key] is not DAMAGED:
            position = data.draw(st.integers(0, file.page_nbytes - 1))
            file._pages[place - self.num_host, position] ^= 1 << data.draw(st.integers(0, 7))
            pages[key] = DAMAGED

    # What holds after every step

    @invariant()
    def the_same_is_here(self):
        assert list(self.space._prefixes) == list(self.prefixes)  # in the same order of use
        assert all(self.space.has(digest) for digest in self.prefixes)
        assert all(seq_id in self.space for seq_id in self.sequences)
        assert self.space.num_free_pages == self.num_free()

    @invariant()
    def every_place_is_free_or_has_one_owner(self):
        space = self.space
        owned = [*space._prefixes.values(), *(p for places in space._sequences.values() for p in places.tolist())]
        assert sorted([*owned, *space._free_host, *space._free_file]) == list(range(self.num_pages))

    @invariant()
    def stats_count_the_model(self):
        stats = self.space.stats()
        num_sequence_pages = sum(map(len, self.sequences.values()))
        assert stats.num_used_host_pages + stats.num_used_file_pages == num_sequence_pages + len(self.prefixes)
        assert (stats.num_sequences, stats.num_sequence_pages) == (len(self.sequences), num_sequence_pages)
        assert stats.num_prefix_pages == len(self.prefixes)
        assert (stats.num_evicted_pages, stats.num_lost_pages) == (self.num_evicted, self.num_lost)


TestSwapMachine = SwapMachine.TestCase
TestSwapMachine.settings = settings(
    max_examples=80,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=True,
)
