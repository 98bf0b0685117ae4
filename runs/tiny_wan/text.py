"""Teach the text encoder to spell: what it says of words and digits, beside what it says of sprites.

    python text.py --sprites sprites.npz --seconds 1400

Continues `text_encoder.safetensors`, whose sprites, motions and backgrounds were taught before (README.md has what it
writes): of captions with sprites it shall say what it said, and of words, at each of their letters, which letter it is
and which place it has. One CPU thread is enough. The encoder stays frozen afterwards.
"""

import argparse
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from clips import BACKGROUNDS, MOTIONS, background_table, caption, image_caption, quoted, split_triples, sprite_names
from lettering import ALPHABET, DIGITS, LONGEST, SHORTEST, sample_word, split
from networks import WRITTEN, WRITTEN_PARTS, byte_ids, encode_text, load_text_encoder
from safetensors.torch import save_file
from torch import nn
from transformers import UMT5EncoderModel

FILE = Path(__file__).parent / "text_encoder.safetensors"
SHARES = {"sprite": 0.3, "word": 0.45}  # of captions; the others name digits
SLOT = 12  # dimensions that a letter has in the code of a whole word


@dataclass(frozen=True)
class Said:
    """A caption and what it says; `motion` and `background` are indices, one past the last where it is unsaid."""

    text: str
    kind: str
    what: str
    motion: int
    background: int


def sample(names: list[str], training: list[str], triples: list[tuple[int, int, int]], rng: random.Random) -> Said:
    """A random caption, as people put it, of a combination that is trained on."""
    at = rng.random()
    kind = "sprite" if at < SHARES["sprite"] else "word" if at < sum(SHARES.values()) else "digit"
    index, motion, background = rng.choice(triples)
    what = {"sprite": names[index], "word": sample_word(training, rng), "digit": rng.choice(DIGITS)}[kind]
    return said(kind, what, motion, background, rng)


def said(kind: str, what: str, motion: int, background: int, rng: random.Random) -> Said:
    tone = list(BACKGROUNDS)[background]
    name = {"sprite": what, "word": quoted(what), "digit": f"the digit {what}"}[kind]
    if rng.random() < 0.1:
        return Said(image_caption(name, tone, rng), kind, what, len(MOTIONS), background)
    text = caption(name, MOTIONS[motion], tone, rng)
    unsaid = f" {tone} " not in f" {text.lower()} ".replace(",", " ").replace(".", " ")
    return Said(text, kind, what, motion, len(BACKGROUNDS) if unsaid else background)


def sign(seed: int) -> torch.Tensor:
    """A code of ones and minus ones for what has no picture."""
    return torch.randint(0, 2, (WRITTEN_PARTS["whole"],), generator=torch.Generator().manual_seed(seed)) * 2.0 - 1


class Target:
    """What the encoder shall write of captions without sprites: [L, WRITTEN] for each."""

    def __init__(self) -> None:
        self._digits = {digit: sign(int(digit)) for digit in DIGITS}
        self._mark, self.letters = sign(100)[LONGEST * SLOT :], letter_codes()
        self._motion = F.pad(torch.eye(len(MOTIONS)), (0, 1, 0, 1)) * 2
        self._motion[-1, -1] = 2.0
        self._background = F.pad(background_table() * 3 - 1.5, (0, 1, 0, 1))
        self._background[-1, -1] = 2.0

    def __call__(self, said: Said, length: int) -> torch.Tensor:
        cell, place = torch.zeros(length, WRITTEN_PARTS["cell"]), torch.zeros(length, WRITTEN_PARTS["place"])
        if said.kind == "word":
            spell(said, cell, place)
        whole = self._spelled(said.what) if said.kind == "word" else self._digits[said.what]
        same = [whole, self._motion[said.motion], self._background[said.background]]
        first, motion, background = (part.expand(length, -1) for part in same)
        return torch.cat([first, cell, place, motion, background], dim=-1)

    def _spelled(self, word: str) -> torch.Tensor:
        """Its letters one after the other, nothing where it has none, and that it is a word."""
        rows = [self.letters[ALPHABET.index(letter)] for letter in word]
        return torch.cat([*rows, torch.zeros((LONGEST - len(word)) * SLOT), self._mark])


