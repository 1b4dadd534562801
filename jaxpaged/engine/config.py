"""The limits of a step, and which requests can never run under them."""

import dataclasses

from jaxpaged.checks import as_count
from jaxpaged.paging import OutOfPagesError, PageAllocator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step.

    Attributes:
        max_num_seqs: Requests that run at the same time.
        max_step_tokens: Tokens in one step. Decoding comes first; longer prompts take several steps.
        max_model_len: Tokens of a sequence, prompt and output. Also the width of the page tables.
        max_num_waiting: Requests that may wait; one more is refused. None is no limit.
    """

    max_num_seqs: int = 64
    max_step_tokens: int = 512
    max_model_len: int = 8192
    max_num_waiting: int | None = None

    def check(self) -> None:
        """Raise ValueError for a limit below 1, TypeError for one that is no integer, by name."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                as_count(value, f"`{field.name}`", minimum=1)  # pyright: ignore[reportArgumentType]

    def num_pages_for(self, num_tokens: int, pages: PageAllocator) -> int:
        """Return the most pages that a request of so many tokens holds at one time, all page groups together."""
        return pages.max_pages_for(num_tokens, chunk=self.max_step_tokens)

    def check_request(self, num_prompt: int, max_len: int, pages: PageAllocator) -> None:
        """Raise where a request can never run.

        Args:
            num_prompt: Tokens of its prompt.
            max_len: Tokens of prompt and output, at most.
            pages: The allocator that it would get its pages from.

        Raises:
            ValueError: The prompt is empty or as long as the context.
            OutOfPagesError: The request needs more pages than the pool has.
        """
        if num_prompt == 0:
            raise ValueError("`prompt` must hold at least one token; got none. There is nothing to continue.")
        if num_prompt >= self.max_model_len:
            raise ValueError(
                f"`prompt` must be shorter than the context of {self.max_model_len} tokens, to leave room for one "
                f"more; got {num_prompt} tokens. Shorten it."
            )
        needed, usable = self.num_pages_for(max_len - 1, pages), pages.num_pages - 1  # the last token is never stored
        if needed > usable:
            new = max_len - num_prompt
            what = f"`prompt` of {num_prompt} tokens with up to {new} new ones, in pages of {pages.page_size},"
            raise OutOfPagesError(needed, usable, what)
