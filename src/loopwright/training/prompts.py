"""What rollouts are asked for: prompts with what is known beside them, and which of them an epoch takes.

    prompts = read("prompts.jsonl")             # lines such as {"prompt": "the word CAT", "text": "CAT"}
    taken(len(prompts), groups=48, epoch=3, seed=0)         # their numbers: every one once before any comes again

A file whose name ends in .txt has a prompt a line.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import DataError, RequestError
from .noise import generator


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt, and facts that rewards read, such as {"text": "CAT"}."""

    text: str
    facts: Mapping[str, str]


def read(path: str) -> tuple[Prompt, ...]:
    """The prompts of a file. Raises RequestError for no file, DataError with the line that is wrong."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot read prompts ({reason})", value=path, remedy="give .jsonl or .txt") from error
    parse = _plain if path.endswith(".txt") else _row
    found = tuple(parse(line, f"{path}:{number}") for number, line in enumerate(lines, start=1) if line.strip())
    if not found:
        raise DataError(path, "holds no prompts")
    return found


def taken(count: int, groups: int, epoch: int, seed: int) -> list[int]:
    """The numbers of an epoch's prompts of so many: one shuffle after the other, going on from epoch to epoch."""
    places = range(epoch * groups, (epoch + 1) * groups)
    rounds = {place // count for place in places}
    orders = {turn: torch.randperm(count, generator=generator("prompts", seed, turn)).tolist() for turn in rounds}
    return [orders[place // count][place % count] for place in places]


def _plain(line: str, where: str) -> Prompt:
    return Prompt(line.strip(), {})


def _row(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(where, f"is not JSON ({error})") from error
    if not isinstance(row, dict) or not all(isinstance(value, str) for value in row.values()):
        raise DataError(where, "is not an object of texts", remedy='write {"prompt": "...", "text": "..."}')
    if "prompt" not in row:
        raise DataError(where, "has no prompt", remedy='write {"prompt": "..."}')
    return Prompt(row["prompt"], {name: value for name, value in row.items() if name != "prompt"})
