from __future__ import annotations

from agent_job import job

__all__ = ["job"]
