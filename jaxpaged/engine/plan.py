"""`StepPlan`: what one step does, as a value. The scheduler decides it, runner and outputs read it, nobody changes it.

The rows of a step are laid out here, once: see `Rows`.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jaxpaged.engine.sampling.params import SamplingRow
from jaxpaged.paging import Eviction, PageCopy
from jaxpaged.paging.store.offload import PageImport

Ints = npt.NDArray[np.int32]


class SwapOut(NamedTuple):
    """Export these pages into the swap space under the request's id, before anything else is moved or written."""

    request_id: int
    page_ids: Ints


class SwapIn(NamedTuple):
    """Import the request's pages from the swap space into these. The request runs from the next step on."""

    request_id: int
    page_ids: Ints


class Seating(NamedTuple):
    """Put the tokens of a request into a row of the device's counts, before the step runs.

    Attributes:
        seat: The row.
        token_ids: Prompt and output.
        num_prompt: Tokens of the prompt among them.
    """

    seat: int
    token_ids: Ints
    num_prompt: int


class PromptRows(NamedTuple):
    """Tokens of a prompt that are rows of their own, so that the logits after each come out.

    Attributes:
        request: Index of the request in the step.
        token_ids: The first tokens of its part of the prompt in this step; the rest stay in the request's own row.
        next_ids: The token of the prompt that follows each of these and, last, the one that follows the own row; -1
            where the prompt ends there.
    """

    request: int
    token_ids: Sequence[int]
    next_ids: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The rows of a step. Each is a run of new tokens of one request, and gives the logits after its last token.

    They stand in this order: for each request its own row, with a row for each of its drafts right behind it; then,
    last of all, the rows of prompt tokens. Each row sees the tokens of its request before it, for the K and V of all
    rows are written before any is read.

    Attributes:
        requests: `[num_rows]`, index of the row's request in the step.
        begins: `[num_rows]`, position of the row's first token.
        num_tokens: `[num_rows]`, >= 1.
        own: `[num_requests]`, index of the row in which a request samples.
        next_ids: `[num_rows]`, the token of the prompt that follows the row, where its log-probability is wanted, else
            -1; None where no row wants it.
        num_sampling: Rows before those of prompt tokens.
    """

    requests: Ints
    begins: Ints
    num_tokens: Ints
    own: Ints
    next_ids: Ints | None
    num_sampling: int

    def __len__(self) -> int:
        return len(self.begins)

    def of_prompts(self) -> Iterator[tuple[int, int, int, int]]:
        """Return row, index of its request, position of its last token, and the token that follows, where that is
        wanted.

        For each request in the order of positions.
        """
        if self.next_ids is not None:
            for row in (*range(self.num_sampling, len(self)), *range(self.num_sampling)):
                if self.next_ids[row] >= 0:
                    position = int(self.begins[row] + self.num_tokens[row]) - 1
                    yield row, int(self.requests[row]), position, int(self.next_ids[row])


def lay_out(
    begins: Ints, num_new_tokens: Ints, drafts: Sequence[Sequence[int]], prompt_rows: Sequence[PromptRows]
) -> Rows:
    """Return the rows of a step.

    Args:
        begins: `[num_requests]`, position of each request's first new token.
        num_new_tokens: `[num_requests]`, drafts not counted.
        drafts: Of each request; empty where no request has any.
        prompt_rows: In the order of requests.
    """
    requests = own = np.arange(len(begins), dtype=np.int32)
    num_tokens = num_new_tokens
    if drafts:
        counts = np.array([1 + len(d) for d in drafts], np.int32)
        own = np.cumsum(counts, dtype=np.int32) - counts
        requests = np.repeat(requests, counts)
        behind = np.arange(len(requests), dtype=np.int32) - own[requests]  # drafts before the row, and itself
        begins = begins[requests] + behind
        num_tokens = np.where(behind > 0, np.int32(1), num_new_tokens[requests])
    num_sampling, next_ids = len(requests), None
    if prompt_rows:
        which = np.array([rows.request for rows in prompt_rows], np.int32)
        counts = np.array([len(rows.token_ids) for rows in prompt_rows], np.int32)
        first = np.repeat(begins[own[which]], counts)
        place = np.arange(len(first), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)
        begins, num_tokens = begins.copy(), num_tokens.copy()
        begins[own[which]] += counts
        num_tokens[own[which]] -= counts
        requests = np.concatenate([requests, np.repeat(which, counts)])
        begins = np.concatenate([begins, first + place], dtype=np.int32)
        num_tokens = np.concatenate([num_tokens, np.ones(len(first), np.int32)])
        next_ids = np.full(len(requests), -1, np.int32)
        next_ids[num_sampling:] = [token_id for rows in prompt_rows for token_id in rows.next_ids[:-1]]
        next_ids[own[which]] = [rows.next_ids[-1] for rows in prompt_rows]
    return Rows(
        requests=requests, begins=begins, num_tokens=num_tokens, own=own, next_ids=next_ids, num_sampling=num_sampling
    )


_NO_INTS = np.zeros(0, np.int32)
_NO_ROWS = lay_out(_NO_INTS, _NO_INTS, (), ())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step computes. It is carried out in this order: what leaves, page copies, what comes back, the model.

    Attributes:
        request_ids: In batch order. May be empty where pages are moved only.
        begins: `[num_requests]`, position of each one's first new token.
        num_new_tokens: `[num_requests]`, >= 1, drafts not counted; pages for all are allocated.
        is_sampled: `[num_requests]`, whether these reach the last token of the request, so that the next is sampled.
        drafts: Of each request the tokens guessed to follow; empty where no request has any.
        rows: What the logits of the step stand for.
        token_ids: The new tokens, row by row; 0 where only the device knows one.
        from_rows: Like `token_ids`, the row of the step before in which the token was sampled; -1 where it is known.
        page_tables: `[num_groups, num_requests, max_pages]`, the pages of each request in each page group.
        sampling: Of each row but those of prompt tokens, how it is sampled; empty where all take the likeliest token
            and nothing else is wanted.
        seatings: Histories of requests with penalties that sit down.
        num_prompt_logprobs: The most that a request wants for each token of its prompt; None where none does.
        page_copies: Copy-on-write.
        swap_outs, swap_ins: Pages of preempted requests.
        evictions: Contents to keep in the swap space, in pages that this step may write.
        restores: Contents that come back from there. What is computed in this step may see them.
    """

    request_ids: tuple[int, ...] = ()
    begins: Ints = dataclasses.field(default_factory=lambda: _NO_INTS)
    num_new_tokens: Ints = dataclasses.field(default_factory=lambda: _NO_INTS)
    is_sampled: npt.NDArray[np.bool_] = dataclasses.field(default_factory=lambda: np.zeros(0, np.bool_))
    drafts: tuple[tuple[int, ...], ...] = ()
    rows: Rows = _NO_ROWS
    token_ids: Ints = dataclasses.field(default_factory=lambda: _NO_INTS)
    from_rows: Ints = dataclasses.field(default_factory=lambda: _NO_INTS)
    page_tables: Ints = dataclasses.field(default_factory=lambda: np.zeros((1, 0, 0), np.int32))
    sampling: tuple[SamplingRow, ...] = ()
    seatings: tuple[Seating, ...] = ()
    num_prompt_logprobs: int | None = None
    page_copies: tuple[PageCopy, ...] = ()
    swap_outs: tuple[SwapOut, ...] = ()
    swap_ins: tuple[SwapIn, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    restores: tuple[PageImport, ...] = ()

    @property
    def num_drafts(self) -> int:
        """Drafts of all requests."""
        return sum(map(len, self.drafts))

    @property
    def is_decode(self) -> bool:
        """Whether each row has one token."""
        return len(self.token_ids) == len(self.rows)

    @property
    def digest(self) -> str:
        """A name of all that the plan says, the same in every process. O(size of the plan)."""
        digest = hashlib.blake2b(digest_size=16)
        _feed(digest, [getattr(self, name) for name in _FIELDS if name != "restores"])
        _feed(digest, [restored.page_ids for restored in self.restores])  # their contents have names of their own
        return digest.hexdigest()


_FIELDS = tuple(field.name for field in dataclasses.fields(StepPlan))


def _feed(digest: "hashlib.blake2b", value: object) -> None:
    """Add a value, its kind and its length to a digest, so that no two values feed the same bytes."""
    if isinstance(value, np.ndarray):
        digest.update(f"a{value.shape}{value.dtype}".encode() + np.ascontiguousarray(value).tobytes())
    elif isinstance(value, list | tuple):
        digest.update(f"t{len(value)}".encode())
        for item in value:
            _feed(digest, item)
    elif dataclasses.is_dataclass(value):
        _feed(digest, [getattr(value, field.name) for field in dataclasses.fields(value)])
    elif isinstance(value, bytes):
        digest.update(f"b{len(value)}".encode() + value)
    else:
        digest.update(f"v{value!r};".encode())
