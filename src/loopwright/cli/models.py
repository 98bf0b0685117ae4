"""List the models that ship with Loopwright and the published checkpoints it knows by name.

Any Diffusers folder or hub repository of a known family loads as well; the defaults shown are those of the first task.
"""

import argparse
import json
from typing import TYPE_CHECKING

from .table import table

if TYPE_CHECKING:
    from ..card import Card

NAME, HELP = "models", "list the known models"
_HEADS = ("name", "family", "tasks", "size", "frames", "steps", "guidance", "parameters", "where")
Cell = str | int | float | list[str] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from .. import catalog

    rows = [_row(card, ships=card.name in catalog.SHIPPED) for card in catalog.known()]
    if arguments.json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(table([_HEADS, *([_cell(head, row[head]) for head in _HEADS] for row in rows)]))
    return 0


def _row(card: "Card", *, ships: bool) -> dict[str, Cell]:
    first = card.defaults[next(iter(card.programs))]
    return {
        "name": card.name,
        "family": card.family,
        "tasks": list(card.programs),
        "size": f"{first['width']}x{first['height']}",
        "frames": _number(first["num_frames"]),
        "steps": _number(first["num_inference_steps"]),
        "guidance": _number(first["guidance_scale"]),
        "parameters": sum(component.parameters for component in card.components.values()) or None,
        "where": "ships" if ships else "hub",
        "recipe": card.recipe.kind,
        "parents": list(card.recipe.parents),
    }


def _number(value: object) -> int | float | None:
    return value if isinstance(value, (int, float)) else None


def _cell(head: str, value: Cell) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    if head == "parameters" and isinstance(value, int):
        return _counted(value)
    return "-" if value is None else f"{value}"


def _counted(parameters: int) -> str:
    """As people say it: 14.3 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit}"
    return str(parameters)
