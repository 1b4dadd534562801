"""The three source sketches, with their own numbers, through this package: what the library is for, in small.

(a) paged decode attention of two sequences; (b) an allocator with beams; (c) a multi-layer pool, written at a position.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpaged as jp

HEADS, HEAD_DIM, PAGE_SIZE = 8, 64, 16


def make_cache(num_layers: int = 1, num_pages: int = 101, heads: int = HEADS, head_dim: int = HEAD_DIM) -> jp.KVCache:
    """100 usable pages of 16, NaN throughout: nobody may read what was not written."""
    cache = jp.KVCache.create(
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype=jnp.float32,
    )
    return jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)


def random_tokens(num_tokens: int, heads: int = HEADS, head_dim: int = HEAD_DIM, *, seed: int) -> np.ndarray:
    """Q, K and V, each [num_tokens, heads, head_dim]."""
    return np.random.default_rng(seed).standard_normal((3, num_tokens, heads, head_dim)).astype(np.float32)


def dense_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Softmax attention of one query [heads, head_dim] over all of k, v [n, heads, head_dim], in float64."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    logits = np.einsum("hd,nhd->hn", q, k) / np.sqrt(q.shape[-1])
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return np.einsum("hn,nhd->hd", p / p.sum(-1, keepdims=True), v)


@jax.jit(donate_argnames="cache")
def write(cache, layer, k, v, slots):
    return cache.write(layer, k, v, slots)


@jax.jit(donate_argnames="cache")
def decode(cache, q, k, v, slots, page_table, seq_lens):
    cache = cache.write(0, k, v, slots)
    return jp.paged_attention(q, cache.k_pages, cache.v_pages, page_table, seq_lens, layer=0), cache


def test_sketch_a_two_sequences_decode_as_dense_attention():
    pages, cache = jp.PageAllocator(101, PAGE_SIZE), make_cache()
    pages.add("a", 18)
    pages.add("b", 18)
    assert pages.stats().num_used_pages == 4
    # Both sequences hold 18 prompt tokens and one more, each sequence with values of its own.
    tokens = {seq_id: random_tokens(19, seed=seed) for seed, seq_id in enumerate("ab")}
    _, k, v = np.concatenate([tokens["a"][:, :18], tokens["b"][:, :18]], axis=1)
    cache = write(cache, 0, k, v, pages.slot_mapping(["a", "b"], [18, 18]))

    assert [pages.append(seq_id) for seq_id in "ab"] == [[], []]
    assert pages.stats().num_used_pages == 4  # 19 tokens still fit in two pages each
    q, k, v = np.stack([tokens["a"][:, 18], tokens["b"][:, 18]], axis=1)
    page_table, slots = pages.page_table(["a", "b"], 8), pages.slot_mapping(["a", "b"], [1, 1])
    out, cache = decode(cache, q, k, v, slots, page_table, np.array([19, 19], np.int32))

    expected = np.stack([dense_attention(tokens[i][0, 18], *tokens[i][1:]) for i in "ab"])
    chex.assert_shape(out, (2, HEADS, HEAD_DIM))
    chex.assert_trees_all_close(out, np.float32(expected), atol=2e-6)
    for seq_id in "ab":
        pages.free(seq_id)
    assert pages.num_free_pages == 100


def test_sketch_a_decoding_across_three_page_boundaries_equals_dense_attention():
    """From 14 tokens to 50: tokens 17, 33 and 49 are the first of a page. Every step is checked."""
    pages, cache = jp.PageAllocator(101, PAGE_SIZE), make_cache()
    q, k, v = random_tokens(50, seed=2)
    pages.add("before", 20)  # so that the sequence does not begin at page 1
    pages.add("a", 14)
    cache = write(cache, 0, k[:14], v[:14], pages.slot_mapping(["a"], [14]))
    held = []
    chex.clear_trace_counter()
    step = jax.jit(chex.assert_max_traces(decode.__wrapped__, n=1), donate_argnums=0)
    for n in range(15, 51):
        pages.append("a")
        held.append(len(pages.page_ids("a")))
        new = slice(n - 1, n)
        out, cache = step(
            cache, q[new], k[new], v[new], pages.slot_mapping(["a"], [1]), pages.page_table(["a"], 8),
            np.array([n], np.int32),
        )  # fmt: skip
        chex.assert_trees_all_close(out[0], np.float32(dense_attention(q[n - 1], k[:n], v[:n])), atol=2e-6)
    assert held == [1] * 2 + [2] * 16 + [3] * 16 + [4] * 2


def test_sketch_b_free_counts_are_89_then_94():
    pages = jp.PageAllocator(101, PAGE_SIZE)
    pages.add(1, 45)
    pages.add(2, 128)
    assert (len(pages.page_ids(1)), len(pages.page_ids(2))) == (3, 8)
    assert pages.num_free_pages == 89
    pages.append(1, 3 * PAGE_SIZE)
    pages.free(2)
    assert pages.num_free_pages == 94


def test_sketch_b_four_beams_share_a_prompt_and_read_their_own_tokens():
    """48 prompt tokens, four beams of 16 more: 3 shared pages and 4 own, where 16 would be needed without sharing."""
    pages, cache = jp.PageAllocator(101, PAGE_SIZE), make_cache()
    _, k, v = random_tokens(48, seed=3)
    pages.add(0, 48)
    cache = write(cache, 0, k, v, pages.slot_mapping([0], [48]))
    beams = range(4)
    for beam in beams[1:]:
        pages.fork(0, beam)
    copies = [copy for beam in beams for copy in pages.append(beam, 16)]
    assert copies == []  # the prompt ends where a page does
    stats = pages.stats()
    assert (stats.num_used_pages, stats.num_unshared_pages, stats.num_shared_pages) == (7, 16, 3)
    assert stats.saved_fraction == pytest.approx(0.5625)

    own = [random_tokens(16, seed=10 + beam)[1:] for beam in beams]
    new_k, new_v = np.concatenate(own, axis=1)
    cache = write(cache, 0, new_k, new_v, pages.slot_mapping(beams, [16] * 4))
    got = cache.gather(0, pages.page_table(beams), np.full(4, 64))
    for beam in beams:
        expected = np.concatenate([k, own[beam][0]]), np.concatenate([v, own[beam][1]])
        chex.assert_trees_all_equal(jax.tree.map(lambda x, beam=beam: x[beam], got), expected)


def test_sketch_b_beams_that_part_inside_a_page_copy_it_first():
    """45 prompt tokens: the beams' first tokens fall into a shared page, so three of the four copy it."""
    pages, cache = jp.PageAllocator(101, PAGE_SIZE), make_cache(num_layers=2)
    _, k, v = random_tokens(45, seed=4)
    pages.add(0, 45)
    for layer in range(2):
        cache = write(cache, layer, k * (layer + 1), v, pages.slot_mapping([0], [45]))
    beams = range(4)
    for beam in beams[1:]:
        pages.fork(0, beam)
    copies = [copy for beam in beams for copy in pages.append(beam, 2)]
    assert len(copies) == 3
    assert pages.stats().num_used_pages == 2 + 4
    src, dst = np.array(copies, np.int32).T
    cache = cache.copy_pages(src, dst)

    own = [random_tokens(2, seed=20 + beam)[1:] for beam in beams]
    new_k, new_v = np.concatenate(own, axis=1)
    slots = pages.slot_mapping(beams, [2] * 4)
    for layer in range(2):
        cache = write(cache, layer, new_k * (layer + 1), new_v, slots)
    for layer in range(2):
        got_k, got_v = cache.gather(layer, pages.page_table(beams), np.full(4, 47))
        for beam in beams:
            chex.assert_trees_all_equal(got_k[beam, :47], np.concatenate([k, own[beam][0]]) * (layer + 1))
            chex.assert_trees_all_equal(got_v[beam, :47], np.concatenate([v, own[beam][1]]))
    for beam in beams:
        pages.free(beam)
    assert pages.num_free_pages == 100


