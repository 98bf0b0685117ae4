"""Write the folder that a run starts from: a whole pipeline, some of it trained and the rest fresh.

    python start.py --output state/fresh                                                     # autoencoder_frames.py
    python start.py --autoencoder state/frames/model-ema --still --output state/clips_start          # autoencoder.py
    python start.py --autoencoder state/clips_1/model-ema --keep --output state/clips_start          # the same, again
    python start.py --autoencoder state/clips/model-ema --sprites sprites.npz --output state/start  # text_to_video.py

With --still the temporal layers begin as copies, so that clips begin where single frames ended; with --keep all goes on
as it was; without either a trained autoencoder is rounded to what ships. With --sprites the latents' statistics are
measured on training clips. --transformer names a folder of weights to go on from, as average.py writes it.
"""

import argparse
import json
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
from feeds import clips
from networks import (
    build_autoencoder,
    build_scheduler,
    build_tokenizer,
    build_transformer,
    load_text_encoder,
    start_temporal_layers_as_copies,
)
from torch import nn

from loopwright.models.wan.whole_clip import WholeClip

MEASURED, MEASURED_BATCH = 20, 100


def autoencoder_of(folder: Path | None, still: bool) -> AutoencoderKLWan:
    """A fresh autoencoder, or a trained one, in float32."""
    vae = build_autoencoder()
    if folder is not None:
        vae = AutoencoderKLWan.from_pretrained(folder / "vae", torch_dtype=torch.float32)
    if still:
        start_temporal_layers_as_copies(vae)
    return vae


@torch.no_grad()
def measure(vae: AutoencoderKLWan, sprites: Path, device: torch.device, batches: int) -> None:
    """Put each latent channel's mean and deviation over training clips into the configuration."""
    source, generator = clips(device, str(sprites)), torch.Generator(device).manual_seed(2)
    videos = (source.batch(step, MEASURED_BATCH, generator)["video"] for step in range(batches))
    clip = WholeClip(vae.to(device))
    sample = torch.cat([clip.encode(video)[0].transpose(0, 1).flatten(1).cpu() for video in videos], dim=1)
    vae.register_to_config(latents_mean=sample.mean(dim=1).tolist(), latents_std=sample.std(dim=1).tolist())
    vae.cpu()


def write(output: Path, vae: AutoencoderKLWan, transformer: WanTransformer3DModel) -> None:
    """The pipeline. Timesteps are per token, so one transformer also takes a first frame."""
    parts = {"vae": vae, "transformer": transformer, "text_encoder": load_text_encoder().bfloat16()}
    pipeline = WanPipeline(**parts, tokenizer=build_tokenizer(), scheduler=build_scheduler(), expand_timesteps=True)
    pipeline.save_pretrained(output, safe_serialization=True)
    for part in ("vae", "transformer"):  # what was read leaves the folder it came from in here
        config = output / part / "config.json"
        values = {name: value for name, value in json.loads(config.read_text()).items() if name != "_name_or_path"}
        config.write_text(json.dumps(values, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--autoencoder", type=Path)
    parser.add_argument("--still", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--sprites", type=Path)
    parser.add_argument("--transformer", type=Path)
    parser.add_argument("--measured", type=int, default=MEASURED, help="batches of 100 clips")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    vae = autoencoder_of(args.autoencoder, args.still)
    if args.autoencoder and not (args.still or args.keep):
        nn.Module.to(vae, torch.bfloat16)  # and measured as it ships
        if args.sprites:
            measure(vae.float(), args.sprites, torch.device(args.device), args.measured)
            nn.Module.to(vae, torch.bfloat16)
    transformer = build_transformer()
    if args.transformer:
        transformer = WanTransformer3DModel.from_pretrained(args.transformer / "transformer", torch_dtype=torch.float32)
    write(args.output, vae, transformer)


if __name__ == "__main__":
    main()
