"""`KVCache`: the pool of pages as an immutable pytree, and the ways to move tokens and pages in and out of it.

It holds memory and no policy: which page belongs to whom is decided in `jaxpaged.paging` and arrives here as page ids
and slots. Every method returns a new cache. Inside a jitted step that donates the cache the update is in place; called
eagerly, each one copies the pool.

    step = jax.jit(step, donate_argnames="cache")
"""

import dataclasses
import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from jaxpaged.checks import as_count, require_arrays
from jaxpaged.config import NULL_PAGE
from jaxpaged.quantize import MAX_VALUE, dequantize, is_quantized, measure_scale, quantize

_DTYPES = ("float32", "bfloat16", "float16", *MAX_VALUE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageBlock:
    """Whole pages cut out of a cache, all layers: what swap, checkpoints and disaggregation move.

    Attributes:
        k: `[num_layers, num_exported, num_kv_heads, page_size, head_dim]`, as `v`.
        k_scale: `[num_layers, num_exported, num_kv_heads, page_size]` float32, as `v_scale`, from a cache that holds a
            scale for each token; None from any other.
    """

    k: Float[Array, "num_layers num_exported num_kv_heads page_size head_dim"]
    v: Float[Array, "num_layers num_exported num_kv_heads page_size head_dim"]
    k_scale: Float[Array, "num_layers num_exported num_kv_heads page_size"] | None = None
    v_scale: Float[Array, "num_layers num_exported num_kv_heads page_size"] | None = None

    def to_host(self) -> dict[str, np.ndarray]:
        """The arrays by name, in the memory of the host: what `SwapSpace` keeps. Scales that are None are left out.

        They come by way of pinned memory where the device has it, to which it copies at the full speed of the bus.
        """
        block = self.to_pinned_memory()  # all are on their way before the first is awaited
        arrays = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        return {name: np.asarray(x) for name, x in arrays.items() if x is not None}

    def to_pinned_memory(self) -> "PageBlock":
        """The block on its way to pinned memory of the host, where the device has such; `to_host` of it then waits."""
        return jax.tree.map(_to_pinned_memory, self)

    @classmethod
    def from_host(cls, arrays: Mapping[str, np.ndarray]) -> "PageBlock":
        """The block whose `to_host` gave these arrays, on JAX's default device, with the same bits.

        Raises:
            ValueError: The names are not those of a block.
        """
        if not {"k", "v"} <= arrays.keys() <= {field.name for field in dataclasses.fields(cls)}:
            raise ValueError(f"`arrays` must have k and v, and may have k_scale and v_scale; got {sorted(arrays)}.")
        return cls(**{name: jax.device_put(x) for name, x in arrays.items()})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KVCache:
    """Keys and values of all layers, in pages. Make one with `KVCache.create`.

    Attributes:
        k_pages: `[num_layers, num_pages, num_kv_heads, page_size, head_dim]`, as `v_pages`. One stacked array, so that
            a scan over layers carries it without a copy; heads before tokens, so that a kernel that works on one KV
            head reads a run of `page_size * head_dim` values.
        k_scale: What a stored key is to be multiplied by, float32, as `v_scale`: `[num_layers, num_kv_heads]`, or for
            each token `[num_layers, num_pages, num_kv_heads, page_size]`. None where the dtype has two bytes or four.
    """

    k_pages: Float[Array, "num_layers num_pages num_kv_heads page_size head_dim"]
    v_pages: Float[Array, "num_layers num_pages num_kv_heads page_size head_dim"]
    k_scale: Float[Array, "num_layers *scales"] | None = None
    v_scale: Float[Array, "num_layers *scales"] | None = None

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int = 16,
        num_kv_heads: int,
        head_dim: int,
        dtype: DTypeLike = jnp.bfloat16,
        k_scale: ArrayLike | None = None,
        v_scale: ArrayLike | None = None,
    ) -> "KVCache":
        """An empty cache of `num_pages` pages, the null page included.

        Args:
            dtype: float32, bfloat16 or float16; or a byte a value: int8, float8_e4m3fn, float8_e5m2.
            k_scale: Of a one-byte dtype: the fixed scale of keys, a number, `[num_kv_heads]` or `[num_layers,
                num_kv_heads]`. None measures one for each token and head as it is written, for `page_size` float32
                more a page and head. `v_scale` likewise, both or neither.

        Raises:
            ValueError: A size is not positive, `num_pages` leaves no page beside the null page, the dtype is not one
                that attention computes with, a scale is not finite and positive or is for another dtype, or a one-byte
                pool has from 2**31 to 2**32 values.
            TypeError: A size is not an integer.
        """
        shape = (
            as_count(num_layers, "`num_layers`", minimum=1),
            as_count(num_pages, "`num_pages`, the null page included,", minimum=2),
            as_count(num_kv_heads, "`num_kv_heads`", minimum=1),
            as_count(page_size, "`page_size`", minimum=1),
            as_count(head_dim, "`head_dim`", minimum=1),
        )
        try:
            name = jnp.dtype(dtype).name
        except TypeError:
            name = repr(dtype)
        if name not in _DTYPES:
            raise ValueError(f"`dtype` must be one of {', '.join(_DTYPES)}; got {name}.")
        _check_pool_size(shape, name)
        scales = _make_scales(shape, name, k_scale, v_scale)
        # Two arrays, never one array twice: donating the same buffer twice is an error.
        return cls(k_pages=jnp.zeros(shape, dtype), v_pages=jnp.zeros(shape, dtype), **scales)

    @property
    def num_layers(self) -> int:
        """Layers that share the page ids."""
        return self.k_pages.shape[0]

    @property
    def num_pages(self) -> int:
        """Pages of the pool, the null page included."""
        return self.k_pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and of V."""
        return self.k_pages.shape[2]

    @property
    def page_size(self) -> int:
        """Token slots a page."""
        return self.k_pages.shape[3]

    @property
    def head_dim(self) -> int:
        """Values a head, of K and of V."""
        return self.k_pages.shape[4]

    @property
    def dtype(self) -> jnp.dtype:
        """Type of the stored values."""
        return self.k_pages.dtype

    @property
    def has_token_scales(self) -> bool:
        """Whether each token and head has a scale of its own."""
        return self.k_scale is not None and self.k_scale.ndim == 4

    @property
    def num_slots(self) -> int:
        """Token slots of the pool. A slot number from here on is dropped by `write`."""
        return self.num_pages * self.page_size

    @property
    def nbytes_per_page(self) -> int:
        """Bytes that one page takes: K and V of `page_size` tokens in all layers, and their scales."""
        nbytes_per_head = self.head_dim * self.dtype.itemsize + 4 * self.has_token_scales
        return 2 * self.num_layers * self.num_kv_heads * self.page_size * nbytes_per_head

    def write(
        self,
        layer: int | Int[Array, ""],
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        slot_mapping: Int[Array, "num_tokens"],
    ) -> "KVCache":
        """Stores K and V of new tokens at their slots of one layer, cast to the cache's dtype or quantised to it.

        Args:
            layer: Which layer; an int or traced.
            slot_mapping: `page_id * page_size + offset` of each token, all distinct. A number of `num_slots` or more
                marks padding, and is dropped. Values are not checked here: see `check_batch_values`.

        Raises:
            ValueError: The shapes do not fit, or a static `layer` is out of range.
            TypeError: `slot_mapping` is not of integers, or an argument is not an array.
        """
        require_arrays(k=k, v=v, slot_mapping=slot_mapping)
        expected = (slot_mapping.shape[0] if slot_mapping.ndim else 0, self.num_kv_heads, self.head_dim)
        for name, x in (("k", k), ("v", v)):
            if x.shape != expected or slot_mapping.ndim != 1:
                raise ValueError(
                    f"`{name}` must have shape (num_tokens, num_kv_heads, head_dim) = {expected} and `slot_mapping` "
                    f"(num_tokens,); got {x.shape} and {slot_mapping.shape}."
                )
        if not jnp.issubdtype(slot_mapping.dtype, jnp.integer):
            raise TypeError(f"`slot_mapping` must be of integers; got {slot_mapping.dtype}.")
        check_layer(layer, self.num_layers)
        page, offset = slot_mapping // self.page_size, slot_mapping % self.page_size
        layers = jnp.full_like(page, layer)
        zeros = jnp.zeros_like(page)
        k, k_scale = self._encode(k, self.k_scale, layer)
        v, v_scale = self._encode(v, self.v_scale, layer)
        # A window is one token of one layer: all its heads, each at the same offset of the same page.
        starts = jnp.stack([layers, page, zeros, offset, zeros], axis=1)
        new = PageBlock(k=k[..., None, :], v=v[..., None, :], k_scale=k_scale, v_scale=v_scale)
        return self._update(starts, jax.tree.map(lambda x: jnp.expand_dims(x, (1, 2)), new))

    def gather(
        self,
        layer: int | Int[Array, ""],
        page_table: Int[Array, "num_seqs max_pages"],
        seq_lens: Int[Array, "num_seqs"],
    ) -> tuple[
        Float[Array, "num_seqs max_len num_kv_heads head_dim"], Float[Array, "num_seqs max_len num_kv_heads head_dim"]
    ]:
        """K and V of one layer as dense arrays, zero past each sequence's end: for people and tests.

        In the cache's dtype; in float32, multiplied by their scales, from a quantised cache.
        `max_len` is `max_pages * page_size`. Takes memory and time in proportion to it.

        Raises:
            ValueError: The shapes do not fit, or a static `layer` is out of range.
            TypeError: An argument is not an array.
        """
        require_arrays(page_table=page_table, seq_lens=seq_lens)
        check_layer(layer, self.num_layers)
        if page_table.ndim != 2 or seq_lens.shape != page_table.shape[:1]:
            raise ValueError(
                "`page_table` must have shape (num_seqs, max_pages) and `seq_lens` (num_seqs,); got "
                f"{page_table.shape} and {seq_lens.shape}."
            )
        num_seqs, max_pages = page_table.shape
        live = jnp.arange(max_pages * self.page_size) < seq_lens[:, None]
        owned = jnp.arange(max_pages) < -(-seq_lens[:, None] // self.page_size)
        ids = jnp.where(owned, page_table, NULL_PAGE)

        def dense(pages: Array, scale: Array | None) -> Array:
            tokens = pages[layer, ids]  # [num_seqs, max_pages, num_kv_heads, page_size, head_dim]
            if scale is not None:
                tokens = dequantize(tokens, scale[layer, ids] if scale.ndim == 4 else scale[layer][:, None])
            tokens = tokens.swapaxes(2, 3).reshape(num_seqs, -1, self.num_kv_heads, self.head_dim)
            return jnp.where(live[..., None, None], tokens, 0)

        return dense(self.k_pages, self.k_scale), dense(self.v_pages, self.v_scale)

    def copy_pages(self, src_page_ids: Int[Array, "num_copies"], dst_page_ids: Int[Array, "num_copies"]) -> "KVCache":
        """Copies pages in all layers: the second half of copy-on-write.

        All sources are read before any destination is written. Destinations must be distinct; one of `num_pages` or
        more is dropped.

        Raises:
            ValueError, TypeError: As `export_pages` for sources and `import_pages` for destinations.
        """
        return self.import_pages(dst_page_ids, self.export_pages(src_page_ids))

    def export_pages(self, page_ids: Int[Array, "num_exported"]) -> PageBlock:
        """Cuts out whole pages, all layers, in the order given.

        Raises:
            ValueError: An id is out of range. A traced id cannot be seen; from outside the pool it reads another page.
            TypeError: `page_ids` are not integers in one row.
        """
        _check_page_ids(page_ids, lambda ids: (ids >= 0) & (ids < self.num_pages), f"be from 0 to {self.num_pages - 1}")
        return PageBlock(**{name: pool[:, page_ids] for name, pool in self._pools().items()})

    def import_pages(self, page_ids: Int[Array, "num_exported"], block: PageBlock) -> "KVCache":
        """Puts the pages of `block` into the pool at `page_ids`, which are distinct; `num_pages` or more is dropped.

        Raises:
            ValueError: The block's pages are of another shape than the pool's, or there are more or fewer than ids, or
                an id is negative, the null page's, or given twice (as far as ids are not traced).
            TypeError: The block is of another dtype, it has scales and the cache has none, or the other way round, or
                `page_ids` are not integers in one row.
        """
        _check_page_ids(page_ids, _are_targets, "be distinct, and none of them negative or the null page, 0")
        page_ids = jnp.asarray(page_ids, jnp.int32)
        shape = (self.num_layers, page_ids.shape[0], self.num_kv_heads, self.page_size, self.head_dim)
        for name, x in (("block.k", block.k), ("block.v", block.v)):
            if x.shape != shape:
                raise ValueError(
                    f"`{name}` must have shape (num_layers, len(page_ids), num_kv_heads, page_size, head_dim) = "
                    f"{shape}; got {x.shape}."
                )
            if x.dtype != self.dtype:
                raise TypeError(
                    f"`{name}` must be of the cache's dtype {self.dtype}; got {x.dtype}. Cast it on purpose."
                )
        for name, x in (("block.k_scale", block.k_scale), ("block.v_scale", block.v_scale)):
            if (x is not None) != self.has_token_scales:
                what = "given, as the cache holds" if self.has_token_scales else "None, as the cache does not hold"
                got = "None" if x is None else "an array"
                raise TypeError(f"`{name}` must be {what} a scale for each token; got {got}.")
        zeros = jnp.zeros_like(page_ids)
        starts = jnp.stack([zeros, page_ids, zeros, zeros, zeros], axis=1)
        return self._update(starts, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0)[:, :, None], block))

    def _pools(self) -> dict[str, Array]:
        """What is stored by page, by its name in `PageBlock`."""
        arrays = {"k": self.k_pages, "v": self.v_pages, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: x for name, x in arrays.items() if x is not None and x.ndim >= 4}

    def _encode(self, x: Array, scale: Array | None, layer: int | Array) -> tuple[Array, Array | None]:
        """New tokens in the cache's dtype; with them their scales, if each has its own."""
        if scale is None:
            return x.astype(self.dtype), None
        if scale.ndim == 2:
            return quantize(x, jnp.broadcast_to(scale[layer], x.shape[:2]), self.dtype), None
        measured = measure_scale(x, self.dtype)
        return quantize(x, measured, self.dtype), measured[..., None]

    def _update(self, starts: Array, new: PageBlock) -> "KVCache":
        """Replaces windows of all pools. `starts` [n, 5]; arrays of `new` [n, *window], one axis more than the pool."""
        pools = self._pools()
        windows = {name: getattr(new, name) for name in pools}
        on_cpu = _update_by_scatter
        if jax.__version_info__ < (0, 11) and self.dtype.itemsize == 2:
            on_cpu = _update_in_loop
        elif self.dtype.name.startswith("float8"):
            on_cpu = _update_bits_by_scatter
        pools = lax.platform_dependent(pools, starts, windows, cpu=on_cpu, default=_update_by_scatter)
        return KVCache(
            k_pages=pools["k"],
            v_pages=pools["v"],
            k_scale=pools.get("k_scale", self.k_scale),
            v_scale=pools.get("v_scale", self.v_scale),
        )


