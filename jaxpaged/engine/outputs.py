"""From token ids to what a caller sees: text, stop strings, log-probabilities, and why a request ended.

The scheduler deals in integers; this module knows nothing of pages, steps that run, or who goes first.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from jaxpaged.engine.logprobs import StepLogprobs, TokenLogprobs
from jaxpaged.engine.plan import StepPlan
from jaxpaged.engine.request import FinishReason, Request
from jaxpaged.engine.scheduler import NewTokenId, Scheduler
from jaxpaged.engine.stats import Counters
from jaxpaged.engine.text import TextStream

_new_tuple = tuple.__new__  # half of what a NamedTuple's own constructor takes, once a token


class NewToken(NamedTuple):
    """One generated token, or the end of a request that ended without one.

    Attributes:
        token_id: None where the request ended by abort, deadline or error.
        finish_reason: Why it ended, if this was the last of it.
        error: The cause, where the reason is DEADLINE or ERROR.
        text: What the token adds to the text, if the engine has a tokenizer: nothing that may yet change, and nothing
            of a stop string. With the finish reason comes what was held back.
        logprobs: Where `num_logprobs` asks for them.
        prompt_logprobs: Where `prompt_logprobs` asks for them, with the first token: as in `RequestOutput`.
    """

    request_id: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    error: Exception | None = None
    text: str = ""
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: What was generated, a stop token included.
        text: That of `token_ids`, where the engine has a tokenizer: without a stop string, unless it is to be included,
            and without what the tokenizer leaves out (markup of the model). All `NewToken.text` together.
        num_pages: Pages that held its keys and values at the end.
        num_cached_tokens: Tokens of the prompt that were not computed, for their pages were there.
        logprobs: Of each token of the output, where `num_logprobs` asks for them.
        prompt_logprobs: Of each token of the prompt, where `prompt_logprobs` asks for them; None for its first, and
            fewer than the prompt where the request ended inside it.
        error: Why it ended early, where `finish_reason` is ERROR or DEADLINE.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_pages: int
    num_cached_tokens: int = 0
    text: str = ""
    error: Exception | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


@dataclasses.dataclass(slots=True)
class _Told:
    """What was made of one request's tokens so far. The samples of one prompt share `prompt_logprobs`."""

    request: Request
    text: TextStream | None
    output_text: str = ""
    num_tokens: int = 0
    logprobs: list[TokenLogprobs] = dataclasses.field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] = dataclasses.field(default_factory=lambda: [None])


class Outputs:
    """Makes `NewToken`s of what the scheduler takes in, and ends requests by their text.

    Args:
        scheduler: Whose requests end where a stop string is found or the tokenizer fails.

    Attributes:
        finished: Requests that ended, by id, until somebody takes them out.
    """

    def __init__(self, scheduler: Scheduler, counters: Counters):
        self.finished: dict[int, RequestOutput] = {}
        self._scheduler = scheduler
        self._counters = counters
        self._told: dict[int, _Told] = {}

    def add(self, request: Request, text: TextStream | None) -> None:
        """Expect the tokens of a request.

        Args:
            text: Makes text of its tokens and finds stop strings; None makes none.
        """
        told = self._told[request.request_id] = _Told(request, text)
        if request.siblings and (first := self._told.get(request.siblings[0].request_id)) is not None:
            told.prompt_logprobs = first.prompt_logprobs

    def forget(self, request_id: int) -> None:
        """Expect nothing any more."""
        self._told.pop(request_id, None)

    def take(
        self,
        plan: StepPlan,
        taken: Sequence[NewTokenId],
        non_finite: frozenset[int],
        logprobs: StepLogprobs | None,
    ) -> list[NewToken]:
        """Return what a step's tokens add, in their order. Tokens behind a stop string are dropped.

        Args:
            taken: What `Scheduler.update` returned.
            non_finite: Rows whose logits were not finite.
            logprobs: Of the rows of the step, where any are wanted.
        """
        if logprobs is not None:
            self._take_prompt_logprobs(plan, non_finite, logprobs)
        new = []
        for request_id, token_id, reason, row in taken:
            told = self._told.get(request_id)
            if told is not None:  # else its text ended at a token before
                told.num_tokens += 1
                of_token = None
                if logprobs is not None and (num_top := told.request.params.num_logprobs) is not None:
                    of_token = logprobs.of(row, token_id, num_top)
                    told.logprobs.append(of_token)
                text, reason = self._text_of(told, token_id, reason) if told.text is not None else ("", reason)
                if reason is not None:
                    text += self._finish(told)
                of_prompt = _prompt_logprobs(told) if told.num_tokens == 1 else None
                new.append(_new_tuple(NewToken, (request_id, token_id, reason, None, text, of_token, of_prompt)))
        self._counters.num_tokens += len(new)
        return new

    def end(self, ended: Sequence[Request]) -> list[NewToken]:
        """Return the last words of requests that ended without a token."""
        new = []
        for request in ended:
            told = self._told.get(request.request_id)
            if told is not None:
                of_prompt = _prompt_logprobs(told) if told.num_tokens == 0 else None
                text = self._finish(told)
                error, reason = request.error, request.finish_reason
                new.append(NewToken(request.request_id, None, reason, error, text, None, of_prompt))
        return new

    def _text_of(self, told: _Told, token_id: int, reason: FinishReason | None) -> tuple[str, FinishReason | None]:
        """Return the text that a token adds, and why the request ends with it, if it does."""
        assert told.text is not None
        try:
            text = told.text.push((token_id,))
        except Exception as error:  # noqa: BLE001 whatever a tokenizer may raise ends its request, with the cause
            told.text = None
            self._scheduler.end_at(told.request, told.num_tokens, FinishReason.ERROR, error)
            return "", None
        told.output_text += text
        if told.text.stopped_by is None:
            return text, reason
        self._scheduler.end_at(told.request, told.num_tokens, FinishReason.STOP)
        return text, FinishReason.STOP

    def _finish(self, told: _Told) -> str:
        """Make the output of a request that has ended. Returns the text that was held back."""
        request, text = told.request, told.text.finish() if told.text is not None else ""
        assert request.finish_reason is not None
        del self._told[request.request_id]
        params = request.params
        self.finished[request.request_id] = RequestOutput(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            token_ids=tuple(request.output_token_ids),
            finish_reason=request.finish_reason,
            num_pages=request.num_pages,
            num_cached_tokens=request.num_cached_tokens or 0,
            text=told.output_text + text,
            error=request.error,
            logprobs=None if params.num_logprobs is None else tuple(told.logprobs),
            prompt_logprobs=_prompt_logprobs(told),
        )
        self._counters.num_finished += 1
        self._counters.num_failed += request.error is not None
        return text

    def _take_prompt_logprobs(self, plan: StepPlan, non_finite: frozenset[int], logprobs: StepLogprobs) -> None:
        """Take the log-probabilities of prompt tokens, each once: a request that started over computes some again."""
        for row, index, position, next_id in plan.rows.of_prompts():
            told = self._told.get(plan.request_ids[index])
            if told is not None and position + 1 == len(told.prompt_logprobs) and row not in non_finite:
                num_top = told.request.params.prompt_logprobs or 0
                told.prompt_logprobs.append(logprobs.of(row, next_id, num_top))


def _prompt_logprobs(told: _Told) -> tuple[TokenLogprobs | None, ...] | None:
    return None if told.request.params.prompt_logprobs is None else tuple(told.prompt_logprobs)
