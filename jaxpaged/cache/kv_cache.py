"""`KVCache`: the pool of pages as an immutable pytree, and the ways to move tokens and pages in and out of it.

It holds memory and no policy: which page belongs to whom is decided in `jaxpaged.paging` and arrives here as page ids
and slots. Every method returns a new cache. Inside a jitted step that donates the cache the update is in place; called
eagerly, each one copies the pool.

    step = jax.jit(step, donate_argnames="cache")
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int

from jaxpaged.cache.quantize import MAX_VALUE, dequantize, is_quantized, measure_scale, quantize
from jaxpaged.cache.ragged import Ragged
from jaxpaged.cache.scatter import update_bits_by_scatter, update_by_scatter, update_in_loop
from jaxpaged.checks import as_count, require_arrays
from jaxpaged.config import NULL_PAGE, LayerPlace

_DTYPES = ("float32", "bfloat16", "float16", *MAX_VALUE)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PageBlock:
    """Whole pages cut out of a cache, all layers: what swap, checkpoints and disaggregation move.

    Attributes:
        k: `[num_rows, num_exported, num_kv_heads, page_size, head_dim]`, as `v`; `KVCache` says what rows are.
        k_scale: `[num_rows, num_exported, num_kv_heads, page_size]` float32, as `v_scale`, from a cache that holds a
            scale for each token; None from any other.
    """

    k: Float[Array, "num_rows num_exported num_kv_heads page_size head_dim"]
    v: Float[Array, "num_rows num_exported num_kv_heads page_size head_dim"]
    k_scale: Float[Array, "num_rows num_exported num_kv_heads page_size"] | None = None
    v_scale: Float[Array, "num_rows num_exported num_kv_heads page_size"] | None = None

    def to_host(self) -> dict[str, np.ndarray]:
        """Return the arrays by name, in the memory of the host: what `SwapSpace` keeps. Scales that are None are left
        out.

        They come by way of pinned memory where the device has it, to which it copies at the full speed of the bus.
        """
        block = self.to_pinned_memory()  # all are on their way before the first is awaited
        arrays = {field.name: getattr(block, field.name) for field in dataclasses.fields(block)}
        return jax.device_get({name: x for name, x in arrays.items() if x is not None})

    def to_pinned_memory(self) -> "PageBlock":
        """Return the block on its way to pinned memory of the host, where the device has such; `to_host` of it then
        waits.
        """
        return jax.tree.map(_to_pinned_memory, self)

    @classmethod
    def from_host(cls, arrays: Mapping[str, np.ndarray]) -> "PageBlock":
        """Return the block whose `to_host` gave these arrays, on JAX's default device, with the same bits.

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
        k_pages: `[num_rows, num_pages, num_kv_heads, page_size, head_dim]`, as `v_pages`. One stacked array, so that a
            scan over layers carries it without a copy; heads before tokens, so that a kernel that works on one KV head
            reads a run of `page_size * head_dim` values. A row is a layer, or one layer of each page group.
        k_scale: What a stored key is to be multiplied by, float32, as `v_scale`: `[num_rows, num_kv_heads]`, or for
            each token `[num_rows, num_pages, num_kv_heads, page_size]`. None where the dtype has two bytes or four.
        layer_places: The page group and the row of each layer; None where layer i has row i, all in one group.
        target: The kind of GPU that it lies on, one of `jaxpaged.config.SLOTS`: attention is cut for that unless its
            `AttentionConfig` names another. None where nobody said.
    """

    k_pages: Float[Array, "num_rows num_pages num_kv_heads page_size head_dim"]
    v_pages: Float[Array, "num_rows num_pages num_kv_heads page_size head_dim"]
    k_scale: Float[Array, "num_rows *scales"] | None = None
    v_scale: Float[Array, "num_rows *scales"] | None = None
    layer_places: tuple[LayerPlace, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    target: str | None = dataclasses.field(default=None, metadata={"static": True})

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
        layer_places: Sequence[LayerPlace] | None = None,
    ) -> "KVCache":
        """Return an empty cache of `num_pages` pages, the null page included.

        Args:
            num_layers: Layers of the model.
            dtype: float32, bfloat16 or float16; or a byte a value: int8, float8_e4m3fn, float8_e5m2.
            k_scale: Of a one-byte dtype: the fixed scale of keys, a number, `[num_kv_heads]` or `[num_layers,
                num_kv_heads]`. None measures one for each token and head as it is written, for `page_size` float32
                more a page and head. `v_scale` likewise, both or neither. A scale for each layer needs rows of its own.
            layer_places: Of each layer, for layers in several page groups: `jaxpaged.paging.group_layers` makes them.
                The pools then have as many rows as the largest group has layers. None is one group of all layers.

        Raises:
            ValueError: A size is not positive, `num_pages` leaves no page beside the null page, the dtype is not one
                that attention computes with, a scale is not finite and positive or is for another dtype, a one-byte
                pool has from 2**31 to 2**32 values, or `layer_places` are not distinct or not one a layer.
            TypeError: A size is not an integer.
        """
        num_layers = as_count(num_layers, "`num_layers`", minimum=1)
        layer_places = _check_places(layer_places, num_layers)
        shape = (
            num_layers if layer_places is None else 1 + max(place.row for place in layer_places),
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
        scales = _make_scales(shape, name, k_scale, v_scale, has_places=layer_places is not None)
        # Two arrays, never one array twice: donating the same buffer twice is an error.
        return cls(
            k_pages=_zeros(shape, name),
            v_pages=_zeros(shape, name),
            k_scale=scales.get("k_scale"),
            v_scale=scales.get("v_scale"),
            layer_places=layer_places,
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return self.num_rows if self.layer_places is None else len(self.layer_places)

    @property
    def num_rows(self) -> int:
        """Rows of the stacked pools: the layers that share a page id."""
        return self.k_pages.shape[0]

    @property
    def num_groups(self) -> int:
        """Page groups of the layers, each with a page table of its own."""
        return 1 if self.layer_places is None else 1 + max(place.group for place in self.layer_places)

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
        """Bytes that one page takes: K and V of `page_size` tokens in all layers of a group, and their scales."""
        nbytes_per_head = self.head_dim * self.dtype.itemsize + 4 * self.has_token_scales
        return 2 * self.num_rows * self.num_kv_heads * self.page_size * nbytes_per_head

    def layer(self, layer: int | Int[Array, ""]) -> "LayerView":
        """Return one layer of the cache, for what writes to it and attends to it. An int, or traced.

        The one place that knows in which row of the pools a layer of the model lies, and in which page group it is.

        Raises:
            ValueError: A static `layer` is out of range.
        """
        check_layer(layer, self.num_layers)
        if self.layer_places is None:
            return LayerView(cache=self, row=layer)
        if isinstance(layer, int | np.integer):
            group, row = self.layer_places[layer]
        else:
            group, row = jnp.array(self.layer_places, jnp.int32)[layer]
        return LayerView(cache=self, row=row, group=group)

    def write(
        self,
        layer: int | Int[Array, ""],
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        slot_mapping: Int[Array, "num_tokens"],
    ) -> "KVCache":
        """Store K and V of new tokens at their slots of one layer, cast to the cache's dtype or quantised to it.

        Args:
            layer: Which layer; an int or traced.
            slot_mapping: `page_id * page_size + offset` of each token, all distinct. A number of `num_slots` or more
                marks padding, and is dropped. Values are not checked here: see `check_batch_values`.

        Raises:
            ValueError: The shapes do not fit, or a static `layer` is out of range.
            TypeError: `slot_mapping` is not of integers, or an argument is not an array.
        """
        return self.layer(layer).write_slots(k, v, slot_mapping).cache

    def gather(
        self,
        layer: int | Int[Array, ""],
        page_table: Int[Array, "num_seqs max_pages"],
        seq_lens: Int[Array, "num_seqs"],
    ) -> tuple[
        Float[Array, "num_seqs max_len num_kv_heads head_dim"], Float[Array, "num_seqs max_len num_kv_heads head_dim"]
    ]:
        """Return K and V of one layer as dense arrays, zero past each sequence's end: for people and tests.

        In the cache's dtype; in float32, multiplied by their scales, from a quantised cache.
        `max_len` is `max_pages * page_size`. Takes memory and time in proportion to it.

        Raises:
            ValueError: The shapes do not fit, or a static `layer` is out of range.
            TypeError: An argument is not an array.
        """
        require_arrays(page_table=page_table, seq_lens=seq_lens)
        row = self.layer(layer).row
        if page_table.ndim != 2 or seq_lens.shape != page_table.shape[:1]:
            raise ValueError(
                "`page_table` must have shape (num_seqs, max_pages) and `seq_lens` (num_seqs,); got "
                f"{page_table.shape} and {seq_lens.shape}."
            )
        num_seqs, max_pages = page_table.shape
        live = jnp.arange(max_pages * self.page_size)[None, :] < seq_lens[:, None]
        owned = jnp.arange(max_pages)[None, :] < -(-seq_lens[:, None] // self.page_size)
        ids = jnp.where(owned, page_table, NULL_PAGE)

        def dense(pages: Array, scale: Array | None) -> Array:
            tokens = pages[row, ids]  # [num_seqs, max_pages, num_kv_heads, page_size, head_dim]
            if scale is not None:
                tokens = dequantize(tokens, scale[row, ids] if scale.ndim == 4 else scale[row][:, None])
            tokens = tokens.swapaxes(2, 3).reshape(num_seqs, -1, self.num_kv_heads, self.head_dim)
            return jnp.where(live[..., None, None], tokens, 0)

        return dense(self.k_pages, self.k_scale), dense(self.v_pages, self.v_scale)

    def copy_pages(self, src_page_ids: Int[Array, "num_copies"], dst_page_ids: Int[Array, "num_copies"]) -> "KVCache":
        """Copy pages in all layers: the second half of copy-on-write.

        All sources are read before any destination is written. Destinations must be distinct; one of `num_pages` or
        more is dropped.

        Raises:
            ValueError, TypeError: As `export_pages` for sources and `import_pages` for destinations.
        """
        return self.import_pages(dst_page_ids, self.export_pages(src_page_ids))

    def export_pages(self, page_ids: Int[Array, "num_exported"]) -> PageBlock:
        """Cut out whole pages, all layers, in the order given.

        Raises:
            ValueError: An id is out of range. A traced id cannot be seen; from outside the pool it reads another page.
            TypeError: `page_ids` are not integers in one row.
        """
        _check_page_ids(page_ids, lambda ids: (ids >= 0) & (ids < self.num_pages), f"be from 0 to {self.num_pages - 1}")
        return PageBlock(**{name: pool[:, page_ids] for name, pool in self._pools().items()})

    def import_pages(self, page_ids: Int[Array, "num_exported"], block: PageBlock) -> "KVCache":
        """Put the pages of `block` into the pool at `page_ids`, which are distinct; `num_pages` or more is dropped.

        Raises:
            ValueError: The block's pages are of another shape than the pool's, or there are more or fewer than ids, or
                an id is negative, the null page's, or given twice (as far as ids are not traced).
            TypeError: The block is of another dtype, it has scales and the cache has none, or the other way round, or
                `page_ids` are not integers in one row.
        """
        _check_page_ids(page_ids, _are_targets, "be distinct, and none of them negative or the null page, 0")
        page_ids = jnp.asarray(page_ids, jnp.int32)
        shape = (self.num_rows, page_ids.shape[0], self.num_kv_heads, self.page_size, self.head_dim)
        for name, x in (("block.k", block.k), ("block.v", block.v)):
            if x.shape != shape:
                raise ValueError(
                    f"`{name}` must have shape (num_rows, len(page_ids), num_kv_heads, page_size, head_dim) = "
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
        """Return what is stored by page, by its name in `PageBlock`."""
        arrays = {"k": self.k_pages, "v": self.v_pages, "k_scale": self.k_scale, "v_scale": self.v_scale}
        return {name: x for name, x in arrays.items() if x is not None and x.ndim >= 4}

    def _encode(self, x: Array, scale: Array | None, row: int | Array) -> tuple[Array, Array | None]:
        """Return new tokens in the cache's dtype; with them their scales, if each has its own."""
        if scale is None:
            return x.astype(self.dtype), None
        if scale.ndim == 2:
            return quantize(x, jnp.broadcast_to(scale[row], x.shape[:2]), self.dtype), None
        measured = measure_scale(x, self.dtype)
        return quantize(x, measured, self.dtype), measured[..., None]

    def _update(self, starts: Array, new: PageBlock) -> "KVCache":
        """Replace windows of all pools. `starts` [n, 5]; arrays of `new` [n, *window], one axis more than the pool."""
        pools = self._pools()
        windows = {name: getattr(new, name) for name in pools}
        on_cpu = update_by_scatter
        if jax.__version_info__ < (0, 11) and self.dtype.itemsize == 2:
            on_cpu = update_in_loop
        elif self.dtype.name.startswith("float8"):
            on_cpu = update_bits_by_scatter
        pools = lax.platform_dependent(pools, starts, windows, cpu=on_cpu, default=update_by_scatter)
        return dataclasses.replace(
            self,
            k_pages=pools["k"],
            v_pages=pools["v"],
            k_scale=pools.get("k_scale", self.k_scale),
            v_scale=pools.get("v_scale", self.v_scale),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """One layer of a cache: where its K and V lie. Make one with `KVCache.layer`; the next layer takes `view.cache`.

    It holds the pools of all layers and a number: to cut a layer out of them would copy it, in each step.

    Attributes:
        cache: The whole cache.
        row: Which row of the stacked pools is this layer's; an int or traced.
        group: Number of the layer's page group; an int or traced.
    """

    cache: KVCache
    row: int | Int[Array, ""]
    group: int | Int[Array, ""] = 0

    def write(
        self,
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        ragged: Ragged,
    ) -> "LayerView":
        """Return the layer with this step's K and V at their slots: `KVCache.write`, which says what it raises."""
        return self.write_slots(k, v, require_slots(self.ragged(ragged)))

    def write_slots(
        self,
        k: Float[Array, "num_tokens num_kv_heads head_dim"],
        v: Float[Array, "num_tokens num_kv_heads head_dim"],
        slot_mapping: Int[Array, "num_tokens"],
    ) -> "LayerView":
        """Return the layer with K and V at these slots of its group: `KVCache.write`, which says what it raises."""
        cache = self.cache
        require_arrays(k=k, v=v, slot_mapping=slot_mapping)
        expected = (slot_mapping.shape[0] if slot_mapping.ndim else 0, cache.num_kv_heads, cache.head_dim)
        for name, x in (("k", k), ("v", v)):
            if x.shape != expected or slot_mapping.ndim != 1:
                raise ValueError(
                    f"`{name}` must have shape (num_tokens, num_kv_heads, head_dim) = {expected} and `slot_mapping` "
                    f"(num_tokens,); got {x.shape} and {slot_mapping.shape}."
                )
        if not jnp.issubdtype(slot_mapping.dtype, jnp.integer):
            raise TypeError(f"`slot_mapping` must be of integers; got {slot_mapping.dtype}.")
        page, offset = slot_mapping // cache.page_size, slot_mapping % cache.page_size
        rows = jnp.full_like(page, self.row)
        zeros = jnp.zeros_like(page)
        k, k_scale = cache._encode(k, cache.k_scale, self.row)
        v, v_scale = cache._encode(v, cache.v_scale, self.row)
        # A window is one token of one layer: all its heads, each at the same offset of the same page.
        starts = jnp.stack([rows, page, zeros, offset, zeros], axis=1)
        new = PageBlock(k=k[..., None, :], v=v[..., None, :], k_scale=k_scale, v_scale=v_scale)
        windows = jax.tree.map(lambda x: jnp.expand_dims(x, (1, 2)), new)
        return dataclasses.replace(self, cache=cache._update(starts, windows))

    def ragged(self, ragged: Ragged) -> Ragged:
        """Return the sequences of a step as this layer sees them: with the page table and the slots of its group.

        Raises:
            ValueError: There is not one page table for each page group of the cache.
        """
        if ragged.num_groups != self.cache.num_groups:
            raise ValueError(
                "`page_table` must have shape (num_seqs, max_pages), or (num_groups, num_seqs, max_pages) where the "
                f"cache has several page groups, of which this has {self.cache.num_groups}; got "
                f"{ragged.page_table.shape}."
            )
        return ragged.of_group(self.group)


def require_slots(ragged: Ragged) -> Int[Array, "num_tokens"]:
    """Return the slots of a step's tokens. Raises ValueError for a step without."""
    if ragged.slot_mapping is None:
        raise ValueError("`ragged` must have a `slot_mapping`, where this step's K and V go; got None.")
    return ragged.slot_mapping


def _to_pinned_memory(x: Array) -> Array:
    """Return `x` in host memory that the device can write to by itself; `x` where there is none."""
    kinds = {memory.kind for device in x.sharding.device_set for memory in device.addressable_memories()}
    return jax.device_put(x, x.sharding.with_memory_kind("pinned_host")) if "pinned_host" in kinds else x


def _check_pool_size(shape: tuple[int, ...], dtype: str) -> None:
    """Refuse a pool that no kernel can index.

    Pallas Triton counts elements in 32 bits up to 2**32 bytes, which one-byte elements overflow from 2**31 on.
    """
    num_values = math.prod(shape)
    if jnp.dtype(dtype).itemsize == 1 and 2**31 <= num_values <= 2**32:
        per_page = num_values // shape[1]
        raise ValueError(
            f"`num_pages` must be at most {(2**31 - 1) // per_page} or at least {2**32 // per_page + 1} here, as a GPU "
            f"kernel cannot index a pool of {dtype} with 2**31 to 2**32 values; got {shape[1]}."
        )


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _zeros(shape: tuple[int, ...], dtype: str) -> Array:
    """Return zeros that come from no transfer, which a user may have forbidden (`jax_transfer_guard`)."""
    return jnp.zeros(shape, dtype)


def _check_places(places: Sequence[LayerPlace] | None, num_layers: int) -> tuple[LayerPlace, ...] | None:
    """Return the places of all layers, or None for those that they have by themselves. Raises ValueError by name."""
    if places is None:
        return None
    places = tuple(LayerPlace(*place) for place in places)
    if len(places) != num_layers or len(set(places)) != num_layers or min(map(min, places)) < 0:
        raise ValueError(
            f"`layer_places` must be a distinct (group, row) >= 0 for each of num_layers = {num_layers} layers; got "
            f"{[tuple(place) for place in places]}."
        )
    return None if places == tuple(LayerPlace(0, i) for i in range(num_layers)) else places


def _make_scales(
    shape: tuple[int, ...], dtype: str, k_scale: ArrayLike | None, v_scale: ArrayLike | None, *, has_places: bool
) -> dict[str, Array]:
    """Return scales of an empty cache: none, the fixed ones, or room for those of each token."""
    if (k_scale is None) != (v_scale is None):
        raise ValueError("`k_scale` and `v_scale` must be given both or neither; got one of them.")
    if not is_quantized(dtype):
        if k_scale is not None:
            raise ValueError(f"`k_scale` must be None for {dtype}; got one. Only one-byte dtypes have scales.")
        return {}
    num_rows, num_pages, num_kv_heads, page_size, _ = shape
    if k_scale is None:
        of_tokens = num_rows, num_pages, num_kv_heads, page_size
        return {name: _zeros(of_tokens, "float32") for name in ("k_scale", "v_scale")}
    scales = {}
    for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
        scale = np.asarray(given, np.float32)
        if scale.ndim == 2 and has_places:
            raise ValueError(
                f"`{name}` must be a number or (num_kv_heads,) = ({num_kv_heads},) with `layer_places`, as layers of "
                f"several page groups share a row; got {scale.shape}."
            )
        if scale.shape not in ((), (num_kv_heads,), (num_rows, num_kv_heads)):
            raise ValueError(
                f"`{name}` must be a number, (num_kv_heads,) = ({num_kv_heads},) or (num_layers, num_kv_heads) = "
                f"({num_rows}, {num_kv_heads}); got {scale.shape}."
            )
        if not np.all((scale > 0) & (scale < np.inf)):
            raise ValueError(f"`{name}` must be finite and above 0; got {given}.")
        scales[name] = jax.device_put(np.broadcast_to(scale, (num_rows, num_kv_heads)))
    return scales


def _check_page_ids(page_ids: Array, rule: Callable[[np.ndarray], np.ndarray], expected: str) -> None:
    """Raise TypeError for what is no row of integers, ValueError for values that break `rule`, if they are known."""
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
    """Raise ValueError where a static layer index is out of range; a traced one cannot be seen."""
    if isinstance(layer, int | np.integer) and not 0 <= layer < num_layers:
        raise ValueError(f"`layer` must be from 0 to num_layers - 1 = {num_layers - 1}; got {layer}.")