def _to_pinned_memory(x: Array) -> Array:
    """`x` in host memory that the device can write to by itself; `x` where there is none."""
    kinds = {memory.kind for device in x.sharding.device_set for memory in device.addressable_memories()}
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) if "pinned_host" in kinds else x


def _check_pool_size(shape: tuple[int, ...], dtype: str) -> None:
    """Pallas Triton counts elements in 32 bits up to 2**32 bytes, which one-byte elements overflow from 2**31 on."""
    num_values = math.prod(shape)
    if jnp.dtype(dtype).itemsize == 1 and 2**31 <= num_values <= 2**32:
        per_page = num_values // shape[1]
        raise ValueError(
            f"`num_pages` must be at most {(2**31 - 1) // per_page} or at least {2**32 // per_page + 1} here, as a GPU "
            f"kernel cannot index a pool of {dtype} with 2**31 to 2**32 values; got {shape[1]}."
        )


def _make_scales(
    shape: tuple[int, ...], dtype: str, k_scale: ArrayLike | None, v_scale: ArrayLike | None
) -> dict[str, Array]:
    """Scales of an empty cache: none, the fixed ones, or room for those of each token."""
    if (k_scale is None) != (v_scale is None):
        raise ValueError("`k_scale` and `v_scale` must be given both or neither; got one of them.")
    if not is_quantized(dtype):
        if k_scale is not None:
            raise ValueError(f"`k_scale` must be None for {dtype}; got one. Only one-byte dtypes have scales.")
        return {}
    num_layers, num_pages, num_kv_heads, page_size, _ = shape
    if k_scale is None:
        return {name: jnp.zeros((num_layers, num_pages, num_kv_heads, page_size)) for name in ("k_scale", "v_scale")}
    scales = {}
    for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
        scale = np.asarray(given, np.float32)
        if scale.shape not in ((), (num_kv_heads,), (num_layers, num_kv_heads)):
            raise ValueError(
                f"`{name}` must be a number, (num_kv_heads,) = ({num_kv_heads},) or (num_layers, num_kv_heads) = "
                f"({num_layers}, {num_kv_heads}); got {scale.shape}."
            )
        if not np.all((scale > 0) & (scale < np.inf)):
            raise ValueError(f"`{name}` must be finite and above 0; got {given}.")
        scales[name] = jnp.asarray(np.broadcast_to(scale, (num_layers, num_kv_heads)))
    return scales


