"""What the processes of a broadcast do."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from loopwright.distributed.group import joined
from loopwright.errors import WeightsError
from loopwright.weights import sync
from loopwright.weights.sync import collective


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = {"a": (3, 5), "b": (7,), "c": (), "d": (64, 64), "e": (0, 2)}
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return tensors | {"half": tensors["d"].bfloat16(), "view": tensors["d"].t(), "count": torch.arange(3)}


def damaging(travel: Callable[..., None]) -> Callable[..., None]:
    """One bit of each run of bytes is another one on arrival."""

    def wrapped(tensors: list[torch.Tensor], *rest: object) -> None:
        travel(tensors, *rest)
        tensors[0].flatten().view(torch.uint8)[:1].bitwise_xor_(1)

    return wrapped


def exchange(folder: str) -> int:
    """Each process writes what it has in the end, and what it is told of a delivery that one of them receives wrong."""
    collective._BUCKET = 4000  # several, of several tensors
    with joined("cpu") as group:
        config = {"eps": 1e-5, "kernel": (3, (1, 2))}
        sent = sync.Delivery.of("full", weights(), alphas={"x": 2.0}, config=config) if group.rank == 1 else None
        sent = replace(sent, stored=True) if sent else None
        got = sync.broadcast(sent, source=1, device=group.device)
        same = all(torch.equal(got.tensors[name], tensor) for name, tensor in weights().items())
        lines = [f"{got.form} {len(got.tensors)} {same} {got.checksum == sync.checksum(weights())} {dict(got.alphas)}"]
        lines.append(f"{got.config} {got.stored}")
        if group.rank == 0:
            collective._travel = damaging(collective._travel)
        try:
            sync.broadcast(sent, source=1, device=group.device)
        except WeightsError as error:
            lines.append(str(error))
    Path(folder, str(group.rank)).write_text("\n".join(lines))
    return 0
