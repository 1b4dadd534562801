"""Continuous batching over one paged cache: `Request -> Scheduler -> StepPlan -> Runner -> Batch -> model -> sample`."""

from jaxpaged.engine.engine import Engine, RequestOutput
from jaxpaged.engine.request import FinishReason, SamplingParams
from jaxpaged.engine.scheduler import SchedulerConfig

__all__ = ["Engine", "FinishReason", "RequestOutput", "SamplingParams", "SchedulerConfig"]
