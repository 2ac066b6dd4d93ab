"""The agent's event loop: file descriptors, timers, signals and child exits in one thread.

Only one thing happens at a time, so nothing here needs a lock. A slow piece of work (unpacking code)
runs in a thread and hands its result back with :meth:`Loop.from_thread`.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import os
import queue
import selectors
import signal
import socket
import time
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

Callback = Callable[[], None]
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE


class Timer:
    """A call that is due once; :meth:`cancel` makes it not happen."""

    def __init__(self, at: float, call: Callback) -> None:
        self.at = at
        self.call: Optional[Callback] = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Create it in the main thread; ``close`` gives the signal handlers back."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: List[Tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._results: queue.SimpleQueue[Callback] = queue.SimpleQueue()
        self._on_signal: Dict[int, Callback] = {}
        self._on_exit: Dict[int, Callable[[int], None]] = {}
        self._before: Dict[int, Any] = {}
        self._running = True
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._wake_out.fileno(), warn_on_full_buffer=False)
        self._selector.register(self._wake_in, READ, self._woken)
        self.on_signal(signal.SIGCHLD, self.reap)

    def watch(self, file: Any, events: int, call: Callable[[int], None]) -> None:
        """Calls ``call(ready events)`` whenever ``file`` is ready; again for a file changes what is awaited."""
        try:
            self._selector.modify(file, events, call)
        except KeyError:
            self._selector.register(file, events, call)

    def forget(self, file: Any) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def after(self, delay_s: float, call: Callback) -> Timer:
        timer = Timer(time.monotonic() + delay_s, call)
        heapq.heappush(self._timers, (timer.at, next(self._order), timer))
        return timer

    def every(self, period_s: float, call: Callback) -> None:
        def again() -> None:
            call()
            self.after(period_s, again)

        self.after(period_s, again)

    def on_signal(self, number: int, call: Callback) -> None:
        # A Python handler rather than SIG_IGN: what is ignored stays ignored in the ranks after exec.
        self._before.setdefault(number, signal.signal(number, lambda *_: None))
        self._on_signal[number] = call

    def on_exit(self, pid: int, call: Callable[[int], None]) -> None:
        """Calls ``call(wait status)`` once the child ``pid`` has ended."""
        self._on_exit[pid] = call

    def from_thread(self, call: Callback) -> None:
        """The one method that other threads may use."""
        self._results.put(call)
        with contextlib.suppress(BlockingIOError):
            self._wake_out.send(b"\0")

    def reap(self) -> None:
        """Collects every child that has ended, also orphans that became ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            call = self._on_exit.pop(pid, None)
            if call is not None:
                call(status)

    def run(self) -> None:
        """Runs until :meth:`stop`."""
        while self._running:
            for key, events in self._selector.select(self._wait_s()):
                if self._running:
                    key.data(events)
            now = time.monotonic()
            while self._running and self._timers and self._timers[0][0] <= now:
                timer = heapq.heappop(self._timers)[2]
                if timer.call is not None:
                    timer.call()

    def stop(self) -> None:
        self._running = False

    def close(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _wait_s(self) -> Optional[float]:
        while self._timers and self._timers[0][2].call is None:
            heapq.heappop(self._timers)
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _woken(self, _events: int) -> None:
        came: Set[int] = set()
        with contextlib.suppress(BlockingIOError):
            while True:
                came.update(self._wake_in.recv(4096))
        # A cancel ends ranks and agent at once: hear the order before its effects.
        for number in sorted(came - {0}, key=lambda n: n == signal.SIGCHLD):
            call = self._on_signal.get(number)
            if call is not None:
                call()
        with contextlib.suppress(queue.Empty):
            while True:
                self._results.get_nowait()()
