"""Continuous batching over one cache: `Request -> Scheduler -> StepPlan -> Runner -> Batch -> model -> sample`."""

from jaxpaged.engine.beam import BeamOutput
from jaxpaged.engine.config import SchedulerConfig
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.engine import Engine
from jaxpaged.engine.handle import RequestHandle
from jaxpaged.engine.logprobs import TokenLogprobs
from jaxpaged.engine.outputs import NewToken, RequestOutput
from jaxpaged.engine.request import FinishReason, QueueFullError
from jaxpaged.engine.sampling.params import SamplingParams
from jaxpaged.engine.speculation import NgramSpeculation
from jaxpaged.engine.stats import EngineStats

__all__ = [
    "BeamOutput",
    "Engine",
    "EngineCore",
    "EngineStats",
    "FinishReason",
    "NewToken",
    "NgramSpeculation",
    "QueueFullError",
    "RequestHandle",
    "RequestOutput",
    "SamplingParams",
    "SchedulerConfig",
    "TokenLogprobs",
]
