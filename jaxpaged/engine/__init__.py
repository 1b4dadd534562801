"""Continuous batching over one cache: `Request -> Scheduler -> StepPlan -> Runner -> Batch -> model -> sample`."""

from jaxpaged.engine.engine import Engine, EngineStats, NewToken, RequestOutput
from jaxpaged.engine.request import FinishReason, SamplingParams
from jaxpaged.engine.scheduler import SchedulerConfig

__all__ = ["Engine", "EngineStats", "FinishReason", "NewToken", "RequestOutput", "SamplingParams", "SchedulerConfig"]
