"""Beam search: beams of several prompts, a token of each a step, on pages that are forked and pruned.

It has the model to itself. A beam is a `Request` and a sequence of the page manager, as elsewhere; the steps are plans
that the same runner carries out, by the programs that tell log-probabilities.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxpaged.config import cdiv
from jaxpaged.engine.beam_scores import BeamParams, BeamScores, Continuation
from jaxpaged.engine.interrupts import Interrupts
from jaxpaged.engine.plan import SchedulerConfig, StepPlan
from jaxpaged.engine.request import FinishReason, Request, SamplingParams
from jaxpaged.engine.runner import Runner
from jaxpaged.paging import OutOfPagesError, PageAllocator, PageCopy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BeamOutput:
    """One of the sentences found for a prompt.

    Attributes:
        token_ids: What was generated, a stop token included.
        score: Sum of the tokens' log-probabilities over their number to the power of `length_penalty`.
        finish_reason: STOP, or LENGTH at `max_new_tokens` or the end of the context.
        text: Where the engine has a tokenizer.
    """

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason
    text: str = ""


class _Search:
    """One prompt, its beams in the order of their scores, and the rows of the last step that are theirs."""

    def __init__(self, prompt: Request, params: BeamParams):
        self.beams = [prompt]
        self.scores = BeamScores(params, prompt.max_new_tokens)

    @property
    def is_prompting(self) -> bool:
        """Whether its prompt is not computed."""
        return not self.scores.is_done and self.beams[0].is_prompting


class BeamSearch:
    """Runs prompts, as many together as there are places and pages for.

    Args:
        new_id: Gives a name to each sequence.
        interrupts: Held back by whoever calls `run`; let through where the model is called and waited for.

    Attributes:
        num_steps: That it ran.
        peak_num_pages: Most pages in use at the same time.
    """

    def __init__(
        self,
        runner: Runner,
        pages: PageAllocator,
        config: SchedulerConfig,
        params: BeamParams,
        new_id: Callable[[], int],
        interrupts: Interrupts,
    ):
        if params.num_beams > (limit := config.max_num_seqs):
            raise ValueError(f"`num_beams` must be at most `max_num_seqs` = {limit}; got {params.num_beams}.")
        self.runner = runner
        self.pages = pages
        self.config = config
        self.params = params
        self.num_steps = self.peak_num_pages = 0
        self._new_id = new_id
        self._interrupts = interrupts
        self._sampling = SamplingParams(max_new_tokens=params.max_new_tokens, num_logprobs=params.num_candidates)

    def num_pages(self, prompt: Request) -> int:
        """Pages that a prompt may take: whole ones of the prompt are shared by all beams, others not for sure."""
        size = self.pages.page_size
        num_shared = len(prompt.prompt_token_ids) // size
        return num_shared + self.params.num_beams * (cdiv(prompt.max_tokens - 1, size) - num_shared)

    def run(self, prompts: Sequence[tuple[int, ...]]) -> list[BeamScores]:
        """The finished sentences of each prompt. All pages are given back, whatever happens.

        Raises:
            ValueError: A prompt is empty or as long as the context.
            OutOfPagesError: A prompt may take more pages than are free; nothing was computed.
            FloatingPointError: Logits of the model were not finite.
        """
        requests = [self._new_request(prompt) for prompt in prompts]
        free = self.pages.num_free_pages
        for place, request in enumerate(requests):
            self.config.check_request(request, self.pages.num_pages, self.pages.page_size)
            if (needed := self.num_pages(request)) > free:
                length, beams = len(request.prompt_token_ids), self.params.num_beams
                what = f"Prompt {place} of {length} tokens, with {beams} beams of {request.max_new_tokens} new ones,"
                raise OutOfPagesError(needed, free, what)
        results: list[BeamScores] = []
        while len(results) < len(requests):
            searches = [_Search(r, self.params) for r in self._that_fit(requests[len(results) :], free)]
            try:
                self._run_together(searches)
            finally:
                for search in searches:
                    self._free(search.beams)
            results += [search.scores for search in searches]
        return results

    def _that_fit(self, requests: Sequence[Request], num_free: int) -> Sequence[Request]:
        """The first of these, as many as run together."""
        num_pages = np.cumsum([self.num_pages(r) for r in requests])
        num_fitting = int(np.searchsorted(num_pages, num_free, side="right"))
        return requests[: min(num_fitting, self.config.max_num_seqs // self.params.num_beams)]

    def _run_together(self, searches: list[_Search]) -> None:
        for search in searches:
            self._begin(search.beams[0])
        while reading := [s for s in searches if s.is_prompting]:
            self._read_prompts(reading)
        while live := [s for s in searches if not s.scores.is_done]:
            beams = [beam for search in live for beam in search.beams]
            copies = self.pages.append_many([beam.request_id for beam in beams], 1)
            self._step(beams, [1] * len(beams), live, copies)

    def _begin(self, prompt: Request) -> None:
        prompt.num_computed_tokens = self.pages.add(prompt.request_id, prompt.known_tokens())

    def _read_prompts(self, searches: list[_Search]) -> None:
        """A step with as many tokens of prompts as it may have."""
        budget, counts = self.config.max_step_tokens, []
        for search in searches:
            counts.append(min(search.beams[0].num_remaining, budget))
            budget -= counts[-1]
        counts = [count for count in counts if count]
        reading = searches[: len(counts)]
        self._step([search.beams[0] for search in reading], counts, reading)

    def _step(
        self, beams: list[Request], counts: list[int], searches: list[_Search], copies: Sequence[PageCopy] = ()
    ) -> None:
        """Computes tokens of beams, and lets the searches advance whose beams have no more."""
        plan = StepPlan(
            requests=tuple(beams),
            num_new_tokens=tuple(counts),
            samples=tuple(n == beam.num_remaining for n, beam in zip(counts, beams, strict=True)),
            page_copies=tuple(copies),
            evictions=tuple(self.pages.take_evictions()),
        )
        self.peak_num_pages = max(self.peak_num_pages, self.pages.num_pages - 1 - self.pages.num_free_pages)
        try:
            self.runner.move(plan)
            with self._interrupts.allowed():
                result = self.runner.read(self.runner.dispatch(plan))
        except BaseException:  # what the cache holds now, nobody knows
            self.runner.restore_cache(is_lost=True)
            self.pages.reset()
            raise
        self.num_steps += 1
        assert result.logprobs is not None
        for row, (beam, count) in enumerate(zip(beams, counts, strict=True)):
            if row in result.non_finite and plan.samples[row]:
                where = f"token {beam.num_tokens} of a beam, whose prompt has {len(beam.prompt_token_ids)},"
                raise FloatingPointError(f"The model's logits after {where} are not finite.")
            beam.num_computed_tokens += count
        row = 0
        for search in searches:
            rows = slice(row, row := row + len(search.beams))
            if search.beams[0].num_remaining:
                continue
            if search.beams[0].is_prompting:
                search.beams[0].is_prompting = False
                self.pages.commit(search.beams[0].request_id, search.beams[0].known_tokens())
            chosen = search.scores.advance(result.logprobs.top_ids[rows], result.logprobs.top_logprobs[rows])
            self._branch(search, chosen)

    def _branch(self, search: _Search, chosen: Sequence[Continuation]) -> None:
        """Beams for what goes on: the first child of a beam takes its pages over, others share them."""
        parents, tokens = search.beams, [list(beam.output_token_ids) for beam in search.beams]
        heirless = {c.parent for c in chosen}
        self._free([beam for place, beam in enumerate(parents) if place not in heirless])
        search.beams = []
        for parent, token_id in chosen:
            beam = parents[parent]
            if parent not in heirless:
                beam = self._new_request(beam.prompt_token_ids)
                beam.is_prompting, beam.num_computed_tokens = False, parents[parent].num_computed_tokens
                self.pages.fork(parents[parent].request_id, beam.request_id)
            heirless.discard(parent)
            beam.output_token_ids = [*tokens[parent], token_id]
            beam.num_tokens = beam.num_known
            search.beams.append(beam)

    def _new_request(self, prompt: tuple[int, ...]) -> Request:
        return Request(
            request_id=self._new_id(),
            prompt_token_ids=prompt,
            params=self._sampling,
            max_tokens=min(len(prompt) + self.params.max_new_tokens, self.config.max_model_len),
        )

    def _free(self, beams: Sequence[Request]) -> None:
        for beam in beams:
            if beam.request_id in self.pages:
                self.pages.free(beam.request_id)
