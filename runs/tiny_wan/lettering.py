"""Words and digits as pictures: glyphs of one width, and the words that are never trained on.

    table = glyphs("cuda")                  # [27, 1, 24, 12]: a to z, then nothing
    rows = letters(["lamp", "sun"])         # [2, 5], the rest filled up
    spelled(table, rows)                    # [2, 1, 64, 64]: how much of each pixel the word covers

`glyphs.npz` holds them as drawn; to draw them anew: python lettering.py. The font is DejaVu Sans Mono Bold, which
matplotlib brings along.
"""

import hashlib
import random
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 12, 24  # of a glyph in a picture of 64x64
SIDE = 64
SHORTEST, LONGEST = 3, 5
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
NOTHING = len(ALPHABET)
DIGITS = "0123456789"
HELD_OUT_SHARE = 0.2
REAL_SHARE = 0.5  # of trained words; the others are any letters, so that a word is read and not known
_FINE = 8  # a glyph is drawn so many times larger
FILE = Path(__file__).parent / "glyphs.npz"

WORDS: tuple[str, ...] = tuple(
    """
    able acid acorn actor album alley amber angel ankle apple apron april arch area arena arm army arrow atlas attic
    axe baby back badge bag baker ball band bank barn basin beach beam bean bear beard bed bell belt bench berry bike
    bird black blade block bloom blue board boat body bone book boot bowl box brain brave bread brick brook broom
    brown brush bulb bus cabin cable cake calm camel camp candy card cargo cart case castle cave chain chair chalk
    chess child city claw clay clock cloud clown coal coast coat coin cold color comet coral cork corn crab crane cream
    creek crown cube cup dance dark date dawn deer desk dial dish dock door dove dream drum duck dune dust eagle early
    earth east echo edge eight elbow elm ember fable face fairy farm field fig film fire fish five flag flame flint
    flute foam fog forest fork four fox frame frog fruit game gate gem ghost giant gift glad glass globe glove goat gold
    grape grass green grey guide gulf hand happy harp hat hawk heart hello herb hill honey hood horse hotel hour house
    ice inch ink iron island ivory jade jam jar jazz jeans jelly jewel joke judge juice jump june jungle kayak key king
    kite knee knife knot lake lamp land laser leaf lemon light lily lime line lion lock loop lotus lucky lunch magic
    mango map maple march mask maze melon metal milk mill mind mint moon moss mouse mouth movie music nail name nest
    night nine noise north nose note novel nut oak oasis ocean olive one onion opera orbit otter oven owl paint palm
    panda paper park peach pearl pen piano pilot pine pink pipe pizza place plane plant plum poem pond pony pool
    power prize queen quick quiet quilt rain ramp raven red reef rice ring river road robin robot rock roof room root
    rope rose ruby rug sail salad salt sand scarf sea seed seven shark sheep shell ship shirt shoe silk silver six sky
    sleep smile smoke snail snow soap sock song soup south space spice spoon star steam steel stone storm sugar sun
    swan sweet swim table tail tea ten tent three tiger time toast top torch tower town toy track train tree tulip
    two uncle unit urban valley van vase velvet verse vine viola violet vivid voice wagon wall watch water wave west
    whale wheat wheel white wind wing wolf wood world wren yarn year yeti yoga young zebra zero zone zoom
    """.split()  # noqa: SIM905
)


def short() -> list[str]:
    """The words that fit."""
    return [word for word in dict.fromkeys(WORDS) if SHORTEST <= len(word) <= LONGEST]


def is_held_out(word: str) -> bool:
    """Whether this word is kept away from training."""
    digest = hashlib.sha256(f"word|{word}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < HELD_OUT_SHARE * 2**32


def split() -> tuple[list[str], list[str]]:
    """Words for training, and those held out."""
    return [w for w in short() if not is_held_out(w)], [w for w in short() if is_held_out(w)]


def sample_word(training: list[str], rng: random.Random) -> str:
    """A word to train on: one of the list, or any letters that are no held-out word."""
    if rng.random() < REAL_SHARE:
        return rng.choice(training)
    while True:
        word = "".join(rng.choices(ALPHABET, k=rng.randint(SHORTEST, LONGEST)))
        if not is_held_out(word):
            return word


def drawn(text: str, size: int, width: int, height: int) -> np.ndarray:
    """How much of each pixel of a picture the text covers, drawn in its middle: uint8 [height, width]."""
    import matplotlib

    path = Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSansMono-Bold.ttf"
    canvas = Image.new("L", (width * _FINE, height * _FINE), 0)
    place = (width * _FINE / 2, height * _FINE * 0.76)
    font = ImageFont.truetype(str(path), size * _FINE)
    ImageDraw.Draw(canvas).text(place, text, font=font, fill=255, anchor="ms")
    return np.asarray(canvas.resize((width, height), Image.Resampling.BOX))


def glyphs(device: torch.device | str = "cpu") -> torch.Tensor:
    """The letters, then nothing: [27, 1, HEIGHT, WIDTH] in 0..1."""
    stored = torch.from_numpy(np.load(FILE)["letters"]).to(device)[:, None].float() / 255
    return F.pad(stored, (0, 0, 0, 0, 0, 0, 0, 1))


def digits(device: torch.device | str = "cpu") -> torch.Tensor:
    """The ten digits, large: [10, 1, SIDE, SIDE] in 0..1."""
    return torch.from_numpy(np.load(FILE)["digits"]).to(device)[:, None].float() / 255


def letters(words: list[str]) -> torch.Tensor:
    """Each word's letters by number, filled up to LONGEST: [N, LONGEST]."""
    rows = [[ALPHABET.index(letter) for letter in word] + [NOTHING] * (LONGEST - len(word)) for word in words]
    return torch.tensor(rows)


def spelled(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The words of these letters in the middle of pictures: [N, 1, SIDE, SIDE] in 0..1."""
    strip = table[rows].squeeze(2).transpose(1, 2).flatten(2)  # [N, HEIGHT, LONGEST * WIDTH]
    count = (rows != NOTHING).sum(dim=1, keepdim=True)
    # a word stands in the middle: its strip is moved right by half of what it lacks
    start = (SIDE - count * WIDTH) // 2
    column = torch.arange(SIDE, device=rows.device) - start  # [N, SIDE]
    inside = (column >= 0) & (column < count * WIDTH)
    index = column.clamp(0, LONGEST * WIDTH - 1)[:, None].expand(-1, HEIGHT, -1)
    row = strip.gather(2, index) * inside[:, None]
    above = (SIDE - HEIGHT) // 2
    return F.pad(row, (0, 0, above, SIDE - HEIGHT - above))[:, None]


if __name__ == "__main__":
    large = [drawn(digit, 66, SIDE, SIDE + 16)[8:-8] for digit in DIGITS]
    np.savez_compressed(FILE, letters=[drawn(letter, 20, WIDTH, HEIGHT) for letter in ALPHABET], digits=large)
