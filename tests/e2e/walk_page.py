"""Reads a walk-through as a machine does: its files, its commands and what they show; and does it as written.

In a page, a fenced block whose line before ends with ``**name**:`` is a file: of the project's folder, or of the home
folder (``~/…``). A block of ``console`` is a shell: ``$ `` begins a command, and what follows is what it shows,
stdout and stderr together. ``…`` stands for anything within a line and, alone, for any lines; ``[exit 3]`` is the exit
status where it is not 0; ``^C`` is pressed once all that stands above it was shown. Other blocks (``sh``) are not run.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ANY = "…"
CTRL_C = "^C"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
_FILE = re.compile(r"\*\*`([^`]+)`\*\*:\s*$")
_EXIT = re.compile(r"^\[exit (\d+)\]$")


@dataclass(frozen=True)
class PageFile:
    """A file that the page gives; ``line``: where in the page."""

    line: int
    name: str
    text: str


@dataclass(frozen=True)
class Command:
    """A command of the page, the lines that it is to show, and its exit status."""

    line: int
    text: str
    shown: tuple[str, ...]
    code: int


def read_page(text: str) -> list[PageFile | Command]:
    """The files and commands of a page, in its order."""
    found: list[PageFile | Command] = []
    for block in _FENCE.finditer(text):
        line = text.count("\n", 0, block.start()) + 2
        before = text[: block.start()].rstrip().rpartition("\n")[2]
        named = _FILE.search(before)
        if named:
            found.append(PageFile(line, named[1], block[2]))
        elif block[1] == "console":
            found += _commands(block[2], line)
    return found


def _commands(block: str, line: int) -> Iterator[Command]:
    parts = re.split(r"^\$ ", block, flags=re.M)
    assert not parts[0], f"line {line}: a console block begins with '$ '"
    for part in parts[1:]:
        text, *shown = part.rstrip("\n").split("\n")
        code = 130 if CTRL_C in shown else 0
        if shown and (said := _EXIT.match(shown[-1])):
            code = int(said[1])
            shown.pop()
        yield Command(line, text, tuple(shown), code)
        line += part.count("\n")


def pattern(shown: Sequence[str]) -> str:
    """A regular expression of what is shown: whole lines, each with its newline."""
    made = ""
    for line in shown:
        if line.strip() == ANY or line == CTRL_C:
            made += r"(?:.*\n)*?"
        else:
            made += ".*?".join(re.escape(piece) for piece in line.rstrip().split(ANY)) + r" *\n"
    return made


def compare(command: Command, out: str, code: int, page: str) -> None:
    """Fails with the first line of the page that was not shown so."""
    text = out.replace("\r", "")  # at a terminal lines end with it, and ssh begins its question so
    text += "" if not text or text.endswith("\n") else "\n"
    where = f"{page}:{command.line}: $ {command.text}"
    assert code == command.code, f"{where}\nexited with {code}, not {command.code}; it said:\n{text}"
    if re.fullmatch(pattern(command.shown), text):
        return
    good = 0
    while good < len(command.shown) and re.match(pattern(command.shown[: good + 1]), text):
        good += 1
    wanted = command.shown[good] if good < len(command.shown) else "(nothing more)"
    raise AssertionError(f"{where}\n{page}:{command.line + 1 + good} shows: {wanted}\nit said:\n{text}")


@dataclass
class Walker:
    """Does a page in ``folder`` with ``home`` as the home folder.

    ``names``: what the page calls something → what it is called here; ``typed``: what a command is asked → the answer.
    ``enter``: an argument list before each command. ``heard``: each command done, with what it said and its exit
    status; ``told`` is handed the same and takes the place of the comparison.
    """

    folder: Path
    home: Path
    environment: Mapping[str, str]
    names: Mapping[str, str] = field(default_factory=dict)
    enter: Sequence[str] = ()
    at_terminal: Callable[..., tuple[int, str]] | None = None
    typed: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    told: Callable[[Command, str, int], Any] | None = None
    timeout_s: float = 180.0
    heard: list[tuple[Command, str, int]] = field(default_factory=list)

    def walk(self, page: Path, *, first: int = 0) -> int:
        """Does all of a page; → how many commands. ``first``: the line of the page to begin at."""
        done = 0
        for step in read_page(page.read_text(encoding="utf-8")):
            if step.line < first:
                continue
            if isinstance(step, PageFile):
                self.write(step.name, step.text)
                continue
            out, code = self.run(step)
            self.heard.append((step, out, code))
            if self.told is not None:
                self.told(step, out, code)
            else:
                compare(step, out, code, page.name)
            done += 1
        return done

    def write(self, name: str, text: str) -> None:
        path = self.home / name[2:] if name.startswith("~/") else self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._here(text), encoding="utf-8")
        path.chmod(0o600 if name.startswith("~/.ssh") else 0o644)

    def run(self, command: Command) -> tuple[str, int]:
        argv = [*self.enter, "bash", "-c", self._here(command.text)]
        environment = {**os.environ, **self.environment, "HOME": str(self.home)}
        answers = self.typed.get(command.text)
        if answers is not None and self.at_terminal is not None:
            code, out = self.at_terminal(argv, answers, cwd=self.folder, env=environment, timeout_s=self.timeout_s)
            return self._there(out), code
        process = subprocess.Popen(
            argv, cwd=self.folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        with process:
            return self._there(self._read(process, command)), process.wait()

    def _read(self, process: subprocess.Popen[bytes], command: Command) -> str:
        """All that it says; Ctrl-C goes to it and its children when the page has it so."""
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        waiting = pattern(command.shown[: command.shown.index(CTRL_C)]) if CTRL_C in command.shown else None
        said, end = b"", time.monotonic() + self.timeout_s
        while True:
            chunk = process.stdout.read()
            if chunk == b"":
                break
            said += chunk or b""
            if waiting is not None and re.match(waiting, self._there(said.decode("utf-8", "replace"))):
                os.killpg(process.pid, signal.SIGINT)
                waiting = None
            if time.monotonic() > end:
                os.killpg(process.pid, signal.SIGKILL)
                said += b"\n(ended by the test: it took too long)\n"
                break
            if not chunk:
                time.sleep(0.1)
        return said.decode("utf-8", "replace")

    def _here(self, text: str) -> str:
        for page, here in self.names.items():
            text = text.replace(page, here)
        return text

    def _there(self, text: str) -> str:
        for page, here in self.names.items():
            text = text.replace(here, page)
        return text
