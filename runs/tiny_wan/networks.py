"""The configurations of tiny-wan, fresh networks, and the text path exactly as diffusers' WanPipeline walks it."""

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import WanCausalConv3d, WanResample
from safetensors.torch import load_file
from torch import nn
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

TEXT_LENGTH = 96  # the longest caption has 91 bytes
LATENT_CHANNELS = 16
FLOW_SHIFT = 3.0
TEXT_FILE = Path(__file__).parent / "text_encoder.safetensors"
# What the text encoder writes into the first of its hidden dimensions; the others stay zero.
WRITTEN_PARTS = {"whole": 64, "cell": 28, "place": 8, "motion": 10, "background": 4}
WRITTEN = sum(WRITTEN_PARTS.values())

# No patches: latents of a quarter of the size, which the transformer's patches of 2x2 turn into 8x8 tokens a frame.
AUTOENCODER = {
    "base_dim": 16,
    "decoder_base_dim": 32,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [True, True],
    "is_residual": True,
    "in_channels": 3,
    "out_channels": 3,
    "patch_size": None,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 4,
}

# Patches of 2x2, which Wan2.2's timesteps per token are made for.
TRANSFORMER = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 5,
    "attention_head_dim": 64,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": 160,
    "freq_dim": 128,
    "ffn_dim": 1024,
    "num_layers": 6,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}

TEXT_ENCODER = {
    "vocab_size": 384,
    "d_model": 160,
    "d_kv": 40,
    "num_heads": 6,
    "d_ff": 320,
    "num_layers": 4,
    "relative_attention_num_buckets": 256,  # One for every distance below 64, either way.
    "relative_attention_max_distance": 128,
    "dropout_rate": 0.0,
    "feed_forward_proj": "gated-gelu",
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}

# What Wan2.1's checkpoints ship, with this model's own shift.
SCHEDULER = {
    "num_train_timesteps": 1000,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "timestep_spacing": "linspace",
    "flow_shift": FLOW_SHIFT,
}


def build_autoencoder() -> AutoencoderKLWan:
    """A fresh autoencoder; the latent statistics are placeholders until they have been measured.

    It begins with little latent noise: the default would be as large as the signal.
    """
    statistics = {"latents_mean": [0.0] * LATENT_CHANNELS, "latents_std": [1.0] * LATENT_CHANNELS}
    vae = AutoencoderKLWan(**AUTOENCODER, **statistics)
    with torch.no_grad():
        vae.quant_conv.bias[LATENT_CHANNELS:] = -5.0
    return vae


@torch.no_grad()
def start_temporal_layers_as_copies(vae: AutoencoderKLWan) -> None:
    """Make the temporal layers pass frames through, so that a network trained on single frames starts clips well.

    Kernels look at the current frame alone, time is halved by keeping every second frame, and doubled by repeating.
    """
    for module in vae.modules():
        if isinstance(module, WanCausalConv3d) and module.kernel_size == (3, 3, 3):
            module.weight[:, :, :2] = 0
        if isinstance(module, WanResample) and hasattr(module, "time_conv"):
            weight = module.time_conv.weight
            identity = torch.eye(module.dim, device=weight.device)
            weight.zero_()
            for part in range(weight.shape[0] // module.dim):
                weight[part * module.dim : (part + 1) * module.dim, :, -1, 0, 0] = identity
            module.time_conv.bias.zero_()


def build_transformer() -> WanTransformer3DModel:
    """A fresh transformer that starts from predicting zero velocity."""
    model = WanTransformer3DModel(**TRANSFORMER)
    for module in model.blocks.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    nn.init.zeros_(model.proj_out.weight)
    nn.init.zeros_(model.proj_out.bias)
    return model


def load_text_encoder(path: Path = TEXT_FILE) -> UMT5EncoderModel:
    """A stored text encoder, frozen and in float32."""
    encoder = UMT5EncoderModel(UMT5Config(**TEXT_ENCODER))
    missing, unexpected = encoder.load_state_dict(load_file(path), strict=False)
    if unexpected or set(missing) - {"encoder.embed_tokens.weight"}:
        raise ValueError(f"{path}: not this text encoder, {missing} missing, {unexpected} unexpected")
    return encoder.float().requires_grad_(False).eval()


def build_tokenizer() -> ByT5Tokenizer:
    """Bytes shifted by the three special tokens; no vocabulary file is needed."""
    return ByT5Tokenizer(model_max_length=TEXT_LENGTH)


def build_scheduler() -> UniPCMultistepScheduler:
    """The sampler's configuration."""
    return UniPCMultistepScheduler(**SCHEDULER)


def byte_ids(texts: list[str]) -> torch.Tensor:
    """What ByT5Tokenizer makes of `texts`, end token included, padded to TEXT_LENGTH: (count, TEXT_LENGTH), int16."""
    # Byte 254 occurs in no UTF-8 text, nor does a zero byte in these captions: they stand for end and padding.
    rows = b"".join((text.encode()[: TEXT_LENGTH - 1] + b"\xfe").ljust(TEXT_LENGTH, b"\0") for text in texts)
    table = np.frombuffer(rows, dtype=np.uint8).reshape(len(texts), TEXT_LENGTH).astype(np.int16)
    return torch.from_numpy(np.where(table == 0, 0, np.where(table == 0xFE, 1, table + 3)).astype(np.int16))


def encode_text(encoder: UMT5EncoderModel, ids: torch.Tensor) -> torch.Tensor:
    """Hidden states with zeros past each prompt's end."""
    mask = (ids != 0).long()
    return encoder(ids, mask).last_hidden_state * mask.unsqueeze(-1)
