"""What of a tree is sent: measured at the transport, with the agent of the shipped zip at the other end."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import io
import json
import os
import random
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from launcher.agent.code import unpack
from launcher.backends.calls import Caller
from launcher.bundles import CodeBundle, Shipment, code_bundle, keep, runtime_bundle
from launcher.contract.bundle import SUFFIX, File, Link, Listing, decode
from launcher.contract.errors import Exit, Refused, UsageError, VerificationFailed
from launcher.transports.local import LocalTransport
from launcher.transports.protocol import Result

LIMIT = 50_000_000
RUNTIME = runtime_bundle()
NOISE = random.Random(7)


class Counted(LocalTransport):
    """A machine beside this one: what is run and put there is counted."""

    def __init__(self) -> None:
        super().__init__("node01")
        self.calls: list[tuple[str, bytes]] = []

    def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result:
        self.calls.append(("look" if "-c" in argv else argv[-1], stdin))
        return super().run(argv, stdin=stdin, timeout_s=timeout_s)

    def put(self, data: bytes, path: str, *, mode: int = 0o600) -> None:
        self.calls.append(("put", data))
        super().put(data, path, mode=mode)

    @property
    def verbs(self) -> list[str]:
        return [verb for verb, _ in self.calls]


class Laptop:
    """Its tree, its runs at home, and a place: each ``submit`` is a command of its own."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.home, self.place = folder / "tree", folder / "home", folder / "place"
        self.tree.mkdir(parents=True)

    def kept(self) -> tuple[CodeBundle, Shipment]:
        code = code_bundle(self.tree, limit=LIMIT)
        keep(code, self.home)
        return code, Shipment(code.name, code.data, self.home)

    def submit(self) -> tuple[Counted, CodeBundle, str]:
        """The calls of one command, the tree, and what is said of it."""
        code, shipment = self.kept()
        there = Counted()
        caller = Caller(str(self.place), sys.executable, (RUNTIME.digest, RUNTIME.data), expected=shipment)
        caller.ready(there)
        caller.put_code(there, shipment)
        return there, code, code.sentence(caller.sent)

    def stored(self) -> set[str]:
        return {path.name for path in (self.place / ".blobs/contents").glob("??/*")}

    def path(self, data: bytes) -> Path:
        digest = hashlib.sha256(data).hexdigest()
        return self.place / ".blobs/contents" / digest[:2] / digest

    def laid_out(self, name: str) -> dict[str, bytes]:
        run = self.place / f"run-{time.monotonic_ns()}"
        run.mkdir()
        code = unpack(str(self.place / ".blobs" / name), str(run))
        return {str(p.relative_to(code)): p.read_bytes() for p in code.rglob("*") if p.is_file()}


@pytest.fixture
def laptop(tmp_path: Path) -> Laptop:
    made = Laptop(tmp_path)
    for number in range(200):
        (made.tree / f"part{number % 7}").mkdir(exist_ok=True)
        (made.tree / f"part{number % 7}" / f"{number}.py").write_bytes(NOISE.randbytes(300))
    for name in ("a", "b"):
        (made.tree / name).mkdir()
        (made.tree / name / "__init__.py").touch()
    (made.tree / "big.bin").write_bytes(NOISE.randbytes(3_000_000))
    return made


def sent_contents(call: bytes) -> dict[str, bytes]:
    head, _, rest = call.partition(b"\n")
    told = json.loads(head)
    stream = gzip.GzipFile(fileobj=io.BytesIO(rest))
    sizes = decode(stream.read(told["bytes"]), told["name"]).sizes
    found = {digest: stream.read(sizes[digest]) for digest in told["contents"]}
    assert stream.read() == b""
    return found


