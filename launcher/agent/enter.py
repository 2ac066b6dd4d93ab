"""The verb ``agent``: reads what it was started with, and lives as one (:mod:`.supervise`)."""

from __future__ import annotations

import argparse
import os
import sys
from typing import List, Tuple

from ..contract.errors import Exit, UsageError
from ..contract.records import Announcement
from . import reach
from .attempt import find_place, load
from .notes import Ready
from .supervise import Agent, Options


def run(argv: List[str]) -> int:
    """``agent --run-dir D --attempt K [--node NAME] [--rendezvous H:P --control H:P] [--ready-fd N]``"""
    parser = argparse.ArgumentParser(prog="agent")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--attempt", required=True, type=int)
    parser.add_argument("--node")
    parser.add_argument("--rendezvous", type=_place)
    parser.add_argument("--control", type=_place)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--kept-by", default="")
    given = parser.parse_args(argv)
    try:
        spec = load(given.run_dir, given.attempt)
        node_rank, node = find_place(spec, given.node, os.environ)
    except UsageError as problem:
        sys.stderr.write(f"{problem.message}\n")
        Ready(given.ready_fd).say(True, failed=problem.message)
        return int(problem.exit_code)
    if spec.reach and not reach.among(spec, node_rank, node):
        return int(Exit.PARTIAL)
    meeting = None
    if given.rendezvous and given.control:
        meeting = Announcement(given.rendezvous[0], given.rendezvous[1], given.control[1])
    return Agent(spec, Options(node, node_rank, meeting, given.ready_fd, given.kept_by)).run()


def _place(text: str) -> Tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise argparse.ArgumentTypeError(f"HOST:PORT was expected, not {text!r}")
    return host.strip("[]"), int(port)