def test_sketch_c_layers_written_at_a_position_are_gathered_at_the_total_length():
    """Two layers share the page ids: 20 tokens at position 0, then 30 at position 20, across pages, layer by layer."""
    layers, heads, head_dim = 2, 4, 32
    pages, cache = jp.PageAllocator(101, PAGE_SIZE), make_cache(layers, heads=heads, head_dim=head_dim)
    pages.add("other", 7)
    pages.add("a", 20)
    k, v = np.stack([random_tokens(50, heads, head_dim, seed=30 + layer)[1:] for layer in range(layers)], axis=1)
    for start, end in ((0, 20), (20, 50)):
        if start:
            pages.append("a", end - start)
        slots = pages.slot_mapping(["a"], [end - start])
        for layer in range(layers):
            cache = write(cache, layer, k[layer, start:end], v[layer, start:end], slots)

    assert len(pages.page_ids("a")) == 4
    for layer in range(layers):
        got_k, got_v = cache.gather(layer, pages.page_table(["a"]), np.array([50]))
        chex.assert_trees_all_equal((got_k[0, :50], got_v[0, :50]), (k[layer], v[layer]))
        assert not np.any(got_k[0, 50:])
        assert not np.any(got_v[0, 50:])


def test_sketch_c_pages_are_free_when_their_last_owner_leaves():
    pages = jp.PageAllocator(101, PAGE_SIZE)
    pages.add("parent", 50)
    pages.fork("parent", "child")
    pages.free("parent")
    assert pages.num_free_pages == 96  # the child still holds them
    pages.free("child")
    assert pages.num_free_pages == 100
    with pytest.raises(ValueError, match="`seq_id` must be a sequence that is here .*; got 'child'"):
        pages.free("child")
