"""The words that start a rank in a container: of all four runtimes, to the letter; and what is mounted."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from launcher.agent.container import argv_in, image, mounts_of
from launcher.agent.environment import STAGED
from launcher.contract.container import Container, Mount
from launcher.contract.data_files import DataFile
from launcher.contract.launch import LaunchSpec, Node, Program

OWN = {
    "RANK": "5", "LOCAL_RANK": "1", "ZERUN_TOKEN": "geheim", "NCCL_IB_HCA": "mlx5", "WORD": "a b;$c",
    "PATH": "/opt/site/bin", "HOME": "/home/ml", "SLURMD_NODENAME": "gpu02",
}  # fmt: skip
RANK = ["python3", "/lustre/runs/.blobs/r.zip", "engine"]


def spec(runtime: str, image: str, **more: Any) -> LaunchSpec:
    box = Container(runtime, image, (Mount("/lustre/img", "/img", read_only=True),), ("--one", "two words"))
    said: dict[str, Any] = dict(
        run="r-1", attempt=2, run_dir="/lustre/runs/r-1", runtime="/lustre/runs/.blobs/r.zip",
        nodes=(Node("gpu02", 4),),
        shared=True, token="geheim", python="python3", agent_python="python3", program=Program(("true",)),
        device_kind="gpu", container=box,
    )  # fmt: skip
    return LaunchSpec(**{**said, **more})


def words(runtime: str, image: str, **more: Any) -> str:
    return " ".join(
        w if " " not in w else f"<{w}>" for w in argv_in(spec(runtime, image, **more), OWN, "/lustre/c", RANK)
    )


def test_apptainer() -> None:
    assert words("apptainer", "/lustre/img/t.sif") == (
        "apptainer exec --nv --bind /lustre/img:/img:ro --bind /lustre/runs:/lustre/runs --pwd /lustre/c"
        " --one <two words> /lustre/img/t.sif python3 /lustre/runs/.blobs/r.zip engine"
    )


def test_pyxis_is_a_step_of_its_own_on_this_node() -> None:
    assert words("pyxis", "nvcr.io#nvidia/pytorch:24.10-py3") == (
        "srun --overlap --nodes=1 --ntasks=1 --nodelist=gpu02 --export=ALL --kill-on-bad-exit=1"
        " --container-image=nvcr.io#nvidia/pytorch:24.10-py3"
        " --container-mounts=/lustre/img:/img:ro,/lustre/runs:/lustre/runs --container-workdir=/lustre/c"
        " --no-container-mount-home --one <two words> python3 /lustre/runs/.blobs/r.zip engine"
    )


_SHARED = "--rm --name zerun-r-1-2-rank-5 --log-driver none --network host --ipc host --pid host"
_REST = (
    " --ulimit memlock=-1 --volume /lustre/img:/img:ro --volume /lustre/runs:/lustre/runs"
    " --env LOCAL_RANK --env NCCL_IB_HCA --env RANK --env SLURMD_NODENAME --env WORD --env ZERUN_TOKEN"
    " --workdir /lustre/c --one <two words> torch:2.13 python3 /lustre/runs/.blobs/r.zip engine"
)


def test_docker() -> None:
    user = f"{os.geteuid()}:{os.getegid()}"
    assert words("docker", "torch:2.13") == f"docker run {_SHARED} --user {user} --gpus all" + _REST


@pytest.mark.parametrize("user", [0, 1000])
def test_podman(user: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    keep = " --userns=keep-id" if user else ""
    assert words("podman", "torch:2.13") == f"podman run {_SHARED}{keep} --device nvidia.com/gpu=all" + _REST


def test_values_stand_on_no_command_line_and_the_jobs_own_path_goes_in() -> None:
    found = argv_in(spec("podman", "i", env={"PATH": "/opt/job/bin"}), OWN, "/lustre/c", RANK)
    assert not [w for w in found if "geheim" in w or "a b;$c" in w]
    assert "PATH" in found and "HOME" not in found


def test_a_folder_within_a_mounted_one_is_mounted_once() -> None:
    one = spec("docker", "i", run_dir="/lustre/img/runs/r", node_local="/lustre/runs/local")
    asked = Container("docker", "i", (Mount("/lustre", "/lustre"), Mount("/data", "/lustre/img")))
    found = mounts_of(one, asked, {})
    # /lustre/img is another folder inside, so what lies below it out here has to be mounted by itself.
    assert found == [*asked.mounts, Mount("/lustre/img/runs", "/lustre/img/runs")]


def test_a_programs_data_and_their_copies_on_the_nodes_own_disk_are_there_inside() -> None:
    file = DataFile("tokens", "/data/pile/train.bin", 6, "xxh3:" + 32 * "0")
    program = Program(("x",), {"ZERUN_DATA_TRAIN": file.path})
    one = spec("docker", "i", run_dir="/scratch/runs/r", node_local="$TMP", program=program, stage=(file,))
    told = {STAGED: json.dumps({file.path: "/local/7/zerun-data/0-train.bin"})}
    found = mounts_of(one, Container("docker", "i"), told)
    assert [(m.source, m.read_only) for m in found] == [
        ("/scratch/runs", False), ("/data/pile", True), ("/local/7/zerun-data", True)
    ]  # fmt: skip


def test_an_image_that_is_not_there(tmp_path: Any) -> None:
    lost = image({"runtime": "apptainer", "image": str(tmp_path / "no.sif")})
    assert "is not there" in lost["problem"]
    (tmp_path / "yes.sif").write_bytes(b"")
    assert image({"runtime": "pyxis", "image": str(tmp_path / "yes.sif")}) == {"problem": "", "note": ""}
    told = image({"runtime": "docker", "image": "torch:1", "login": True})
    assert told["problem"] == "" and "when the job starts" in told["note"]
