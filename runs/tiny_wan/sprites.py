"""Render the sprite set of tiny-wan from a colour emoji font into one small archive.

Each sprite is a 64x64 RGBA image with a plain English name. The set is chosen so that an evaluator can tell
its members apart: near duplicates are dropped, and so are shapes that look the same after a turn (a spinning
ball cannot be told from a still one).

    python sprites.py --font NotoColorEmoji.ttf --output sprites.npz
"""

import argparse
import re
import unicodedata
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

FONT_SIZE = 109  # The only strike of the bitmap font.
SPRITE_SIZE = 64
MIN_COVERAGE = 0.25  # Thin drawings vanish at 20 pixels.
MIN_TURN_CHANGE = 0.05  # Mean absolute change after a turn, below which spinning is invisible.
MIN_DISTANCE = 0.11  # Mean absolute difference between two sprites.
ALWAYS = ("red apple",)  # Too well known to miss, however close its neighbours are.

# Animals, food, plants, vehicles, buildings, clothes, instruments, tools, sports gear, a few characters.
RANGES: tuple[tuple[int, int], ...] = (
    (0x1F400, 0x1F43F),
    (0x1F980, 0x1F9AE),
    (0x1FAB0, 0x1FABA),
    (0x1F32D, 0x1F37F),
    (0x1F950, 0x1F96F),
    (0x1F9C0, 0x1F9CB),
    (0x1FAD0, 0x1FAD9),
    (0x1F680, 0x1F6FC),
    (0x1F380, 0x1F3FA),
    (0x1F451, 0x1F462),
    (0x1F47B, 0x1F480),
    (0x1F484, 0x1F48E),
    (0x1F4A1, 0x1F4A3),
    (0x1F4A9, 0x1F4A9),
    (0x1F4B0, 0x1F4B0),
    (0x1F4BA, 0x1F4FF),
    (0x1F50B, 0x1F52E),
    (0x1F56F, 0x1F579),
    (0x1F5A5, 0x1F5FF),
    (0x1F7E0, 0x1F7E0),
    (0x1F916, 0x1F916),
    (0x1F920, 0x1F929),
    (0x1F93F, 0x1F94F),
    (0x1F970, 0x1F976),
    (0x1F97B, 0x1F97F),
    (0x1F9AF, 0x1F9BF),
    (0x1F9E0, 0x1F9FF),
    (0x1FA70, 0x1FAA8),
    (0x1F308, 0x1F30B),
    (0x1F31E, 0x1F31F),
    (0x1F525, 0x1F52E),
    (0x2602, 0x2604),
    (0x2693, 0x2693),
    (0x26C4, 0x26C4),
    (0x26F2, 0x26F5),
    (0x26FA, 0x26FA),
    (0x2708, 0x2708),
    (0x2B50, 0x2B50),
    (0x1F600, 0x1F644),
)

# Signs, flags, people (whose drawing depends on skin tone), and pictures of the same thing seen again.
EXCLUDE = re.compile(
    r"symbol|sign\b|flag|pennant|clock|moon|globe|button|arrow|input|litter|smoking|potable|bicycles|pedestrian|"
    r"children|restroom|toilet|closet|baggage|customs|passport|left luggage|no entry|mens|womens|person|swimmer|"
    r"surfer|runner|snowboarder|golfer|weight lifter|horse racing|rowboat|bicyclist|bath\b|sleuth|levitating|dancing|"
    r"father christmas|^\w* ?note$|notes$|score|slider|control knobs|film frames|ticket|cinema|performing|"
    r"direct hit|playing cards|hands|baby angel|imp|mobile phone|speaker|lock with|closed lock|open lock|"
    r"envelope|mailbox|tray|chart|calendar|ledger|tabs|page|notebook|open file|card|memo|newspaper|clipboard|folder|"
    r"document|japan|kissing|empty|note\b|speech|thought|mood|ballot|lips|rays|minimize|maximize|overlap|"
    r"compression|font|mouse$|computers|icon|disk|trackball|old personal|frame with|oncoming|"
    r"vertical traffic|^train$|railway|tram$|tram car|metro|light rail|trolleybus|minibus|delivery|"
    r"couch|bed$|sleeping accommodation|bellhop|shopping trolley|hut|elevator|place of worship|octagonal|"
    r"airplane (departure|arriving)|small airplane|up-pointing|elf|zombie|mage|fairy|merperson|genie|vampire|"
    r"foot|leg|ear with|bone$|tooth$|superhero|supervillain|cane|vest|eyes?$|front-facing|dvd|optical|"
    r"label|banknote|link|radio|vibration|antenna|white down|mending|lungs|anatomical|drop of|petri|dna|"
    r"wedding|face with (cold|no|ok|open mouth and)|hole|rosette|^mouth|savouring|weary cat|pouting cat|"
    r"smiling face with (open|smiling)|grinning face with|relieved|expressionless|unamused|pensive|confounded|persever|"
    r"disappointed|worried|anguished|tired|slightly|hushed|smirking|winking|stuck-out tongue and tightly|"
    r"cat face with|cat face$(?<!^cat face)|astonished|frowning|triumph|sleepy|grimacing|with moustache"
)

