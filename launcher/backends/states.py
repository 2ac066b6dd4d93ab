"""Slurm's words, sorted into ours; its reasons, in plain words."""

from __future__ import annotations

from typing import Literal

State = Literal["queued", "running", "ended", "unknown"]

_QUEUED = {
    *("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"),
    *("POWER_UP_NODE",),
}
_RUNNING = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING", "EXPEDITING"}
_ENDED = {
    *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE"),
    *("PREEMPTED", "REVOKED", "LAUNCH_FAILED", "RECONFIG_FAIL"),
}

_NEVER = "as it is, it will never start"
_REASONS = {
    "None": "Slurm has not looked at it yet",
    "Priority": "other jobs come first",
    "Resources": "waits until enough nodes are free",
    "BeginTime": "waits for its time: the one asked for, or the pause after a requeue",
    "Dependency": "waits for another job",
    "DependencyNeverSatisfied": f"waits for a job that failed; {_NEVER}",
    "JobHeldUser": "held by its owner: scontrol release",
    "JobHeldAdmin": "held by an administrator",
    "PartitionDown": "its partition is closed to jobs",
    "PartitionInactive": "its partition is switched off",
    "PartitionNodeLimit": f"asks for more nodes than its partition allows; {_NEVER}",
    "PartitionTimeLimit": f"asks for more time than its partition allows; {_NEVER}",
    "PartitionConfig": f"its partition does not allow what it asks for; {_NEVER}",
    "BadConstraints": f"no node has what it asks for; {_NEVER}",
    "ReqNodeNotAvail": "a node that it needs is down, drained or reserved",
    "NodeDown": "a node that it needs is down",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation to begin",
    "InvalidAccount": f"its account is not valid; {_NEVER}",
    "InvalidQOS": f"its qos is not valid; {_NEVER}",
    "JobLaunchFailure": "could not be started on a node",
    "launch_failed_requeued_held": "could not be started on a node and is held",
    "Cleaning": "is cleaned up after a requeue",
    "Prolog": "its nodes are being prepared",
    "MaxMemPerLimit": f"asks for more memory than allowed; {_NEVER}",
}
_STARTS = (
    ("QOSMax", "is above a limit of its qos"),
    ("QOSGrp", "waits: its qos is at its limit"),
    ("QOSMin", "asks for less than its qos wants"),
    ("QOS", "waits for a limit of its qos"),
    ("AssocGrp", "waits: its account is at its limit"),
    ("AssocMax", "is above a limit of its account"),
    ("Assoc", "waits for a limit of its account"),
    ("MaxTime", "asks for more time than allowed"),
    ("ReqNodeNotAvail", "a node that it needs is down, drained or reserved"),
    ("Nodes_required_for_job_are_DOWN", "the nodes that it needs are down, drained or reserved"),
)


def state_of(word: str) -> State:
    """``word`` is squeue's or sacct's state, with whatever follows it (``CANCELLED by 1000``)."""
    first = word.split()[0].rstrip("+") if word.split() else ""
    if first in _QUEUED:
        return "queued"
    if first in _RUNNING:
        return "running"
    return "ended" if first in _ENDED else "unknown"


def why_queued(word: str, reason: str) -> str:
    """One clause for people, with Slurm's own word in brackets."""
    reason = reason.strip("() ")
    if word == "CONFIGURING":
        return "its nodes are being prepared"
    if not reason or reason == "None":
        return _REASONS["None"]
    key = reason.split(",")[0].split(" ")[0]
    plain = _REASONS.get(key) or next((text for start, text in _STARTS if key.startswith(start)), None)
    return f"{plain} ({reason})" if plain else reason
