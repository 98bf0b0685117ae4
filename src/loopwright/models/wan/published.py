"""The Wan checkpoints that are published, by what tells them apart: for listings and defaults, without a download.

    card = next(card for card in KNOWN if card.name == "Wan-AI/Wan2.1-T2V-1.3B-Diffusers")

Loading one reads its own configuration.
"""

from collections.abc import Mapping

from ...card import Card, Value, derive
from .card import UNIPC, Config, build


def _published(
    repo: str,
    *,
    transformer: Config,
    parameters: Mapping[str, int],
    index: Config | None = None,
    vae: Config | None = None,
    shift: float = 3.0,
    defaults: Mapping[str, Value] | None = None,
) -> Card:
    """A checkpoint by its hub name."""
    parts: dict[str, object] = {
        "tokenizer": ["transformers", "T5TokenizerFast"],
        "text_encoder": ["transformers", "UMT5EncoderModel"],
        "transformer": ["diffusers", "WanTransformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLWan"],
        "scheduler": ["diffusers", "UniPCMultistepScheduler"],
        **(index or {}),
    }
    scheduler = {"_class_name": "UniPCMultistepScheduler", "flow_shift": shift, **UNIPC}
    configs = {"transformer": transformer, "vae": vae or {}, "scheduler": scheduler, "text_encoder": {}}
    configs |= {"transformer_2": transformer} if "transformer_2" in parts else {}
    shared = {"text_encoder": 5_680_910_336, "vae": 126_892_531}
    card = build(repo, parts, configs, source=repo, parameters={**shared, **parameters})
    return derive(card, defaults={task: {**own, **(defaults or {})} for task, own in card.defaults.items()})


_TWO = {"transformer_2": ["diffusers", "WanTransformer3DModel"]}
_CLIP = {
    "image_encoder": ["transformers", "CLIPVisionModel"],
    "image_processor": ["transformers", "CLIPImageProcessor"],
}
_LARGE = {"height": 720, "width": 1280}
_WAN22_VAE = {"z_dim": 48, "scale_factor_spatial": 16, "scale_factor_temporal": 4}

KNOWN = (
    _published(
        "Wan-AI/Wan2.1-T2V-1.3B-Diffusers", transformer={"in_channels": 16}, parameters={"transformer": 1_418_996_800}
    ),
    _published(
        "Wan-AI/Wan2.1-T2V-14B-Diffusers", transformer={"in_channels": 16}, parameters={"transformer": 14_288_491_584}
    ),
    _published(
        "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers",
        transformer={"in_channels": 36, "image_dim": 1280},
        index=_CLIP,
        parameters={"transformer": 16_396_000_000, "image_encoder": 632_000_000},
    ),
    _published(
        "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
        transformer={"in_channels": 36, "image_dim": 1280},
        index=_CLIP,
        parameters={"transformer": 16_396_000_000, "image_encoder": 632_000_000},
        shift=5.0,
        defaults=_LARGE,
    ),
    _published(
        "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        transformer={"in_channels": 48},
        index={"expand_timesteps": True},
        vae=_WAN22_VAE,
        parameters={"transformer": 4_999_787_712, "vae": 704_000_000},
        shift=5.0,
        defaults={"height": 704, "width": 1280, "num_frames": 121, "fps": 24},
    ),
    _published(
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers",
        transformer={"in_channels": 16},
        index={**_TWO, "boundary_ratio": 0.875},
        parameters={"transformer": 14_288_491_584, "transformer_2": 14_288_491_584},
    ),
    _published(
        "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
        transformer={"in_channels": 36},
        index={**_TWO, "boundary_ratio": 0.9},
        parameters={"transformer": 14_288_901_184, "transformer_2": 14_288_901_184},
    ),
)
