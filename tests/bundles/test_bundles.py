"""The code that travels: what is in a bundle, what is not, and that equal trees have equal names."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
import warnings
import zipfile
from pathlib import Path

import pytest

from launcher.agent.code import unpack
from launcher.bundles import CodeBundle, NothingMatches, Wish, code_bundle, keep, runtime_bundle
from launcher.contract.bundle import decode
from launcher.contract.errors import UsageError
from launcher.contract.plain import dumps, loads

LIMIT = 10_000_000


def git(folder: Path, *args: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *args], check=True, capture_output=True)


def contents(bundle: CodeBundle) -> dict[str, bytes]:
    listing = decode(bundle.data, bundle.name)
    links = {link.name: b"->" + link.target.encode() for link in listing.links}
    return links | {file.name: bundle.contents[file.digest] for file in listing.files}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "jobs").mkdir()
    (tmp_path / "model.py").write_text("old")
    (tmp_path / "gone.py").write_text("x")
    (tmp_path / ".gitignore").write_text("*.log\n")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    return tmp_path


def test_the_working_tree_travels_as_it_is_now(tree: Path) -> None:
    (tree / "model.py").write_text("new")
    (tree / "untracked é.py").write_text("u")
    (tree / "big.log").write_text("ignored")
    (tree / "gone.py").unlink()
    (tree / "run.sh").write_text("#!/bin/sh\n")
    (tree / "run.sh").chmod(0o755)
    bundle = code_bundle(tree / "jobs", limit=LIMIT)
    assert contents(bundle) == {
        ".gitignore": b"*.log\n",
        "model.py": b"new",
        "untracked é.py": b"u",
        "run.sh": b"#!/bin/sh\n",
    }
    assert [f.name for f in decode(bundle.data, bundle.name).files if f.executable] == ["run.sh"]
    assert bundle.changed == 4
    assert "4 files" in bundle.sentence() and "+ 4 changed files" in bundle.sentence()


def test_runs_kept_in_the_tree_do_not_travel(tree: Path) -> None:
    before = code_bundle(tree / "jobs", limit=LIMIT, without=tree / "kept")
    blob = tree / "kept" / ".blobs" / before.name
    blob.parent.mkdir(parents=True)
    blob.write_bytes(before.data)
    (tree / "kept.py").write_text("not a run")
    after = code_bundle(tree / "jobs", limit=LIMIT, without=tree / "kept")
    assert set(contents(after)) == {*contents(before), "kept.py"}


def test_equal_trees_have_equal_names_whatever_their_times(tree: Path) -> None:
    before = code_bundle(tree, limit=LIMIT)
    os.utime(tree / "model.py", (1, 1))
    assert code_bundle(tree, limit=LIMIT).name == before.name
    (tree / "model.py").write_text("other")
    assert code_bundle(tree, limit=LIMIT).name != before.name


def test_hard_links_travel_as_files(tree: Path) -> None:
    os.link(tree / "model.py", tree / "same.py")
    assert contents(code_bundle(tree, limit=LIMIT))["same.py"] == b"old"


def test_links_stay_inside_the_tree(tree: Path) -> None:
    (tree / "in.py").symlink_to("model.py")
    (tree / "out.py").symlink_to("/etc/hostname")
    (tree / "up.py").symlink_to("../elsewhere")
    bundle = code_bundle(tree, limit=LIMIT)
    assert contents(bundle)["in.py"] == b"->model.py"
    assert "out.py" not in contents(bundle) and "up.py" not in contents(bundle)
    assert [n for n in bundle.notes if "out.py" in n] and [n for n in bundle.notes if "up.py" in n]


def test_outside_git_the_jobs_own_folder(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("a")
    (tmp_path / "__pycache__").mkdir()
    (tmp_path / "__pycache__" / "a.pyc").write_text("x")
    bundle = code_bundle(tmp_path, limit=LIMIT)
    assert contents(bundle) == {"a.py": b"a"}
    assert bundle.commit is None and "no git" in bundle.sentence()


def test_a_tree_above_the_limit_names_the_five_largest(tmp_path: Path) -> None:
    for i in range(7):
        (tmp_path / f"f{i}").write_bytes(b"x" * 1000 * (i + 1))
    with pytest.raises(UsageError) as refused:
        code_bundle(tmp_path, limit=20_000)
    for name in ("f6", "f5", "f4", "f3", "f2"):
        assert name in refused.value.message
    assert "f1 " not in refused.value.message and "code.limit" in (refused.value.hint or "")


@pytest.mark.parametrize(
    ("pattern", "gone"),
    [
        ("wandb/", {"wandb/x", "a/wandb/y"}),
        ("*.bin", {"a/b.bin"}),
        ("a/*", {"a/b.bin", "a/wandb/y"}),
        ("a/", {"a/b.bin", "a/wandb/y"}),
    ],
)
def test_exclude(tmp_path: Path, pattern: str, gone: set[str]) -> None:
    names = {"wandb/x", "a/wandb/y", "a/b.bin", "keep.py"}
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert set(contents(code_bundle(tmp_path, wish=Wish(exclude=(pattern,)), limit=LIMIT))) == names - gone


def test_the_runtime_runs_by_itself_and_nothing_of_the_users_shadows_it(tmp_path: Path) -> None:
    bundle = runtime_bundle()
    assert bundle == runtime_bundle()
    with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
        names = set(archive.namelist())
    assert {"__main__.py", "zerun.py", "_zerun/contract/partition.py", "_zerun/agent/__init__.py"} <= names
    assert not [n for n in names if "cli" in n or "specs" in n]
    (tmp_path / "rt.zip").write_bytes(bundle.data)
    (tmp_path / "launcher").mkdir()
    (tmp_path / "launcher" / "__init__.py").write_text("raise SystemExit('shadowed')")
    (tmp_path / "contract.py").write_text("raise SystemExit('shadowed')")
    code = "import zerun, _zerun.contract.partition as p; print(p.__name__, zerun._package())"
    environment = {"PYTHONPATH": str(tmp_path / "rt.zip"), "PATH": os.environ["PATH"]}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.stdout.split() == ["_zerun.contract.partition", "_zerun"], done.stderr


def test_ignore_files_and_lists_have_gitignores_syntax(tree: Path) -> None:
    for name in ("data/big.bin", "data/small.bin", "notes/a.md", "made.log", "keep/made.log"):
        (tree / name).parent.mkdir(exist_ok=True)
        (tree / name).write_text(name)
    (tree / ".zerunignore").write_text("# not for the cluster\n/notes/\ndata/*\n!data/small.bin\n")
    names = set(contents(code_bundle(tree, limit=LIMIT)))
    assert names == {".gitignore", ".zerunignore", "model.py", "gone.py", "data/small.bin"}
    more = code_bundle(tree, wish=Wish(include=("made.log", "data/big.bin"), exclude=("keep/", "gone.py")), limit=LIMIT)
    assert set(contents(more)) == names - {"gone.py"} | {"made.log", "data/big.bin"}
    with pytest.raises(NothingMatches) as nothing:
        code_bundle(tree, wish=Wish(include=("made.log", "!x", "data/*.bim", "runs/")), limit=LIMIT)
    assert nothing.value.said == {
        n: f"{p!r} matches no file below {tree}" for n, p in ((2, "data/*.bim"), (3, "runs/"))
    }
    (tree / "runs" / "r").mkdir(parents=True)
    (tree / "runs" / "r" / "run.json").write_text("{}")
    with pytest.raises(
        NothingMatches, match="'runs/' matches the runs that are kept in runs/ alone, which never travel"
    ):
        code_bundle(tree, wish=Wish(include=("runs/",)), limit=LIMIT, without=tree / "runs")
    (tree / ".zerunignore").write_text("ok\na/**b[\n!\n")
    with pytest.raises(UsageError, match=r"\.zerunignore:3: '!'"):
        code_bundle(tree, limit=LIMIT)


def test_names_of_any_bytes_arrive_and_unreadable_files_are_named(tree: Path, tmp_path: Path) -> None:
    odd = ["two\nlines.py", "tab\t.py", "-rf", os.fsdecode(b"latin-\xe9.py"), " blank "]
    for name in odd:
        (tree / name).write_text("odd")
    os.mkfifo(tree / "pipe")
    bundle = code_bundle(tree, limit=LIMIT)
    assert set(odd) <= set(contents(bundle)) and "pipe" not in contents(bundle)
    assert set(odd) <= set(loads(dumps(bundle.about()))["changed"])  # code.json, of names that are no UTF-8
    os.mkfifo(tree / ".zerunignore")
    with pytest.raises(UsageError, match=r"\.zerunignore cannot be read: .*no plain file"):
        code_bundle(tree, limit=LIMIT)
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    keep(bundle, run.parent)
    (run.parent / ".blobs" / bundle.name).write_bytes(bundle.data)
    there = unpack(str(run.parent / ".blobs" / bundle.name), str(run))
    assert all((there / name).read_text() == "odd" for name in odd)


def test_a_file_that_cannot_be_read_is_an_error_and_not_a_hole(tmp_path: Path) -> None:
    code_bundle(tmp_path, limit=LIMIT)  # loads what it needs, before this process becomes somebody else
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        tree = Path(folder)
        tree.chmod(0o755)
        (tree / "two\nlines.py").write_text("x")
        (tree / "two\nlines.py").chmod(0)
        receive, send = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, from Python 3.12 on
            child = os.fork()
        if child == 0:
            if os.geteuid() == 0:
                os.setuid(65534)  # root reads everything
            try:
                code_bundle(tree, limit=LIMIT)
                said = "nothing"
            except UsageError as problem:
                said = f"{problem.message}; {problem.hint}"
            os.write(send, said.encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(receive, 4096).decode()
        os.close(receive)
        os.close(send)
    assert told.startswith(r"the code's 'two\nlines.py' cannot be read: Permission denied") and ".zerunignore" in told


def test_submodules_travel_when_they_are_checked_out(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = tmp_path_factory.mktemp("other")
    git(other, "init", "-q")
    (other / "lib.py").write_text("lib")
    (other / ".gitignore").write_text("cache\n")
    git(other, "add", ".")
    git(other, "commit", "-qm", "first")
    git(tree, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(other), "third/lib")
    git(tree, "commit", "-qm", "with a submodule")
    (tree / "third/lib/cache").write_text("ignored there")
    (tree / "third/lib/new.py").write_text("untracked there")
    git(tree, "init", "-q", "nested")
    bundle = code_bundle(tree, limit=LIMIT)
    assert {"third/lib/lib.py", "third/lib/new.py", ".gitmodules"} <= set(contents(bundle))
    assert "third/lib/cache" not in contents(bundle) and list(bundle.submodules) == ["third/lib"]
    assert [n for n in bundle.notes if "nested/ is another repository" in n]
    git(tree, "submodule", "deinit", "-q", "-f", "third/lib")
    told = code_bundle(tree, limit=LIMIT)
    assert "third/lib/lib.py" not in contents(told)
    assert [n for n in told.notes if "third/lib is not checked out" in n and "submodule update" in n]


def test_what_differs_from_the_commit_is_kept_and_keys_are_named_not_shown(tree: Path) -> None:
    (tree / "deploy.pem").write_text("-----BEGIN")
    git(tree, "add", ".")
    git(tree, "commit", "-qm", "second")
    clean = code_bundle(tree, limit=LIMIT)
    assert not clean.about()["dirty"] and clean.diff == b"" and "with deploy.pem (keys?" in clean.sentence()
    (tree / "model.py").write_text("token = 'planted-secret'\n")
    (tree / "deploy.pem").write_text("-----BEGIN other")
    (tree / "gone.py").unlink()
    (tree / ".env").write_text("WANDB_API_KEY=planted-secret\n")
    (tree / "blob.py").write_bytes(bytes(range(256)) * 9000)
    git(tree, "add", "blob.py")
    code = code_bundle(tree, limit=LIMIT, secrets={"WANDB_API_KEY": "planted-secret"})
    about = code.about()
    assert about["changed"] == [".env", "blob.py", "deploy.pem", "gone.py", "model.py"] and about["dirty"]
    assert about["branch"] in ("master", "main") and len(about["commit"]) == 40
    assert b"+token = '***WANDB_API_KEY***'" in code.diff and b"planted" not in code.diff
    assert b"-----BEGIN" not in code.diff and b"Binary files" in code.diff and b"deleted file" in code.diff
    notes = " ".join(code.notes)
    assert "WANDB_API_KEY stands in .env" in notes and "stands in model.py" in notes and "planted" not in notes
    assert (
        ".env, deploy.pem (keys?" in code.sentence() and f"commit {about['commit'][:7]} + 5 changed" in code.sentence()
    )
    (tree / "model.py").write_text("x\n" * 2_000_000)
    cut = code_bundle(tree, limit=LIMIT)
    assert cut.diff_cut and len(cut.diff) == 1 << 20


def test_a_tree_that_git_will_not_read_is_not_shipped_whole(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match="git is not installed here"):
        code_bundle(tree / "jobs", limit=LIMIT)
    monkeypatch.undo()
    (tree / ".git" / "config").write_text("[core\n")
    with pytest.raises(UsageError, match=r"git will not read: fatal: bad config line 1"):
        code_bundle(tree / "jobs", limit=LIMIT)
