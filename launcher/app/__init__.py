"""The use cases of zerun: what the command line does, as a Python API that returns data.

Only the command line prints. Everything here raises :class:`launcher.contract.errors.ZerunError`, whose
``exit_code`` is the command's.
"""

from __future__ import annotations

from .ends import Ends
from .plans import Plans, Prepared, refuse_what_cannot_fit
from .project import Project, find_root
from .sites import Sites
from .starts import Starts, Submitted, read_secrets, refuse_to_resume
from .watches import Watches, exit_code_of

__all__ = [
    "App",
    "Prepared",
    "Project",
    "Submitted",
    "exit_code_of",
    "find_root",
    "read_secrets",
    "refuse_to_resume",
    "refuse_what_cannot_fit",
]


class App(Plans, Starts, Watches, Ends, Sites):
    """zerun in one project. ``root`` is the project's folder (default: found from the working folder)."""
