"""Job on cluster → Plan: nodes, training configuration, memory, communication, fit. No clock, no I/O, no torch."""

from __future__ import annotations

from .batch import replan
from .launch import Begun, job_name, launch_spec
from .make import check_engine, job_table, make_plan
from .memory import plan_parameters
from .reasons import CannotPlan, Reason
from .search import search
from .simulated import with_simulation
from .told import told_plan

__all__ = [
    "Begun",
    "CannotPlan",
    "Reason",
    "check_engine",
    "job_name",
    "job_table",
    "launch_spec",
    "make_plan",
    "plan_parameters",
    "replan",
    "search",
    "told_plan",
    "with_simulation",
]
