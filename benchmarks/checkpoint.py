"""Wan checkpoints of random weights for benchmarks: the published 1.3B, or one that a laptop runs.

    folder = build(Path("work"), REAL, device="cuda")

Weights are normal with activations of order one; none is zero. The text encoder is one small layer of the right width
unless the real one is asked for.
"""

import json
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel


@dataclass(frozen=True)
class Sizes:
    """What decides the work of a forward."""

    heads: int
    head: int
    ffn: int
    layers: int
    text: int
    encoder: dict[str, int]
    vae: dict[str, object]

    @property
    def width(self) -> int:
        return self.heads * self.head


XXL = {"vocab_size": 256384, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64}
ONE = {"vocab_size": 384, "d_kv": 64, "d_ff": 64, "num_layers": 1, "num_heads": 2}
REAL = Sizes(12, 128, 8960, 30, 4096, ONE, {})
TINY = Sizes(2, 12, 32, 2, 32, ONE | {"d_kv": 8}, {"base_dim": 3, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1})


def build(folder: Path, sizes: Sizes, device: str) -> Path:
    """Write the checkpoint, unless it is there."""
    if (folder / "model_index.json").exists():
        return folder
    torch.manual_seed(0)
    with torch.device(device):
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=sizes.heads,
            attention_head_dim=sizes.head,
            in_channels=16,
            out_channels=16,
            text_dim=sizes.text,
            freq_dim=256,
            ffn_dim=sizes.ffn,
            num_layers=sizes.layers,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
        )
        vae = AutoencoderKLWan(**sizes.vae)
        encoder = text_encoder(sizes)
    randomise(transformer)
    # stored in bfloat16 to halve the writing; Module.to, because diffusers' own keeps some layers in float32
    for module in (transformer, encoder):
        torch.nn.Module.to(module, torch.bfloat16)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = {"transformer": transformer, "vae": vae, "text_encoder": encoder, "scheduler": scheduler}
    WanPipeline(tokenizer=ByT5Tokenizer(), **parts).save_pretrained(folder)
    return folder


def with_encoder(folder: Path, base: Path, sizes: Sizes, device: str) -> Path:
    """The same checkpoint under the published text encoder (11 GB in bfloat16)."""
    if (folder / "text_encoder" / "config.json").exists():
        return folder
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("text_encoder"), copy_function=os.link)
    torch.manual_seed(1)
    with torch.device(device):
        encoder = text_encoder(sizes, XXL)
    torch.nn.Module.to(encoder, torch.bfloat16).save_pretrained(folder / "text_encoder")
    assert json.loads((folder / "model_index.json").read_text())["text_encoder"][1] == "UMT5EncoderModel"
    return folder


def text_encoder(sizes: Sizes, config: dict[str, int] | None = None) -> UMT5EncoderModel:
    """Its layers, of the width that the transformer reads."""
    chosen = sizes.encoder if config is None else config
    return UMT5EncoderModel(UMT5Config(d_model=sizes.text, feed_forward_proj="gated-gelu", **chosen)).eval()


def randomise(module: torch.nn.Module) -> None:
    """Matrices by their inputs, gains around one, everything else small."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.endswith("scale_shift_table"):
                weight.normal_(std=0.1)
            elif weight.ndim > 1:
                weight.normal_(std=1 / math.sqrt(weight[0].numel()))
            elif "norm" in name and name.endswith("weight"):
                weight.normal_(mean=1.0, std=0.1)
            else:
                weight.normal_(std=0.02)


def tokens(height: int, width: int, frames: int) -> int:
    """Of the transformer, for a video of that size."""
    return ((frames - 1) // 4 + 1) * (height // 16) * (width // 16)


def flops(sizes: Sizes, count: int, text: int = 512) -> tuple[float, float]:
    """Of a forward on so many tokens: of all its products, and of attention among them."""
    d = sizes.width
    attention = 4 * count * count * d + 4 * count * text * d
    products = 2 * d * d * (6 * count + 2 * text) + 4 * count * d * sizes.ffn
    return sizes.layers * (attention + products), sizes.layers * attention
