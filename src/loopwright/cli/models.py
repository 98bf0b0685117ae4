"""List the known models; fetch one ahead of its first use, list what is here, or remove it.

    loopwright models                                         # what ships, and published checkpoints known by name
    loopwright models pull Wan-AI/Wan2.1-T2V-1.3B-Diffusers   # all that it needs; goes on where it broke off
    loopwright models list                                    # what lies in the cache
    loopwright models remove Wan-AI/Wan2.1-T2V-1.3B-Diffusers

Any Diffusers folder or hub repository of a known family loads as well; the defaults shown are those of the first task.
The cache is huggingface_hub's (HF_HOME).
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RequestError
from .report import as_size
from .table import table

if TYPE_CHECKING:
    from ..card import Card

NAME, HELP = "models", "list, fetch and remove models"
_HEADS = ("name", "family", "tasks", "size", "frames", "steps", "guidance", "parameters", "where")
_HERE = ("name", "revision", "size", "used", "folder")
Cell = str | int | float | list[str] | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags, and its actions."""
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.set_defaults(act=_known)
    actions = parser.add_subparsers(metavar="ACTION")
    pull = actions.add_parser("pull", help="fetch a model of the hub, all its weights", allow_abbrev=False)
    listing = actions.add_parser("list", help="list what is here", allow_abbrev=False)
    gone = actions.add_parser("remove", help="remove a model from the cache", allow_abbrev=False)
    for action in (pull, gone):
        action.add_argument("model", metavar="MODEL", help="its name on the hub")
        action.add_argument("--revision", help="branch, tag or commit")
    listing.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="one JSON object a line")
    for action, act in ((pull, _pull), (listing, _list), (gone, _remove)):
        action.set_defaults(act=act)


def run(arguments: argparse.Namespace) -> int:
    """Do what is asked; without an action, print what is known."""
    arguments.act(arguments)
    return 0


def _known(arguments: argparse.Namespace) -> None:
    from .. import catalog

    rows = [_row(card, ships=card.name in catalog.SHIPPED) for card in catalog.known()]
    _show(_HEADS, rows, as_json=arguments.json)


def _pull(arguments: argparse.Namespace) -> None:
    """Fetch what the model's card names, from wherever it comes."""
    from .. import catalog
    from ..weights import hub

    name = arguments.model
    if name in catalog.SHIPPED or hub.is_local(name):
        raise RequestError("nothing to fetch: this model is here", value=name, remedy="give a hub name (org/name)")
    card = catalog.find(name, revision=arguments.revision)
    for part, component in card.components.items():
        print(f"fetching {part}", file=sys.stderr, flush=True)
        catalog.locate(card, component)
    print(hub.fetch(name, revision=arguments.revision, weights=True).folder)


def _list(arguments: argparse.Namespace) -> None:
    from .. import catalog
    from ..weights.cached import cached

    rows: list[Mapping[str, Cell]] = [
        {"name": name, "revision": None, "size": _bytes(folder), "used": None, "folder": str(folder)}
        for name, folder in catalog.SHIPPED.items()
    ]
    for model in cached():
        for commit in model.commits:
            named = ", ".join((*commit.refs, commit.hash[:12]))
            folder = str(commit.folder)
            rows.append(
                {"name": model.name, "revision": named, "size": model.bytes, "used": model.used, "folder": folder}
            )
    _show(_HERE, rows, as_json=arguments.json)


def _remove(arguments: argparse.Namespace) -> None:
    from .. import catalog
    from ..weights.cached import remove

    if arguments.model in catalog.SHIPPED:
        raise RequestError("a model that ships cannot be removed", value=arguments.model)
    print(f"removed {arguments.model}, {as_size(remove(arguments.model, revision=arguments.revision))}")


def _bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _show(heads: Sequence[str], rows: Sequence[Mapping[str, Cell]], *, as_json: bool) -> None:
    if as_json:
        for row in rows:
            print(json.dumps(row))
    else:
        print(table([heads, *([_cell(head, row[head]) for head in heads] for row in rows)]))


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
    if isinstance(value, (int, float)) and head in _TOLD:
        return _TOLD[head](value)
    return "-" if value is None else f"{value}"


def _counted(parameters: float) -> str:
    """As people say it: 14.3 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit}"
    return str(parameters)


def _size(count: float) -> str:
    return as_size(int(count))


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


_TOLD = {"parameters": _counted, "size": _size, "used": _day}
