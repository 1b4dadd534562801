"""One step ahead: a step is scheduled and started while the one before it runs. Here a step that fails is contained."""

import time
from collections import deque

from jaxpaged.engine.interrupts import Interrupts
from jaxpaged.engine.plan import StepPlan
from jaxpaged.engine.request import NewToken
from jaxpaged.engine.runner import InFlight, Runner
from jaxpaged.engine.scheduler import Scheduler


class Pipeline:
    """`Scheduler.schedule -> Runner.move, dispatch`, then `Runner.read -> Scheduler.update` of the step before.

    Args:
        interrupts: Held back by whoever calls `advance`; let through where the model is called or waited for.

    Attributes:
        num_steps: Started so far.
        waited_s: For the device, in the last `advance`.
    """

    def __init__(self, scheduler: Scheduler, runner: Runner, interrupts: Interrupts):
        self.scheduler = scheduler
        self.runner = runner
        self._interrupts = interrupts
        self.num_steps = 0
        self.waited_s = 0.0
        self._in_flight: deque[tuple[StepPlan, InFlight]] = deque()
        self._new: list[NewToken] = []  # not yet handed out: an interrupt loses none

    def advance(self, now: float) -> list[NewToken]:
        """Starts a step, and reads the one before; this one too, where the next depends on its tokens."""
        self.waited_s = 0.0
        while len(self._in_flight) > (0 if self.scheduler.needs_tokens else 1):
            self._read()
        if not self._in_flight:
            self.runner.mover.keep_leaving()  # nothing is held up, and it can be found already
        plan = self.scheduler.schedule(now)
        if plan is not None:
            self._dispatch(plan)
        if self._in_flight and (plan is None or len(self._in_flight) > 1 or self.scheduler.needs_tokens):
            self._read()
        new, self._new = self._new, []
        return new

    def _dispatch(self, plan: StepPlan) -> None:
        in_flight = None
        try:
            lost = self.runner.move(plan)
            if plan.requests:
                with self._interrupts.allowed():
                    in_flight = self.runner.dispatch(plan)
        except BaseException as error:
            self._recover(plan, error)
            if isinstance(error, Exception):  # whatever a model may raise
                return
            raise
        self.scheduler.dispatched(plan)
        for request in lost:
            self.scheduler.lose(request)
        if in_flight is not None:
            self._in_flight.append((plan, in_flight))
            self.num_steps += 1

    def _read(self) -> None:
        """Waits for the oldest step and takes its tokens in. Interrupted, it can be called again."""
        plan, in_flight = self._in_flight[0]
        begin = time.perf_counter()
        try:
            with self._interrupts.allowed():
                result = self.runner.read(in_flight)
        except BaseException as error:
            if isinstance(error, Exception):
                self._recover(plan, error, is_lost=True)
                return
            raise
        self.waited_s += time.perf_counter() - begin
        self._in_flight.popleft()
        if result.non_finite:
            self.runner.mover.forget_prefixes()  # or others would read what it wrote
        self._new += self.scheduler.update(plan, *result)

    def _recover(self, plan: StepPlan, error: BaseException, *, is_lost: bool = False) -> None:
        """Ends the requests of a step that failed; all others start over if it took the cache with it.

        They do so too after an interrupt, of which nobody knows how far it let the step come.
        """
        failed = isinstance(error, Exception)
        if failed:
            self.scheduler.fail(plan, error)
        if self.runner.restore_cache(is_lost=is_lost) or not failed:
            self._in_flight.clear()
            self.scheduler.restart_all()
