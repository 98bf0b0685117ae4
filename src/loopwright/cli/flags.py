"""Flags as data, so that a command takes the same names from its command line and from a file.

    add_arguments(parser, FLAGS)                        # unset flags are None
    fill(arguments, read_config("fox.yaml", FLAGS))     # the command line beats the file

In a file, names have dashes or underscores: `num-frames: 9`. Deliberately absent: defaults, which are the card's.
"""

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import RequestError

Setting = str | int | float | bool | list[str]
_EXAMPLE = "write lines such as seed: 7"
_KINDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}


@dataclass(frozen=True, slots=True)
class Flag:
    """One setting. `kind` is str, int, float or bool; `many` may be given again; `instead` names its alternatives."""

    name: str
    help: str
    kind: type = str
    group: str = ""
    metavar: str = ""
    many: bool = False
    instead: tuple[str, ...] = ()
    in_file: bool = True


def add_arguments(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Add `--num-frames` for the flag num_frames, and so on, grouped in --help."""
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for flag in flags:
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        group = groups[flag.group]
        option = "--" + flag.name.replace("_", "-")
        if flag.kind is bool:
            group.add_argument(option, dest=flag.name, action="store_true", default=None, help=flag.help)
        else:
            group.add_argument(
                option,
                dest=flag.name,
                type=flag.kind,
                help=flag.help,
                metavar=flag.metavar or None,
                action="append" if flag.many else "store",
            )


def fill(arguments: argparse.Namespace, settings: Mapping[str, Setting], flags: Iterable[Flag]) -> None:
    """Set what the command line left out, unless it gave an alternative of the setting."""
    given = {name for name, value in vars(arguments).items() if value is not None}
    instead = {flag.name: flag.instead for flag in flags}
    for name, value in settings.items():
        if not {name, *instead[name]} & given:
            setattr(arguments, name, value)


def read_config(path: str, flags: Sequence[Flag]) -> dict[str, Setting]:
    """The settings in a YAML or JSON file. Raises RequestError naming the file and the key."""
    known = {flag.name: flag for flag in flags if flag.in_file}
    settings: dict[str, Setting] = {}
    for key, value in _mapping(path).items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise RequestError(f"{path}: unknown key", value=key, choices=known)
        if name in settings:
            raise RequestError(f"{path}: key given twice", value=name)
        if value is not None:
            settings[name] = _setting(path, known[name], value)
    return settings


def read_text(path: str) -> str:
    """A text file of the user's. Raises RequestError naming it."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot read {path} ({reason})", remedy="give a text file in UTF-8") from error


def _mapping(path: str) -> Mapping[object, object]:
    import yaml  # type: ignore[import-untyped]

    text = read_text(path)
    try:
        data = json.loads(text) if path.endswith(".json") else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise RequestError(f"{path} is neither YAML nor JSON ({error})", remedy=_EXAMPLE) from error
    if not isinstance(data, Mapping):
        raise RequestError(f"{path} holds no settings", value=data, remedy=_EXAMPLE)
    return data


def _setting(path: str, flag: Flag, value: object) -> Setting:
    if flag.many:
        return [str(_plain(path, flag, item)) for item in (value if isinstance(value, list) else [value])]
    return _plain(path, flag, value)


def _plain(path: str, flag: Flag, value: object) -> str | int | float | bool:
    if flag.kind is float and isinstance(value, str):
        value = _number(value)  # YAML takes 1e-3 for text
    fits = (int, float) if flag.kind is float else (flag.kind,)
    if not isinstance(value, fits) or (isinstance(value, bool) and flag.kind is not bool):
        raise RequestError(f"{path}: {flag.name} must be {_KINDS[flag.kind]}", value=value)
    return value  # type: ignore[return-value]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
