"""The walk-throughs of docs/ as written: every file, every command, every line that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from testbed.second_factor import PASSWORD, PORT, at_terminal, second_factor
from walk_page import Command, PageFile, Walker, compare, read_page

DOCS = Path(__file__).parents[2] / "docs"
NAMES = {"alice": "trainer"}
"""What the pages call it → what the testbed does. Hosts have the names of the pages by /etc/hosts."""
ALIASES = {"login.uni.edu": "login"}
WORD = re.compile(r"[A-Za-z]{3,}")


def make_walker(testbed: Any, tmp_path: Path, node_python: str) -> Walker:
    """A laptop of its own: a home folder with a key and known hosts, the hosts by name, an empty project."""
    home, folder = tmp_path / "home", tmp_path / "home" / "project"
    for part in (home / ".ssh", folder, tmp_path / "run"):
        part.mkdir(parents=True, mode=0o700)
    key = home / ".ssh" / "id_ed25519"
    key.write_bytes((testbed.state / "userkey").read_bytes())
    key.chmod(0o600)
    known = (testbed.state / "known_hosts").read_text()
    public = (testbed.state / "hostkey.login.pub").read_text().split()
    known += "".join(f"{a},[{a}]:{PORT} {public[0]} {public[1]}\n" for a in ALIASES)
    (home / ".ssh" / "known_hosts").write_text(known)
    hosts = (testbed.state / "hosts").read_text()
    hosts += "".join(f"{testbed.address(host)} {alias}\n" for alias, host in ALIASES.items())
    (tmp_path / "hosts").write_text(hosts)
    # ssh takes the home folder from the user's entry, not from $HOME.
    entries = Path("/etc/passwd").read_text().splitlines()
    name = next(e for e in entries if e.split(":")[2] == str(os.getuid())).split(":")
    entry = ":".join([*name[:5], str(home), name[6]])
    (tmp_path / "passwd").write_text(
        "\n".join([entry, *(e for e in entries if not e.startswith(name[0] + ":"))]) + "\n"
    )
    make_venv(testbed, node_python)
    mounts = f'mount --bind {tmp_path}/hosts /etc/hosts && mount --bind {tmp_path}/passwd /etc/passwd && exec "$@"'
    environment = {
        "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8", "ZERUN_RUNS": "",
        "ZERUN_CLUSTER": "", "XDG_CONFIG_HOME": str(home / ".config"), "XDG_RUNTIME_DIR": str(tmp_path / "run"),
        "XDG_CACHE_HOME": str(home / ".cache"), "NO_COLOR": "1",
    }  # fmt: skip
    enter = ("unshare", "--mount", "sh", "-c", mounts, "sh")
    return Walker(folder, home, environment, names=NAMES, enter=enter, at_terminal=at_terminal)


def make_venv(testbed: Any, node_python: str) -> None:
    """~/zerun-venv on the cluster, as the pages make it, with the packages of ``node_python``."""
    venv = testbed.home() / "zerun-venv"
    if venv.exists():
        return
    testbed.exec("login", ["/usr/bin/python3", "-m", "venv", "--without-pip", f"/home/{testbed.user}/zerun-venv"])
    asked = [node_python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    (site,) = venv.glob("lib/python3*/site-packages")
    (site / "packages.pth").write_text(packages)


@pytest.fixture
def walker(testbed: Any, tmp_path: Path, node_python: str) -> Walker:
    return make_walker(testbed, tmp_path, node_python)


@pytest.mark.timeout(900)
def test_a_rack_of_ssh_machines(walker: Walker) -> None:
    assert walker.walk(DOCS / "walk-rack.md") >= 15
    every_word_counts(walker)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_university_account(walker: Walker, testbed: Any, tmp_path: Path) -> None:
    walker.typed = {"zerun login uni": (("password:", PASSWORD),)}
    with second_factor(testbed, tmp_path):
        assert walker.walk(DOCS / "walk-university.md") >= 20
    every_word_counts(walker)


def every_word_counts(walker: Walker) -> None:
    """One word of a page changed, and the page is wrong."""
    for command, out, code in walker.heard:
        for number, line in enumerate(command.shown):
            for word in WORD.findall(line):
                shown = list(command.shown)
                shown[number] = line.replace(word, f"{word}x", 1)
                with pytest.raises(AssertionError, match="shows: "):
                    compare(replace(command, shown=tuple(shown)), out, code, "page")


@pytest.mark.parametrize("page", ["walk-rack.md", "walk-university.md"])
def test_a_page_has_nothing_that_is_passed_over(page: str) -> None:
    """Blocks are files, commands that are run, or what a reader alone does (``sh``: pip and ssh by hand)."""
    text = (DOCS / page).read_text(encoding="utf-8")
    kinds = re.findall(r"^```(.*)$", text, re.M)[::2]
    steps = read_page(text)
    files, by_hand = [s for s in steps if isinstance(s, PageFile)], kinds.count("sh")
    assert len(kinds) == len(files) + by_hand + kinds.count("console") and by_hand <= 2 and len(files) >= 3
    assert all(s.shown or "exec" in s.text for s in steps if isinstance(s, Command))


def test_a_page_that_says_something_else_is_told_with_its_line() -> None:
    page = "**`a.txt`**:\n```\nx\n```\n\n```console\n$ say\none … three\n…\nlast\n[exit 3]\n$ next\n^C\n```\n"
    file, say, following = read_page(page)
    assert (file, say) == (PageFile(3, "a.txt", "x\n"), Command(7, "say", ("one … three", "…", "last"), 3))
    assert isinstance(following, Command) and (following.line, following.code) == (12, 130)
    assert isinstance(say, Command)
    for out in ("one two three\nlast\n", "one  three\nx\ny\nlast\n"):
        compare(say, out, 3, "p.md")
    for out, words in (("one three\nlast\n", "p.md:8 shows: one"), ("one two three\nlost\n", "p.md:10 shows: last")):
        with pytest.raises(AssertionError, match=words):
            compare(say, out, 3, "p.md")
    with pytest.raises(AssertionError, match="exited with 0, not 3"):
        compare(say, "one two three\nlast\n", 0, "p.md")
