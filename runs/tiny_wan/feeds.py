"""What the runs train on, made on the device: drawings for the autoencoder, latents with captions for the transformer.

`autoencoder_frames.py`, `autoencoder.py` and `text_to_video.py` name these functions in their `drawn`.
"""

import os
import random
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import torch
import torch.nn.functional as F
from clips import (
    BACKGROUNDS,
    MOTIONS,
    Objects,
    Scenes,
    caption,
    compose_clips,
    compose_frames,
    image_caption,
    is_held_out,
    quoted,
    scenes,
    split_triples,
)
from diffusers import AutoencoderKLWan
from lettering import ALPHABET, LONGEST, NOTHING, SHORTEST, letters, sample_word, split
from networks import TEXT_ENCODER, WRITTEN, byte_ids, encode_text, load_text_encoder

from loopwright.data.kept import kept
from loopwright.distributed.group import size
from loopwright.models.wan.whole_clip import WholeClip

WORDS = 0.25  # the share of clips that show a word, when the autoencoder trains
TURNING = 3.0  # how much oftener than others it sees what spins: its square error is four times the others'
SPELLED, DIGITS = 0.4, 0.06  # and of those with a word, or a digit, when the transformer does: they are learnt last
HELD_OUT, HELD_OUT_BATCH = 256, 64
IMAGES, PINNED = {0}, {3, 6, 9}  # of ten steps: those of single frames, and those that are given the first frame
TEXT_BATCH, CLIP_BATCH = 2048, 500
Compose = Callable[[Scenes, torch.Generator], tuple[torch.Tensor, torch.Tensor]]
Triple = tuple[int, int, int]


def frames(device: torch.device, sprites: str) -> "Drawings":
    """Single frames, for the autoencoder's first run."""
    return Drawings(Objects.load(sprites, device), compose_frames)


def clips(device: torch.device, sprites: str) -> "Drawings":
    """Clips, for its second."""
    return Drawings(Objects.load(sprites, device), compose_clips)


class Drawings:
    """Random drawings of what is trained on, and the same ones ever of what is held out."""

    blank = None

    def __init__(self, objects: Objects, compose: Compose) -> None:
        torch.backends.cudnn.benchmark = True  # every step has the same few shapes
        self._objects, self._compose = objects, compose
        self._training, self._unseen = (part.to(objects.images.device) for part in split_triples(objects.names))
        self._weight = torch.where(self._training[:, 1] == MOTIONS.index("spinning"), TURNING, 1.0)

    def batch(self, step: int, rows: int, generator: torch.Generator) -> Mapping[str, torch.Tensor]:
        """Any letters stand for words: which they are, an autoencoder does not know."""
        device = self._training.device
        triples = self._training[self._weight.multinomial(rows, replacement=True, generator=generator)]
        worded = torch.rand(rows, device=device, generator=generator) < WORDS
        triples[:, 0] = torch.where(worded, -1, triples[:, 0])
        return self._drawn(triples, any_letters(rows, device, generator), generator)

    def held_out(self) -> list[Mapping[str, torch.Tensor]]:
        """Combinations and words that are never trained on."""
        device, generator = self._training.device, torch.Generator(self._training.device).manual_seed(1)
        order = torch.randperm(len(self._unseen), generator=torch.Generator().manual_seed(0))[:HELD_OUT]
        triples = self._unseen[order.to(device)]
        triples[:: round(1 / WORDS), 0] = -1
        words = letters(split()[1])
        words = words[torch.arange(len(triples)) % len(words)].to(device)
        batches = zip(triples.split(HELD_OUT_BATCH), words.split(HELD_OUT_BATCH), strict=True)
        return [self._drawn(each, spelled, generator) for each, spelled in batches]

    def _drawn(self, triples: torch.Tensor, words: torch.Tensor, generator: torch.Generator) -> dict[str, torch.Tensor]:
        video, coverage = self._compose(scenes(self._objects, triples, words), generator)
        return {"video": video, "focus": coverage}


def any_letters(rows: int, device: torch.device, generator: torch.Generator) -> torch.Tensor:
    """Words of random letters [rows, LONGEST]."""
    drawn = torch.randint(len(ALPHABET), (rows, LONGEST), device=device, generator=generator)
    length = torch.randint(SHORTEST, LONGEST + 1, (rows, 1), device=device, generator=generator)
    return torch.where(torch.arange(LONGEST, device=device) < length, drawn, NOTHING)


def latents(
    device: torch.device, sprites: str, autoencoder: str, cache: str, count: int, look: str = "", shuffled: int = 0
) -> "Latents":
    """Clips as latents of this autoencoder, encoded once and kept in the cache's folder, and their captions.

    Of several processes each makes a part of its own, and draws from it. With look "grey" the clips have no colours,
    of which their captions still speak; where `shuffled` is 1, every clip has another one's caption.
    """
    part, parts = int(os.environ.get("RANK", "0")), size()
    triples, words = (each[part::parts] for each in combinations(Objects.load(sprites).names, count))
    digests = [sha256(path.read_bytes()).hexdigest() for path in (*Path(autoencoder).glob("*.*"), Path(sprites))]
    about = {"count": str(count), "look": look, "made of": " ".join(sorted(digests))}
    name = f"latents-{look}{part}-of-{parts}"
    encoded = kept(Path(cache), name, about, lambda: encode(device, sprites, Path(autoencoder), triples, words, look))
    if shuffled:
        order = random.Random(2).sample(range(len(triples)), len(triples))
        triples, words = ([each[i] for i in order] for each in (triples, words))
    return Latents(device, encoded["latents"], Objects.load(sprites).names, triples, words)


