"""What most tests of the engine share: limits that cut prompts in chunks, prompts, and engines for `model`."""

import dataclasses
import itertools

import numpy as np

from jaxpaged.config import CacheConfig
from jaxpaged.engine import Engine, EngineCore, RequestOutput, SamplingParams, SchedulerConfig
from jaxpaged.engine.beam import BeamsFound
from jaxpaged.engine.beam_scores import BeamParams
from jaxpaged.engine.log import Abort, Add, AddBeams, Now, Reset, WarmUp
from jaxpaged.models.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position=96,
    rms_norm_eps=1e-5,
)
CACHE = CacheConfig(num_layers=2, num_pages=80, page_size=4, num_kv_heads=2, head_dim=8, dtype="float32")
LIMITS = SchedulerConfig(max_num_seqs=4, max_step_tokens=8, max_model_len=96)
PROMPTS = [[int(t) for t in np.random.default_rng(i).integers(0, 64, n)] for i, n in enumerate((1, 17, 40, 5))]


def make_engine(model, num_pages: int = 80, limits: SchedulerConfig = LIMITS, **options) -> "Stepped":
    """Engines of the same shapes, whose programs are compiled once a process, to be stepped by hand.

    Args:
        num_pages: Pages that the engine may use, the null page among them. All pools are as large as that of `CACHE`:
            each size would be compiled. Where these are fewer, a sequence that no step sees holds the rest.
    """
    clock = options.pop("clock", lambda: 0.0)
    size = max(num_pages, CACHE.num_pages)
    core = EngineCore(model, dataclasses.replace(CACHE, num_pages=size), limits, **options)
    if num_pages < size:
        core.pages.add("elsewhere", (size - num_pages) * CACHE.page_size)
    return Stepped(core, clock)


def make_front(model, num_pages: int = 80, limits: SchedulerConfig = LIMITS, **options) -> Engine:
    """The same behind its thread."""
    return Engine(model, dataclasses.replace(CACHE, num_pages=num_pages), limits, **options)


class Stepped:
    """An `EngineCore` that a test steps by hand, with the arguments of `Engine` checked by nobody."""

    def __init__(self, core: EngineCore, clock=lambda: 0.0):
        self.core = core
        self._clock = clock
        self._ids = itertools.count()

    def __getattr__(self, name: str):
        return getattr(self.core, name)

    def add_request(self, prompt, params=None, **options) -> int:
        return self.add_samples(prompt, params or SamplingParams(), **options)[0]

    def add_samples(self, prompt, params, **options) -> list[int]:
        ids = tuple(next(self._ids) for _ in range(params.n))
        self.core.apply(Add(request_ids=ids, prompt_token_ids=tuple(prompt), params=params, **options))
        return list(ids)

    def has_unfinished(self) -> bool:
        return self.core.has_work

    def step(self) -> list:
        self.core.apply(Now(self._clock()))
        return self.core.step()

    def abort(self, request_id: int) -> None:
        self.core.apply(Abort(request_id))

    def reset(self) -> None:
        self.core.apply(Reset())

    def warmup(self, params=(), *, greedy=True, **options) -> int:
        return self.core.warm_up(WarmUp(params=tuple(params), greedy=greedy), **options)

    def run(self) -> list:
        """Steps to the end."""
        new = []
        while self.core.has_work:
            new += self.step()
        return new

    def generate(self, prompts, params=None, *, on_token=None) -> list[RequestOutput]:
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, list | tuple) else params
        ids = [i for prompt, p in zip(prompts, each, strict=True) for i in self.add_samples(prompt, p)]
        for token in self.run():
            if on_token is not None and token.token_id is not None:
                on_token(token._replace(request_id=ids.index(token.request_id)))
        outputs = [self.core.outputs.finished.pop(i) for i in ids]
        if outputs and all(output.error is not None for output in outputs):
            raise outputs[0].error
        return outputs

    def beam_search(self, prompts, **options) -> list[tuple]:
        params = BeamParams(**{"max_new_tokens": 64, **options})
        ids = [next(self._ids) for _ in prompts]
        for request_id, prompt in zip(ids, prompts, strict=True):
            self.core.apply(AddBeams(request_id=request_id, prompt_token_ids=tuple(prompt), params=params))
        found = {item.request_id: item for item in self.run() if isinstance(item, BeamsFound)}
        if errors := [item.error for item in found.values() if item.error is not None]:
            raise errors[0]
        return [found[request_id].outputs for request_id in ids]
