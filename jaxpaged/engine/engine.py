"""The engine: requests in, tokens out. `generate -> step -> Scheduler.schedule -> Runner.run -> Scheduler.update`."""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Sequence

from jaxpaged.config import CacheConfig
from jaxpaged.engine.request import FinishReason, Request, SamplingParams
from jaxpaged.engine.runner import Model, Runner
from jaxpaged.engine.scheduler import Scheduler, SchedulerConfig
from jaxpaged.kv_cache import KVCache
from jaxpaged.paging import PageAllocator


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewToken:
    """One generated token, and why its request ended if it was the last."""

    request_id: int
    token_id: int
    finish_reason: FinishReason | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A finished request.

    Attributes:
        token_ids: What was generated, a stop token included.
        num_pages: Pages that held its keys and values at the end.
    """

    request_id: int
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_pages: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """What the engine has done so far.

    Attributes:
        peak_num_pages: Most pages in use at the same time.
        nbytes_per_page: K and V of all layers.
        num_preemptions: Times that a request gave its pages back and started over.
    """

    num_steps: int
    peak_num_pages: int
    nbytes_per_page: int
    num_preemptions: int


class Engine:
    """Runs many requests through one model and one pool of pages.

    Args:
        model: A pytree that is called as `logits, cache = model(cache, batch)`: see `jaxpaged.engine.runner.Model`. One
            with a true attribute `compiles_itself` is called as it is; any other is compiled with the sampling.
        cache_config: Shape of the cache; `Llama.cache_config` makes it.
        scheduler_config: Limits of a step. A model's `max_position` lowers `max_model_len`, and its `vocab_size` bounds
            token ids, where it has these attributes.
    """

    def __init__(self, model: Model, cache_config: CacheConfig, scheduler_config: SchedulerConfig | None = None):
        config = scheduler_config or SchedulerConfig()
        config.check()
        context = getattr(model, "max_position", config.max_model_len)
        config = dataclasses.replace(config, max_model_len=min(config.max_model_len, context))
        make_cache = functools.partial(KVCache.create, **dataclasses.asdict(cache_config))
        cache = make_cache()
        self.pages = PageAllocator(cache.num_pages, cache.page_size)
        self.scheduler = Scheduler(config, self.pages)
        whole = not getattr(model, "compiles_itself", False)
        self.runner = Runner(model, cache, self.pages, config, make_cache=make_cache, compile_whole=whole)
        self._vocab_size: int | None = getattr(model, "vocab_size", None)
        self._ids = itertools.count()
        self._num_steps = 0

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams | None = None) -> int:
        """Queues a prompt and returns the id under which its tokens will come.

        Raises:
            ValueError: The prompt is empty or as long as the context, a token id is not in the vocabulary, or a
                sampling parameter is out of range.
            TypeError: A token id or a count is not an integer.
            OutOfPagesError: The pool is too small for this request alone.
        """
        return self._add(prompt_token_ids, params or SamplingParams()).request_id

    def step(self) -> list[NewToken]:
        """Computes one step. Empty when nothing is left to do, or while a long prompt is still being read.

        When a step fails, or is interrupted, what its requests had computed may be gone with the cache that it owned:
        they all start over, with the tokens that they have generated, at the next call.
        """
        plan = self.scheduler.schedule()
        if plan is None:
            return []
        try:
            token_ids = self.runner.run(plan)
        except BaseException:
            self.scheduler.preempt_all()
            self.runner.restore_cache()
            raise
        progressed = self.scheduler.update(plan, token_ids)
        self._num_steps += 1
        return [
            NewToken(request_id=r.request_id, token_id=r.output_token_ids[-1], finish_reason=r.finish_reason)
            for r in progressed
        ]

    def has_unfinished(self) -> bool:
        """Whether `step` has anything left to do."""
        return bool(self.scheduler.waiting or self.scheduler.running)

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
            params: For all, or one for each prompt.
            on_token: Called with each token as it comes; its `request_id` is here the index of the prompt.

        Returns:
            One output a prompt, in the order given.

        Raises:
            ValueError, TypeError, OutOfPagesError: As `add_request`, before anything is computed. Whatever is raised,
                no request of this call stays behind.
            RuntimeError: Requests of `add_request` are unfinished: their tokens would have nowhere to go.
        """
        if self.has_unfinished():
            raise RuntimeError(
                "`generate` must have the engine to itself; requests are unfinished. Step them to the end."
            )
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"`params` must be one, or one for each of {len(prompts)} prompts; got {len(params)}.")
        requests: list[Request] = []
        try:
            for prompt, p in zip(prompts, params, strict=True):
                requests.append(self._add(prompt, p))
            index = {r.request_id: i for i, r in enumerate(requests)}
            while any(r.finish_reason is None for r in requests):
                for token in self.step():
                    if on_token is not None and token.request_id in index:
                        on_token(dataclasses.replace(token, request_id=index[token.request_id]))
        finally:
            for request in requests:
                self.scheduler.drop(request)
        return [_output(r) for r in requests]

    def stats(self) -> EngineStats:
        """Counts since the engine was made."""
        return EngineStats(
            num_steps=self._num_steps,
            peak_num_pages=self.scheduler.peak_num_pages,
            nbytes_per_page=self.runner.cache.nbytes_per_page,
            num_preemptions=self.scheduler.num_preemptions,
        )

    def _add(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Request:
        params.check()
        token_ids = self._checked(prompt_token_ids)
        request = Request(
            request_id=next(self._ids),
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=min(len(token_ids) + params.max_new_tokens, self.scheduler.config.max_model_len),
        )
        self.scheduler.add(request)
        return request

    def _checked(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        limit = 2**31 if self._vocab_size is None else self._vocab_size
        checked = []
        for place, token_id in enumerate(token_ids):
            try:
                checked.append(operator.index(token_id))
            except TypeError as error:
                raise TypeError(
                    f"`prompt_token_ids[{place}]` must be an integer; got {token_id!r}. Encode it."
                ) from error
            if not 0 <= checked[-1] < limit:
                raise ValueError(
                    f"`prompt_token_ids[{place}]` must be from 0 to vocab_size - 1 = {limit - 1}; got {token_id}. "
                    "Does the tokenizer belong to this model?"
                )
        return tuple(checked)


def _output(request: Request) -> RequestOutput:
    assert request.finish_reason is not None
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(request.output_token_ids),
        finish_reason=request.finish_reason,
        num_pages=request.num_pages,
    )