def combinations(names: list[str], count: int) -> tuple[list[Triple], list[str]]:
    """What each clip shows, none of it held out; where the object is -1, the word beside it."""
    rng, (training, _) = random.Random(0), split()
    every: list[Triple] = [tuple(row) for row in split_triples(names)[0].tolist()]
    digits = {index for index, name in enumerate(names) if name.startswith("the digit")}
    allowed = [[each for each in every if (each[0] in digits) is digit] for digit in (False, True)]
    tones, triples, words = list(BACKGROUNDS), [], []
    while len(triples) < count:
        triple, word = rng.choice(allowed[rng.random() < DIGITS / (1 - SPELLED)]), ""
        if rng.random() < SPELLED:
            word = sample_word(training, rng)
            triple = (-1, rng.randrange(len(MOTIONS)), rng.randrange(len(tones)))
            if is_held_out(quoted(word), MOTIONS[triple[1]], tones[triple[2]]):
                continue
        triples.append(triple)
        words.append(word)
    return triples, words


@torch.no_grad()
def encode(
    device: torch.device, sprites: str, autoencoder: Path, triples: list[Triple], words: list[str], look: str
) -> dict[str, torch.Tensor]:
    """The normalised latents of each clip, float16 [N, C, T, H, W]."""
    objects, generator = Objects.load(sprites, device), torch.Generator(device).manual_seed(0)
    vae = AutoencoderKLWan.from_pretrained(autoencoder, torch_dtype=torch.float32).to(device)
    shape = (1, -1, 1, 1, 1)
    mean, std = (torch.tensor(v, device=device).view(shape) for v in (vae.config.latents_mean, vae.config.latents_std))
    clip, made = WholeClip(vae), []
    spelled = letters([word or "aaa" for word in words])
    for rows, each in zip(torch.tensor(triples).split(CLIP_BATCH), spelled.split(CLIP_BATCH), strict=True):
        video, _ = compose_clips(scenes(objects, rows.to(device), each.to(device)), generator)
        if look == "grey":
            video = video.mean(dim=1, keepdim=True).expand(video.shape)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            latent, _ = clip.encode(video)
        made.append(((latent.float() - mean) / std).half())
    return {"latents": torch.cat(made)}


class Latents:
    """Rows of latents and what the frozen text encoder says of their captions."""

    def __init__(
        self, device: torch.device, latents: torch.Tensor, names: list[str], triples: list[Triple], words: list[str]
    ) -> None:
        self._latents = latents.to(device)
        rng, tones = random.Random(1), list(BACKGROUNDS)
        named = [quoted(word) if word else names[index] for (index, _, _), word in zip(triples, words, strict=True)]
        said = [(name, MOTIONS[m], tones[b]) for name, (_, m, b) in zip(named, triples, strict=True)]
        self._moving = described([caption(*each, rng) for each in said], device)
        upright = torch.tensor([MOTIONS[motion] != "growing" for _, motion, _ in triples])
        self._large = upright.nonzero().flatten().to(device)  # clips whose first frame is not their smallest
        self._still = described([still_caption(*each, rng) for each in said], device)
        self.blank = padded(described([""], device))[0].float()

    def batch(self, step: int, rows: int, generator: torch.Generator) -> Mapping[str, torch.Tensor]:
        """Single frames, clips, or clips that are given their first frame, as the step has it."""
        if step % 10 in IMAGES:
            pick = self._large[self._random(len(self._large), rows, generator)]
            return {"latent": self._latents[pick, :, :1], "cond": padded(self._still[pick])}
        pick = self._random(len(self._latents), rows, generator)
        latent = self._latents[pick]
        given = {"first_frame": latent[:, :, :1]} if step % 10 in PINNED else {}
        return {"latent": latent, "cond": padded(self._moving[pick]), **given}

    def _random(self, below: int, rows: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randint(below, (rows,), device=self._latents.device, generator=generator)

    def held_out(self) -> list[Mapping[str, torch.Tensor]]:
        """None: what was learnt is judged by what is generated."""
        return []


def still_caption(name: str, motion: str, tone: str, rng: random.Random) -> str:
    """Of a single frame: half of the time it is told a motion, which it cannot show."""
    return image_caption(name, tone, rng) if rng.random() < 0.5 else caption(name, motion, tone)


@torch.no_grad()
def described(texts: list[str], device: torch.device) -> torch.Tensor:
    """The dimensions that the text encoder writes, bfloat16 [N, TEXT_LENGTH, WRITTEN]."""
    encoder = load_text_encoder().to(device)
    parts = byte_ids(texts).split(TEXT_BATCH)
    return torch.cat([encode_text(encoder, part.to(device).long())[..., :WRITTEN].bfloat16() for part in parts])


def padded(states: torch.Tensor) -> torch.Tensor:
    """With the dimensions in which the text encoder only thinks, which are zero."""
    return F.pad(states, (0, TEXT_ENCODER["d_model"] - states.shape[-1]))