def letter_codes() -> torch.Tensor:
    """A code of ones and minus ones for each letter, any two of which differ in at least three places: [26, SLOT]."""
    generator, found = torch.Generator().manual_seed(26), torch.zeros(0, SLOT)
    while len(found) < len(ALPHABET):
        code = torch.randint(0, 2, (1, SLOT), generator=generator) * 2.0 - 1
        if ((found != code).sum(dim=1) >= 3).all():
            found = torch.cat([found, code])
    return found


def spell(said: Said, cell: torch.Tensor, place: torch.Tensor) -> None:
    """At each letter between the quotes which one it is, its place and how many there are."""
    start = said.text.index('"') + 1
    for index, letter in enumerate(said.what):
        cell[start + index, ALPHABET.index(letter)] = 3.0
        place[start + index, index] = 2.0
        place[start + index, LONGEST + len(said.what) - SHORTEST] = 2.0


def trimmed(texts: list[str]) -> torch.Tensor:
    """Byte ids up to the longest text."""
    ids = byte_ids(texts).long()
    return ids[:, : int((ids != 0).sum(dim=1).max())]


def loss_of(encoder: UMT5EncoderModel, teacher: UMT5EncoderModel, target: Target, rows: list[Said]) -> torch.Tensor:
    """Mean squared error of each part, added; letters count by themselves, for they are few."""
    ids = trimmed([row.text for row in rows])
    real, length = ids != 0, ids.shape[1]
    with torch.no_grad():
        wanted = encode_text(teacher, ids)[..., :WRITTEN]
    for index, row in enumerate(rows):
        if row.kind != "sprite":
            wanted[index] = target(row, length)
    spelled = (wanted[..., WRITTEN_PARTS["whole"] :][..., : len(ALPHABET)] == 3.0).any(dim=-1)
    error = (encode_text(encoder, ids)[..., :WRITTEN] - wanted).square()
    parts = error.split(list(WRITTEN_PARTS.values()), dim=-1)
    loss = torch.stack([part[real].mean() for part in parts]).sum()
    letters = [parts[list(WRITTEN_PARTS).index(name)] for name in ("cell", "place")]
    return loss + sum((part[spelled].mean() for part in letters), torch.zeros(())) if spelled.any() else loss


