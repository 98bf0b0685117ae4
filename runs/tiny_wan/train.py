"""Train tiny-wan: the autoencoder, the text encoder, then the transformer on cached outputs of both.

    python train.py autoencoder   --sprites sprites.npz --state state
    python train.py text          --sprites sprites.npz --state state --device cpu
    python train.py text-to-video --sprites sprites.npz --state state

The last stage also runs on several GPUs under `torchrun --nproc-per-node N train.py text-to-video ...`.

Each stage is scheduled in seconds of training (learning rates follow the clock, so a budget is always used up
well), and `--limit` bounds one process: when it is reached, weights, averages and optimiser go to the state
folder and the same command continues from there. What the last stage keeps are four files below 14 MB.
"""

import argparse
import math
import os
import random
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.nn.functional as F
from clips import (
    BACKGROUNDS,
    FRAMES,
    GRID,
    MOTIONS,
    SIZE,
    Sprites,
    background_table,
    caption,
    compose_clips,
    compose_frames,
    draw,
    image_caption,
    split_triples,
)
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from fast_autoencoder import FastAutoencoder, start_temporal_layers_as_copies
from networks import (
    PARTS,
    TEXT_LENGTH,
    TRAIN_TIMESTEPS,
    WRITTEN,
    WRITTEN_PARTS,
    build_autoencoder,
    build_text_encoder,
    build_transformer,
    byte_ids,
    encode_text,
)
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed, nn
from transformers import UMT5EncoderModel

SPRITE_WEIGHT = 4.0  # A sprite covers a tenth of a frame and holds all of its detail.
GRADIENT_WEIGHT = 0.5
KL_WEIGHT = 5e-5
TEXT_ENCODER_FILE = "text_encoder.safetensors"
NAME_WEIGHT = 1.0
CAPTION_DROPOUT = 0.1
ONE_FRAME_SHARE = 0.1
CAPTION_VARIANTS = 4
SIGMA_SHIFT = 3.0
SYNC_STEPS = 20  # Between two agreements of parallel processes on how far they are.
LOG_SECONDS = 15.0


class Budget:
    """The seconds a stage has used, those it may use in all, and those this process may use."""

    def __init__(self, total: float, used: float, deadline: float) -> None:
        self.total, self.used, self.deadline = total, used, deadline
        self._last = time.monotonic()

    def tick(self) -> float:
        """Count the time since the last tick; returns the share of the stage that is done."""
        now = time.monotonic()
        self.used += now - self._last
        self._last = now
        return min(1.0, self.used / max(self.total, 1e-6))

    @property
    def finished(self) -> bool:
        return self.used >= self.total

    @property
    def exhausted(self) -> bool:
        return self.finished or time.monotonic() >= self.deadline


class Average:
    """Exponential moving average of parameters, with a window that starts short."""

    def __init__(self, parameters: Iterable[nn.Parameter], decay: float) -> None:
        self.parameters = list(parameters)
        self.values = [parameter.detach().clone() for parameter in self.parameters]
        self.decay, self.steps = decay, 0

    @torch.no_grad()
    def update(self) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.values, [parameter.detach() for parameter in self.parameters], 1 - decay)

    @torch.no_grad()
    def swap(self) -> None:
        """Exchange the averaged and the current values; call it again to undo."""
        for parameter, value in zip(self.parameters, self.values, strict=True):
            current = parameter.detach().clone()
            parameter.copy_(value)
            value.copy_(current)

    def state_dict(self) -> dict[str, object]:
        return {"values": self.values, "steps": self.steps}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.steps = state["steps"]
        with torch.no_grad():
            for value, saved in zip(self.values, state["values"], strict=True):
                value.copy_(saved)


def learning_rate(peak: float, share: float, step: int, warmup: int, floor: float = 0.02) -> float:
    """Linear warmup in steps, then a cosine over the stage's seconds."""
    cosine = floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share))
    return peak * cosine * min(1.0, (step + 1) / warmup)


def make_optimizer(parameters: Iterable[nn.Parameter], device: torch.device, decay: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        parameters, lr=1e-3, betas=(0.9, 0.99), eps=1e-8, weight_decay=decay, fused=device.type == "cuda"
    )


def optimizer_step(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter], rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def autocast(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def save(path: Path, state: dict[str, object]) -> None:
    """Write beside the target and rename, so that an interrupted save leaves the old state."""
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, path.with_suffix(".part"))
    path.with_suffix(".part").replace(path)