def test_only_what_changed_is_sent_in_one_piece_and_no_call_more(laptop: Laptop) -> None:
    there, code, said = laptop.submit()
    assert there.verbs == ["look", "put", "receive"] and said.endswith(", all sent")
    assert laptop.laid_out(code.name) == {f.name: code.contents[f.digest] for f in decode(code.data, code.name).files}
    again, _, said = laptop.submit()
    assert again.verbs == ["look"] and said.endswith(", already there")
    changed = NOISE.randbytes(2500)
    (laptop.tree / "part3/3.py").write_bytes(changed)
    (laptop.tree / "moved.bin").write_bytes((laptop.tree / "big.bin").read_bytes())
    (laptop.tree / "big.bin").unlink()
    there, code, said = laptop.submit()
    assert there.verbs == ["look", "receive"]
    assert list(sent_contents(there.calls[-1][1]).values()) == [changed]
    # What names the files is asked and sent too: some 0.1 kB a file each way, however large they are.
    assert sum(len(stdin) for _, stdin in there.calls) < len(changed) + 203 * 200
    assert said.endswith(", 1 of 203 files sent (2.5 kB of 3.1 MB)"), said
    assert laptop.laid_out(code.name)["part3/3.py"] == changed
    (laptop.tree / "moved.bin").unlink()  # a tree with another list of known contents
    there, code, said = laptop.submit()
    assert there.verbs == ["look", "receive"] and said.endswith("already there")
    assert "moved.bin" not in laptop.laid_out(code.name)


def test_what_was_kept_at_the_place_is_read_and_not_believed(laptop: Laptop) -> None:
    _, code, _ = laptop.submit()
    paths = [laptop.path((laptop.tree / f"part{n % 7}" / f"{n}.py").read_bytes()) for n in range(6)]
    flipped, emptied, gone, pipe, link, longer = paths
    data = bytearray(flipped.read_bytes())
    data[150] ^= 1
    flipped.write_bytes(data)
    emptied.write_bytes(b"")
    gone.unlink()
    pipe.unlink()
    os.mkfifo(pipe)
    link.unlink()
    link.symlink_to("/etc/hostname")
    longer.write_bytes(longer.read_bytes() + b"x")
    with pytest.raises(VerificationFailed, match="is not what its name says"):
        flipped.with_name("run").mkdir()
        laptop.laid_out(code.name)
    there, code, said = laptop.submit()
    assert there.verbs == ["look", "receive"] and "6 of 203 files sent (1.8 kB" in said
    assert set(sent_contents(there.calls[-1][1])) == {path.name for path in paths}
    assert laptop.laid_out(code.name)["part0/0.py"] == (laptop.tree / "part0/0.py").read_bytes()
    (laptop.place / ".blobs" / code.name).write_bytes(b"{}")  # the list itself
    assert laptop.submit()[0].verbs == ["look", "receive"] and laptop.laid_out(code.name)
    old = time.time() - 30 * 86400
    os.utime(flipped, (old, old))
    laptop.submit()
    assert time.time() - flipped.stat().st_mtime < 3600, "a scratch disk purges what looks unused"


def test_what_is_damaged_at_home_is_not_sent(laptop: Laptop) -> None:
    _, shipment = laptop.kept()
    (path,) = (laptop.home / ".blobs/contents").glob(f"??/{next(iter(shipment.sizes))}")
    path.write_bytes(b"junk")
    with pytest.raises(UsageError, match="is not what its name says") as problem:
        Caller(str(laptop.place), sys.executable, (RUNTIME.digest, RUNTIME.data)).put_code(Counted(), shipment)
    assert "submit the job again" in str(problem.value.hint) and laptop.stored() == set()
    laptop.submit()  # which keeps it anew
    assert len(laptop.stored()) == 202


