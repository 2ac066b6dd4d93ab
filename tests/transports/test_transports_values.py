"""Values arrive byte-equal whatever the login shell is, on this machine and over a real sshd."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from testbed.cluster import USERS

from launcher.contract.errors import Unreachable, UsageError
from launcher.transports.fabric import FabricTransport
from launcher.transports.local import LocalTransport
from launcher.transports.master import Master
from launcher.transports.openssh import OpenSshTransport
from launcher.transports.protocol import Transport
from launcher.transports.quoting import for_sshd
from launcher.transports.target import SshTarget

HARD = (
    *("a,b", "it's", '"quoted"', "$HOME", "`id`", "two\nlines\n\n", "é ü Á 漢 🎉", "k=v", "%j", "!history", "!!"),
    *("back\\slash\\n", "", " ", "~", "*", "a;b|c&d>e<f", "#no", "-x", "tab\there", "{a,b}", "(sub)", "[0-9]"),
    *("^caret", "=zsh", "@at", "".join(chr(c) for c in range(1, 128)), "\udc81\udc88\udcff"),
)
SHOW = 'for a in "$@"; do printf "%s\\0" "$a"; done'


BY_OPENSSH = ["trainer/openssh", *(pytest.param(f"{user}/openssh", marks=pytest.mark.full) for user in USERS[1:])]


@pytest.fixture(params=["here", *USERS, *BY_OPENSSH])
def transport(request: pytest.FixtureRequest, logins: None) -> Iterator[Transport]:
    if request.param == "here":
        yield LocalTransport()
        return
    user, _, via = request.param.partition("/")
    target = SshTarget("login", config=str(request.getfixturevalue("testbed").ssh_config_of(user)))
    if via == "openssh":
        yield OpenSshTransport("login", Master("login", target))
        return
    opened = FabricTransport("login", target)
    yield opened
    opened.close()


def test_arguments_arrive_byte_equal(transport: Transport) -> None:
    done = transport.run(["/bin/sh", "-c", SHOW, "show", *HARD])
    assert done.stdout == b"".join(os.fsencode(a) + b"\0" for a in HARD)
    assert (done.returncode, done.stderr) == (0, b"")


def test_plain_words_arrive_too(transport: Transport) -> None:
    assert transport.run(["printf", "%s", "plain/words,1:2"]).stdout == b"plain/words,1:2"


def test_a_megabyte_of_stdin_comes_back(transport: Transport) -> None:
    data = os.urandom(2**20)
    done = transport.run(["/bin/sh", "-c", "tee /dev/stderr | cat"], stdin=data)
    assert done.stdout == data
    assert hashlib.sha256(done.stderr).digest() == hashlib.sha256(data).digest()


def test_streams_and_statuses_are_kept_apart(transport: Transport) -> None:
    done = transport.run(["/bin/sh", "-c", "echo out; echo err >&2; exit 7"])
    assert done == (7, b"out\n", b"err\n")
    assert transport.run(["/bin/sh", "-c", "kill -9 $$"]).returncode == 137
    missing = transport.run(["/nowhere/command"])
    assert missing.returncode == 127 and b"not found" in missing.stderr.lower()


def test_a_command_that_does_not_read_its_stdin_is_no_fault(transport: Transport) -> None:
    assert transport.run(["echo", "done"], stdin=b"x" * 2**22).stdout == b"done\n"


def test_time_runs_out(transport: Transport) -> None:
    with pytest.raises(Unreachable, match="did not end within"):
        transport.run(["sleep", "30"], timeout_s=0.7)
    assert transport.run(["echo", "still usable"]).returncode == 0


def test_many_commands_at_once_on_one_connection(transport: Transport) -> None:
    def one(i: int) -> bytes:
        return transport.run(["/bin/sh", "-c", "sleep 0.1; echo $1", "x", str(i)]).stdout

    with ThreadPoolExecutor(24) as pool:
        assert list(pool.map(one, range(120))) == [b"%d\n" % i for i in range(120)]


def test_a_stream_arrives_as_it_comes_and_leaving_it_ends_nothing_else(transport: Transport) -> None:
    script = "echo first; while :; do echo more; sleep 0.1; done"
    with transport.stream(["/bin/sh", "-c", script]) as stream:
        seen = b""
        for chunk in stream:
            seen += chunk
            if seen.count(b"\n") >= 3:
                break
    assert seen.startswith(b"first\nmore\n")
    assert transport.run(["echo", "on"]).stdout == b"on\n"


def test_a_stream_that_fails_says_so(transport: Transport) -> None:
    with transport.stream(["/bin/sh", "-c", "echo part; echo why >&2; exit 3"]) as stream:
        chunks = iter(stream)
        assert next(chunks) == b"part\n"
        with pytest.raises(Unreachable, match=r"status 3: why"):
            list(chunks)


def test_closing_a_stream_from_another_thread_ends_its_reader(transport: Transport) -> None:
    stream = transport.stream(["sleep", "60"])
    timer = threading.Timer(0.5, stream.close)
    timer.start()
    assert list(stream) == []
    timer.join()


def test_put_makes_folders_and_keeps_the_mode(transport: Transport) -> None:
    folder = transport.run(["mktemp", "-d"]).stdout.decode().strip()
    transport.put(b"one", f"{folder}/a/b c/it's", mode=0o640)
    transport.put(b"two", f"{folder}/a/b c/it's")
    shown = transport.run(["stat", "-c", "%a %s %n", f"{folder}/a/b c/it's"]).stdout.decode()
    assert shown == f"600 3 {folder}/a/b c/it's\n"
    assert transport.run(["ls", "-A", f"{folder}/a/b c"]).stdout == b"it's\n"
    transport.run(["rm", "-r", folder])


def test_what_no_command_can_take_is_refused() -> None:
    with pytest.raises(UsageError, match="NUL"):
        for_sshd(["echo", "a\0b"])
    with pytest.raises(UsageError, match="too many"):
        for_sshd(["echo", "é" * 60_000])


def test_the_wire_holds_nothing_that_any_login_shell_reads_inside_quotes() -> None:
    for argv in (["echo", *HARD], ["printf", "%s", "plain"]):
        command = for_sshd(argv).command
        inside = command.removeprefix("/bin/sh -c '").removesuffix("'")
        assert not set(inside) & set("'!\\\n"), command


def test_the_submitters_own_environment_is_not_handed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("PLANTED", "secret")
    said = LocalTransport().run(["env"]).stdout
    assert b"PLANTED" not in said and b"SLURM_JOB_ID" not in said and b"PATH=" in said
