"""The engine: requests in, tokens out.

`generate -> step -> Pipeline.advance -> schedule, move, dispatch, read, update`
"""

import asyncio
import dataclasses
import functools
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Literal

from jaxpaged.checks import check_integer, check_number
from jaxpaged.config import CacheConfig
from jaxpaged.engine.beam import BeamOutput, BeamSearch
from jaxpaged.engine.beam_scores import BeamParams, Sentence
from jaxpaged.engine.interrupts import Interrupts
from jaxpaged.engine.logprobs import TokenLogprobs
from jaxpaged.engine.pipeline import Pipeline
from jaxpaged.engine.plan import SchedulerConfig
from jaxpaged.engine.progress import progress_bar
from jaxpaged.engine.request import FinishReason, NewToken, Request, SamplingParams, check_token_ids
from jaxpaged.engine.runner import Model, Runner
from jaxpaged.engine.scheduler import Scheduler
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.engine.stats import EngineStats, StepTimes, collect_stats
from jaxpaged.engine.streams import TokenStream
from jaxpaged.engine.text import TextStream
from jaxpaged.kv_cache import KVCache
from jaxpaged.paging import PageAllocator
from jaxpaged.paging.swap import SwapSpace


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: What was generated, a stop token included.
        text: That of `token_ids`, where the engine has a tokenizer: without a stop string, unless it is to be included,
            and without what the tokenizer leaves out (markup of the model). All `NewToken.text` together.
        num_pages: Pages that held its keys and values at the end.
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
    text: str = ""
    error: Exception | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None


