"""What the outside world answers: a swap space whose memory or file may fail. The engine must be told, not surprised.

An engine is a function of its log. So each call of the space that went otherwise than the engine could know is noted,
and in a replay goes as it was noted, whatever disk and memory would say.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from jaxpaged.paging.store.layout import Block, num_pages_of
from jaxpaged.paging.store.swap import SwapSpace

T = TypeVar("T")
Outcome = str | int | list[bool]
"""An error's text; how many pages of a sequence came back; which pages of prefixes did."""


class Outside:
    """A `SwapSpace` with all its verbs, some of which note their outcome.

    Args:
        space: The space itself.

    Attributes:
        outcomes: Of the calls since the last `take_outcomes`, by number, those that did not go as they should.
    """

    def __init__(self, space: SwapSpace):
        self.outcomes: dict[int, Outcome] = {}
        self._space = space
        self._expected: dict[int, Outcome] | None = None
        self._num_calls = 0
        self._num_pages: dict[Hashable, int] = {}  # of each sequence that is there

    def __getattr__(self, name: str) -> Any:
        return getattr(self._space, name)

    def __contains__(self, seq_id: Hashable) -> bool:
        return seq_id in self._space

    def expect(self, outcomes: dict[int, Outcome]) -> None:
        """Let the calls to come go as they were noted in another run."""
        self._expected, self._num_calls = outcomes, 0

    def take_outcomes(self) -> dict[int, Outcome]:
        """Return the outcomes noted since the last call."""
        outcomes, self.outcomes, self._num_calls = self.outcomes, {}, 0
        return outcomes

    def put_sequence(self, seq_id: Hashable, block: Block) -> None:
        """See `SwapSpace.put_sequence`."""
        self._num_pages[seq_id] = num_pages_of(block)
        self._attempt(lambda: self._space.put_sequence(seq_id, block))

    def put_pages(self, digests: Sequence[bytes], block: Block) -> None:
        """See `SwapSpace.put_pages`."""
        self._attempt(lambda: self._space.put_pages(digests, block))

    def take_sequence(self, seq_id: Hashable) -> dict[str, npt.NDArray[Any]]:
        """See `SwapSpace.take_sequence`. How many pages came back whole is noted, unless all did."""
        block = self._attempt(lambda: self._space.take_sequence(seq_id))
        num_pages = self._pick(num_pages_of(block))
        if num_pages < self._num_pages.pop(seq_id, 0):
            self.outcomes[self._num_calls] = num_pages
        return {name: x[:, :num_pages] for name, x in block.items()}

    def get_pages(self, digests: Sequence[bytes]) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[np.bool_]]:
        """See `SwapSpace.get_pages`. Which pages were found is noted, unless all were."""
        block, found = self._attempt(lambda: self._space.get_pages(digests))
        picked = np.array(self._pick(found.tolist()), np.bool_)
        if not picked.all():
            self.outcomes[self._num_calls] = picked.tolist()
            self._space.drop_pages([digest for digest, is_here in zip(digests, picked, strict=True) if not is_here])
        return {name: x[:, picked[found]] for name, x in block.items()}, picked & found

    def _attempt(self, call: Callable[[], T]) -> T:
        self._num_calls += 1
        expected = None if self._expected is None else self._expected.get(self._num_calls)
        try:
            if isinstance(expected, str):
                raise OSError(expected)
            return call()
        except Exception as error:
            self.outcomes[self._num_calls] = str(error)
            raise

    def _pick(self, value: Any) -> Any:
        """Return what a call gave, or in a replay what it was noted to give."""
        return value if self._expected is None else self._expected.get(self._num_calls, value)
