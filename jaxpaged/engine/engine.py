"""The engine: prompts in, outputs or streams out, from any thread at the same time.

`generate -> queue -> Worker -> EngineCore.step -> queue -> RequestOutput`
"""

import dataclasses
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jaxpaged.checks import check_integer, check_number
from jaxpaged.config import CacheConfig
from jaxpaged.engine.beam import BeamOutput, BeamsFound, num_beam_pages
from jaxpaged.engine.beam_scores import BeamParams
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.handle import Mailbox, RequestHandle
from jaxpaged.engine.log import Add, AddBeams, Entry, LoadPrefixes, Reset, WarmUp
from jaxpaged.engine.outputs import NewToken, RequestOutput
from jaxpaged.engine.request import QueueFullError, check_token_ids
from jaxpaged.engine.sampling.params import SamplingParams
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.engine.stats import EngineStats
from jaxpaged.engine.step import Model
from jaxpaged.engine.worker import Worker
from jaxpaged.paging import OutOfPagesError, PageEvent, save_prefix_cache
from jaxpaged.paging.store.swap import SwapSpace
from jaxpaged.progress import progress_bar


class Engine:
    """Runs many requests through one model and one pool of pages.

    A thread of its own steps it while there is work: it starts with the first request, and ends with `close`, or when
    nobody holds the engine any more. The JAX contexts in force here (default device, matmul precision, mesh) apply in
    it. In a process that was forked each verb raises RuntimeError.

    Args:
        model: A pytree that is called as `logits, cache = model(cache, batch)`: see `jaxpaged.engine.step.Model`. One
            with a true attribute `compiles_itself` is called as it is; any other is compiled with the sampling.
        cache_config: Shape of the cache; `Llama.cache_config` makes it.
        scheduler_config: Limits of a step. A model's `max_position` lowers `max_model_len`, and its `vocab_size` bounds
            token ids, where it has these attributes. Its `layer_specs` divide the layers into page groups.
        tokenizer: Makes text of tokens: see `jaxpaged.engine.text.TextStream`. Needed for `SamplingParams.stop`; tokens
            come without it too.
        prefix_caching: Prompts share the pages of earlier ones that begin alike, as long as those are not needed.
        swap: Of this engine alone: where the pages of preempted requests are kept, and of prefixes that were evicted
            from the cache. None, or where it is full: they are computed again.
        speculation: Guesses tokens that a step checks all at once. The tokens that come out are the same.
        record_events: Keep what becomes cached and what ceases to be, for `take_events`.
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
        record_events: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        core = EngineCore(
            model,
            cache_config,
            scheduler_config,
            prefix_caching=prefix_caching,
            tokenizer=tokenizer,
            swap=swap,
            speculation=speculation,
            record_events=record_events,
        )
        self.config = core.config
        self.num_pages = core.pages.num_pages
        self.page_size = core.pages.page_size
        self._pages = core.pages  # asked only what never changes, as its owner is another thread
        self._worker = Worker(core, clock)
        self._vocab_size: int | None = getattr(model, "vocab_size", None)
        self._has_tokenizer = tokenizer is not None
        self._ids = itertools.count()
        self._adding = threading.Lock()
        self._num_added = 0
        self._header = {
            "cache": dataclasses.asdict(cache_config),
            "scheduler": dataclasses.asdict(core.config),
            "prefix_caching": prefix_caching,
            "num_swap_pages": 0 if swap is None else swap.stats().num_host_pages + swap.stats().num_file_pages,
            "speculation": _description(speculation),
        }

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> RequestHandle:
        """Queue a prompt, and return the handle through which its tokens and its output come.

        Whoever holds the handle may iterate over the tokens (`for`, `async for`), wait for `result()`, or `abort()`.

        Args:
            priority: Lower numbers go first.
            deadline: When it fails if it has not ended, by the engine's clock: `time.monotonic() + seconds`.
            cache_salt: Pages of the prefix cache are shared only with requests of the same salt, a tenant's say.

        Raises:
            ValueError: The prompt is empty or as long as the context, a token id is not in the vocabulary, a sampling
                parameter is out of range, or the deadline is NaN; `n` must be 1 here.
            TypeError: A token id, a count or the priority is not an integer, or the deadline is not a number.
            OutOfPagesError: The pool is too small for this request alone.
            QueueFullError: `max_num_waiting` requests wait.
            RuntimeError: The engine is closed, or this process was forked.
        """
        params = params or SamplingParams()
        self._check_params(params)
        if params.n != 1:
            raise ValueError(f"`n` must be 1 here; got {params.n}. `add_samples` and `generate` take more.")
        [handle] = self.add_samples(
            prompt_token_ids, params, priority=priority, deadline=deadline, cache_salt=cache_salt
        )
        return handle

    stream = add_request
    """The handle is both iterators."""
    astream = add_request

    def add_samples(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        deadline: float | None = None,
        cache_salt: str | None = None,
    ) -> list[RequestHandle]:
        """Queue the `params.n` samples of a prompt, which is computed once: they share its pages until they write.

        Returns:
            A handle for each sample, whose tokens are those of a request with `params.of_sample(i)`.

        Raises:
            ValueError, TypeError, OutOfPagesError, QueueFullError, RuntimeError: As `add_request`; then none is queued.
        """
        entry = self._entry(prompt_token_ids, params, priority, deadline, cache_salt)
        mailboxes = {request_id: Mailbox() for request_id in entry.request_ids}
        handles = [RequestHandle(i, mailbox, self._worker.abort) for i, mailbox in mailboxes.items()]
        self._submit([entry], _Switch(mailboxes))
        return handles

    def abort(self, request_id: int) -> None:
        """End a request at the next step, and free its pages; one that has ended, or never was, is left alone."""
        self._worker.check()
        self._worker.abort(request_id)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_token: Callable[[NewToken], None] | None = None,
    ) -> list[RequestOutput]:
        """Run prompts to their ends, together with whatever else runs.

        Args:
            prompts: Token ids.
            params: For all, or one for each prompt. One with `n` above 1 makes as many outputs, one after another: its
                prompt is computed once, and the samples share its pages until they write.
            on_token: Called with each token as it comes; its `request_id` is here the index of the output.

        Returns:
            One output a prompt and sample, in the order given.

        Raises:
            ValueError, TypeError, OutOfPagesError, QueueFullError, RuntimeError: As `add_request`, before anything is
                computed.
            BaseException: What `on_token` raised, or Ctrl-C. Whatever is raised, the requests of this call are aborted.
            Exception: What the model raised, where none of the prompts came to its end.
        """
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"`params` must be one, or one for each of {len(prompts)} prompts; got {len(params)}.")
        entries = [self._entry(prompt, p, 0, None, None) for prompt, p in zip(prompts, params, strict=True)]
        ids = [request_id for entry in entries for request_id in entry.request_ids]
        index, mailbox = {request_id: i for i, request_id in enumerate(ids)}, Mailbox()
        outputs: dict[int, RequestOutput] = {}
        try:
            self._submit(entries, mailbox)
            while len(outputs) < len(ids):
                item = mailbox.get()
                if isinstance(item, RequestOutput):
                    outputs[item.request_id] = item
                elif on_token is not None and item.token_id is not None:
                    on_token(item._replace(request_id=index[item.request_id]))
        finally:
            for request_id in ids:
                if request_id not in outputs:
                    self._worker.abort(request_id)
        errors = [output.error for output in outputs.values() if output.error is not None]
        if errors and len(errors) == len(outputs):
            raise outputs[ids[0]].error or errors[0]
        return [outputs[request_id] for request_id in ids]

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
        """Return the sentences with the highest scores that a search with several beams finds.

        They are those of `transformers`. Beams share pages as far as they begin alike, and run beside other requests.
        `warmup` compiles what it needs where its `params` have one with `num_logprobs` of `num_beams` times 2, or times
        1 + the number of stop tokens if that is more.

        Args:
            prompts: Token ids.
            num_beams, max_new_tokens, length_penalty, early_stopping, num_return_sequences, stop_token_ids: See
                `jaxpaged.engine.beam_scores.BeamParams`.

        Returns:
            For each prompt its sentences, best first.

        Raises:
            ValueError, TypeError: An argument is out of range or of the wrong kind, or as in `add_request`.
            OutOfPagesError: A prompt with all its beams may take more pages than the pool has. Nothing was computed.
            QueueFullError: `max_num_waiting` requests wait.
            FloatingPointError: The model's logits were not finite.
            Exception: What the model raised.
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
        if num_beams > (limit := self.config.max_num_seqs):
            raise ValueError(f"`num_beams` must be at most `max_num_seqs` = {limit}; got {num_beams}.")
        entries = []
        for place, prompt in enumerate(prompts):
            token_ids = check_token_ids(prompt, self._vocab_size)
            self._check_beams(place, len(token_ids), params)
            entries.append(AddBeams(request_id=next(self._ids), prompt_token_ids=token_ids, params=params))
        found: dict[int, BeamsFound] = {}
        mailbox = Mailbox()
        try:
            self._submit(entries, mailbox)
            while len(found) < len(entries):
                item: BeamsFound = mailbox.get()
                if item.error is not None:
                    raise item.error
                found[item.request_id] = item
        finally:
            for entry in entries:
                if entry.request_id not in found:
                    self._worker.abort(entry.request_id)
        return [found[entry.request_id].outputs for entry in entries]

    def warmup(
        self,
        params: Sequence[SamplingParams] = (),
        *,
        greedy: bool = True,
        progress: Callable[[int, int], None] | None = None,
    ) -> int:
        """Compile every program that steps can need, so that no request waits for a compiler.

        Args:
            params: Ways to sample, besides the likeliest token, that requests will use.
            greedy: Compile also what steps need in which all take the likeliest token and want nothing else.
            progress: Called with (done, total), in the engine's thread; None shows a bar on stderr, if that is a
                terminal.

        Returns:
            How many programs there are.
        """
        with progress_bar("Compiling", "programs") as bar:
            entry = WarmUp(params=tuple(params), greedy=greedy)
            return self._worker.ask(lambda: self._worker.warm_up(entry, progress or bar))

    def reset(self) -> None:
        """Abort all requests and forget all cached prefixes, in the swap space too. Counts stay."""
        self._worker.ask(lambda: self._worker.apply(Reset()))

    def stats(self) -> EngineStats:
        """Return the counts since the engine was made, and what it holds now."""
        return self._worker.ask(self._worker.stats)

    def take_events(self) -> list[PageEvent]:
        """Return what became and what ceased to be cached since the last call: a router follows it.

        Raises:
            ValueError: The engine was made without `record_events`.
        """
        return self._worker.ask(self._worker.core.take_events)

    def save_prefixes(self, path: str | os.PathLike[str], *, model: str) -> int:
        """Save all cached prefixes to a file, and return how many pages they are: see `save_prefix_cache`."""
        core = self._worker.core
        return self._worker.ask(lambda: save_prefix_cache(path, core.pages, core.runner.cache, model=model))

    def load_prefixes(self, path: str | os.PathLike[str], *, model: str) -> None:
        """Load prefixes that were saved, as far as there is room: see `load_prefix_cache`."""
        self._worker.ask(lambda: self._worker.apply(LoadPrefixes(path=os.fspath(path), model=model)))

    def record(self, path: str | os.PathLike[str]) -> None:
        """Write all that the engine is asked and what each step makes of it to a file, for `jaxpaged replay`.

        Raises:
            RuntimeError: The engine has run already: what it did before would be missing.
            OSError: The file cannot be written.
        """
        self._worker.ask(lambda: self._worker.record(path, self._header))

    def close(self) -> None:
        """End all requests, and the thread. Whoever waits for a request gets a RuntimeError."""
        self._worker.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, entries: Sequence[Entry], mailbox: Any) -> None:
        """Hand in entries, all or none, so that they begin in the same step."""
        count = sum(len(entry.request_ids) if isinstance(entry, Add) else 1 for entry in entries)
        with self._adding:
            waiting, limit = self._num_added - self._worker.num_started, self.config.max_num_waiting
            if limit is not None and waiting + count > limit:
                raise QueueFullError(
                    f"{waiting} requests are waiting, {count} are to come, and `max_num_waiting` is {limit}. "
                    "Try again later."
                )
            self._worker.check()
            self._num_added += count
            self._worker.submit(entries, mailbox)

    def _entry(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        priority: int,
        deadline: float | None,
        cache_salt: str | None,
    ) -> Add:
        """Return the entry of a prompt whose arguments are all right."""
        self._check_params(params)
        check_integer("priority", priority)
        if deadline is not None:
            check_number("deadline", deadline)
            if math.isnan(deadline):
                raise ValueError("`deadline` must be a time by the engine's clock; got nan. None is no deadline.")
        if cache_salt is not None and not isinstance(cache_salt, str):
            raise TypeError(f"`cache_salt` must be a string; got {cache_salt!r}.")
        token_ids = check_token_ids(prompt_token_ids, self._vocab_size)
        max_len = min(len(token_ids) + params.max_new_tokens, self.config.max_model_len)
        self.config.check_request(len(token_ids), max_len, self._pages)
        return Add(
            request_ids=tuple(next(self._ids) for _ in range(params.n)),
            prompt_token_ids=token_ids,
            params=params,
            priority=int(priority),
            deadline=None if deadline is None else float(deadline),
            cache_salt=cache_salt,
        )

    def _check_params(self, params: SamplingParams) -> None:
        if not isinstance(params, SamplingParams):
            raise TypeError(f"`params` must be SamplingParams; got {params!r}.")
        params.check(self._vocab_size)
        if params.stop and not self._has_tokenizer:
            raise ValueError(f"`stop` needs a tokenizer, to find {params.stop!r} in text: Engine(tokenizer=...).")

    def _check_beams(self, place: int, num_prompt: int, params: BeamParams) -> None:
        max_len = min(num_prompt + params.max_new_tokens, self.config.max_model_len)
        self.config.check_request(num_prompt, max_len, self._pages)
        needed = num_beam_pages(num_prompt, max_len, params.num_beams, self._pages, self.config)
        usable = self.num_pages - 1
        if needed > usable:
            new = max_len - num_prompt
            what = f"Prompt {place} of {num_prompt} tokens, with {params.num_beams} beams of {new} new ones,"
            raise OutOfPagesError(needed, usable, what)


class _Switch:
    """Leaves what is said of each request in a mailbox of its own."""

    def __init__(self, mailboxes: dict[int, Mailbox]):
        self._mailboxes = mailboxes

    def put(self, item: Any) -> None:
        if isinstance(item, Exception):
            for mailbox in self._mailboxes.values():
                mailbox.put(item)
        else:
            self._mailboxes[item.request_id].put(item)


def _description(speculation: object) -> dict[str, Any] | None:
    """Return how a speculation was made, where it is one of ours; any other is named, and cannot be made again."""
    if speculation is None:
        return None
    if type(speculation) is NgramSpeculation:
        return {name: getattr(speculation, name) for name in ("num_drafts", "max_ngram", "min_ngram")}
    return {"type": type(speculation).__name__}
