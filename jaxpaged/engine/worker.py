"""The thread of an engine: it alone steps the core, launches programs and touches the cache.

While it is idle it holds no strong reference, so that an engine that nobody uses any more is freed. It never outlives
the interpreter: it is stopped and waited for before Python takes modules apart.
"""

import atexit
import contextlib
import dataclasses
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxpaged.engine.beam import BeamsFound
from jaxpaged.engine.core import EngineCore
from jaxpaged.engine.handle import Mailbox, forked
from jaxpaged.engine.log import Abort, Add, AddBeams, Entry, Now, Recorder, WarmUp
from jaxpaged.engine.stats import EngineStats, StepTimes

_threads: "weakref.WeakKeyDictionary[threading.Thread, queue.SimpleQueue]" = weakref.WeakKeyDictionary()
_STOP = None
Call = Callable[[], Any]


class Worker:
    """Serves a core: entries and calls come through `submit` and `ask`, what the core says goes to mailboxes.

    Args:
        core: Nobody else may touch it once the first request is here.
        clock: What deadlines are measured by, in seconds.
    """

    def __init__(self, core: EngineCore, clock: Callable[[], float]):
        self.core = core
        self.times = StepTimes()
        self._num_taken = 0
        self._clock = clock
        self._recorder: Recorder | None = None
        self._mailboxes: dict[int, Mailbox] = {}
        self._deadlines: set[int] = set()  # requests that have one
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._contexts = _contexts()
        self._cause: BaseException | None = None  # why it has stopped
        self._pid = os.getpid()
        weakref.finalize(self, self._inbox.put, _STOP)

    def check(self) -> None:
        """Raise RuntimeError in a forked process, and after the end."""
        if os.getpid() != self._pid:
            raise forked()
        if self._cause is not None:
            raise RuntimeError("The engine is closed.") from self._cause

    def submit(self, entries: Sequence[Entry], mailbox: Mailbox | None = None) -> None:
        """Hand in entries for the next step boundary: no step comes between them.

        Args:
            mailbox: Gets what the core says of the requests that the entries add.
        """
        self.check()
        self._put(entries, mailbox)

    def abort(self, request_id: int) -> None:
        """Hand in an abort, also from a destructor: it takes no lock, and starts nothing."""
        if self._cause is None and os.getpid() == self._pid:
            self._inbox.put(((Abort(request_id),), None))

    def ask(self, call: Call) -> Any:
        """Return what a call returns that is made between two steps, by the thread."""
        self.check()
        mailbox = Mailbox()
        self._put(call, mailbox)
        return mailbox.get()[0]

    def close(self) -> None:
        """End all requests and the thread, and waits for it."""
        if os.getpid() != self._pid:
            raise forked()
        with self._starting:
            self._inbox.put(_STOP)
            thread = self._thread
        if thread is not None:
            thread.join()
        self._stop(None)

    @property
    def num_started(self) -> int:
        """Requests that came out of the queue so far. Any thread may read it; it may be a step old."""
        return self._num_taken - self.core.scheduler.num_waiting

    def stats(self) -> EngineStats:
        """Return what the core has counted, and how long steps took. Call it by `ask`."""
        return dataclasses.replace(self.core.stats(), **self.times.summary())

    def warm_up(self, entry: WarmUp, progress: Callable[[int, int], None]) -> int:
        """Give the core an entry that takes long. Call it by `ask`."""
        if self._recorder is not None:
            self._recorder.entry(entry)
        return self.core.warm_up(entry, progress)

    def record(self, path: str | os.PathLike[str], header: dict[str, Any]) -> None:
        """Write all entries and steps from now on. Call it by `ask`."""
        if self._num_taken or self._recorder is not None:
            raise RuntimeError("`record` must be called once, before the first request; got a later call.")
        self._recorder = Recorder(path, header)
        self.core.recorder = self._recorder.step

    def apply(self, entry: Entry, mailbox: Mailbox | None = None) -> None:
        """Give the core an entry. Only the thread calls it."""
        if isinstance(entry, Add | AddBeams):
            ids = entry.request_ids if isinstance(entry, Add) else (entry.request_id,)
            if mailbox is not None:
                self._mailboxes |= dict.fromkeys(ids, mailbox)
            if isinstance(entry, Add) and entry.deadline is not None:
                self._deadlines.update(ids)
            self._num_taken += len(ids)
        if self._recorder is not None:
            self._recorder.entry(entry)
        self.core.apply(entry)

    def serve(self, item: Any) -> bool:
        """Handle an item of the inbox, and steps until nothing is left to do; False at the end."""
        while True:
            if item is _STOP:
                return False
            self._handle(*item)
            while self._inbox.empty():
                if not self.core.has_work:
                    return True
                self._step()
            item = self._inbox.get()

    def _handle(self, what: Sequence[Entry] | Call, mailbox: Mailbox | None) -> None:
        if not callable(what):
            for entry in what:
                self.apply(entry, mailbox)
            return
        try:
            answer: Any = (what(),)
        except Exception as error:  # noqa: BLE001 whatever it is goes to who asked
            answer = error
        if mailbox is not None:
            mailbox.put(answer)

    def _step(self) -> None:
        core, begin, num_steps = self.core, time.perf_counter(), self.core.counters.num_steps
        if self._deadlines:
            self.apply(Now(self._clock()))
        new = core.step()
        for item in new:
            mailbox = self._mailboxes.get(item.request_id)
            if mailbox is not None:
                mailbox.put(item)
            if isinstance(item, BeamsFound) or item.finish_reason is not None:
                self._mailboxes.pop(item.request_id, None)
                self._deadlines.discard(item.request_id)
                output = core.outputs.finished.pop(item.request_id, None)
                if mailbox is not None and output is not None:
                    mailbox.put(output)
        if new or core.counters.num_steps > num_steps:
            self.times.add(time.perf_counter() - begin, core.waited_s, len(new))

    def _stop(self, cause: BaseException | None) -> None:
        """Tell all who wait that nothing comes any more."""
        if self._cause is None:
            self._cause = cause or RuntimeError("`close` was called, or Python is about to exit.")
        error = RuntimeError("The engine was closed before this request ended.")
        error.__cause__ = self._cause
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in {id(mailbox): mailbox for mailbox in mailboxes.values()}.values():
            mailbox.put(error)
        self._refuse(error)
        if self._recorder is not None:
            self._recorder.close()

    def _refuse(self, error: Exception) -> None:
        """Tell those whose entries nobody will take."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if item is not _STOP and item[1] is not None:
                    item[1].put(error)

    def _put(self, what: Sequence[Entry] | Call, mailbox: Any) -> None:
        self._inbox.put((what, mailbox))
        if self._cause is not None:  # it came to its end meanwhile, and may have looked before this was there
            self._refuse(RuntimeError("The engine was closed before this request began."))
            return
        if self._thread is None:
            with self._starting:
                if self._thread is None:
                    arguments = (self._inbox, weakref.ref(self), self._contexts)
                    thread = threading.Thread(target=_run, args=arguments, name="jaxpaged engine", daemon=True)
                    _threads[thread] = self._inbox
                    thread.start()
                    self._thread = thread


def _run(inbox: queue.SimpleQueue, ref: "weakref.ref[Worker]", contexts: Callable[[], contextlib.ExitStack]) -> None:
    """Run the thread. Only while there is work it holds the worker."""
    with contexts():
        while True:
            item = inbox.get()
            worker = ref()
            if worker is None:
                return
            try:
                if not worker.serve(item):
                    worker._stop(None)
                    return
            except BaseException as error:  # noqa: BLE001 a fault of the engine: all who wait are told, and no thread is left
                worker._stop(error)
                return
            finally:
                del worker, item


def _contexts() -> Callable[[], contextlib.ExitStack]:
    """Return the JAX contexts that are in force here and now, to be entered in another thread."""
    device, precision = jax.config.jax_default_device, jax.config.jax_default_matmul_precision
    mesh = jax.sharding.get_mesh()

    def enter() -> contextlib.ExitStack:
        stack = contextlib.ExitStack()
        stack.enter_context(jax.default_device(device))
        stack.enter_context(jax.default_matmul_precision(precision))
        if not mesh.empty:
            stack.enter_context(jax.set_mesh(mesh))
        return stack

    return enter


@atexit.register
def _stop_all() -> None:
    """End all threads before Python takes modules apart: one inside JAX would end the process with a crash."""
    for thread, inbox in list(_threads.items()):
        inbox.put(_STOP)
        thread.join()
