"""Write the prompts that the runs here learn from, and those that they are judged by: words, and clips.

    python runs/two_steps/prompts.py --output out/two_steps

`words.txt` asks for pictures of words, half of them real and the others any letters, as in the training of tiny-wan,
and `words_held_out.txt` for each of the words that it was never trained on. `clips.jsonl` asks for combinations of
object, motion and background with which it was trained, and `clips_held_out.jsonl` for such as it was not.
"""

import argparse
import json
import random
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tiny_wan"))

import lettering
from clips import BACKGROUNDS, MOTIONS, caption, split_triples, sprite_names, with_article

COUNT, JUDGED, SEED = 2000, 100, 0
TONES = list(BACKGROUNDS)
SPRITES = Path(__file__).parents[1] / "tiny_wan/sprites.npz"


def words(count: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """So many to learn from, and one of each held-out word."""
    training, unseen = lettering.split()
    learnt = (lettering.sample_word(training, rng) for _ in range(count))
    return [picture(word, rng) for word in learnt], [picture(word, rng) for word in unseen]


def picture(word: str, rng: random.Random) -> str:
    """The prompt for a single picture of a word."""
    return f'the word "{word}" on {with_article(rng.choice(TONES))} background'


def clips(sprites: Path, count: int, judged: int, rng: random.Random) -> tuple[list[str], list[str]]:
    """So many rows to learn from, and so many of combinations never trained on."""
    names = sprite_names(sprites)
    drawn = (rng.sample(every.tolist(), n) for every, n in zip(split_triples(names), (count, judged), strict=True))
    learnt, unseen = ([row(names[i], MOTIONS[j], TONES[k]) for i, j, k in each] for each in drawn)
    return learnt, unseen


def row(name: str, motion: str, tone: str) -> str:
    """A prompt with what rewards read."""
    facts = {"object": name, "motion": motion, "background": tone}
    return json.dumps({"prompt": caption(name, motion, tone), **facts})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("out/two_steps"))
    parser.add_argument("--sprites", type=Path, default=SPRITES)
    parser.add_argument("--count", type=int, default=COUNT, help="to learn from, of each kind")
    parser.add_argument("--judged", type=int, default=JUDGED, help="clips held out")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    rng = random.Random(SEED)
    files = dict(zip(("words.txt", "words_held_out.txt"), words(args.count, rng), strict=True))
    rows = clips(args.sprites, args.count, args.judged, rng)
    for name, lines in (files | dict(zip(("clips.jsonl", "clips_held_out.jsonl"), rows, strict=True))).items():
        (args.output / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(f"{args.output / name}: {len(lines)} prompts")


if __name__ == "__main__":
    main()
