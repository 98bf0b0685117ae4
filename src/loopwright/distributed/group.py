"""The processes of a run as a group: one alone, or those that torchrun or `launch` started.

    with joined("cpu") as group:
        group.rank, group.ranks, group.device       # 0, 1, device("cpu")
        group.total(torch.tensor([2.0]))            # the sum over all processes, in each of them

One process is a group of one and takes the same path. Numbers travel as tensors, never as pickled objects.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

# collectives on the host go by gloo also where those on the device go by NCCL
_BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
KINDS = tuple(_BACKENDS)  # of devices


@dataclass(frozen=True, slots=True)
class Group:
    """This process among its like. `device` is its own; `mesh` has one dimension, over all processes."""

    rank: int
    ranks: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all processes. The tensor may lie on the host or the device, and is not changed."""
        out = tensor.clone()
        dist.all_reduce(out)
        return out

    def any(self, flag: bool) -> bool:
        """Whether it is true in one of the processes."""
        return bool(self.total(torch.tensor([int(flag)])))

    def told(self, number: int) -> int:
        """The number that the first process has."""
        out = torch.tensor([number])
        dist.broadcast(out, src=0)
        return int(out)

    def wait(self) -> None:
        """Until all processes are here."""
        self.total(torch.zeros(1))


def size() -> int:
    """How many processes this one was started with, by the environment that torchrun and `launch` set."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def local_size() -> int:
    """How many of them are on this machine: torchrun tells, and `launch` starts all on one."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", size()))


def leads() -> bool:
    """Whether this process is the first of those it was started with."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def joined(kind: str) -> Iterator[Group]:
    """The group of this process, on devices of that kind ("cpu", "cuda", or one device's name), for a `with` block."""
    device = _device(kind)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(_BACKENDS[device.type])
    else:
        dist.init_process_group(_BACKENDS[device.type], store=HashStore(), rank=0, world_size=1)
    try:
        ranks = dist.get_world_size()
        yield Group(dist.get_rank(), ranks, device, init_device_mesh(device.type, (ranks,)))
    finally:
        dist.destroy_process_group()


def _device(kind: str) -> torch.device:
    """Each process of a machine takes a device of its own."""
    device = torch.device(kind)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device