def _check_page_ids(page_ids: Array, rule: Callable[[np.ndarray], np.ndarray], expected: str) -> None:
    """Raises TypeError for what is no row of integers, ValueError for values that break `rule`, if they are known."""
    require_arrays(page_ids=page_ids)
    if page_ids.ndim != 1 or not jnp.issubdtype(page_ids.dtype, jnp.integer):
        raise TypeError(f"`page_ids` must be integers [num_pages]; got {page_ids.dtype} {page_ids.shape}.")
    if not isinstance(page_ids, Tracer):
        ids = np.asarray(page_ids)
        wrong = ids[~rule(ids)]
        if wrong.size:
            raise ValueError(f"`page_ids` must {expected}; got {wrong[0]} among {ids.size}.")


def _are_targets(ids: np.ndarray) -> np.ndarray:
    first_use = np.zeros(ids.size, bool)
    first_use[np.unique(ids, return_index=True)[1]] = True
    return first_use & (ids > NULL_PAGE)


def check_layer(layer: int | ArrayLike, num_layers: int) -> None:
    """Raises ValueError where a static layer index is out of range; a traced one cannot be seen."""
    if isinstance(layer, int | np.integer) and not 0 <= layer < num_layers:
        raise ValueError(f"`layer` must be from 0 to num_layers - 1 = {num_layers - 1}; got {layer}.")


