"""What stage 3's third Ψ costs on a slow link: its step over stage 2's, two ranks in network namespaces of their own.

The two are joined by a veth pair that tc narrows in both directions, as root; nothing else passes there, and its own
counters say what did. All engines stand ready in the same two processes and take two steps in turn, every other turn
backwards; what the second leaves under way is waited for inside the turn, and a ratio is taken turn by turn. Stage 3
sends up to 1.5 times stage 2's bytes: its step may cost that, and a tenth. ``2-waits`` waits for updated parameters
at the end of each step instead of in the next forward (``zero.overlap_gather``).
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import measuring
import policies
from measuring import PYTHON, ROOT, Figure, Report, figure, ratios

PAIRS = 12
STEPS = 2  # of a turn
AT_MOST = 1.5 * 1.1
STAGES = (2, 3)
SIDES: dict[str, dict[str, Any]] = {
    "2": {"stage": 2},
    "3": {"stage": 3},
    "2-waits": {"stage": 2, "overlap_gather": False},
}
PORT = 29417
ANSWER_S = 120.0


@dataclass(frozen=True)
class Link:
    """Two ends: a namespace, a device in it and its address each."""

    spaces: tuple[str, str]
    device: str
    addresses: tuple[str, str]

    def passed(self) -> int:
        """Bytes that left both ends, headers and all."""
        total = 0
        for space in self.spaces:
            said = _ip("-n", space, "-s", "-j", "link", "show", self.device)
            total += int(json.loads(said)[0]["stats64"]["tx"]["bytes"])
        return total


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=30, check=False)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


@contextlib.contextmanager
def joined(rate: str) -> Iterator[Link]:
    """Two namespaces and the narrow link between them, for the length of a with-block."""
    lacking = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if os.geteuid() != 0 or lacking:
        raise SystemExit(f"this benchmark makes network namespaces: it needs root and ip, tc ({lacking or 'not root'})")
    number = os.getpid() % 250
    link = Link((f"znl{number}a", f"znl{number}b"), "narrow0", (f"10.213.{number}.1", f"10.213.{number}.2"))
    try:
        for space in link.spaces:
            _ip("netns", "add", space)
        first, second = link.spaces
        _ip("-n", first, "link", "add", link.device, "type", "veth", "peer", "name", link.device, "netns", second)
        for space, address in zip(link.spaces, link.addresses, strict=True):
            _ip("-n", space, "address", "add", f"{address}/30", "dev", link.device)
            for device in ("lo", link.device):
                _ip("-n", space, "link", "set", device, "up")
            shaping = ["tbf", "rate", rate, "burst", "256k", "latency", "50ms"]
            _ip("netns", "exec", space, "tc", "qdisc", "add", "dev", link.device, "root", *shaping)
        yield link
    finally:
        for space in link.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True, timeout=30, check=False)


class Pair:
    """Two ranks, one at each end, that step as they are told."""

    def __init__(self, link: Link, size: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": link.device}
        self._ranks = []
        for rank, space in enumerate(link.spaces):
            argv = ["ip", "netns", "exec", space, PYTHON, __file__]
            argv += ["--rank", str(rank), "--meet", link.addresses[0], "--parameters", size]
            self._ranks.append(
                subprocess.Popen(argv, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            )

    def tell(self, word: str) -> list[Any]:
        """What both ranks answer."""
        for process in self._ranks:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()
        answers = []
        for rank, process in enumerate(self._ranks):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise SystemExit(f"rank {rank} failed; its traceback stands above")
            answers.append(json.loads(line))
        return answers

    def steps(self, side: str) -> float:
        """Seconds a step of a turn."""
        return float(max(answer["seconds"] for answer in self.tell(side))) / STEPS

    def end(self) -> None:
        for process in self._ranks:
            with contextlib.suppress(OSError):
                assert process.stdin is not None
                process.stdin.close()
        for process in self._ranks:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


@dataclass(frozen=True)
class Measured:
    """Seconds a step by side and turn; of one step of each: what both ranks counted, and what the link did."""

    samples: Mapping[str, Sequence[float]]
    counted: Mapping[int, Mapping[str, Any]]
    passed: Mapping[int, int]


def measure(rate: str, size: str, pairs: int) -> Measured:
    with joined(rate) as link:
        pair = Pair(link, size)
        try:
            counted, passed = {}, {}
            for side in SIDES:
                pair.steps(side)  # until it has, the first parameters may still be on their way
            for stage in STAGES:
                before = link.passed()
                pair.steps(str(stage))
                passed[stage] = (link.passed() - before) // STEPS
                counted[stage] = pair.tell(f"count {stage}")[0]
            sides = {f"stage {side}": (lambda side=side: pair.steps(side)) for side in SIDES}
            return Measured(measuring.interleave(sides, pairs, warm_ups=0), counted, passed)
        finally:
            pair.end()


def report(measured: Measured, about: argparse.Namespace, load: float) -> Report:
    two, three = (measured.counted[stage] for stage in STAGES)
    beside = ratios(measured.samples["stage 3"], measured.samples["stage 2"])
    figures: list[Figure] = [figure("stage 3, a step, over stage 2", "×", beside, AT_MOST)]
    late = ratios(measured.samples["stage 2"], measured.samples["stage 2-waits"])
    figures.append(figure("stage 2, a step, over stage 2 that waits", "×", late))
    figures += [figure(f"`zero{side}`, a step", "s", measured.samples[f"stage {side}"]) for side in SIDES]
    whole = three["parameters"]
    notes = [f"2 ranks, {whole:,} parameters, {about.rate} each way"]
    for stage, counts in zip(STAGES, (two, three), strict=True):
        said = f"stage {stage}: {counts['volume_elements'] / whole:.2f} Ψ a step, {counts['sent_bytes'] / 1e6:.1f} MB"
        notes.append(f"{said} sent by a rank; {measured.passed[stage] / 1e6:.1f} MB passed the link")
    words = [f"--rounds {about.rounds}", f"--parameters {about.parameters}", f"--rate {about.rate}"]
    return Report(
        benchmark="narrow_link",
        command=" ".join([".venv/bin/python benchmarks/narrow_link.py", *words]),
        machine=measuring.machine(load, about.quiet > 0),
        figures=figures,
        samples=measured.samples,
        notes=notes,
    )


# --- inside a rank ---------------------------------------------------------------------------------------


def rank_main(rank: int, meet: str, size: str) -> None:
    import torch
    import torch.distributed as dist

    from launcher.engine.zero import ZeroEngine

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries that print do not do so into the answers
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=ANSWER_S)
    dist.init_process_group("gloo", init_method=f"tcp://{meet}:{PORT}", rank=rank, world_size=2, timeout=limit)
    optimizer = {"lr": policies.LR, "betas": policies.BETAS, "eps": policies.EPS, "clip": policies.CLIP}
    engines = {}
    for side, settings in SIDES.items():
        zero = {"bucket_bytes": policies.BUCKET_BYTES, **settings}
        engines[side] = ZeroEngine(policies.make_model(size), {"zero": zero, "optimizer": optimizer})
    numbers = dict.fromkeys(SIDES, 0)
    counted: dict[str, dict[str, Any]] = {}
    for line in sys.stdin:
        if line.startswith("count"):
            answers.write(json.dumps(counted[line.split()[1]]) + "\n")
        else:
            side = line.strip()
            batches = [policies.batch(size, numbers[side] + i, rank) for i in range(STEPS)]
            numbers[side] += STEPS
            dist.barrier()
            seconds, counted[side] = _turn(engines[side], batches)
            answers.write(json.dumps({"seconds": seconds}) + "\n")
        answers.flush()
    os._exit(0)  # no destructor that waits for the other


def _turn(engine: Any, batches: Sequence[Any]) -> tuple[float, dict[str, Any]]:
    """Seconds of a turn, and what the engine counted of each of its steps."""
    before = replace(engine.comm.traffic)
    began = time.perf_counter()
    for tokens in batches:
        loss = engine.model(tokens[:, :-1], tokens[:, 1:])
        engine.backward(loss)
        engine.step()
    engine.finish_gathering()  # what the last step leaves under way for the next one is this turn's
    seconds = time.perf_counter() - began
    traffic = engine.comm.traffic
    kept = [] if engine.gathering is None else engine.gathering.kept
    return seconds, {
        "parameters": engine.layout.numel,
        "padded": sum(unit.padded for unit in engine.layout.units),
        "kept": sum(engine.layout.units[number].padded for number in kept),
        "volume_elements": (traffic.volume_elements - before.volume_elements) // len(batches),
        "sent_bytes": (traffic.sent_bytes - before.sent_bytes) // len(batches),
        "loss": float(loss.detach()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="narrow_link.py", description=__doc__)
    parser.add_argument("--rounds", type=int, default=PAIRS, help=f"default {PAIRS}; below 6 there is no interval")
    parser.add_argument("--rate", default="200mbit", help="of the link, each way, in tc's words (default 200mbit)")
    parser.add_argument("--parameters", choices=policies.SIZES, default="11M", help="size of the model (default 11M)")
    parser.add_argument("--quiet", type=float, default=0.0, metavar="SECONDS", help="wait so long for a quiet machine")
    parser.add_argument("--json", action="store_true", help="print one JSON value instead of a table")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--meet", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        rank_main(given.rank, given.meet, given.parameters)
        return
    load = measuring.wait_for_quiet(given.quiet)
    measured = measure(given.rate, given.parameters, given.rounds)
    measuring.tell(measuring.without_unfair_misses(report(measured, given, load)), given.json)


if __name__ == "__main__":
    main()