@torch.no_grad()
def quality(encoder: UMT5EncoderModel, teacher: UMT5EncoderModel, names: list[str]) -> dict[str, float]:
    """On held-out words, digits and all sprites: letters and places that are right, what is said at every byte, sprites
    still told apart."""
    rng = random.Random(0)
    _, unseen = split()
    rows = [said("word", word, rng.randrange(len(MOTIONS)), rng.randrange(len(BACKGROUNDS)), rng) for word in unseen]
    hidden = encode_text(encoder, trimmed([row.text for row in rows]))
    first = WRITTEN_PARTS["whole"]
    letters = hidden[..., first : first + len(ALPHABET)].argmax(dim=-1)
    second = first + WRITTEN_PARTS["cell"]
    places = hidden[..., second : second + LONGEST].argmax(dim=-1)
    right, total, whole_words = [0, 0], 0, 0
    for index, row in enumerate(rows):
        start, wanted = row.text.index('"') + 1, [ALPHABET.index(letter) for letter in row.what]
        span = slice(start, start + len(wanted))
        read = [a == b for a, b in zip(letters[index, span].tolist(), wanted, strict=True)]
        put = [a == b for a, b in zip(places[index, span].tolist(), range(len(wanted)), strict=True)]
        right[0], right[1], total = right[0] + sum(read), right[1] + sum(put), total + len(wanted)
        whole_words += all(read) and all(put)
    slots = hidden[..., : LONGEST * SLOT].unflatten(-1, (LONGEST, SLOT))
    read = (slots.unsqueeze(3) * letter_codes()).sum(dim=-1).argmax(dim=-1)  # [words, bytes, LONGEST]
    told = [[ALPHABET.index(letter) for letter in row.what] for row in rows]
    everywhere = [
        (read[i, : len(row.text), : len(told[i])] == torch.tensor(told[i])).float().mean() for i, row in enumerate(rows)
    ]
    texts = trimmed([caption(name, MOTIONS[0], "red") for name in names])
    before, after = (encode_text(model, texts)[..., :WRITTEN] for model in (teacher, encoder))
    codes = [
        (hidden[..., :first] * (texts != 0)[..., None]).sum(1) / (texts != 0).sum(1, True) for hidden in (before, after)
    ]
    counted = [said("digit", digit, motion, 0, rng) for digit in DIGITS for motion in range(len(MOTIONS))]
    hidden = encode_text(encoder, trimmed([row.text for row in counted]))
    signs = torch.stack([sign(int(digit)) for digit in DIGITS])
    digits = (hidden[..., :first] @ signs.T).argmax(dim=-1)  # [captions, bytes]
    named = [(digits[i, : len(row.text)] == DIGITS.index(row.what)).float().mean() for i, row in enumerate(counted)]
    kept = (torch.cdist(codes[1], codes[0]).argmin(dim=1) == torch.arange(len(names))).float().mean()
    return {
        "letters": right[0] / total,
        "places": right[1] / total,
        "words": whole_words / len(rows),
        "letters_everywhere": float(torch.stack(everywhere).mean()),
        "digits": float(torch.stack(named).mean()),
        "sprites": float(kept),
        "drift": float((after - before)[texts != 0].square().mean() / before[texts != 0].var()),
    }


def train(seconds: float, batch: int, rate: float, names: list[str], report: float) -> UMT5EncoderModel:
    """The encoder with averaged weights after so many seconds."""
    encoder, teacher, target = load_text_encoder(FILE), load_text_encoder(FILE), Target()
    encoder.requires_grad_(True)
    final = encoder.encoder.final_layer_norm.weight
    triples = [tuple(row) for row in split_triples(names)[0].tolist()]
    training, _ = split()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    average = torch.optim.swa_utils.AveragedModel(
        encoder, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.99)
    )
    rng, begun, told, step = random.Random(0), time.monotonic(), 0.0, 0
    while (used := time.monotonic() - begun) < seconds:
        drawn = sorted((sample(names, training, triples, rng) for _ in range(4 * batch)), key=lambda row: len(row.text))
        start = rng.randrange(len(drawn) - batch + 1)  # of much the same length, so that little is padding
        loss = loss_of(encoder, teacher, target, drawn[start : start + batch])
        loss.backward()
        final.grad[WRITTEN:] = 0.0  # the other dimensions are there to think in
        nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
        share = used / seconds
        optimizer.param_groups[0]["lr"] = (
            rate * min(1, (step + 1) / 50) * (0.02 + 0.98 * (1 + math.cos(math.pi * share)) / 2)
        )
        optimizer.step()
        optimizer.zero_grad()
        average.update_parameters(encoder)
        step += 1
        if used - told > report:
            told = used
            print(
                f"{used:.0f} s step {step} loss {loss.item():.3f} {rounded(quality(average.module, teacher, names))}",
                flush=True,
            )
    print(f"{step} steps: {rounded(quality(average.module, teacher, names))}", flush=True)
    return average.module


def rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in figures.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sprites", type=Path, default=Path("sprites.npz"))
    parser.add_argument("--output", type=Path, default=FILE)
    parser.add_argument("--seconds", type=float, default=1400)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=8e-4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    encoder = train(args.seconds, args.batch, args.rate, sprite_names(args.sprites), 60)
    weights = {name: value.detach().bfloat16().contiguous() for name, value in encoder.state_dict().items()}
    weights.pop("encoder.embed_tokens.weight", None)  # the same tensor as `shared`
    save_file(weights, args.output)


if __name__ == "__main__":
    main()