def _update_by_scatter(pools: dict[str, Array], starts: Array, windows: dict[str, Array]) -> dict[str, Array]:
    """One scatter a pool. XLA drops a window that starts out of range, and may assume that none overlap."""

    def update(pool: Array, new: Array) -> Array:
        axes = tuple(range(pool.ndim))
        dims = lax.ScatterDimensionNumbers(
            update_window_dims=tuple(i + 1 for i in axes), inserted_window_dims=(), scatter_dims_to_operand_dims=axes
        )
        mode = lax.GatherScatterMode.FILL_OR_DROP
        return lax.scatter(pool, starts[:, : pool.ndim], new, dims, unique_indices=True, mode=mode)

    return jax.tree.map(update, pools, windows)


def _update_bits_by_scatter(pools: dict[str, Array], starts: Array, windows: dict[str, Array]) -> dict[str, Array]:
    """The same of fp8 pools on a CPU, where XLA scatters such values by way of a float16 copy of the pool. Of their
    bytes it still makes a copy, in a third of the time (0.12 and 0.10: 65 and 79 ms a pool of 50 MB, not 187 and 270);
    an update in a loop makes none and takes seconds.
    """

    def bits(x: Array) -> Array:
        return lax.bitcast_convert_type(x, jnp.int8) if x.dtype.itemsize == 1 else x

    updated = _update_by_scatter(jax.tree.map(bits, pools), starts, jax.tree.map(bits, windows))
    return jax.tree.map(
        lambda pool, new: lax.bitcast_convert_type(new, pool.dtype) if pool.dtype.itemsize == 1 else new, pools, updated
    )


def _update_in_loop(pools: dict[str, Array], starts: Array, windows: dict[str, Array]) -> dict[str, Array]:
    """One slice update a window; a branch drops the padding. For 16-bit caches on the CPU of JAX 0.10, whose scatter
    first widens a copy of the whole pool to float32. An update does so value by value: slow too, but without memory.
    """
    shape = jnp.array(pools["k"].shape)
    if starts.shape[0] == 0:
        return pools

    def body(i: Array, pools: dict[str, Array]) -> dict[str, Array]:
        start = tuple(starts[i])

        def put(pools: dict[str, Array]) -> dict[str, Array]:
            return jax.tree.map(
                lambda pool, new: lax.dynamic_update_slice(pool, new[i], start[: pool.ndim]), pools, windows
            )

        in_range = jnp.all((starts[i] >= 0) & (starts[i] < shape))
        return lax.cond(in_range, put, lambda pools: pools, pools)

    return lax.fori_loop(0, starts.shape[0], body, pools)