# Scenes, buildings that look alike, and drawings few people would name unprompted.
DROP: frozenset[str] = frozenset(
    " ".join(name.split())
    for name in """
    water buffalo; ox; guide dog; microbe; wood; nest with eggs; oden; dango; rice cracker; cooked rice; curry and rice;
    bento box; pot of food; cooking; shallow pan of food; stuffed flatbread; falafel; butter; mate drink; flatbread;
    tamale; pouring liquid; beans; fondue; high-speed train; station; bus stop; mountain cableway; aerial tramway;
    horizontal traffic light; police cars revolving light; hindu temple; motorway; satellite; passenger ship;
    motor boat; articulated lorry; monorail; fireworks;
    firework sparkler; confetti ball; tanabata tree; pine decoration;
    carp streamer; wind chime; military medal; reminder ribbon; beach with umbrella; building construction;
    house buildings; cityscape; derelict house building; desert; national park; stadium; house with garden;
    office building; european post office; automated teller machine; hotel; love hotel; convenience store;
    department store; running shirt; camping; face massage; haircut; kiss mark; minidisc; triangular ruler; name badge;
    fax machine; videocassette; prayer beads; bookmark; keycap ten; nut and bolt; pistol; kitchen knife; dagger knife;
    file cabinet; speaking head in silhouette; right anger bubble; world map; tokyo tower; drum with drumsticks;
    goal net; martial arts uniform; lacrosse stick and ball; field hockey stick and ball; ice hockey stick and puck;
    softball; sari; motorized wheelchair; manual wheelchair; mechanical arm; roll of paper; bar of soap; receipt;
    nazar amulet; briefs; bikini; thong sandal; x-ray; diya lamp; military helmet; long drum; mouse trap; headstone;
    bridge at night; fountain; ferry; cockroach; mosquito; worm; fork and knife; fork and knife with plate;
    bottle with popping cork; cut of meat; leafy green; canned food; sake bottle and cup; teacup without handle;
    roasted sweet potato; baby bird; fly; syringe; bomb; pouch; shaved ice; lying face; drooling face; sneezing face;
    emoji component red hair; emoji component curly hair; emoji component bald; emoji component white hair;
    ski and ski boot; cricket bat and ball; camera with flash; lab coat; one-piece swimsuit; oil drum; wheel;
    round pushpin; love letter; seat; postal horn; knot; mirror; hook; razor; safety pin; sewing needle; paperclip;
    orange heart; billed cap; takeout box; beverage box; european castle; fearful face; flushed face; masked face;
    second place medal; face palm; tomato; blue book; green book; leaf fluttering in wind; herb; ear of rice;
    face with one eyebrow raised; fallen leaf; recreational vehicle; hammer and wrench; classical building; bank;
    factory; glass of milk; tumbler glass; jar; fishing pole and fish; mount fuji; nail polish; abacus; wilted flower;
    sled; playground slide; boomerang; flying disc; bowl with spoon; cup with straw; oyster; dodo; slot machine;
    stethoscope; fortune cookie; studio microphone; sponge; scroll; film projector; cow face; horse face; dragon face;
    overheated face; yawning face; nauseated face; pouting face; shower; diving mask; lotion bottle
    """.split(";")  # noqa: SIM905
)

RENAME: dict[str, str] = {
    "lion face": "lion",
    "fox face": "fox",
    "frog face": "frog",
    "hamster face": "hamster",
    "wolf face": "wolf",
    "bear face": "bear",
    "panda face": "panda",
    "unicorn face": "unicorn",
    "zebra face": "zebra",
    "giraffe face": "giraffe",
    "robot face": "robot",
    "automobile": "car",
    "aubergine": "eggplant",
    "ear of maize": "corn",
    "slice of pizza": "pizza",
    "lady beetle": "ladybug",
    "honeybee": "bee",
    "house building": "house",
    "wrapped present": "present",
    "extraterrestrial alien": "alien",
    "alien monster": "space invader",
    "pile of poo": "poo",
    "electric light bulb": "light bulb",
    "personal computer": "laptop",
    "basketball and hoop": "basketball",
    "racing motorcycle": "motorcycle",
    "american football": "football",
    "european castle": "castle",
    "carousel horse": "carousel",
    "school satchel": "backpack",
    "baby chick": "chick",
    "front-facing baby chick": "baby bird",
    "dromedary camel": "camel",
    "doughnut": "donut",
    "spouting whale": "blue whale",
    "mans shoe": "shoe",
    "athletic shoe": "sneaker",
    "womans hat": "sun hat",
    "womans boots": "boot",
    "womans sandal": "sandal",
    "womans clothes": "blouse",
    "electric torch": "flashlight",
    "hocho": "kitchen knife",
    "left-pointing magnifying glass": "magnifying glass",
    "black scissors": "scissors",
    "snowman without snow": "snowman",
    "white medium star": "star",
    "smiling face with heart-shaped eyes": "heart eyes face",
    "smiling face with sunglasses": "sunglasses face",
    "smiling face with halo": "angel face",
    "smiling face with horns": "devil face",
    "face with tears of joy": "laughing face",
    "face screaming in fear": "screaming face",
    "face with medical mask": "masked face",
    "loudly crying face": "sobbing face",
    "face throwing a kiss": "kiss face",
    "smiling face with smiling eyes and three hearts": "face with hearts",
    "running shirt with sash": "running shirt",
    "steam locomotive": "steam train",
    "high-speed train with bullet nose": "bullet train",
    "musical keyboard": "piano",
    "gem stone": "diamond",
    "shooting star": "comet",
    "glowing star": "star",
    "black droplet": "droplet",
    "poultry leg": "drumstick",
    "french fries": "fries",
    "lower left crayon": "crayon",
    "lower left paintbrush": "paintbrush",
    "lower left fountain pen": "fountain pen",
    "lower left ballpoint pen": "ballpoint pen",
    "sun with face": "sun",
    "statue of liberty": "statue of liberty",
    "moyai": "stone head",
    "billiards": "eight ball",
    "freezing face": "freezing face",
    "adhesive bandage": "bandage",
    "t-shirt": "t-shirt",
    "jack-o-lantern": "jack-o-lantern",
}


