"""A model as plain data: what it is made of, what it can do, what its weights assume, what it claims.

    card = load_card("card.json")
    student = derive(card, name="fast", recipe=Recipe(kind="distilled", assumes=("flow_euler.cfg/v1",), steps=(4,)))

Cards are frozen, go to JSON and back, and have a digest of their content. Deliberately absent: code, weights, devices.
Programs are here only as data (`Stage`); `program.py` checks them and binds them to loops.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from .errors import CardError

SCHEMA = 1
# What a claim may say; `rollout` is checked by training, the others by `verify`.
LEVELS = ("component", "trajectory", "rollout", "batch", "output")
REFERENCES = ("diffusers", "self")
METRICS = ("relative", "psnr")
Value = str | int | float | bool | None | tuple["Value", ...]


@dataclass(frozen=True, slots=True)
class Component:
    """One module or tokenizer. `source` is a folder or hub name, "." the card's own folder.

    Attributes:
        kind: the class, as "library.Class", loaded by name from that library.
        dtype: compute precision, such as "float32"; "auto" is the device's preference; "" for what has no weights.
        parameters: how many, for listings and admission; 0 for what has no weights.
    """

    kind: str
    source: str = "."
    revision: str = ""
    subfolder: str = ""
    dtype: str = ""
    parameters: int = 0


@dataclass(frozen=True, slots=True)
class Stage:
    """One loop of a program: `loop` names an entry of `Card.loops`; slots are tensors passed between stages.

    A stage with one slot to write names it as it likes; one with several uses the loop's own names, and the loop may
    leave some out (no negative embeddings without guidance).
    """

    name: str
    loop: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Program:
    """The stages of one task. `inputs` are the request's media it needs; `outputs` maps an output to its slot."""

    stages: tuple[Stage, ...]
    inputs: tuple[str, ...] = ()
    outputs: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How the weights were made and what they therefore assume.

    Attributes:
        assumes: semantics of the loops these weights may run under.
        precision: dtypes the generator's weights may run in.
        steps: step counts allowed; empty means any.
        parents: digests or names of the cards these weights came from.
    """

    kind: str = "base"
    assumes: tuple[str, ...] = ()
    precision: tuple[str, ...] = ("float32", "bfloat16")
    steps: tuple[int, ...] = ()
    parents: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """A parity promise that `verify` runs: `level` of DESIGN.md's five, against `reference`, within `bound`.

    `metric` is "relative" (||a - b|| / ||b||, 0 means bit-identical) or "psnr" (dB, a lower bound).
    """

    level: str
    reference: str
    task: str
    metric: str = "relative"
    bound: float = 0.0
    precision: str = "float32"


@dataclass(frozen=True, slots=True)
class Card:
    """A model. `settings` are the family's own numbers (strides, channels, schedule), read by its loops.

    Attributes:
        loops: name used by stages -> semantics, such as "flow_unipc.cfg/v1".
        programs: task -> program.
        defaults: task -> request parameter -> value.
        home: where "." components live; set when the card is found, not part of its content.
    """

    name: str
    family: str
    components: Mapping[str, Component]
    loops: Mapping[str, str]
    programs: Mapping[str, Program]
    defaults: Mapping[str, Mapping[str, Value]]
    settings: Mapping[str, Value]
    recipe: Recipe = field(default_factory=Recipe)
    claims: tuple[Claim, ...] = ()
    home: str = field(default="", compare=False)

    @property
    def digest(self) -> str:
        """Hash of the content; equal cards have equal digests wherever they lie."""
        return hashlib.sha256(json.dumps(_content(self), sort_keys=True).encode()).hexdigest()[:16]


def whole(settings: Mapping[str, Value], name: str) -> int:
    """A setting that is a whole number. Raises CardError."""
    value = settings.get(name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise CardError(f"setting {name} must be a whole number", value=value, remedy="correct the card")
    return value


def experts(card: Card) -> tuple[str, ...]:
    """The components that generate, by name: what precision, recipes and `dtype=` are about. Raises CardError."""
    names = card.settings.get("experts")
    if not isinstance(names, tuple) or not names or not all(name in card.components for name in names):
        raise CardError(
            f"card {card.name}: setting experts must name its generating components",
            value=names,
            choices=sorted(card.components),
            remedy="correct the card",
        )
    return tuple(str(name) for name in names)


def derive(base: Card, **changes: object) -> Card:
    """A variant: `base` with fields replaced; mappings are merged key by key. Unknown fields raise CardError."""
    known = [f.name for f in fields(Card)]
    merged: dict[str, object] = {}
    for name, value in changes.items():
        if name not in known:
            raise CardError("a card has no such field", value=name, choices=known)
        old = getattr(base, name)
        merged[name] = {**old, **value} if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return replace(base, **merged)  # type: ignore[arg-type]


def dumps(card: Card) -> str:
    """The card as JSON text with its schema version."""
    return json.dumps({"schema": SCHEMA, **_content(card)}, indent=2, ensure_ascii=False) + "\n"


def loads(text: str, *, home: str = "", origin: str = "card") -> Card:
    """Read a card. Raises CardError naming `origin` on broken JSON, another schema, unknown or missing fields."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise CardError(f"{origin} is not JSON ({error})", remedy="write it with loopwright.card.dumps") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else data
        raise CardError(f"{origin} has an unknown schema version", value=found, choices=(SCHEMA,))
    data.pop("schema")
    try:
        return Card(
            **{
                **data,
                "loops": dict(data["loops"].items()),
                "components": {k: Component(**v) for k, v in data["components"].items()},
                "programs": {k: _program(v) for k, v in data["programs"].items()},
                "defaults": {k: {n: _tuples(x) for n, x in v.items()} for k, v in data["defaults"].items()},
                "settings": {k: _tuples(v) for k, v in data["settings"].items()},
                "recipe": Recipe(**{k: _tuples(v) for k, v in data["recipe"].items()}),  # type: ignore[arg-type]
                "claims": tuple(Claim(**v) for v in data["claims"]),
                "home": home,
            }
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CardError(
            f"{origin} does not have the fields of a card ({error})", choices=[f.name for f in fields(Card)][:-1]
        ) from error


def load_card(path: str | Path) -> Card:
    """Read `card.json`; "." components are found beside it."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise CardError(f"{path} is not text ({error})", remedy="write it with loopwright.card.dumps") from error
    return loads(text, home=str(path.parent), origin=str(path))


def _content(card: Card) -> dict[str, object]:
    content = asdict(card)
    del content["home"]
    return content


def _program(data: Mapping[str, list[Mapping[str, list[str]]]]) -> Program:
    stages = tuple(Stage(**{k: _tuples(v) for k, v in stage.items()}) for stage in data["stages"])  # type: ignore
    return Program(stages=stages, inputs=tuple(data["inputs"]), outputs=dict(data["outputs"]))  # type: ignore


def _tuples(value: object) -> Value:
    """JSON has lists where cards have tuples."""
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value  # type: ignore
