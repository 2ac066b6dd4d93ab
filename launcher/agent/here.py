"""The verb ``here``: runs an attempt's script inside an allocation that is there already, instead of queueing it."""

from __future__ import annotations

import subprocess
from pathlib import Path, PurePosixPath
from typing import Any, Dict

from ..contract.errors import UsageError
from ..contract.folder import RunFolder
from ..contract.plain import dumps, write_atomically
from . import processes
from .install import with_space


def here(request: Dict[str, Any]) -> Dict[str, Any]:
    """``{run_dir, attempt, files, secrets?, job, name, environment}`` → ``{pid: ProcessId}`` of the script's shell.

    ``environment`` is what the allocation's own shell has (SLURM_JOB_ID, …). The shell outlives the caller; it ends
    with its step, which ends with the allocation at the latest.
    """
    attempt = Path(RunFolder(PurePosixPath(str(request["run_dir"]))).attempt(int(request["attempt"])).root)
    attempt.mkdir(parents=True, exist_ok=True)
    try:
        (attempt / "submitting").mkdir()
    except FileExistsError:
        raise UsageError(f"attempt {request['attempt']} was started here already ({attempt})") from None
    with_space(request)
    (attempt / "logs").mkdir(exist_ok=True)
    job, name = str(request["job"]), str(request["name"])
    environment = {str(k): str(v) for k, v in dict(request["environment"]).items()}
    with open(attempt / "logs" / f"slurm-{job}-{name}.out", "ab") as log:
        process = subprocess.Popen(
            ["/bin/bash", str(attempt / "script")],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=str(request["run_dir"]),
            env=environment,
            start_new_session=True,
        )
    own = processes.process_id(process.pid)
    if own is None:
        raise UsageError(f"the script ended at once: see {log.name}")
    write_atomically(attempt / "here", dumps({"job": job, "name": name, "pid": own}))
    return {"pid": {"pid": own.pid, "started_ticks": own.started_ticks, "boot": own.boot}}