def candidates() -> dict[str, int]:
    """Names to codepoints, in the order of RANGES."""
    names: dict[str, int] = {}
    for first, last in RANGES:
        for code in range(first, last + 1):
            name = unicodedata.name(chr(code), "").lower()
            if not name or len(name) > 40:
                continue
            name = RENAME.get(name, name if not EXCLUDE.search(name) else "")
            if name and len(name) <= 28 and name not in DROP:
                names.setdefault(name, code)
    return names


def render(font: ImageFont.FreeTypeFont, code: int) -> np.ndarray | None:
    """One glyph, its bounding box centred in a transparent 64x64 square; None where the font has no drawing."""
    canvas = Image.new("RGBA", (170, 170), (0, 0, 0, 0))
    ImageDraw.Draw(canvas).text((10, 10), chr(code), font=font, embedded_color=True)
    box = canvas.getchannel("A").getbbox()
    if box is None:
        return None
    glyph = canvas.crop(box)
    side = max(glyph.size)
    square = Image.new("RGBA", (side, side), (0, 0, 0, 0))
    square.paste(glyph, ((side - glyph.width) // 2, (side - glyph.height) // 2))
    pixels = np.asarray(square.resize((SPRITE_SIZE, SPRITE_SIZE), Image.Resampling.LANCZOS))
    colours = pixels[pixels[..., 3] > 200][:, :3]
    if len(colours) == 0 or colours.std() < 4:  # A monochrome placeholder box.
        return None
    return pixels


def on_grey(sprite: np.ndarray) -> np.ndarray:
    """The sprite over mid grey with its coverage as a fourth channel: what two drawings are compared by."""
    alpha = sprite[..., 3:].astype(np.float32) / 255
    colour = sprite[..., :3].astype(np.float32) / 255 * alpha + 0.5 * (1 - alpha)
    return np.concatenate([colour, alpha], axis=-1)


def turn_change(sprite: np.ndarray) -> float:
    """How much the drawing changes under the least visible of several turns."""
    image = Image.fromarray(sprite)
    upright = on_grey(sprite)
    turns = (40, 80, 120, 180)
    return min(
        float(np.abs(on_grey(np.asarray(image.rotate(turn, Image.Resampling.BILINEAR))) - upright).mean())
        for turn in turns
    )


def build(font_path: Path) -> tuple[np.ndarray, list[str], list[int]]:
    """The sprite images, names and codepoints that pass every filter."""
    font = ImageFont.truetype(str(font_path), FONT_SIZE)
    images, names, codes, features = [], [], [], []
    for name, code in candidates().items():
        sprite = render(font, code)
        if sprite is None or (sprite[..., 3] > 128).mean() < MIN_COVERAGE or turn_change(sprite) < MIN_TURN_CHANGE:
            continue
        feature = on_grey(sprite)
        close = bool(features) and min(float(np.abs(feature - other).mean()) for other in features) < MIN_DISTANCE
        if close and name not in ALWAYS:
            continue
        images.append(sprite)
        names.append(name)
        codes.append(code)
        features.append(feature)
    return np.stack(images), names, codes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--font", type=Path, default=Path("/usr/share/fonts/truetype/noto/NotoColorEmoji.ttf"))
    parser.add_argument("--output", type=Path, default=Path("sprites.npz"))
    args = parser.parse_args()
    images, names, codes = build(args.font)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(args.output, images=images, names=np.array(names), codes=np.array(codes))
    print(f"{len(names)} sprites, {args.output.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