def say(message: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {message}", flush=True)


# --- autoencoder ---------------------------------------------------------------------------------------------------


def reconstruction_loss(output: torch.Tensor, video: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    """Absolute and squared error with the sprite weighted up, and the error of spatial differences."""
    halo = F.max_pool3d(alpha, (1, 3, 3), 1, (0, 1, 1))
    weight = 1 + (SPRITE_WEIGHT - 1) * halo
    error = output - video
    loss = (weight * (0.5 * error.abs() + 4 * error.square())).mean()
    across = (error[..., 1:] - error[..., :-1]).abs() * weight[..., 1:]
    along = (error[..., 1:, :] - error[..., :-1, :]).abs() * weight[..., 1:, :]
    return loss + GRADIENT_WEIGHT * (across.mean() + along.mean())


def autoencoder_loss(fast: FastAutoencoder, video: torch.Tensor, alpha: torch.Tensor) -> torch.Tensor:
    with autocast(video.device):
        mean, log_variance = fast.encode(video)
        mean, log_variance = mean.float(), log_variance.float()
        latents = mean + (0.5 * log_variance).exp() * torch.randn_like(mean)
        output = fast.decode(latents)
    kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
    return reconstruction_loss(output.float(), video, alpha) + KL_WEIGHT * kl


@torch.no_grad()
def autoencoder_quality(
    fast: FastAutoencoder, sprites: Sprites, triples: torch.Tensor, frames: bool, count: int
) -> tuple[float, float]:
    """PSNR in dB over all pixels and over the sprite's pixels, on held-out clips or frames."""
    generator = torch.Generator(triples.device).manual_seed(1)
    compose = compose_frames if frames else compose_clips
    total, inside, pixels, covered = 0.0, 0.0, 0.0, 0.0
    for chunk in triples[:count].split(128):
        video, alpha = compose(sprites, chunk, generator)
        with autocast(video.device):
            output = fast.decode(fast.encode(video)[0].float()).float().clamp(-1, 1)
        error = ((output - video) / 2).square()
        mask = (alpha > 0.5).expand_as(error)
        total, pixels = total + error.sum().item(), pixels + error.numel()
        inside, covered = inside + error[mask].sum().item(), covered + mask.sum().item()
    return -10 * math.log10(total / pixels), -10 * math.log10(inside / covered)


def train_autoencoder(args: argparse.Namespace, sprites: Sprites, device: torch.device) -> None:
    """Single frames first (cheap, and they teach the drawings), then clips."""
    path = args.state / "autoencoder.pt"
    training, held_out = (part.to(device) for part in split_triples(sprites.names))
    held_out = held_out[torch.randperm(len(held_out), generator=torch.Generator().manual_seed(0)).to(device)]
    vae = build_autoencoder().to(device)
    with torch.no_grad():  # Start with little latent noise: the default would be as large as the signal.
        vae.quant_conv.bias[vae.config.z_dim :] = -5.0
    fast = FastAutoencoder(vae, compile_norms=args.compile)
    plain = FastAutoencoder(vae)  # Measuring has other batch sizes, each of which would be compiled anew.
    parameters = list(vae.parameters())
    optimizer = make_optimizer(parameters, device, 0.0)
    average = Average(parameters, args.autoencoder_average)
    state = {"phase": "frames", "used": 0.0, "step": 0}
    if path.exists():
        saved = torch.load(path, map_location=device, weights_only=True)
        vae.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        average.load_state_dict(saved["average"])
        state = saved["progress"]

    deadline = time.monotonic() + args.limit
    plan = {
        "frames": (args.frame_seconds, args.frame_batch, compose_frames, args.frame_rate),
        "clips": (args.clip_seconds, args.clip_batch, compose_clips, args.clip_rate),
    }
    for phase, (seconds, batch, compose, peak) in plan.items():
        if list(plan).index(phase) < list(plan).index(state["phase"]):
            continue
        if phase != state["phase"]:
            state = {"phase": phase, "used": 0.0, "step": 0}
            start_temporal_layers_as_copies(vae)
            optimizer = make_optimizer(parameters, device, 0.0)
            average = Average(parameters, args.autoencoder_average)
        budget = Budget(seconds, state["used"], deadline)
        logged, since, running = time.monotonic(), state["step"], torch.zeros((), device=device)
        # Fade the learning rate of the first phase less: the second goes on from it.
        floor = 0.15 if phase == "frames" else 0.01
        while not budget.exhausted:
            triples = training[torch.randint(len(training), (batch,), device=device)]
            loss = autoencoder_loss(fast, *compose(sprites, triples))
            loss.backward()
            rate = learning_rate(peak, budget.tick(), state["step"], 100, floor)
            optimizer_step(optimizer, parameters, rate)
            average.update()
            running += loss.detach()
            state["step"] += 1
            if time.monotonic() - logged > args.log_seconds:
                mean_loss = running.item() / (state["step"] - since)
                quality = autoencoder_quality(plain, sprites, held_out, phase == "frames", 128)
                say(
                    f"{phase} {budget.used:.0f} s step {state['step']} lr {rate:.1e} loss {mean_loss:.4f} "
                    f"held-out {quality[0]:.2f} dB, sprite {quality[1]:.2f} dB"
                )
                logged, since, running = time.monotonic(), state["step"], torch.zeros((), device=device)
        budget.tick()
        state["used"] = budget.used
        average.swap()
        quality = autoencoder_quality(plain, sprites, held_out, phase == "frames", args.quality_clips)
        average.swap()
        say(f"{phase} at {budget.used:.0f} s, averaged weights: {quality[0]:.2f} dB, sprite {quality[1]:.2f} dB")
        if not budget.finished:
            break
        if phase == "frames" and seconds > 0:  # The averaged weights are the better start for the clips.
            average.swap()
    save(
        path,
        {
            "model": vae.state_dict(),
            "average": average.state_dict(),
            "optimizer": optimizer.state_dict(),
            "progress": state,
        },
    )


def trained_autoencoder(state: Path, warm_start: Path | None, device: torch.device) -> AutoencoderKLWan:
    """The trained autoencoder as it ships: averaged weights rounded to bfloat16, here held in float32."""
    path = state / "autoencoder.pt"
    if not path.exists() and warm_start:
        return AutoencoderKLWan.from_pretrained(warm_start / "vae", torch_dtype=torch.float32).to(device).eval()
    saved = torch.load(path, map_location=device, weights_only=True)
    vae = build_autoencoder().to(device)
    vae.load_state_dict(saved["model"])
    with torch.no_grad():
        for parameter, value in zip(vae.parameters(), saved["average"]["values"], strict=True):
            parameter.copy_(value.bfloat16())
    return vae.eval()


# --- latents -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def encode_clips(
    args: argparse.Namespace, vae: AutoencoderKLWan, sprites: Sprites, training: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of random training clips (half precision, not normalised) and the row of each clip's triple."""
    fast = FastAutoencoder(vae)
    latents, rows = [], []
    started = time.monotonic()
    for _ in range(math.ceil(args.clips / args.encode_batch)):
        row = torch.randint(len(training), (args.encode_batch,), device=training.device)
        video, _ = compose_clips(sprites, training[row])
        with autocast(training.device):
            mean, _ = fast.encode(video)
        latents.append(mean.half())
        rows.append(row)
    say(f"encoded {args.clips} clips in {time.monotonic() - started:.0f} s")
    return torch.cat(latents), torch.cat(rows)


def normalise(latents: torch.Tensor, vae: AutoencoderKLWan, path: Path) -> torch.Tensor:
    """Bring every channel to mean 0 and deviation 1, as the pipeline will assume; the statistics go to `path`.

    An autoencoder that comes with statistics keeps them: a transformer trained with it expects them.
    """
    if any(value != 1.0 for value in vae.config.latents_std):
        mean, std = (torch.tensor(value) for value in (vae.config.latents_mean, vae.config.latents_std))
    else:
        sample = latents[:20_000].float().transpose(0, 1).flatten(1)
        mean, std = sample.mean(dim=1).cpu(), sample.std(dim=1).cpu()
    save(path, {"mean": mean, "std": std})
    mean, std = (value.view(-1, 1, 1, 1).to(latents.device) for value in (mean, std))
    for chunk in latents.split(10_000):
        chunk.copy_((chunk.float() - mean) / std)
    return latents


# --- text encoder --------------------------------------------------------------------------------------------------


def sample_captions(
    names: list[str], triples: torch.Tensor, count: int, rng: random.Random
) -> tuple[list[str], torch.Tensor]:
    """Captions as people put them and what they say: indices of sprite, motion and background (or 'unsaid')."""
    backgrounds = list(BACKGROUNDS)
    texts, said = [], []
    for row in rng.choices(range(len(triples)), k=count):
        sprite, motion, background = triples[row].tolist()
        name, tone = names[sprite], backgrounds[background]
        if rng.random() < 0.1:
            texts.append(image_caption(name, tone, rng))
            said.append((sprite, len(MOTIONS), background))
        else:
            texts.append(caption(name, MOTIONS[motion], tone, rng))
            unsaid = f" {tone} " not in f" {texts[-1].lower()} ".replace(",", " ").replace(".", " ")
            said.append((sprite, motion, len(BACKGROUNDS) if unsaid else background))
    return texts, torch.tensor(said)


def similar_captions(
    names: list[str], triples: torch.Tensor, count: int, rng: random.Random
) -> tuple[list[str], torch.Tensor]:
    """Captions of much the same length, so that little of a batch is padding."""
    texts, said = sample_captions(names, triples, 8 * count, rng)
    order = sorted(range(len(texts)), key=lambda row: len(texts[row]))
    start = rng.randrange(len(texts) - count + 1)
    rows = order[start : start + count]
    return [texts[row] for row in rows], said[rows]


def trimmed_ids(texts: list[str], device: torch.device) -> torch.Tensor:
    """Byte ids up to the longest text."""
    ids = byte_ids(texts).to(device).long()
    return ids[:, : int((ids != 0).sum(dim=1).max())]


@torch.no_grad()
def sprite_codes(vae: AutoencoderKLWan, sprites: Sprites) -> tuple[torch.Tensor, torch.Tensor, float]:
    """What the text encoder shall say of every sprite, and the share of variance that the first part keeps.

    Each sprite is drawn on mid-gray so that it covers 4x4 cells of the autoencoder. The first part holds principal
    components of its latents, (sprites, whole); the second each cell's latents and the coverage of its quarters,
    (sprites, PARTS, cell). Sprites that look alike have codes that are alike.
    """
    count, device = len(sprites.names), sprites.images.device
    middle, side = torch.full((count,), SIZE / 2, device=device), torch.full((count,), 32.0, device=device)
    gray = torch.full((count, 3), 0.5, device=device)
    picture, alpha = draw(sprites.images, gray, middle, middle, side, torch.zeros_like(middle))
    cells = slice(SIZE // GRID // 2 - 2, SIZE // GRID // 2 + 2)
    latents = torch.cat([FastAutoencoder(vae).encode(part)[0] for part in (picture * 2 - 1).unsqueeze(2).split(64)])
    latents = latents[:, :, 0, cells, cells].float()
    latents = (latents - latents.mean(dim=(0, 2, 3), keepdim=True)) / latents.std(dim=(0, 2, 3), keepdim=True)
    coverage = F.avg_pool2d(alpha, GRID // 2).unflatten(2, (-1, 2)).unflatten(4, (-1, 2))
    coverage = (coverage[:, 0, cells, :, cells] * 2 - 1).permute(0, 1, 3, 2, 4)
    patches = torch.cat([latents.permute(0, 2, 3, 1).flatten(1, 2), coverage.flatten(3).flatten(1, 2)], dim=-1)

    flat = latents.flatten(1) - latents.flatten(1).mean(dim=0)
    _, scale, directions = torch.linalg.svd(flat, full_matrices=False)
    kept = WRITTEN_PARTS["whole"]
    whole = flat @ directions[:kept].T
    deviation = whole.std(dim=0)
    whole = whole / (deviation * deviation.mean()).sqrt()  # Half way to equal weights: the last ones are mostly noise.
    return whole, patches, (scale[:kept].square().sum() / scale.square().sum()).item()


class Describer:
    """Compares the text encoder's hidden states with what they shall say of sprite, motion and background."""

    def __init__(self, whole: torch.Tensor, patches: torch.Tensor) -> None:
        device = whole.device
        # A caption without a sprite, a motion or a background gets the last row of each table: zeros.
        self.whole, self.patches = F.pad(whole, (0, 0, 0, 1)), F.pad(patches, (0, 0, 0, 0, 0, 1))
        self.motion = F.pad(torch.eye(len(MOTIONS), device=device), (0, 1, 0, 1)) * 2
        self.motion[-1, -1] = 2.0
        self.background = F.pad(background_table(device) * 3 - 1.5, (0, 1, 0, 1))
        self.background[-1, -1] = 2.0
        cell = torch.arange(PARTS, device=device)
        self.place = torch.cat([F.one_hot(cell // 4, 4), F.one_hot(cell % 4, 4)], dim=-1).float() * 1.5

    def targets(self, real: torch.Tensor, said: torch.Tensor) -> list[torch.Tensor]:
        """Each part of the hidden states, (texts, bytes, width), for texts that name the rows `said`."""
        length = real.shape[1]
        from_end = real.sum(dim=1, keepdim=True) - 1 - torch.arange(length, device=real.device)
        part = from_end % PARTS
        sprite, motion, background = (column.unsqueeze(1).expand(-1, length) for column in said.unbind(dim=1))
        return [
            self.whole[sprite],
            self.patches[sprite, part],
            self.place[part],
            self.motion[motion],
            self.background[background],
        ]

    def nearest(self, hidden: torch.Tensor) -> torch.Tensor:
        """Negative squared distance to each sprite's code."""
        return -torch.cdist(hidden[..., : self.whole.shape[1]], self.whole[:-1]).square()


def train_text_encoder(args: argparse.Namespace, sprites: Sprites, device: torch.device) -> None:
    """Teach the text encoder to describe, at every byte of a caption, what the sprite that it names looks like.

    The diffusion loss alone teaches a byte-level encoder hundreds of names far too slowly, and a transformer that is
    told only which of hundreds of names it is has to learn each drawing by heart. So this stage teaches names on
    their own, cheaply, and what they stand for: codes made from the autoencoder's latents. The encoder then stays
    frozen.
    """
    training, held_out = split_triples(sprites.names)
    encoder = build_text_encoder().to(device)
    whole, patches, kept = sprite_codes(trained_autoencoder(args.state, args.warm_start, device), sprites)
    say(f"codes of {whole.shape[1]} numbers keep {kept:.3f} of the variance")
    describer = Describer(whole, patches)
    path = args.state / TEXT_ENCODER_FILE
    if path.exists():  # A second run refines the first.
        encoder.load_state_dict(load_file(path), strict=False)
    final = encoder.encoder.final_layer_norm.weight
    parameters = list(encoder.parameters())
    optimizer = make_optimizer(parameters, device, 0.0)
    average = Average(parameters, 0.99)
    budget = Budget(args.text_seconds, 0.0, time.monotonic() + args.limit)
    rng, step, logged = random.Random(time.time()), 0, time.monotonic()
    sizes = list(WRITTEN_PARTS.values())
    nothing = torch.tensor([[len(sprites.names), len(MOTIONS), len(BACKGROUNDS)]])

    def described(texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = trimmed_ids(texts, device)
        return encode_text(encoder, ids), ids != 0

    @torch.no_grad()
    def quality() -> str:
        """On captions of unseen combinations, put as training puts them: right at each byte, and by their mean."""
        texts, said = sample_captions(sprites.names, held_out, 400, random.Random(0))
        hidden, real = described(texts)
        said = said.to(device)
        right = (describer.nearest(hidden).argmax(dim=-1) == said[:, :1])[real].float().mean().item()
        mean = hidden.sum(dim=1) / real.sum(dim=1, keepdim=True)
        together = (describer.nearest(mean).argmax(dim=-1) == said[:, 0]).float().mean().item()
        errors = {
            name: round(((part - target)[real].square().mean() / target[real].var()).item(), 3)
            for name, part, target in zip(
                WRITTEN_PARTS,
                hidden[..., :WRITTEN].split(sizes, dim=-1),
                describer.targets(real, said),
                strict=True,
            )
        }
        return f"sprite right at {right:.4f} of bytes, by mean {together:.4f}; relative error {errors}"

    while not budget.exhausted:
        texts, said = similar_captions(sprites.names, training, args.text_batch, rng)
        hidden, real = described([*texts, ""])
        said = torch.cat([said, nothing]).to(device)
        parts = hidden[..., :WRITTEN].split(sizes, dim=-1)
        loss = sum(
            (part - target)[real].square().mean()
            for part, target in zip(parts, describer.targets(real, said), strict=True)
        )
        named = real.clone()
        named[-1] = False
        sprite = said[:, :1].expand_as(real)[named]
        loss = loss + NAME_WEIGHT * F.cross_entropy(describer.nearest(hidden[named]) / 8, sprite)
        loss.backward()
        final.grad[WRITTEN:] = 0.0  # The other dimensions are there to think in.
        optimizer_step(optimizer, parameters, learning_rate(args.text_rate, budget.tick(), step, 50))
        average.update()
        step += 1
        if time.monotonic() - logged > args.log_seconds:
            say(f"{budget.used:.0f} s step {step} loss {loss.item():.3f} {quality()}")
            logged = time.monotonic()
    average.swap()
    say(f"stopped at step {step}, averaged weights: {quality()}")
    args.state.mkdir(parents=True, exist_ok=True)
    weights = {name: value.bfloat16().cpu().contiguous() for name, value in encoder.state_dict().items()}
    weights.pop("encoder.embed_tokens.weight", None)  # The same tensor as `shared`.
    save_file(weights, path)


# --- text to video -------------------------------------------------------------------------------------------------


@torch.no_grad()
def caption_states(
    encoder: UMT5EncoderModel, names: list[str], triples: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states of several captions for each triple, for clips and for single frames, and of the empty one.

    The encoder is frozen, so that this is done once: (triples, variants, longest caption, width) in half precision.
    """
    rng = random.Random(0)
    backgrounds = list(BACKGROUNDS)
    clips, images = [], []
    for sprite, motion, background in triples.tolist():
        name, tone = names[sprite], backgrounds[background]
        clips += [caption(name, MOTIONS[motion], tone, rng) for _ in range(CAPTION_VARIANTS)]
        images += [image_caption(name, tone, rng), caption(name, MOTIONS[motion], tone)]
    tables = [byte_ids(clips), byte_ids(images), byte_ids([""])]
    width = max(int((table != 0).sum(dim=-1).max()) for table in tables)
    states = []
    for table in tables:
        parts = [
            encode_text(encoder, part.to(device).long()[:, :width]).to(torch.bfloat16) for part in table.split(1000)
        ]
        states.append(torch.cat(parts))
    return states[0].unflatten(0, (len(triples), -1)), states[1].unflatten(0, (len(triples), -1)), states[2]


def sample_sigma(batch: int, device: torch.device) -> torch.Tensor:
    """Noise levels: half logit-normal, half uniform, pushed towards noise, where only the prompt can tell."""
    normal = torch.randn(batch, device=device).sigmoid()
    uniform = torch.rand(batch, device=device)
    sigma = torch.where(torch.rand(batch, device=device) < 0.5, normal, uniform)
    return SIGMA_SHIFT * sigma / (1 + (SIGMA_SHIFT - 1) * sigma)


def velocity_loss(transformer: nn.Module, latents: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """Flow matching as WanPipeline samples it: x_s = (1 - s) x0 + s eps, target eps - x0, timestep 1000 s."""
    sigma = sample_sigma(len(latents), latents.device)
    noise = torch.randn_like(latents)
    level = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * latents + level * noise
    # Like the pipeline, hand over zeros past a prompt's end and let the transformer attend to them.
    text = F.pad(text, (0, 0, 0, TEXT_LENGTH - text.shape[1]))
    with autocast(latents.device):
        velocity = transformer(noisy, sigma * TRAIN_TIMESTEPS, text, return_dict=False)[0]
    return F.mse_loss(velocity.float(), noise - latents)


def average_gradients(parameters: list[nn.Parameter]) -> None:
    """Mean of the gradients over all processes, in one message."""
    gradients = [parameter.grad for parameter in parameters]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    flat /= distributed.get_world_size()
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def agreed(values: list[float], device: torch.device) -> list[float]:
    """The first process's values, for all: their clocks differ."""
    message = torch.tensor(values, device=device, dtype=torch.float64)
    distributed.broadcast(message, 0)
    return message.tolist()


@torch.no_grad()
def start_from(transformer: nn.Module, folder: Path) -> None:
    """Take over a trained transformer, except how it reads the text: that text encoder said other things."""
    trained = WanTransformer3DModel.from_pretrained(folder / "transformer", torch_dtype=torch.float32).state_dict()
    kept = {name: value for name, value in trained.items() if "text_embedder" not in name and ".attn2." not in name}
    transformer.load_state_dict(kept, strict=False)
    for block in transformer.blocks:
        nn.init.zeros_(block.attn2.to_out[0].weight)


def progress_file(state: Path, part: str) -> Path:
    """One of the four files, below 14 MB each, that hold the text-to-video stage: weights, average, first, second."""
    return state / f"text_to_video-{part}.safetensors"


@torch.no_grad()
def save_progress(
    state: Path, transformer: nn.Module, optimizer: torch.optim.Optimizer, average: Average, used: float, step: int
) -> None:
    """Weights, their average and the optimiser's two moments, all in bfloat16, so that they travel in small files."""
    names = [name for name, _ in transformer.named_parameters()]
    parameters = list(transformer.parameters())
    parts = {
        "first": [optimizer.state[parameter]["exp_avg"] for parameter in parameters],
        # Stored as roots, which bfloat16 holds as precisely as the step needs them.
        "second": [optimizer.state[parameter]["exp_avg_sq"].sqrt() for parameter in parameters],
        "average": average.values,
        "weights": parameters,  # Last, and with the step: without it, the others are not looked at.
    }
    progress = {"used": str(used), "step": str(step), "averaged": str(average.steps)}
    state.mkdir(parents=True, exist_ok=True)
    for part, values in parts.items():
        path = progress_file(state, part)
        tensors = {n: value.detach().bfloat16().cpu().contiguous() for n, value in zip(names, values, strict=True)}
        save_file(tensors, path.with_suffix(".part"), metadata=progress)
        path.with_suffix(".part").replace(path)


@torch.no_grad()
def load_progress(
    state: Path, transformer: nn.Module, optimizer: torch.optim.Optimizer, average: Average
) -> tuple[float, int]:
    """Continue from a state folder; returns the seconds used and the step, or zeros where there is none.

    Where only the optimiser's moments are missing, they start afresh.
    """
    if not progress_file(state, "weights").exists():
        return 0.0, 0
    with safe_open(progress_file(state, "weights"), "pt") as file:
        progress = file.metadata()
    step = int(progress["step"])
    weights, averages = load_file(progress_file(state, "weights")), load_file(progress_file(state, "average"))
    for (name, parameter), value in zip(transformer.named_parameters(), average.values, strict=True):
        parameter.copy_(weights[name])
        value.copy_(averages[name])
    if all(progress_file(state, part).exists() for part in ("first", "second")):
        first, second = load_file(progress_file(state, "first")), load_file(progress_file(state, "second"))
        for name, parameter in transformer.named_parameters():
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step), device=parameter.device if parameter.is_cuda else "cpu"),
                "exp_avg": first[name].to(parameter),
                "exp_avg_sq": second[name].to(parameter).square(),
            }
    average.steps = int(progress["averaged"])
    return float(progress["used"]), step


def train_text_to_video(args: argparse.Namespace, sprites: Sprites, device: torch.device) -> None:
    """Train the transformer on cached latents and cached hidden states of the frozen text encoder."""
    parallel = distributed.is_initialized()
    first = not parallel or distributed.get_rank() == 0
    training, _ = split_triples(sprites.names)
    training = training.to(device)

    vae = trained_autoencoder(args.state, args.warm_start, device)
    latents, rows = encode_clips(args, vae, sprites, training)
    statistics = args.state / ("latents.pt" if first else f"latents-{distributed.get_rank()}.pt")
    latents = normalise(latents, vae, statistics)
    clip_text, image_text, empty = caption_states(
        trained_text_encoder(args.state).to(device), sprites.names, training, device
    )
    say(f"captions ready, at most {clip_text.shape[-2]} tokens")

    torch.manual_seed(0)
    transformer = build_transformer().to(device)
    if args.warm_start:
        start_from(transformer, args.warm_start)
    parameters = list(transformer.parameters())
    optimizer = make_optimizer(parameters, device, 0.01)
    average = Average(parameters, args.average)
    used, step = load_progress(args.state, transformer, optimizer, average)
    if args.compile:
        for block in transformer.blocks:
            block.compile(dynamic=False)
    torch.manual_seed(int(time.time()) + (0 if first else distributed.get_rank()))

    budget = Budget(args.seconds, used, time.monotonic() + args.limit)
    logged, since, running, counted = time.monotonic(), step, torch.zeros((), device=device), 0
    share, stop, known = budget.tick(), budget.exhausted, 0.0
    while not stop:
        pick = torch.randint(len(latents), (args.batch,), device=device)
        one_frame = step % round(1 / ONE_FRAME_SHARE) == 0
        clean = latents[pick, :, :1].float() if one_frame else latents[pick].float()
        table = image_text if one_frame else clip_text
        text = table[rows[pick], torch.randint(table.shape[1], (args.batch,), device=device)].float()
        dropped = torch.rand(args.batch, 1, 1, device=device) < CAPTION_DROPOUT
        loss = velocity_loss(transformer, clean, torch.where(dropped, empty.float(), text))
        loss.backward()
        if parallel:
            average_gradients(parameters)
        rate = learning_rate(args.rate, share, step, 200)
        optimizer_step(optimizer, parameters, rate)
        average.update()
        step += 1
        share, stop = budget.tick(), budget.exhausted
        if parallel:
            known, ended = agreed([share, float(stop)], device) if step % SYNC_STEPS == 0 else (known, 0.0)
            share, stop = known, bool(ended)
        if not one_frame:
            running, counted = running + loss.detach(), counted + 1
        if first and time.monotonic() - logged > args.log_seconds and counted:
            speed = (step - since) / (time.monotonic() - logged)
            say(
                f"{budget.used:.0f} s step {step} lr {rate:.1e} loss {running.item() / counted:.4f} {speed:.1f} steps/s"
            )
            logged, since, running, counted = time.monotonic(), step, torch.zeros((), device=device), 0
    say(f"stopped at {budget.used:.0f} s, step {step}")
    if first:
        save_progress(args.state, transformer, optimizer, average, budget.used, step)


def trained_text_encoder(state: Path) -> UMT5EncoderModel:
    """The trained text encoder as it ships, rounded to bfloat16 and held in float32.

    Where the state folder has none, it is the one that lies beside these scripts.
    """
    path = state / TEXT_ENCODER_FILE
    encoder = build_text_encoder()
    weights = load_file(path if path.exists() else Path(__file__).parent / TEXT_ENCODER_FILE)
    missing, unexpected = encoder.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"encoder.embed_tokens.weight"}:
        raise ValueError(f"{path}: not this text encoder, {missing} missing, {unexpected} unexpected")
    return encoder.bfloat16().float().eval()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("autoencoder", "text", "text-to-video"))
    parser.add_argument("--sprites", type=Path, default=Path("sprites.npz"))
    parser.add_argument("--state", type=Path, default=Path("state"), help="folder that keeps what a stage needs")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds this process may train")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--log-seconds", type=float, default=LOG_SECONDS)
    group = parser.add_argument_group("autoencoder")
    group.add_argument("--frame-seconds", type=float, default=230)
    group.add_argument("--frame-batch", type=int, default=384)
    group.add_argument("--frame-rate", type=float, default=1.5e-3)
    group.add_argument("--clip-seconds", type=float, default=370)
    group.add_argument("--clip-batch", type=int, default=96)
    group.add_argument("--clip-rate", type=float, default=1e-3)
    group.add_argument("--autoencoder-average", type=float, default=0.998)
    group.add_argument("--quality-clips", type=int, default=512)
    group = parser.add_argument_group("text")
    group.add_argument("--text-seconds", type=float, default=420)
    group.add_argument("--text-batch", type=int, default=64)
    group.add_argument("--text-rate", type=float, default=1e-3)
    group.add_argument("--warm-start", type=Path, default=None, help="exported folder to start networks from")
    group = parser.add_argument_group("text-to-video")
    group.add_argument("--clips", type=int, default=300_000, help="clips to encode once")
    group.add_argument("--encode-batch", type=int, default=500)
    group.add_argument("--seconds", type=float, default=1080)
    group.add_argument("--batch", type=int, default=256)
    group.add_argument("--rate", type=float, default=1e-3)
    group.add_argument("--average", type=float, default=0.999)
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    device = torch.device(args.device)
    if "RANK" in os.environ:
        distributed.init_process_group()
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch._dynamo.config.recompile_limit = 64
    rank = int(os.environ.get("RANK", "0"))
    torch.manual_seed(int(time.time()) + rank)  # Neither a continued run nor another process may repeat batches.
    sprites = Sprites.load(args.sprites, device)
    say(f"{args.stage}: {len(sprites.names)} sprites, clips of {FRAMES} frames of {SIZE}x{SIZE}, on {device}")
    stages = {
        "autoencoder": train_autoencoder,
        "text": train_text_encoder,
        "text-to-video": train_text_to_video,
    }
    stages[args.stage](args, sprites, device)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
