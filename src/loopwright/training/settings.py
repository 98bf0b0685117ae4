"""Frozen dataclasses from plain values and back, with every name and type checked.

    settings = build(Run, {"model": "loopwright/tiny-wan", "batch_size": 8})
    plain(settings)                                            # dictionaries, lists, numbers and texts
    change(values, "optimiser.lr=3e-4")                        # as the command line gives it

Errors name the setting by its path, such as optimiser.lr. Deliberately absent: defaults, which the classes have.
"""

import difflib
import types
from collections import abc
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from ..errors import LoopwrightError, RequestError

T = TypeVar("T")
_KINDS: dict[object, str] = {str: "text", int: "a whole number", float: "a number", bool: "true or false"}
Plain = dict[str, object]


def build(cls: type[T], values: object, path: str = "") -> T:
    """An instance of a dataclass. Raises RequestError for unknown or missing names and for values of another type."""
    if not isinstance(values, Mapping):
        raise RequestError(f"{path or 'a run'} must be settings by name", value=values)
    hints, known = get_type_hints(cls), {field.name: field for field in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            raise RequestError("no such setting", value=_join(path, name), choices=near or known)
    for name, field in known.items():
        if name not in values and field.default is MISSING and field.default_factory is MISSING:
            raise RequestError(f"{_join(path, name)} is missing", remedy="add it, or give it with --set")
    return cls(**{str(name): _value(hints[str(name)], value, _join(path, name)) for name, value in values.items()})


@contextmanager
def naming(setting: str) -> Iterator[None]:
    """Errors of a `with` block are this setting's, and say so."""
    try:
        yield
    except LoopwrightError as error:
        raise RequestError(f"{setting}: {error}") from error


def refuse(setting: str, given: Mapping[str, object], remedies: Mapping[str, str]) -> None:
    """Raise RequestError for the first of these names that is given, with what to do instead."""
    for name, remedy in remedies.items():
        if name in given:
            raise RequestError(f"{setting} takes no {name}", value=given[name], remedy=remedy)


def plain(settings: object) -> Plain:
    """The settings as values that YAML and JSON have."""
    return cast(Plain, _listed(asdict(settings)))  # type: ignore[call-overload]


def leaves(values: object, path: str = "") -> Plain:
    """The settings that have none of their own, by their paths."""
    if not isinstance(values, Mapping):
        return {path: values}
    return {name: leaf for key, item in values.items() for name, leaf in leaves(item, _join(path, key)).items()}


def change(values: Mapping[str, object], text: str) -> Plain:
    """The values with one of them set, from a text such as "a.b=c", c in YAML. Raises RequestError for other texts."""
    import yaml  # type: ignore[import-untyped]

    name, equals, written = text.partition("=")
    if not (name and equals):
        raise RequestError("not a setting", value=text, remedy="write --set NAME=VALUE, such as optimiser.lr=3e-4")
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError as error:
        raise RequestError(f"{name} is not YAML ({error})", value=written) from error
    return _put(values, name.split("."), value, name)


def _put(values: Mapping[str, object], names: list[str], value: object, path: str) -> Plain:
    first, *rest = names
    if not rest:
        return {**values, first: value}
    inner = values.get(first)
    if inner is not None and not isinstance(inner, Mapping):
        raise RequestError("no such setting", value=path, remedy=f"{first} has no settings of its own")
    return {**values, first: _put(inner or {}, rest, value, path)}


def _value(hint: object, value: object, path: str) -> object:
    """The value as the type has it, such as a tuple for a list."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        kind = next(kind for kind in inner if kind is not type(None))
        return None if value is None else _value(kind, value, path)
    if origin is Literal:
        return _choice(inner, value, path)
    if origin is tuple:
        return _values(inner, value, path)
    if origin is abc.Mapping:
        nested = any(get_origin(kind) is abc.Mapping for kind in get_args(inner[1]))
        return _named(value, path, nested=nested)
    assert isinstance(hint, type)
    if is_dataclass(hint):
        return value if isinstance(value, hint) else build(hint, value, path)
    return _scalar(hint, value, path)


def _choice(choices: tuple[object, ...], value: object, path: str) -> object:
    if value not in choices:
        raise RequestError(f"unknown {path}", value=value, choices=choices)
    return value


def _named(value: object, path: str, *, nested: bool = False) -> Plain:
    """Numbers and texts by names that are not settings of ours; `nested` ones may have such of their own."""
    if not isinstance(value, Mapping):
        raise RequestError(f"{path} must be settings by name", value=value)
    found: Plain = {}
    for name, item in value.items():
        inside = nested and isinstance(item, Mapping)
        if not inside and not isinstance(item, (str, int, float)):
            raise RequestError(f"{_join(path, name)} must be a number or text", value=item)
        found[str(name)] = _named(item, _join(path, name)) if inside else item
    return found


def _values(kinds: tuple[object, ...], value: object, path: str) -> tuple[object, ...]:
    if not isinstance(value, (list, tuple)):
        raise RequestError(f"{path} must be a list", value=value, remedy=f"write [{value}]")
    if Ellipsis not in kinds and len(value) != len(kinds):
        raise RequestError(f"{path} must have {len(kinds)} values", value=list(value))
    each = (kinds[0],) * len(value) if Ellipsis in kinds else kinds
    return tuple(_value(kind, item, f"{path}[{i}]") for i, (kind, item) in enumerate(zip(each, value, strict=True)))


def _scalar(kind: type, value: object, path: str) -> object:
    if kind is float and isinstance(value, str):
        value = _number(value)  # YAML takes 1e-4 for text
    fits = (int, float) if kind is float else kind
    if not isinstance(value, fits) or (isinstance(value, bool) and kind is not bool):
        raise RequestError(f"{path} must be {_KINDS.get(kind, kind.__name__)}", value=value)
    return kind(value)


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def _listed(value: object) -> object:
    if isinstance(value, Mapping):
        return {name: _listed(item) for name, item in value.items()}
    return [_listed(item) for item in value] if isinstance(value, (list, tuple)) else value


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
