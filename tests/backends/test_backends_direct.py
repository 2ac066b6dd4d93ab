"""Agents over plain SSH, on nodes with one filesystem or with none in common, and on this machine."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from backend_kit import PYTHON, RUNTIME, cluster_of, program, runtime
from testbed.cluster import USERS, Testbed

from launcher import backends
from launcher.backends.protocol import Backend, Handle, Submission
from launcher.contract.errors import JobFailed, PartialAnswer, Refused, Unreachable, UsageError, ZerunError
from launcher.specs import cluster_from_plain

Wait = Callable[..., None]
NODES = ("node01", "node02", "node03")
HIDE = """
import os
if os.fork() == 0:
    os.setsid()
    os.fork()
os.execvp("sleep", ["sleep", "16180339"])
"""
SHOW = """
import json, os
with open(os.environ["ZERUN_RUN_DIR"] + "/seen-" + os.environ["RANK"], "w") as file:
    json.dump({name: os.environ[name] for name in "ABCDEFG"}, file)
"""


def local_paths() -> dict[str, object]:
    return {"runs": "/scratch/$USER/zerun", "shared": False}


@pytest.fixture(params=["shared", "apart"])
def direct(request: pytest.FixtureRequest, testbed: Testbed, tmp_path: Path) -> Iterator[Backend]:
    more = {} if request.param == "shared" else {"paths": local_paths()}
    backend = backends.open(cluster_of(testbed, "direct", **more), runtime(), tmp_path)
    yield backend
    backend.close()


@pytest.fixture
def apart(testbed: Testbed, tmp_path: Path) -> Iterator[Backend]:
    backend = backends.open(cluster_of(testbed, "direct", paths=local_paths()), runtime(), tmp_path)
    yield backend
    backend.close()


def marked(testbed: Testbed, mark: str, nodes: tuple[str, ...] = NODES) -> list[str]:
    return [f"{node}: {line}" for node in nodes for line in testbed.processes(node, mark)]


def make(backend: Backend, argv: tuple[str, ...], nodes: tuple[str, ...] = NODES, **more: object) -> Submission:
    places = backend.places()
    return program(places[0].runs, argv, nodes, shared=places[0].node is None, **more)  # type: ignore[arg-type]


def ended(backend: Backend, handle: Handle) -> bool:
    return backend.poll([handle])[0].state == "ended"


def test_places(direct: Backend, testbed: Testbed) -> None:
    places = direct.places()
    assert [p.node for p in places] in ([None], ["node01", "node02", "node03", "node04"])
    for place in places:
        assert place.runs in ("/home/trainer/zerun runs/trainer", "/scratch/trainer/zerun")
        assert direct.call(place, "expand", {"paths": ["~"]}) == {"paths": ["/home/trainer"]}


def test_started_on_every_node_once_and_found_again_by_another_shell(
    direct: Backend, testbed: Testbed, tmp_path: Path, wait_until: Wait
) -> None:
    made = make(direct, ("sleep", "27182818"))
    handle = direct.submit(made)
    assert sorted(handle.data["agents"]) == list(NODES)
    wait_until(lambda: len(marked(testbed, "sleep 27182818")) == 3, 60, "the ranks did not start")
    assert direct.submit(made).data["agents"] == handle.data["agents"]  # adopted
    assert len(marked(testbed, "sleep 27182818")) == 3
    cluster = cluster_of(testbed, "direct", **({} if direct.places()[0].node is None else {"paths": local_paths()}))
    other = backends.open(cluster, runtime(), tmp_path)
    assert other.find(made.name, made.run, 1) == handle
    assert other.find("zerun-never", "never", 1) is None
    polls = other.poll([handle, Handle("direct", {"agents": {}})])
    assert [p.state for p in polls] == ["running", "absent"] and set(polls[0].nodes) == set(NODES)
    other.cancel(handle, made.run, 1)
    assert not marked(testbed, "sleep 27182818")
    assert ended(other, handle)
    other.cancel(handle, made.run, 1)  # again is no fault
    other.close()


def test_cancel_ends_also_what_hides_in_its_own_session(direct: Backend, testbed: Testbed, wait_until: Wait) -> None:
    made = make(direct, (PYTHON, "-c", HIDE))
    bystander = make(direct, ("sleep", "14142135"), ("node01",))
    handle, other = direct.submit(made), direct.submit(bystander)
    wait_until(lambda: len(marked(testbed, "sleep 16180339")) == 9, 60, "the ranks did not start")
    direct.cancel(handle, made.run, 1)
    assert not marked(testbed, "sleep 16180339")
    assert marked(testbed, "sleep 14142135", ("node01",))
    direct.cancel(other, bystander.run, 1)


def test_a_poll_tells_a_living_agent_from_a_later_process_of_its_number(
    direct: Backend, testbed: Testbed, wait_until: Wait
) -> None:
    made = make(direct, ("sleep", "60"), ("node02",))
    handle = direct.submit(made)
    agent = handle.data["agents"]["node02"]
    forged = Handle("direct", {"agents": {"node02": {**agent, "started_ticks": agent["started_ticks"] + 1}}})
    earlier = Handle("direct", {"agents": {"node02": {**agent, "boot": "an-earlier-boot"}}})
    assert [p.state for p in direct.poll([handle, forged, earlier])] == ["running", "ended", "ended"]
    testbed.exec("node02", ["kill", "-9", str(agent["pid"])])
    wait_until(lambda: ended(direct, handle), 30, "a killed agent still counts as running")
    direct.cancel(handle, made.run, 1)  # what it left behind


def test_values_reach_every_rank_byte_equal(testbed: Testbed, tmp_path: Path, wait_until: Wait) -> None:
    hard = {
        "A": "a,b",
        "B": 'it\'s "q"',
        "C": "$HOME `id`",
        "D": "two\nlines\n",
        "E": "é 漢",
        "F": "k=v",
        "G": "%j !x \\n",
    }
    for user in USERS:
        backend = backends.open(cluster_of(testbed, "direct", user), runtime(), tmp_path)
        made = make(backend, (PYTHON, "-c", SHOW, *hard.values()), ("node01", "node02"), env=hard)
        handle = backend.submit(made)
        wait_until(lambda b=backend, h=handle: ended(b, h), 30, "the ranks did not end")
        folder = testbed.home(user) / f"zerun runs/{user}" / made.run
        assert [json.loads((folder / f"seen-{rank}").read_text()) for rank in (0, 1)] == [hard, hard]
        backend.close()


def test_a_node_that_cannot_start_is_named_and_the_others_are_stopped(
    direct: Backend, testbed: Testbed, wait_until: Wait
) -> None:
    made = make(direct, ("sleep", "17320508"))
    broken = dataclasses.replace(
        made.launch, nodes=(*made.launch.nodes[:2], dataclasses.replace(made.launch.nodes[2], name="node04"))
    )
    # node04 knows of the attempt, but its launch.json says node03: its agent refuses to be anybody.
    spoiled = dataclasses.replace(made, launch=broken)
    with pytest.raises(ZerunError, match="node04"):
        direct.submit(spoiled)
    wait_until(lambda: not marked(testbed, "sleep 17320508"), 60, "agents were left")


def test_a_node_that_is_off(apart: Backend, testbed: Testbed, tmp_path: Path, wait_until: Wait) -> None:
    made = make(apart, ("sleep", "22360679"))
    handle = apart.submit(made)
    testbed.kill("node03")
    try:
        with pytest.raises(PartialAnswer, match="node03") as partial:
            apart.cancel(handle, made.run, 1)
        assert partial.value.exit_code == 8
        assert not marked(testbed, "sleep 22360679", ("node01", "node02"))
        (poll,) = apart.poll([handle])
        assert poll.state == "unknown" and "node03" in poll.why
        # Other runs of the cluster go on: only whoever asks node03 hears that it is off.
        fresh = backends.open(cluster_of(testbed, "direct", paths=local_paths()), runtime(), tmp_path)
        small = make(fresh, ("true",), ("node01",))
        wait_until(lambda h=fresh.submit(small): ended(fresh, h), 60, "it did not end")
        again = make(fresh, ("sleep", "22360680"))
        with pytest.raises(Unreachable, match="node03"):
            fresh.submit(again)
        wait_until(lambda: not marked(testbed, "sleep 22360680", ("node01", "node02")), 60, "agents were left")
        fresh.close()
    finally:
        testbed.start("node03")
        testbed.exec("login", ["scontrol", "update", "NodeName=node03", "State=RESUME"], user=None, check=False)
    # It answers again, and nothing of the run survived the power cut.
    wait_until(lambda: ended(apart, handle), 60, "it is still not known to have ended")


def test_nothing_is_begun_twice_after_its_end(direct: Backend, wait_until: Wait) -> None:
    made = make(direct, ("true",), ("node01",))
    handle = direct.submit(made)
    wait_until(lambda: ended(direct, handle), 60, "it did not end")
    with pytest.raises(Refused, match="already ran on node01"):
        direct.submit(made)


def test_secrets_reach_the_ranks_and_nothing_else(direct: Backend, testbed: Testbed, wait_until: Wait) -> None:
    check = "import os,sys; sys.exit(0 if os.environ['KEY'] == 'planted' + '-1123' else 9)"
    made = make(direct, (PYTHON, "-c", check), ("node01", "node02"), secret={"KEY": "planted-1123"})
    handle = direct.submit(made)
    wait_until(lambda: ended(direct, handle), 30, "it did not end")
    for node in ("node01", "node02"):
        found = testbed.exec(node, ["grep", "-rl", "planted-1123", "/home/trainer", "/scratch"], check=False)
        assert found.stdout == b""
    place = direct.places()[0]
    state = direct.call(place, "state", {"run_dirs": [made.launch.run_dir], "attempt": 1})
    ranks = [r for record in state["runs"][made.launch.run_dir]["attempts"]["1"]["records"] for r in record["ranks"]]
    assert ranks and all(rank["exit_code"] == 0 for rank in ranks)


def test_check_names_what_is_wrong_on_each_node(testbed: Testbed, node_python: str, tmp_path: Path) -> None:
    nodes = [{"name": name, "slots": 1} for name in ("node01", "node02", "node03")]
    nodes.append({"name": "ghost", "address": "10.255.255.1x", "slots": 1})
    backend = backends.open(cluster_of(testbed, "direct", nodes=nodes, python=node_python), runtime(), tmp_path)
    good, _, _, ghost = backend.check()
    backend.close()
    assert good.name == "node01" and not good.ok and "ghost" not in good.problems[0]
    assert "does not know the names of 10.255.255.1x" in good.problems[0]
    assert good.facts["torch"] and good.facts["cores"] == os.cpu_count() and good.facts["gpus"] is None
    assert not ghost.ok and ghost.facts["reached"] is False
    plain = cluster_of(testbed, "direct", python="/no/python", setup="echo noise")
    backend = backends.open(plain, runtime(), tmp_path)
    found = backend.check()
    backend.close()
    assert [f.ok for f in found] == [False] * 4 and "/no/python" in found[0].problems[0]


def test_an_agent_python_that_is_not_there(testbed: Testbed, tmp_path: Path) -> None:
    backend = backends.open(cluster_of(testbed, "direct", agent_python="/no/python"), runtime(), tmp_path)
    with pytest.raises(UsageError, match="agent_python '/no/python' is not there"):
        backend.places()
    backend.close()


# --- this machine ---------------------------------------------------------------------------------


@pytest.fixture
def laptop(tmp_path: Path) -> Iterator[Backend]:
    cluster = cluster_from_plain({"name": "laptop", "backend": "direct", "nodes": {"names": "localhost", "slots": 2}})
    backend = backends.open(cluster, runtime(), tmp_path / "home runs")
    yield backend
    backend.close()


def test_the_laptop_is_a_cluster_like_any_other(laptop: Backend, tmp_path: Path, wait_until: Wait) -> None:
    (place,) = laptop.places()
    assert place.runs == str(tmp_path / "home runs")
    assert (tmp_path / "home runs/.blobs" / RUNTIME.name).exists()
    made = program(place.runs, (sys.executable, "-c", "import time; time.sleep(60)"), ("localhost",), slots=2)
    spec = dataclasses.replace(made.launch, python=sys.executable, agent_python=sys.executable)
    from launcher.contract.plain import dumps

    made = dataclasses.replace(made, launch=spec, files={**made.files, "attempts/1/launch.json": dumps(spec)})
    handle = laptop.submit(made)
    assert laptop.poll([handle])[0].state == "running"
    began = time.monotonic()
    laptop.cancel(handle, made.run, 1)
    assert ended(laptop, handle) and time.monotonic() - began < 30
    (finding,) = laptop.check()
    assert finding.facts["torch"] and finding.facts["reached"] is True


def test_a_program_that_is_not_there_fails_in_words(laptop: Backend, wait_until: Wait) -> None:
    made = program(laptop.places()[0].runs, ("/no/such/program",), ("localhost",))
    try:
        handle = laptop.submit(made)
    except JobFailed as problem:
        assert "/no/such/program" in problem.message
    else:
        wait_until(lambda: ended(laptop, handle), 60, "it did not end")
