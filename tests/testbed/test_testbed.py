"""The cluster is what the other tests take it for."""

from __future__ import annotations

import subprocess

from testbed.cluster import Testbed


def test_users_are_not_root_and_share_home_but_not_scratch(testbed: Testbed) -> None:
    assert testbed.exec("node01", ["cat", "/root/.profile"], check=False).returncode != 0
    testbed.exec("node01", ["sh", "-c", "echo shared > ~/seen; echo own > /scratch/seen"])
    assert testbed.exec("node02", ["cat", "/home/trainer/seen"]).stdout == b"shared\n"
    assert testbed.exec("node02", ["cat", "/scratch/seen"], check=False).returncode != 0
    assert (testbed.home() / "seen").read_bytes() == b"shared\n"


def test_ssh_reaches_every_host_and_the_rc_files_do_print(testbed: Testbed) -> None:
    for host in ("login", *testbed.nodes):
        done = subprocess.run(["ssh", "-F", testbed.ssh_config, host, "hostname"], capture_output=True)
        assert done.stdout == host.encode() + b"\n"
    for user in ("tess", "nora"):
        config = testbed.ssh_config_of(user, jump=True)
        done = subprocess.run(["ssh", "-F", config, "node02", "echo $0"], capture_output=True)
        assert len(done.stdout.splitlines()) == 2, done  # its greeting, then its shell's name


def test_slurm_grants_what_was_asked(testbed: Testbed) -> None:
    asked = [
        "srun",
        "-A",
        "lab",
        "-N2",
        "--ntasks-per-node=1",
        "-c3",
        "--mem=900",
        "sh",
        "-c",
        "scontrol show job $SLURM_JOB_ID",
    ]
    shown = testbed.exec("login", asked).stdout.decode()
    assert "cpu=6" in shown and "mem=1800M" in shown


def test_nodes_have_a_python_with_torch(testbed: Testbed, node_python: str) -> None:
    said = testbed.exec(
        "node01", [node_python, "-c", "import torch, safetensors, xxhash; print(torch.ones(2).sum().item())"]
    )
    assert said.stdout == b"2.0\n"
