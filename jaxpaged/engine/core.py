"""`EngineCore`: scheduler, runner and outputs, stepped by one thread. It is a function of the entries that it is given.

    step: Scheduler.schedule -> Runner.move, dispatch; for the step before: Runner.read -> Scheduler.update -> Outputs

One step ahead: a step is scheduled and started while the one before it runs. Here a step that fails is contained.
"""

import dataclasses
import functools
import itertools
import time
from collections import deque
from collections.abc import Callable
from typing import cast

from jaxpaged.cache.kv_cache import KVCache
from jaxpaged.config import CacheConfig, LayerPlace, target_of
from jaxpaged.engine.beam import BeamOutput, BeamSearch, BeamsFound
from jaxpaged.engine.beam_scores import Sentence
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.log import Abort, Add, AddBeams, Entry, LoadPrefixes, Now, Reset, StepRecord, WarmUp
from jaxpaged.engine.logprobs import StepLogprobs
from jaxpaged.engine.outputs import NewToken, Outputs
from jaxpaged.engine.outside import Outcome, Outside
from jaxpaged.engine.plan import StepPlan
from jaxpaged.engine.request import FinishReason, Request
from jaxpaged.engine.runner import InFlight, Runner, StepResult
from jaxpaged.engine.sampling.params import SamplingParams
from jaxpaged.engine.scheduler import NewTokenId, Scheduler
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.engine.stats import Counters, EngineStats
from jaxpaged.engine.step import Model
from jaxpaged.engine.text import TextStream
from jaxpaged.paging import PageAllocator, PageEvent, PageGroup, group_layers, load_prefix_cache
from jaxpaged.paging.store.swap import SwapSpace

_FIRST_BEAM_ID = 1 << 32
"""Ids of forked beams are above those of all requests."""


