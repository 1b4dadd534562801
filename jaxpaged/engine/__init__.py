"""Continuous batching over one cache: `Request -> Scheduler -> StepPlan -> Runner -> Batch -> model -> sample`."""

from jaxpaged.engine.beam import BeamOutput
from jaxpaged.engine.engine import Engine, RequestOutput
from jaxpaged.engine.logprobs import TokenLogprobs
from jaxpaged.engine.plan import SchedulerConfig
from jaxpaged.engine.request import FinishReason, NewToken, QueueFullError, SamplingParams
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.engine.stats import EngineStats

__all__ = [
    "BeamOutput",
    "Engine",
    "EngineStats",
    "FinishReason",
    "NewToken",
    "NgramSpeculation",
    "QueueFullError",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TokenLogprobs",
]
