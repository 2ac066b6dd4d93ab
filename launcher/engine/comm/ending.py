"""The end of a process that has spoken by gloo: its interpreter goes once gloo's own threads have let go.

``wait`` of a collective returns before the thread that did it has dropped the message's tensors. Where Python has
dropped its own by then, that thread gives the last one back, for which it needs the interpreter. Under a script of
one's own (plain torchrun) nothing waits for it: if the interpreter is being taken down meanwhile, the process aborts
("terminate called without an active exception", SIGABRT) after all its work was done. Our own ranks end by
``main._leave``.
"""

from __future__ import annotations

import atexit
import os
import time

_NAME = "pt_gloo_runloop"  # as torch's ProcessGroupGloo calls its threads
_LOOKS = 3  # in a row: a thread that waits for the interpreter sleeps too, and gets it between two of them
_PAUSE_S = 0.001
_LIMIT_S = 5.0  # a thread that never comes to rest holds nobody up

_registered = False


def rest_before_exit() -> None:
    """From now on this process's exit waits until gloo's threads rest. Hooks of the user's own that were registered
    later run before, and may still communicate."""
    global _registered
    if not _registered:
        _registered = True
        atexit.register(wait_until_at_rest)


def wait_until_at_rest(limit_s: float = _LIMIT_S) -> bool:
    """Whether gloo's threads have nothing left to do (a message that was never waited for is none of it)."""
    end = time.monotonic() + limit_s
    looks = 0
    while looks < _LOOKS:
        threads = _states()
        if not threads:
            return True
        looks = looks + 1 if all(state == "S" for state in threads) else 0
        if time.monotonic() > end:
            return False
        time.sleep(_PAUSE_S)  # without the interpreter's lock
    return True


def _states() -> list[str]:
    """The kernel's word on each of them: R while there is something to do, S once it waits for the next message."""
    found = []
    try:
        threads = os.listdir("/proc/self/task")
    except OSError:
        return []  # no Linux
    for thread in threads:
        try:
            with open(f"/proc/self/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
                text = file.read()
        except OSError:
            continue  # it has just ended
        name, _, rest = text.partition("(")[2].rpartition(")")
        if name == _NAME:
            found.append(rest.split()[0])
    return found