class Engine:
    """Runs many requests through one model and one pool of pages.

    One thread steps it; `add_request` and `abort` may be called from any other.

    Args:
        model: A pytree that is called as `logits, cache = model(cache, batch)`: see `jaxpaged.engine.runner.Model`. One
            with a true attribute `compiles_itself` is called as it is; any other is compiled with the sampling.
        cache_config: Shape of the cache; `Llama.cache_config` makes it.
        scheduler_config: Limits of a step. A model's `max_position` lowers `max_model_len`, and its `vocab_size` bounds
            token ids, where it has these attributes.
        tokenizer: Makes text of tokens: see `jaxpaged.engine.text.TextStream`. Needed for `SamplingParams.stop`; tokens
            come without it too.
        prefix_caching: Prompts share the pages of earlier ones that begin alike, as long as those are not needed.
        swap: Of this engine alone: where the pages of preempted requests are kept, and of prefixes that were evicted
            from the cache. None, or where it is full: they are computed again.
        speculation: Guesses tokens that a step checks all at once. The tokens that come out are the same.
        clock: What deadlines are measured by, in seconds.
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
        clock: Callable[[], float] = time.monotonic,
    ):
        config = scheduler_config or SchedulerConfig()
        config.check()
        context = getattr(model, "max_position", config.max_model_len)
        config = dataclasses.replace(config, max_model_len=min(config.max_model_len, context))
        make_cache = functools.partial(KVCache.create, **dataclasses.asdict(cache_config))
        cache = make_cache()
        offload = prefix_caching and swap is not None
        self.pages = PageAllocator(cache.num_pages, cache.page_size, prefix_caching=prefix_caching, offload=offload)
        self.scheduler = Scheduler(config, self.pages, swap=swap, speculation=speculation)
        self.runner = Runner(
            model,
            cache,
            self.pages,
            config,
            make_cache=make_cache,
            compile_whole=not getattr(model, "compiles_itself", False),
            swap=swap,
            rows_per_seq=1 + (speculation.num_drafts if speculation else 0),
        )
        self._interrupts = Interrupts()
        self.pipeline = Pipeline(self.scheduler, self.runner, self._interrupts)
        self._vocab_size: int | None = getattr(model, "vocab_size", None)
        self._tokenizer = tokenizer
        self._clock = clock
        self._ids = itertools.count()
        self._requests: dict[int, Request] = {}  # those unfinished
        self._aborts: deque[int] = deque()
        self._mailboxes: dict[int, deque[NewToken]] = {}
        self._closed_streams: set[int] = set()  # of requests unfinished
        self._untold: list[NewToken] = []  # of requests without a mailbox, for the next `step`
        self._lock = threading.Lock()
        self._stepping: asyncio.Future | None = None
        self._times = StepTimes()
        self._num_tokens = self._num_finished = self._num_failed = 0

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> int:
        """Queues a prompt and returns the id under which its tokens will come.

        Args:
            priority: Lower numbers go first.
            deadline: When it fails if it has not ended, by the engine's clock: `time.monotonic() + seconds`.

        Raises:
            ValueError: The prompt is empty or as long as the context, a token id is not in the vocabulary, a sampling
                parameter is out of range, or the deadline is NaN; `n` must be 1 here.
            TypeError: A token id, a count or the priority is not an integer, or the deadline is not a number.
            OutOfPagesError: The pool is too small for this request alone.
            QueueFullError: `max_num_waiting` requests wait.
        """
        return self._add_one(prompt_token_ids, params, priority, deadline).request_id

    def add_samples(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> list[int]:
        """Queues the `params.n` samples of a prompt, which is computed once: they share its pages until they write.

        Returns:
            An id for each sample, whose tokens are those of a request with `params.of_sample(i)`.

        Raises:
            ValueError, TypeError, OutOfPagesError, QueueFullError: As `add_request`; then none is queued.
        """
        samples = self._add_samples(prompt_token_ids, params, priority, deadline)
        return [request.request_id for request in samples]

    def stream(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
    ) -> TokenStream:
        """Queues a prompt and returns its tokens as they come: `for token in ...`, or `async for token in ...`.

        Whoever reads drives the engine; several streams, and `step`, may take turns: each gets its own tokens. Of async
        streams any number run together. Abandoning a stream aborts its request.

        Raises:
            ValueError, TypeError, OutOfPagesError, QueueFullError: As `add_request`.
        """
        mailbox: deque[NewToken] = deque()
        request = self._add_one(prompt_token_ids, params, priority, deadline, mailbox)
        return TokenStream(self, request.request_id, mailbox)

    astream = stream  # one object is both iterators

    def step(self) -> list[NewToken]:
        """Starts one step, and returns the tokens of the one before: those of requests that have no stream.

        Empty while a long prompt is being read, while the first step runs, and when nothing is left to do. A step that
        raises ends its requests with the cause; the others go on, those whose pages it took with it from their start.
        Ctrl-C comes through while the model compiles or its tokens are waited for, and loses none. Where it comes while
        the model is called, all start over at the next call, with the tokens that they have generated.
        """
        with self._lock:
            self._advance()
            told, self._untold = self._untold, []
            return told

    def advance(self) -> None:
        """`step` for those who read streams: what it would return is kept for the next `step`."""
        with self._lock:
            self._advance()

    async def advance_async(self) -> None:
        """One `advance` in a thread of its own; who calls while it runs, in the same loop, waits for the same one."""
        loop = asyncio.get_running_loop()
        if self._stepping is None or self._stepping.done() or self._stepping.get_loop() is not loop:
            self._stepping = asyncio.ensure_future(asyncio.to_thread(self.advance))
        await asyncio.shield(self._stepping)

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do, or to tell."""
        return bool(self._requests or self._untold)

    def abort(self, request_id: int) -> None:
        """Ends a request at once, wherever it is, and frees its pages; one that has ended, or never was, is let be.

        While another thread is in `step`, that step ends it.
        """
        self._aborts.append(request_id)
        with self._interrupts.deferred():
            if self._lock.acquire(blocking=False):
                try:
                    self._carry_out_aborts()
                finally:
                    self._lock.release()

    def close_stream(self, request_id: int) -> None:
        """Aborts the request of a stream, unless it has ended, and delivers nothing to it any more."""
        if request_id in self._requests:
            self._closed_streams.add(request_id)
        self._mailboxes.pop(request_id, None)
        self.abort(request_id)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[NewToken], None] | None = None,
    ) -> list[RequestOutput]:
        """Runs prompts to their ends, together.

        Args:
            prompts: Token ids.
            params: For all, or one for each prompt. One with `n` above 1 makes as many outputs, one after another: its
                prompt is computed once, and the samples share its pages until they write.
            on_token: Called with each token as it comes; its `request_id` is here the index of the output.

        Returns:
            One output a prompt and sample, in the order given.

        Raises:
            ValueError, TypeError, OutOfPagesError, QueueFullError: As `add_request`, before anything is computed.
                Whatever is raised, no request of this call stays behind.
            RuntimeError: Requests of `add_request` are unfinished: their tokens would have nowhere to go.
            Exception: What the model raised, where none of the prompts came to its end.
        """
        if self._requests:
            raise RuntimeError(
                "`generate` must have the engine to itself; requests are unfinished. Step them to the end."
            )
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"`params` must be one, or one for each of {len(prompts)} prompts; got {len(params)}.")
        requests: list[Request] = []
        others: list[NewToken] = []  # of requests that `on_token` or another thread adds
        try:
            with self._interrupts.deferred():
                for prompt, p in zip(prompts, params, strict=True):
                    requests += self._add_samples(prompt, p)
            index = {r.request_id: i for i, r in enumerate(requests)}
            while any(r.finish_reason is None for r in requests):
                for token in self.step():
                    if token.request_id not in index:
                        others.append(token)
                    elif on_token is not None and token.token_id is not None:
                        on_token(token._replace(request_id=index[token.request_id]))
        finally:
            with self._interrupts.deferred():
                for request in requests:
                    if request.finish_reason is None:
                        self.abort(request.request_id)
                ours = {request.request_id for request in requests}
                self._untold = others + [token for token in self._untold if token.request_id not in ours]
        errors = [r.error for r in requests if r.error is not None]
        if errors and len(errors) == len(requests):
            raise errors[0]
        return [_output(r) for r in requests]

    def beam_search(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        num_beams: int,
        max_new_tokens: int = 64,
        length_penalty: float = 1.0,
        early_stopping: bool | Literal["never"] = False,
        num_return_sequences: int | None = None,
        stop_token_ids: Sequence[int] = (),
    ) -> list[tuple[BeamOutput, ...]]:
        """The sentences with the highest scores that a search with several beams finds, as `transformers` does it.

        Beams share pages as far as they begin alike; as many prompts run together as there are places
        (`max_num_seqs`, one a beam) and pages for. `warmup` compiles what it needs where its `params` have one with
        `num_logprobs` of `num_beams` times 2, or times 1 + the number of stop tokens if that is more.

        Args:
            prompts: Token ids.
            num_beams, max_new_tokens, length_penalty, early_stopping, num_return_sequences, stop_token_ids: See
                `jaxpaged.engine.beam_scores.BeamParams`.

        Returns:
            For each prompt its sentences, best first.

        Raises:
            ValueError, TypeError: An argument is out of range or of the wrong kind, or as in `add_request`.
            OutOfPagesError: A prompt with all its beams may take more pages than are free. Nothing was computed.
            RuntimeError: Requests of `add_request` are unfinished.
            FloatingPointError: The model's logits were not finite.
            Exception: What the model raised. All pages are given back, and cached prefixes forgotten.
        """
        params = BeamParams(
            num_beams=num_beams,
            max_new_tokens=max_new_tokens,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            num_return_sequences=num_return_sequences,
            stop_token_ids=tuple(stop_token_ids),
        )
        params.check(self._vocab_size)
        SamplingParams(stop_token_ids=params.stop_token_ids).check(self._vocab_size)
        token_ids = [check_token_ids(prompt, self._vocab_size) for prompt in prompts]
        with self._lock, self._interrupts.deferred():
            if self._requests:
                raise RuntimeError("`beam_search` must have the engine to itself; requests are unfinished.")
            search = BeamSearch(
                self.runner, self.pages, self.scheduler.config, params, lambda: next(self._ids), self._interrupts
            )
            try:
                found = search.run(token_ids)
            finally:
                self.pipeline.num_steps += search.num_steps
                self.scheduler.peak_num_pages = max(self.scheduler.peak_num_pages, search.peak_num_pages)
        return [tuple(map(self._beam_output, scores.results)) for scores in found]

    def warmup(
        self,
        params: Sequence[SamplingParams] = (),
        *,
        greedy: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Compiles every program that steps can need, so that no request waits for a compiler.

        Args:
            params: Ways to sample, besides the likeliest token, that requests will use.
            greedy: Compile also what steps need in which all take the likeliest token. False spares half of the
                programs, where `params` has a way to sample without log-probabilities: such steps run as those that
                draw.
            progress: Called with (done, total); None shows a bar on stderr, if that is a terminal.

        Returns:
            How many programs there are.
        """
        greedy = greedy or all(p.num_logprobs is not None for p in params)
        programs = self.runner.all_programs(params, greedy=greedy)
        with self._lock, progress_bar("Compiling", "programs") as bar:
            advance = progress or bar
            self.runner.cache = self.runner.mover.warm_up(self.runner.cache)
            for done, program in enumerate(programs):
                advance(done, len(programs))
                self.runner.warm_up(program)
            advance(len(programs), len(programs))
        return len(programs)

    def reset(self) -> None:
        """Aborts all requests, forgets their tokens and all cached prefixes, in the swap space too. Counts stay."""
        with self._lock, self._interrupts.deferred():
            self._aborts.extend(self._requests)
            self._carry_out_aborts()
            self._untold = []
            self.pages.reset()
            self.runner.mover.forget_prefixes()

    def stats(self) -> EngineStats:
        """Counts since the engine was made, and what it holds now."""
        return collect_stats(
            self.pipeline,
            self._times,
            num_finished=self._num_finished,
            num_failed=self._num_failed,
            num_tokens=self._num_tokens,
        )

    def _advance(self) -> None:
        """One step; its tokens go where they are awaited. Needs the lock."""
        with self._interrupts.deferred():
            begin, num_steps = time.perf_counter(), self.pipeline.num_steps
            self._take_aborts()
            new = self.pipeline.advance(self._clock())
            self._take_aborts()
            new += self.scheduler.take_ended()
            self._deliver(new, others=self._untold)
            if new or self.pipeline.num_steps > num_steps:
                self._times.add(time.perf_counter() - begin, self.pipeline.waited_s, len(new))

    def _carry_out_aborts(self) -> None:
        self._take_aborts()
        self._deliver(self.scheduler.take_ended(), others=[])  # who aborts knows of it

    def _take_aborts(self) -> None:
        while self._aborts:
            request = self._requests.get(self._aborts.popleft())
            if request is not None:
                self.scheduler.end([request], FinishReason.ABORT)

    def _deliver(self, new: list[NewToken], *, others: list[NewToken]) -> None:
        """Counts new tokens, puts them into the mailboxes of streams or to `others`, and forgets ended requests."""
        for token in new:
            self._num_tokens += token.token_id is not None
            if token.finish_reason is not None:
                del self._requests[token.request_id]
                self._num_finished += 1
                self._num_failed += token.error is not None
            if token.request_id not in self._closed_streams:
                self._mailboxes.get(token.request_id, others).append(token)
            elif token.finish_reason is not None:
                self._closed_streams.discard(token.request_id)

    def _add_one(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None,
        priority: int,
        deadline: float | None,
        mailbox: deque[NewToken] | None = None,
    ) -> Request:
        params = params or SamplingParams()
        params.check(self._vocab_size)
        if params.n != 1:
            raise ValueError(f"`n` must be 1 here; got {params.n}. `add_samples` and `generate` take more.")
        with self._interrupts.deferred():
            return self._add(prompt_token_ids, params, priority, deadline, mailbox)

    def _add_samples(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        deadline: float | None = None,
    ) -> list[Request]:
        params.check(self._vocab_size)
        samples: list[Request] = []
        with self._interrupts.deferred():
            try:
                for i in range(params.n):
                    sample = params.of_sample(i) if params.n > 1 else params
                    self._add(prompt_token_ids, sample, priority, deadline, samples=samples)
            except (TypeError, ValueError, RuntimeError):
                for request in samples:
                    self.abort(request.request_id)
                raise
        return samples

    def _add(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        deadline: float | None = None,
        mailbox: deque[NewToken] | None = None,
        samples: list[Request] | None = None,
    ) -> Request:
        check_integer("priority", priority)
        if deadline is not None:
            check_number("deadline", deadline)
            if math.isnan(deadline):
                raise ValueError("`deadline` must be a time by the engine's clock; got nan. None is no deadline.")
        token_ids = samples[0].prompt_token_ids if samples else check_token_ids(prompt_token_ids, self._vocab_size)
        request = Request(
            request_id=next(self._ids),
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=min(len(token_ids) + params.max_new_tokens, self.scheduler.config.max_model_len),
            priority=priority,
            deadline=deadline,
            text=self._text_of(params),
        )
        if samples is not None:
            samples.append(request)
            request.samples, request.prompt_logprobs = samples, samples[0].prompt_logprobs
        self._requests[request.request_id] = request  # first: another thread may be in `step`
        if mailbox is not None:
            self._mailboxes[request.request_id] = mailbox
        try:
            self.scheduler.add(request)
        except (ValueError, RuntimeError):
            del self._requests[request.request_id]
            self._mailboxes.pop(request.request_id, None)
            raise
        return request

    def _beam_output(self, sentence: Sentence) -> BeamOutput:
        stream = self._text_of(SamplingParams())
        return BeamOutput(
            token_ids=sentence.token_ids,
            score=sentence.score,
            finish_reason=FinishReason.STOP if sentence.is_stopped else FinishReason.LENGTH,
            text="" if stream is None else stream.push(sentence.token_ids) + stream.finish(),
        )

    def _text_of(self, params: SamplingParams) -> TextStream | None:
        if self._tokenizer is None:
            if params.stop:
                raise ValueError(f"`stop` needs a tokenizer, to find {params.stop!r} in text: Engine(tokenizer=...).")
            return None
        return TextStream(
            self._tokenizer,
            stop=params.stop,
            include_stop=params.include_stop,
            min_new_tokens=params.min_new_tokens,
        )


def _output(request: Request) -> RequestOutput:
    assert request.finish_reason is not None
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(request.output_token_ids),
        finish_reason=request.finish_reason,
        num_pages=request.num_pages,
        text=request.output_text,
        error=request.error,
        logprobs=None if request.params.num_logprobs is None else tuple(request.logprobs),
        prompt_logprobs=None if request.params.prompt_logprobs is None else tuple(request.prompt_logprobs),
    )