class EngineCore:
    """What an engine does, with no lock, no signal and no clock of its own.

    The same entries and steps give the same plans and tokens. One thread calls it.

    Args:
        model, cache_config, scheduler_config, prefix_caching, tokenizer, swap, speculation, record_events: See
            `jaxpaged.engine.engine.Engine`.

    Attributes:
        recorder: Called after each step with what it did; None saves the digests.
        waited_s: Seconds for which the last step waited for the device.
    """

    def __init__(
        self,
        model: Model,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig | None = None,
        *,
        prefix_caching: bool = True,
        tokenizer: object = None,
        swap: SwapSpace | None = None,
        speculation: NgramSpeculation | None = None,
        record_events: bool = False,
    ):
        config = scheduler_config or SchedulerConfig()
        config.check()
        context = getattr(model, "max_position", config.max_model_len)
        self.config = dataclasses.replace(config, max_model_len=min(config.max_model_len, context))
        groups, layer_places = _page_groups(model, cache_config)
        make_cache = functools.partial(_make_cache, cache_config, layer_places)
        cache = make_cache()
        self.pages = PageAllocator(
            cache.num_pages,
            cache.page_size,
            prefix_caching=prefix_caching,
            groups=groups,
            offload=prefix_caching and swap is not None,
            record_events=record_events,
        )
        self._outside = None if swap is None else Outside(swap)
        noted = cast(SwapSpace | None, self._outside)  # it has all the verbs of the space
        self.counters = Counters()
        self.scheduler = Scheduler(self.config, self.pages, swap=noted, speculation=speculation, counters=self.counters)
        self.runner = Runner(
            model,
            cache,
            self.config,
            make_cache=make_cache,
            compile_whole=not getattr(model, "compiles_itself", False),
            swap=noted,
            num_drafts=speculation.num_drafts if speculation else 0,
            counters=self.counters,
        )
        self.outputs = Outputs(self.scheduler, self.counters)
        self.recorder: Callable[[StepRecord], None] | None = None
        self.waited_s = 0.0
        self._tokenizer = tokenizer
        self._records_events = record_events
        self._now = float("-inf")
        self._searches: dict[int, BeamSearch] = {}
        self._beam_ids = itertools.count(_FIRST_BEAM_ID)
        self._in_flight: deque[tuple[StepPlan, InFlight]] = deque()
        self._new: list[NewToken | BeamsFound] = []
        self._token_ids: list[int] | None = None  # that this step read
        self._errors: list[str] = []  # of this step

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything left to do."""
        return bool(self.scheduler.requests or self._in_flight or self._new)

    def apply(self, entry: Entry) -> None:
        """Take in what happened outside, between two steps."""
        match entry:
            case Add():
                self._add(entry)
            case AddBeams():
                self._add_beams(entry)
            case Abort(request_id):
                self._abort(request_id)
            case Now(now):
                self._now = now
            case Reset():
                for request_id in [*self.scheduler.requests, *self._searches]:
                    self._abort(request_id)
                self.pages.prefix.reset()
                self.runner.mover.forget_prefixes()
            case WarmUp():
                self.warm_up(entry)
            case LoadPrefixes():
                self.runner.cache = load_prefix_cache(entry.path, self.pages, self.runner.cache, model=entry.model)

    def step(self) -> list[NewToken | BeamsFound]:
        """Start one step, read the one before, and return what that gave.

        Empty while a long prompt is being read, while the first step runs, and when nothing is left to do. A step that
        raises ends its requests with the cause; the others go on, those whose pages it took with it from their start.
        """
        self.waited_s, self._token_ids, self._errors = 0.0, None, []
        if not self._in_flight:
            self.runner.mover.keep_leaving()  # nothing is held up, and it can be found already
        plan = self.scheduler.schedule(self._now)
        if plan is not None:
            self._dispatch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1):
            self._read()
        self._take_ended()
        if self.recorder is not None:
            outcomes = {} if self._outside is None else self._outside.take_outcomes()
            digest = None if plan is None else plan.digest
            self.recorder(StepRecord(digest, self._token_ids, tuple(self._errors), outcomes))
        new, self._new = self._new, []
        return new

    def expect(self, outcomes: dict[int, Outcome]) -> None:
        """Let the swap space answer in the next step as it did in another run."""
        if self._outside is not None:
            self._outside.expect(outcomes)

    def warm_up(self, entry: WarmUp, progress: Callable[[int, int], None] = lambda done, total: None) -> int:
        """Compile the programs that steps can need. Returns how many they are."""
        greedy = entry.greedy or all(p.num_logprobs is not None for p in entry.params)
        programs = self.runner.all_programs(entry.params, greedy=greedy)
        self.runner.cache = self.runner.mover.warm_up(self.runner.cache)
        for done, program in enumerate(programs):
            progress(done, len(programs))
            self.runner.warm_up(program)
        progress(len(programs), len(programs))
        return len(programs)

    def stats(self) -> EngineStats:
        """Return the counts since the core was made, and what it holds now. Costs a pass over the pool."""
        of_pages = self.pages.stats()
        return EngineStats(
            **self.counters.snapshot(),
            num_running=len(self.scheduler.running),
            num_waiting=self.scheduler.num_waiting,
            num_pages=of_pages.num_usable_pages,
            num_free_pages=self.pages.num_free_pages,
            nbytes_per_page=self.runner.cache.nbytes_per_page,
            num_hit_tokens=of_pages.num_hit_tokens,
            num_missed_tokens=of_pages.num_missed_tokens,
            max_programs=len(self.runner.all_programs()),
        )

    def take_events(self) -> list[PageEvent]:
        """Return what became and what ceased to be cached since the last call."""
        if not self._records_events:
            raise ValueError("`record_events` must be True in Engine(...) for `take_events`; got False.")
        return self.pages.prefix.take_events()

    def _add(self, entry: Add) -> None:
        siblings: list[Request] = []
        max_len = min(len(entry.prompt_token_ids) + entry.params.max_new_tokens, self.config.max_model_len)
        for index, request_id in enumerate(entry.request_ids):
            request = Request(
                request_id=request_id,
                prompt_token_ids=entry.prompt_token_ids,
                params=entry.params.of_sample(index) if entry.params.n > 1 else entry.params,
                max_len=max_len,
                priority=entry.priority,
                deadline=entry.deadline,
                cache_salt=entry.cache_salt,
                siblings=siblings if entry.params.n > 1 else [],
            )
            siblings.append(request)
            self.scheduler.add(request)
            try:
                text, cause = self._text_of(entry.prompt_token_ids, entry.params), None
            except Exception as error:  # noqa: BLE001 whatever a tokenizer may raise ends its request, with the cause
                text, cause = None, error
            self.outputs.add(request, text)
            if cause is not None:
                self.scheduler.end([request], FinishReason.ERROR, cause)

    def _add_beams(self, entry: AddBeams) -> None:
        params = SamplingParams(max_new_tokens=entry.params.max_new_tokens, num_logprobs=entry.params.num_candidates)
        prompt = Request(
            request_id=entry.request_id,
            prompt_token_ids=entry.prompt_token_ids,
            params=params,
            max_len=min(len(entry.prompt_token_ids) + params.max_new_tokens, self.config.max_model_len),
            family=entry.request_id,
        )
        self.scheduler.add(prompt)
        search = BeamSearch(self.scheduler, prompt, entry.params, lambda: next(self._beam_ids))
        self._searches[entry.request_id] = search

    def _abort(self, request_id: int) -> None:
        search = self._searches.pop(request_id, None)
        if search is not None:
            search.end()
            self._new.append(BeamsFound(request_id))
        elif request_id in self.scheduler.requests:
            self.scheduler.end([self.scheduler.requests[request_id]], FinishReason.ABORT)
        self._take_ended()

    def _text_of(self, prompt_token_ids: tuple[int, ...], params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            return None
        return TextStream(
            self._tokenizer,
            prompt_token_ids,
            stop=params.stop,
            include_stop=params.include_stop,
            min_new_tokens=params.min_new_tokens,
        )

    def _dispatch(self, plan: StepPlan) -> None:
        in_flight = None
        try:
            lost = self.runner.move(plan)
            if plan.request_ids:
                in_flight = self.runner.dispatch(plan)
        except Exception as error:  # noqa: BLE001 whatever a model may raise ends its requests, with the cause
            self._recover(plan, error)
            return
        self.scheduler.dispatched(plan)
        for request_id in lost:
            self.scheduler.lose(request_id)
        if in_flight is not None:
            self._in_flight.append((plan, in_flight))
            self.counters.num_steps += 1

    def _read(self) -> None:
        """Wait for the oldest step and take its tokens in."""
        plan, in_flight = self._in_flight.popleft()
        begin = time.perf_counter()
        try:
            result = self.runner.read(in_flight)
        except Exception as error:  # noqa: BLE001 as in `_dispatch`: on a device it comes when tokens are read
            self._recover(plan, error, is_lost=True)
            return
        self.waited_s = time.perf_counter() - begin
        self._token_ids = result.token_ids
        if result.non_finite:
            self.runner.mover.forget_prefixes()  # or others would read what it wrote
        taken = self.scheduler.update(plan, result.token_ids, result.non_finite)
        if self._searches:
            taken = self._take_beams(taken, result)
        self._new += self.outputs.take(plan, taken, result.non_finite, result.logprobs)

    def _recover(self, plan: StepPlan, error: Exception, *, is_lost: bool = False) -> None:
        """End the requests of a step that failed; all others start over if it took the cache with it."""
        self._errors.append(f"{type(error).__name__}: {error}")
        self.scheduler.fail(plan, error)
        if self.runner.restore_cache(is_lost=is_lost):
            self._in_flight.clear()
            self.scheduler.restart_all()
            for search in self._searches.values():
                search.forget_rows()

    def _take_beams(self, taken: list[NewTokenId], result: StepResult) -> list[NewTokenId]:
        """Let searches go on whose beams a step computed. Returns the tokens of all other requests."""
        others = []
        for token in taken:
            request = self.scheduler.requests.get(token.request_id)
            family = None if request is None else request.family
            if family is None:
                others.append(token)
            elif family in self._searches:
                self._advance(family, self._searches[family], token, result.logprobs)
        return others

    def _advance(self, family: int, search: BeamSearch, token: NewTokenId, logprobs: StepLogprobs | None) -> None:
        assert logprobs is not None
        search.take(token.request_id, logprobs.top_ids[token.row], logprobs.top_logprobs[token.row])
        if search.scores.is_done:
            del self._searches[family]
            prompt_token_ids = search.prompt.prompt_token_ids
            outputs = tuple(self._beam_output(prompt_token_ids, sentence) for sentence in search.scores.results)
            self._new.append(BeamsFound(family, outputs))

    def _beam_output(self, prompt_token_ids: tuple[int, ...], sentence: Sentence) -> BeamOutput:
        stream = self._text_of(prompt_token_ids, SamplingParams())
        return BeamOutput(
            token_ids=sentence.token_ids,
            score=sentence.score,
            finish_reason=FinishReason.STOP if sentence.is_stopped else FinishReason.LENGTH,
            text="" if stream is None else stream.push(sentence.token_ids) + stream.finish(),
        )

    def _take_ended(self) -> None:
        """Tell of the requests that ended without a token. A beam that fails ends its search."""
        ended = self.scheduler.take_ended()
        for request in ended:
            search = self._searches.get(request.family) if request.family is not None else None
            if search is not None and request.error is not None:
                del self._searches[search.prompt.request_id]
                search.end()
                self._new.append(BeamsFound(search.prompt.request_id, error=request.error))
        self._new += self.outputs.end(ended)


def _make_cache(cache_config: CacheConfig, layer_places: tuple[LayerPlace, ...] | None) -> KVCache:
    """Return an empty cache on the device in force, which says what kind of device that is."""
    cache = KVCache.create(**dataclasses.asdict(cache_config), layer_places=layer_places)
    device = next(iter(cache.k_pages.devices()))
    return dataclasses.replace(cache, target=target_of(device.device_kind))


def _page_groups(
    model: object, cache_config: CacheConfig
) -> tuple[tuple[PageGroup, ...] | None, tuple[LayerPlace, ...] | None]:
    """Return the page groups of a model that says what its layers see, and the places of these; one group of all else.

    Raises:
        ValueError: The layers are not those that the cache is for, or cannot share a pool.
    """
    layer_specs = getattr(model, "layer_specs", None)
    if layer_specs is None:
        return None, None
    shape = cache_config.num_layers, cache_config.num_kv_heads, cache_config.head_dim
    groups, places = group_layers(layer_specs)
    declared = len(places), layer_specs[0].num_kv_heads, layer_specs[0].head_dim
    if declared != shape:
        raise ValueError(
            f"`cache_config` must have (num_layers, num_kv_heads, head_dim) = {declared}, as `layer_specs` of the "
            f"model; got {shape}."
        )
    return groups, places
