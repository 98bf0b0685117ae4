"""A delivery from one process of a group to all others, by torch.distributed.

    delivery = broadcast(full(trained) if rank == 0 else None, source=0, device="cuda")

A collective: every process of the group must call it. Numbers travel as tensors and what describes them as JSON.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.distributed as dist

from ...errors import WeightsError
from .delivery import Delivery

_BUCKET = 2**28  # bytes that travel at once

Described = Sequence[tuple[str, str, list[int]]]  # name, dtype, shape


def broadcast(
    delivery: Delivery | None,
    *,
    source: int,
    device: str | torch.device,
    group: dist.ProcessGroup | None = None,
) -> Delivery:
    """The delivery that `source` (a rank of the whole job) gives, in every process; the others give None.

    `device` is where it travels: "cpu" by gloo, "cuda" by NCCL. It is kept by nobody unless it has arrived everywhere:
    raises WeightsError in every process where one of them has received something else.
    """
    mine = dist.get_rank() == source
    assert mine == (delivery is not None), "the source gives a delivery, and nobody else"
    head = _told(_head(delivery) if delivery is not None else b"", source, device, group)
    described: Described = head["tensors"]  # type: ignore[assignment]
    sent = delivery.tensors if delivery is not None else _empty(described, device)
    for names in _buckets(described):
        _travel([sent[name] for name in names], mine, source, device, group)
    if delivery is None:
        delivery = Delivery.arrived(head, sent)
    _all_received(delivery, device, group)
    return delivery


def _head(delivery: Delivery) -> bytes:
    tensors = [(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in delivery.tensors.items()]
    return json.dumps({**delivery.head, "tensors": tensors}).encode()


def _told(
    text: bytes, source: int, device: str | torch.device, group: dist.ProcessGroup | None
) -> Mapping[str, object]:
    size = torch.tensor([len(text)], device=device)
    dist.broadcast(size, source, group=group)
    letters = torch.tensor(list(text) or [0] * int(size), dtype=torch.uint8, device=device)
    dist.broadcast(letters, source, group=group)
    head: Mapping[str, object] = json.loads(bytes(letters.tolist()))
    return head


def _empty(described: Described, device: str | torch.device) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=getattr(torch, dtype), device=device) for name, dtype, shape in described}


def _buckets(described: Described) -> Iterator[list[str]]:
    """Names whose tensors travel together; a large tensor alone."""
    names: list[str] = []
    size = 0
    for name, dtype, shape in described:
        count = torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        if names and size + count > _BUCKET:
            yield names
            names, size = [], 0
        names.append(name)
        size += count
    if names:
        yield names


def _travel(
    tensors: Sequence[torch.Tensor],
    mine: bool,
    source: int,
    device: str | torch.device,
    group: dist.ProcessGroup | None,
) -> None:
    """As one run of bytes."""
    sizes = [tensor.nbytes for tensor in tensors]
    if mine:
        parts = [tensor.detach().to(device).contiguous().flatten().view(torch.uint8) for tensor in tensors]
        dist.broadcast(torch.cat(parts), source, group=group)
        return
    run = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    dist.broadcast(run, source, group=group)
    for tensor, part in zip(tensors, run.split(sizes), strict=True):
        tensor.flatten().view(torch.uint8).copy_(part)


def _all_received(delivery: Delivery, device: str | torch.device, group: dist.ProcessGroup | None) -> None:
    wrong: WeightsError | None = None
    try:
        delivery.verify()
    except WeightsError as error:
        wrong = error
    failed = torch.tensor([int(wrong is not None)], device=device)
    dist.all_reduce(failed, group=group)
    if wrong is not None:
        raise wrong
    if int(failed):
        raise WeightsError(
            "the weights arrived damaged in other processes", value=int(failed), remedy="send them again"
        )
