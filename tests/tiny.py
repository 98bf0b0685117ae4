"""Tiny random Wan checkpoints in Diffusers layout, made of the real classes; the pipelines that read them."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLWan,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
    WanImageToVideoPipeline,
    WanPipeline,
    WanTransformer3DModel,
    WanVideoToVideoPipeline,
)
from transformers import (
    ByT5Tokenizer,
    CLIPImageProcessor,
    CLIPVisionConfig,
    CLIPVisionModel,
    UMT5Config,
    UMT5EncoderModel,
)

KINDS = ("t2v", "i2v", "ti2v", "a14b", "a14b_i2v", "v2v")
TASKS = {"t2v": "text_to_video", "i2v": "image_to_video", "ti2v": "image_to_video", "a14b": "text_to_video",
         "a14b_i2v": "image_to_video", "v2v": "video_to_video"}  # fmt: skip
SIZE = {"height": 32, "width": 48, "num_frames": 9}


def build(folder: Path, kind: str, scheduler: str = "euler") -> Path:
    """Write the checkpoint of that kind to `folder`."""
    torch.manual_seed(KINDS.index(kind))
    image = kind in ("i2v", "a14b_i2v")
    vae = _vae22() if kind == "ti2v" else _vae21()
    latent = vae.config.z_dim
    transformers = [_transformer(latent, image, clip=kind == "i2v") for _ in range(2 if "a14b" in kind else 1)]
    parts = {
        "tokenizer": ByT5Tokenizer(),
        "text_encoder": _text_encoder(),
        "vae": vae,
        "scheduler": _scheduler(scheduler),
        "transformer": transformers[0],
    }
    if "a14b" in kind:
        parts |= {"transformer_2": transformers[1], "boundary_ratio": 0.9}
    if image or kind == "ti2v":
        clip = _clip() if kind == "i2v" else (None, None)
        cls = WanPipeline if kind == "ti2v" else WanImageToVideoPipeline
        parts |= {} if kind == "ti2v" else {"image_encoder": clip[0], "image_processor": clip[1]}
    else:
        cls = WanPipeline
    if kind == "ti2v":
        parts["expand_timesteps"] = True
    pipeline = cls(**parts)
    for module in (*transformers, vae):
        _spread(module)
    pipeline.save_pretrained(folder, safe_serialization=True)
    return folder


def reference(folder: Path, kind: str):
    """diffusers' own pipeline on the checkpoint."""
    cls = {"i2v": WanImageToVideoPipeline, "ti2v": WanImageToVideoPipeline, "a14b_i2v": WanImageToVideoPipeline,
           "v2v": WanVideoToVideoPipeline}.get(kind, WanPipeline)  # fmt: skip
    extra = {} if kind in ("i2v", "v2v", "t2v", "a14b") else {"image_encoder": None, "image_processor": None}
    pipeline = cls.from_pretrained(folder, torch_dtype=torch.float32, **extra)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _transformer(latent: int, image: bool, *, clip: bool) -> WanTransformer3DModel:
    return WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12,
        in_channels=2 * latent + 4 if image else latent, out_channels=latent, text_dim=32, freq_dim=32, ffn_dim=32,
        num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        image_dim=4 if clip else None, added_kv_proj_dim=24 if clip else None,
    )  # fmt: skip


def _vae21() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                            temperal_downsample=[False, True, True])  # fmt: skip


def _vae22() -> AutoencoderKLWan:
    return AutoencoderKLWan(
        base_dim=3, decoder_base_dim=4, z_dim=48, dim_mult=[1, 1, 1, 1], num_res_blocks=1, is_residual=True,
        temperal_downsample=[False, True, True], in_channels=12, out_channels=12, patch_size=2, scale_factor_spatial=16,
        latents_mean=[0.1 * i for i in range(48)], latents_std=[1 + 0.02 * i for i in range(48)],
    )  # fmt: skip


def _text_encoder() -> UMT5EncoderModel:
    config = UMT5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4,
                        relative_attention_num_buckets=8, feed_forward_proj="gated-gelu")  # fmt: skip
    return UMT5EncoderModel(config).eval()


def _clip() -> tuple[CLIPVisionModel, CLIPImageProcessor]:
    config = CLIPVisionConfig(
        hidden_size=4, projection_dim=4, num_hidden_layers=2, num_attention_heads=2, image_size=32,
        intermediate_size=16, patch_size=1,
    )  # fmt: skip
    return CLIPVisionModel(config).eval(), CLIPImageProcessor(crop_size=32, size=32)


def _scheduler(name: str):
    if name == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=5.0)
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0,
                                   num_train_timesteps=1000)  # fmt: skip


def _spread(module: torch.nn.Module) -> None:
    """Default initialisation leaves tiny models nearly linear; wider weights make errors visible."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim > 1 and "norm" not in name:
                parameter.mul_(1.5)
