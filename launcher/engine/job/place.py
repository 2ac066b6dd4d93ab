"""Where this rank stands, and how it meets the others."""

from __future__ import annotations

import datetime
import fcntl
import os
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...contract.errors import UsageError
from ...contract.launch import LaunchSpec

TIMEOUT_S = 300.0
"""How long a message may go unanswered; ``ZERUN_COMM_TIMEOUT`` (seconds) changes it."""


@dataclass(frozen=True)
class Place:
    """What the agent told this rank about itself."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    address: str
    port: int
    node: str
    device: torch.device
    timeout_s: float = TIMEOUT_S

    @classmethod
    def of(cls, spec: LaunchSpec, env: Mapping[str, str]) -> Place:
        def number(name: str) -> int:
            try:
                return int(env[name])
            except (KeyError, ValueError) as error:
                raise UsageError(
                    f"{name} is {env.get(name)!r}; a rank is started by zerun's agent, which sets it"
                ) from error

        local_rank = number("LOCAL_RANK")
        if spec.device_kind == "gpu":
            if not torch.cuda.is_available():
                raise UsageError(
                    "the job asks for GPUs, but torch sees none here",
                    hint="zerun cluster check; a torch built for CPUs cannot use one",
                )
            device = torch.device("cuda", local_rank % torch.cuda.device_count())
        else:
            device = torch.device("cpu")
        return cls(
            rank=number("RANK"),
            local_rank=local_rank,
            world_size=number("WORLD_SIZE"),
            local_world_size=number("LOCAL_WORLD_SIZE"),
            address=env.get("MASTER_ADDR", "127.0.0.1"),
            port=int(env.get("MASTER_PORT", "0")),
            node=env.get("ZERUN_NODE") or "localhost",
            device=device,
            timeout_s=float(env.get("ZERUN_COMM_TIMEOUT", TIMEOUT_S)),
        )


def meet(place: Place, env: Mapping[str, str]) -> None:
    """Makes the default process group; one rank alone needs none. Own host names are never resolved."""
    if place.device.type == "cuda":
        torch.cuda.set_device(place.device)
    if place.world_size == 1:
        return
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = interface_to(place.address, place.port)
        if interface:
            os.environ["GLOO_SOCKET_IFNAME"] = interface
    timeout = datetime.timedelta(seconds=place.timeout_s)
    listening = env.get("ZERUN_LISTEN_FD")
    first = place.rank == 0
    store = dist.TCPStore(  # type: ignore[attr-defined]
        place.address,
        place.port,
        place.world_size,
        is_master=first,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=int(listening) if first and listening else None,
    )
    dist.init_process_group(
        "nccl" if place.device.type == "cuda" else "gloo",
        store=store,
        rank=place.rank,
        world_size=place.world_size,
        timeout=timeout,
    )


def interface_to(address: str, port: int) -> str | None:
    """The network interface from which ``address`` is reached, or None: gloo would look up its own host
    name otherwise, which may not resolve."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((address, port or 9))  # sends nothing
            own = probe.getsockname()[0]
            for _, name in socket.if_nameindex():
                if own == _address_of(name, probe):
                    return name
    except OSError:
        return None
    return None


def _address_of(interface: str, probe: socket.socket) -> str | None:
    get_address = 0x8915  # SIOCGIFADDR
    try:
        reply = fcntl.ioctl(probe.fileno(), get_address, struct.pack("256s", interface.encode()[:15]))
    except OSError:
        return None
    return socket.inet_ntoa(reply[20:24])