def waits_for_more(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has taken all that was written to it, and sleeps."""
    assert process.stdin is not None
    for _ in range(5):  # at each of several looks: asleep may be on its way from one content to the next
        unread = fcntl.ioctl(process.stdin, termios.FIONREAD, bytes(4))
        state = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        if any(unread) or state != "S":
            return False
        time.sleep(0.02)
    return True


def test_a_send_that_was_killed_goes_on_where_it_stopped(laptop: Laptop) -> None:
    for number in range(4):
        (laptop.tree / f"{number}.bin").write_bytes(NOISE.randbytes(1_000_000))
    code, shipment = laptop.kept()
    there = Counted()
    Caller(str(laptop.place), sys.executable, (RUNTIME.digest, RUNTIME.data)).ready(there)
    zipped = laptop.place / ".blobs" / RUNTIME.name
    data = shipment.packed(str(laptop.place), set(shipment.sizes))
    process = subprocess.Popen([sys.executable, zipped, "receive"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.write(data[: len(data) // 2])
    process.stdin.flush()
    end = time.monotonic() + 60
    while not (laptop.stored() and waits_for_more(process)):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    process.kill()
    process.communicate()
    arrived = laptop.stored()
    assert 0 < len(arrived) < len(shipment.sizes) and not (laptop.place / ".blobs" / code.name).exists()
    (half,) = (laptop.place / ".blobs/contents/parts").iterdir()
    old = time.time() - 2 * 86400
    os.utime(half, (old, old))
    there, _, said = laptop.submit()
    assert set(sent_contents(there.calls[-1][1])) == set(shipment.sizes) - arrived and "of 207 files sent" in said
    assert list((laptop.place / ".blobs/contents/parts").iterdir()) == []
    assert len(laptop.laid_out(code.name)) == 207
    # A connection that breaks: the agent reads an end where more was told.
    (laptop.place / ".blobs" / code.name).unlink()
    laptop.path((laptop.tree / "3.bin").read_bytes()).unlink()
    data = shipment.packed(str(laptop.place), {laptop.path((laptop.tree / "3.bin").read_bytes()).name})
    done = subprocess.run([sys.executable, zipped, "receive"], input=data[:-9], capture_output=True)
    assert done.returncode == Exit.VERIFICATION and "did not arrive whole" in json.loads(done.stdout)["error"]
    assert not (laptop.place / ".blobs" / code.name).exists()


def test_two_submits_at_once_and_a_place_that_loses_files(tmp_path: Path) -> None:
    both = [Laptop(tmp_path / name) for name in ("one", "two")]
    common = {f"{number}.py": NOISE.randbytes(20_000) for number in range(40)}
    for laptop in both:
        laptop.place = tmp_path / "place"
        for name, data in {**common, "own.py": NOISE.randbytes(500)}.items():
            (laptop.tree / name).write_bytes(data)
    names: dict[int, str] = {}

    def submit(at: int) -> None:
        names[at] = both[at].submit()[1].name

    threads = [threading.Thread(target=submit, args=(at,)) for at in (0, 1, 0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for at, laptop in enumerate(both):
        assert laptop.laid_out(names[at])["own.py"] == (laptop.tree / "own.py").read_bytes()
    assert len(both[0].stored()) == 42 and list((tmp_path / "place/.blobs/contents/parts").iterdir()) == []

    class Losing(Counted):
        """Something deletes a file between the question and the answer."""

        losses = 1

        def run(self, argv: Sequence[str], *, stdin: bytes = b"", timeout_s: float | None = 60.0) -> Result:
            if argv[-1] == "receive" and self.losses:
                self.losses -= 1
                both[0].path(common["7.py"]).unlink(missing_ok=True)
            return super().run(argv, stdin=stdin, timeout_s=timeout_s)

    (both[0].tree / "own.py").write_bytes(b"other")
    _, shipment = both[0].kept()
    caller = Caller(str(both[0].place), sys.executable, (RUNTIME.digest, RUNTIME.data), expected=shipment)
    there = Losing()
    caller.put_code(there, shipment)
    assert there.verbs == ["look", "receive", "receive"]
    assert list(sent_contents(there.calls[-1][1]).values()) == [common["7.py"]]
    assert both[0].laid_out(shipment.name)["own.py"] == b"other"


def listed(place: Path, listing: Listing, contents: Sequence[bytes] = ()) -> str:
    """A listing as somebody else might have put it there."""
    data = listing.encode()
    path = place / ".blobs" / (hashlib.sha256(data).hexdigest() + SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    for content in contents:
        digest = hashlib.sha256(content).hexdigest()
        (place / ".blobs/contents" / digest[:2]).mkdir(parents=True, exist_ok=True)
        (place / ".blobs/contents" / digest[:2] / digest).write_bytes(content)
    return str(path)


X = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"  # of b"x"


@pytest.mark.parametrize(
    ("files", "links"),
    [
        ([("../out", X)], []),
        ([("/tmp/out", X)], []),
        ([("a/../../out", X)], []),
        ([("a\0b", X)], []),
        ([("", X)], []),
        ([("f", X), ("f", X)], []),
        ([("f", X), ("f/g", X)], []),
        ([("f", "../../../../secret")], []),
        ([("f", X.upper())], []),
        ([], [("l", "/etc")]),
        ([], [("l", "../..")]),
        ([], [("l", "../../.."), ("l/out", "x")]),
        ([], [("l", "../../.."), ("l/out/deep", "x")]),
        ([("d/f", X)], [("d", "x")]),
        ([], [("p/q/r/s", "../../.."), ("t", "p/q/r/s/../../..")]),
    ],
)
def test_a_listing_that_would_leave_its_folder_is_refused(
    tmp_path: Path, files: list[tuple[str, str]], links: list[tuple[str, str]]
) -> None:
    listing = Listing(tuple(File(name, digest, 1) for name, digest in files), tuple(Link(*link) for link in links))
    path = listed(tmp_path / "place", listing, [b"x"])
    run = tmp_path / "place" / "run"
    run.mkdir()
    (tmp_path / "secret").write_text("s")
    with pytest.raises((Refused, VerificationFailed, OSError, ValueError)):
        unpack(path, str(run))
    assert list(run.iterdir()) == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["place", "secret"]


def test_modes_links_and_times_arrive(laptop: Laptop) -> None:
    (laptop.tree / "run.sh").write_text("#!/bin/sh\n")
    (laptop.tree / "run.sh").chmod(0o755)
    (laptop.tree / "latest").symlink_to("part0/0.py")
    (laptop.tree / "folder").symlink_to("part1")
    _, code, _ = laptop.submit()
    run = laptop.place / "r"
    run.mkdir()
    there = unpack(str(laptop.place / ".blobs" / code.name), str(run))
    assert os.readlink(there / "latest") == "part0/0.py" and (there / "folder/1.py").is_file()
    modes = {path.name: path.stat().st_mode & 0o777 for path in (there / "run.sh", there / "big.bin")}
    assert modes == {"run.sh": 0o755, "big.bin": 0o644}
    facts = (there / "big.bin").stat()
    assert facts.st_mtime == 0 and facts.st_atime > time.time() - 600, "or a scratch disk that purges by age takes it"
    (there / "big.bin").write_bytes(b"what a job does to its own files")
    assert laptop.submit()[0].verbs == ["look"], "stays the job's own"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda head: {**head, "name": "../x" + SUFFIX}, "is no listing's place"),
        (lambda head: {**head, "name": "0" * 64 + SUFFIX}, "is not what its name says"),
        (lambda head: {**head, "runs": "relative"}, "is no listing's place"),
        (lambda head: {**head, "contents": ["../../../x"]}, "is no content of"),
        (lambda head: {**head, "contents": head["contents"][::-1]}, "is not what its name says"),
        (lambda head: {**head, "contents": head["contents"][1:]}, "is not what its name says"),
    ],
)
def test_what_arrives_is_held_against_its_names(tmp_path: Path, spoil: object, words: str) -> None:
    laptop = Laptop(tmp_path)
    for name in ("a", "b"):
        (laptop.tree / name).write_text(name)
    _, shipment = laptop.kept()
    laptop.place.mkdir()
    zipped = tmp_path / "rt.zip"
    zipped.write_bytes(RUNTIME.data)
    head, _, rest = shipment.packed(str(laptop.place), set(shipment.sizes)).partition(b"\n")
    data = json.dumps(spoil(json.loads(head))).encode() + b"\n" + rest  # type: ignore[operator]
    done = subprocess.run([sys.executable, zipped, "receive"], input=data, capture_output=True, cwd=tmp_path)
    assert done.returncode and words in json.loads(done.stdout)["error"] and done.stderr == b""
    assert not list(laptop.place.rglob("*.tree")) and not (tmp_path / "x").exists()


def test_to_several_nodes_the_line_says_what_the_emptiest_got(laptop: Laptop) -> None:
    code, shipment = laptop.kept()
    every, one = frozenset(shipment.sizes), frozenset(list(shipment.sizes)[-1:])
    cases = ({"a": every, "b": every}, {"a": one, "b": one}, {"a": one, "b": every}, {"a": one, "b": frozenset()})
    said = [code.sentence(sent).rsplit("no git, all of ", 1)[1].partition(", ")[2] for sent in cases]
    assert said[0] == "all sent" and said[1].startswith("1 of 203 files sent to each of 2 nodes (")
    assert said[2].startswith("203 of 203 files sent to the node that lacked most (3.1 MB")
    assert said[3].startswith("1 of 203 files sent to the node that lacked most (")
