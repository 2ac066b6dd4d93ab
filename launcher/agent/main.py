"""``agent_python RUNTIME.zip VERB``: the verbs that the launcher asks for on a node.

Most verbs read one JSON object from stdin and write one to stdout. A failure is ``{"error", "hint"}``
with the exit status of its kind (contract.errors.Exit).
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import sys
from typing import Any, Dict, List, Optional

from ..contract.errors import Busy, Exit, UsageError, ZerunError

_JSON_VERBS = {
    "start": ".detach",
    "stop": ".stop",
    "state": ".state",
    "install": ".install",
    "submit": ".submit",
    "inventory": ".inventory",
    "data": ".data",
    "digest": ".digest",
    "digests": ".own_files",
    "probe": ".probe",
    "prune": ".prune",
    "weights": ".weights",
    "left": ".quota",
    "expand": ".expand",
    "runs": ".listing",
    "here": ".here",
    "image": ".container",
    "remove": ".removal",
    "reach": ".reach",
    "reached": ".reach",
    "slots": ".leases",
    "pull": ".pull",
    "pieces": ".pieces",
    "handed": ".handed",
}

_OF_TORCH = {"simulate": "..engine.rehearsal.simulate", "convert": "..engine.saving.convert"}
_STREAMS = ("agent", "claim", "convert", "engine", "receive", "serve", "simulate", "tail")


def main(argv: Optional[List[str]] = None) -> int:
    """Runs one verb and returns the exit status. Verb modules are imported only when asked for."""
    words = sys.argv[1:] if argv is None else argv
    verb, rest = (words[0], words[1:]) if words else ("", [])
    if verb == "engine":
        return int(importlib.import_module("..engine.job.main", __package__).main(rest))
    if verb == "agent":
        return int(importlib.import_module(".enter", __package__).run(rest))
    try:
        if verb in _OF_TORCH:
            return int(_with_torch(_OF_TORCH[verb], verb).main())
        if verb == "claim":
            return int(importlib.import_module(".claim", __package__).run(rest))
        if verb == "tail":
            return int(importlib.import_module(".tail", __package__).stream(_request(), sys.stdout.buffer))
        if verb == "serve":
            return int(importlib.import_module(".pull", __package__).serve(_request(), sys.stdout.buffer))
        if verb == "receive":
            _reply(importlib.import_module(".receive", __package__).receive(sys.stdin.buffer))
            return 0
        if verb == "listen":
            return int(importlib.import_module(".reach", __package__).listen(_request(), sys.stdout.buffer))
        if verb in ("exec", "step"):
            run = getattr(importlib.import_module(".execute", __package__), "execute" if verb == "exec" else verb)
            return int(run(_request(), sys.stdout.buffer))
        if verb == "allreduce":
            return _allreduce()
        if verb not in _JSON_VERBS:
            known = ", ".join([*_STREAMS, *_JSON_VERBS])
            raise UsageError(f"unknown verb {verb!r}", hint=f"one of {known}")
        request = _request()
        module = importlib.import_module(_JSON_VERBS[verb], __package__)
        _reply(getattr(module, verb)(request))
        return 0
    except ZerunError as problem:
        _reply({"error": problem.message, "hint": problem.hint, "busy": isinstance(problem, Busy)})
        return int(problem.exit_code)
    except OSError as problem:
        full = problem.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = None if full else "on that machine your user must be able to reach it, and to write into paths.runs"
        _reply({"error": f"{verb}: {problem.strerror or problem}: {problem.filename or ''}".rstrip(": "), "hint": hint})
        return int(Exit.NO_SPACE if full else Exit.USAGE)
    except (ValueError, KeyError, TypeError) as problem:
        _reply({"error": f"{verb}: {type(problem).__name__}: {problem}", "hint": None})
        return 1


def _allreduce() -> int:
    if importlib.util.find_spec("torch") is None:
        _reply({"skipped": f"{sys.executable} has no torch"})
        return 0
    return int(importlib.import_module("..engine.job.allreduce", __package__).main())


def _with_torch(module: str, verb: str) -> Any:
    try:
        return importlib.import_module(module, __package__)
    except ModuleNotFoundError as problem:
        if problem.name not in ("torch", "safetensors"):
            raise
        what = "a simulation runs the real engine, which" if verb == "simulate" else "this form"
        without = "; without --simulate a plan needs neither" if verb == "simulate" else ""
        raise UsageError(
            f"{what} needs {problem.name}: {sys.executable} has none",
            hint=f"{sys.executable} -m pip install torch safetensors (torch for CPUs is enough), or name a Python "
            f"that has them in ZERUN_TORCH_PYTHON{without}",
        ) from problem


def _request() -> Dict[str, Any]:
    request = json.loads(sys.stdin.buffer.read())
    if not isinstance(request, dict):
        raise UsageError("one JSON object was expected on stdin")
    return request


def _reply(answer: Dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode("ascii") + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
