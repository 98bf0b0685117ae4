"""The configurations of tiny-wan's networks, and the text path exactly as diffusers' WanPipeline walks it."""

import numpy as np
import torch
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

TEXT_LENGTH = 128
LATENT_CHANNELS = 24
TRAIN_TIMESTEPS = 1000
# What the text encoder writes into the first of its hidden dimensions; the others stay zero.
PARTS = 16  # Cells of a sprite; every byte describes the one whose turn it is, counted from the end of the text.
WRITTEN_PARTS = {"whole": 64, "cell": 28, "place": 8, "motion": 10, "background": 4}
WRITTEN = sum(WRITTEN_PARTS.values())

AUTOENCODER = {
    "base_dim": 24,
    "decoder_base_dim": 48,
    "z_dim": LATENT_CHANNELS,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 8,
}

TRANSFORMER = {
    "patch_size": (1, 1, 1),
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": LATENT_CHANNELS,
    "out_channels": LATENT_CHANNELS,
    "text_dim": 160,
    "freq_dim": 128,
    "ffn_dim": 704,
    "num_layers": 7,
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
    "num_train_timesteps": TRAIN_TIMESTEPS,
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "solver_order": 2,
    "solver_type": "bh2",
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "timestep_spacing": "linspace",
}


def build_autoencoder(**overrides: object) -> AutoencoderKLWan:
    """A fresh autoencoder; the latent statistics are placeholders until they have been measured."""
    config = {"latents_mean": [0.0] * LATENT_CHANNELS, "latents_std": [1.0] * LATENT_CHANNELS} | AUTOENCODER
    return AutoencoderKLWan(**(config | overrides))


def build_transformer() -> WanTransformer3DModel:
    """A fresh transformer that starts from predicting zero velocity."""
    model = WanTransformer3DModel(**TRANSFORMER)
    for module in model.blocks.modules():
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.xavier_uniform_(module.weight)
            torch.nn.init.zeros_(module.bias)
    torch.nn.init.zeros_(model.proj_out.weight)
    torch.nn.init.zeros_(model.proj_out.bias)
    return model


def build_text_encoder() -> UMT5EncoderModel:
    """A fresh text encoder over bytes, whose heads start with two abilities that training finds only slowly.

    Three heads of every layer look one, two and three bytes back: from random attention, telling hundreds of names
    apart by their bytes stays on a plateau for very long. Two heads of each of the first two layers find the end of
    the text where its distance has a certain binary digit: together they tell a byte its place in a cycle of PARTS.
    """
    encoder = UMT5EncoderModel(UMT5Config(**TEXT_ENCODER))
    width, end = TEXT_ENCODER["d_kv"], TEXT_ENCODER["eos_token_id"]
    with torch.no_grad():
        embedding = encoder.shared.weight
        embedding[:, 0], embedding[:, 1], embedding[end, 1] = 1.0, 0.0, 4.0
        encoder.encoder.final_layer_norm.weight[WRITTEN:] = 0.0
        for depth, block in enumerate(encoder.encoder.block):
            attention = block.layer[0].SelfAttention
            attention.q.weight.mul_(0.3)
            bias = attention.relative_attention_bias.weight  # (buckets, heads); bucket n is n positions back.
            bias.zero_()
            for head in range(3):
                bias[head + 1, head] = 5.0
            for digit in {0: (0, 1), 1: (2, 3)}.get(depth, ()):
                head = 4 + digit % 2
                bias[:, head] = digit_bias(attention, digit)
                rows = slice(head * width, (head + 1) * width)
                attention.q.weight[rows] = 0.0
                attention.k.weight[rows] = 0.0
                attention.q.weight[head * width, 0] = 3.0
                attention.k.weight[head * width, 1] = 1.0
    return encoder


def digit_bias(attention: torch.nn.Module, digit: int) -> torch.Tensor:
    """A head's bias, by bucket, that shuts out all but positions ahead whose distance has this binary digit set."""
    ahead = torch.arange(1, TEXT_LENGTH)
    bias = torch.full((TEXT_ENCODER["relative_attention_num_buckets"],), -20.0)
    bias[0] = -4.0  # The byte itself, for want of such a distance.
    bias[attention._relative_position_bucket(ahead)] = torch.where((ahead >> digit) % 2 == 1, 0.0, -20.0)
    return bias


def build_tokenizer() -> ByT5Tokenizer:
    """Bytes shifted by the three special tokens; no vocabulary file is needed."""
    return ByT5Tokenizer(model_max_length=TEXT_LENGTH)


def build_scheduler(shift: float) -> UniPCMultistepScheduler:
    """The sampler's configuration with the given flow shift."""
    return UniPCMultistepScheduler(**SCHEDULER, flow_shift=shift)


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


def parameter_count(module: torch.nn.Module) -> int:
    """Number of parameters."""
    return sum(parameter.numel() for parameter in module.parameters())
