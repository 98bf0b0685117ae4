"""Random adapters of a Wan transformer, as tensors and as files."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from diffusers import WanTransformer3DModel

from loopwright.weights import lora

ATTENTION = tuple(f"attn{n}.{part}" for n in (1, 2) for part in ("to_q", "to_k", "to_v", "to_out.0"))
EVERY = (*ATTENTION, "ffn.net.0.proj", "ffn.net.2")  # of a block


def in_blocks(parts: Iterable[str], blocks: int = 2) -> list[str]:
    """The names of these parts in every block."""
    return [f"blocks.{block}.{part}" for block in range(blocks) for part in parts]


def matrices(
    model: WanTransformer3DModel, names: Iterable[str], *, rank: int | Mapping[str, int] = 4, seed: int = 0
) -> dict[str, torch.Tensor]:
    """A and B for layers of the model, neither zero, of that rank (or rank by name)."""
    generator, out = torch.Generator().manual_seed(seed), {}
    for name in names:
        n = rank if isinstance(rank, int) else rank[name]
        rows, columns = model.get_submodule(name).weight.shape
        out[f"transformer.{name}.lora_A.weight"] = torch.randn(n, columns, generator=generator) / columns**0.5
        out[f"transformer.{name}.lora_B.weight"] = torch.randn(rows, n, generator=generator)
    return out


def written(
    path: Path, model: WanTransformer3DModel, *, alpha: float = 4, layout: str = "diffusers", seed: int = 0
) -> Path:
    """A file that adapts every layer of every block."""
    return lora.save(path, matrices(model, in_blocks(EVERY), seed=seed), alpha=alpha, layout=layout)
