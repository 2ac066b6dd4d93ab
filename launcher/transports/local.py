"""This very machine, as a peer of the SSH transport: same protocol, no shell, no network."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..contract.errors import Unreachable
from ..contract.unwritable import of_oserror
from .protocol import Progress, Result
from .rsync import check_names

_BLOCK = 2**20
_SITE = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "XDG_RUNTIME_DIR", "SLURM_CONF")
_OURS = ("ZERUN_LEASES",)  # where slots of this machine are leased: of this machine, not of whoever submits


def site_environment() -> dict[str, str]:
    """What a command would find after a login: the submitter's own variables are never handed on."""
    return {k: v for k, v in os.environ.items() if k in _SITE or k in _OURS or k.startswith("LC_")}


class LocalTransport:
    """``runs`` folders of a laptop cluster are reached by it. Nothing is kept open."""

    def __init__(self, name: str = "this machine") -> None:
        self.name = name

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result:
        try:
            done = subprocess.run(
                list(argv),
                input=stdin,
                capture_output=True,
                timeout=timeout_s,
                env=site_environment(),
                cwd="/",
                check=False,
            )
        except subprocess.TimeoutExpired as problem:
            raise Unreachable(f"{self.name}: {argv[0]} did not end within {timeout_s:g} s") from problem
        except FileNotFoundError:
            return Result(127, b"", f"{argv[0]}: not found\n".encode())
        except PermissionError:
            return Result(126, b"", f"{argv[0]}: not executable\n".encode())
        return Result(_status(done.returncode), done.stdout, done.stderr)

    def stream(self, argv: Sequence[str], *, stdin: bytes = b"") -> LocalStream:
        return LocalStream(self.name, argv, stdin)

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        target = Path(path)
        with _problems(self.name):
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            handle, beside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
                    os.fchmod(file.fileno(), mode)
                os.replace(beside, target)
            except BaseException:
                Path(beside).unlink(missing_ok=True)
                raise

    def fetch(self, files: Sequence[str], source: str, target: Path, *, progress: Progress | None = None) -> None:
        self._copy(files, Path(source), target, progress)

    def push(self, files: Sequence[str], source: Path, target: str, *, progress: Progress | None = None) -> None:
        self._copy(files, source, Path(target), progress)

    def _copy(self, files: Sequence[str], source: Path, target: Path, progress: Progress | None) -> None:
        check_names(tuple(files))
        if source.resolve() == target.resolve():
            return
        with _problems(self.name):
            for name in files:
                _copy_file(source / name, target / name, progress)

    def close(self) -> None:
        pass


class LocalStream:
    """stdout of a running child; leaving it ends the child (and what it started in its own group)."""

    def __init__(self, name: str, argv: Sequence[str], stdin: bytes) -> None:
        self._name = name
        self._what = argv[0]
        self._closed = False
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115, closed with the stream
        # A file for stdin: however large it is, nobody has to feed it.
        with tempfile.TemporaryFile() as given:
            given.write(stdin)
            given.seek(0)
            try:
                self._process = subprocess.Popen(
                    list(argv),
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=self._stderr,
                    env=site_environment(),
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as problem:
                self._stderr.close()
                raise Unreachable(f"{name}: {self._what}: {problem.strerror}") from problem

    def __iter__(self) -> Iterator[bytes]:
        assert self._process.stdout is not None
        while True:
            try:
                chunk = os.read(self._process.stdout.fileno(), 65536)
            except (OSError, ValueError):
                if self._closed:
                    return
                raise
            if not chunk:
                break
            yield chunk
        if self._closed:
            return
        status = _status(self._process.wait())
        if status:
            self._stderr.seek(0)
            said = self._stderr.read()[-4096:].decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise Unreachable(f"{self._name}: {self._what} ended with status {status}: {said}")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()

    def __enter__(self) -> LocalStream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _status(returncode: int) -> int:
    """As a shell tells it: 128 + n for signal n."""
    return 128 - returncode if returncode < 0 else returncode


def _copy_file(source: Path, target: Path, progress: Progress | None) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with source.open("rb") as give, part.open("wb") as take:
            while block := give.read(_BLOCK):
                take.write(block)
                if progress is not None:
                    progress(len(block))
        shutil.copystat(source, part)
        part.replace(target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def _problems(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as problem:
        raise of_oserror(problem, name) from problem
