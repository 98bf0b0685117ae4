"""Rewards by text, as run files name them.

    parse({"ocr": 1.0, "jpeg": -0.1})
    parse({"drawings": {"weight": 1.0, "sprites": "sprites.npz"}, "mine.py:brightness": 0.5})
    parse({"ocr": {"weight": 1.0, "workers": 8, "timeout": 30}})        # in processes of its own
    judges({"tesseract": 1.0}, trained={"ocr": 1.0})                    # who are never trained on

A name is one of `REWARDS` or a function or class in a file. Beside its weight a reward has its constructor's
parameters; with `workers` it runs in a pool of so many processes, and `timeout` is then the pool's.
"""

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import cast

from ..errors import BackendError, RequestError
from .composite import Composite
from .reward import Reward

Value = str | int | float | bool
# module and class here; imported when chosen
REWARDS: Mapping[str, tuple[str, str]] = {
    "ocr": ("ocr", "OCR"),
    "motion": ("tracking", "Motion"),
    "position": ("tracking", "Position"),
    "colour": ("tracking", "Colour"),
    "drawings": ("drawings", "Drawings"),
    "jpeg": ("jpeg", "JPEG"),
    "remote": ("remote", "Remote"),
    "vision": ("vision", "Vision"),
    "served": ("served", "Served"),
}
JUDGES: Mapping[str, tuple[str, str]] = {"tesseract": ("judge", "Tesseract")}  # and no rewards
_POOL = ("workers", "timeout")
Settings = Mapping[str, float | Mapping[str, Value]]


def parse(settings: Settings) -> Composite:
    """The rewards that a mapping names, with a weight or a mapping of weight and parameters. Raises RequestError."""
    for name in settings:
        if name in JUDGES:
            raise RequestError(f"{name} is a judge and never trained on", value=name, choices=REWARDS)
    return _parsed(settings)


def judges(settings: Settings, trained: Settings) -> Composite:
    """Judges, named as rewards are. Raises RequestError also for one whose name is among those trained on: with other
    parameters it is the same scorer."""
    ours = set(map(_identity, trained))
    for name in settings:
        if _identity(name) in ours:
            choices = [other for other in (*JUDGES, *REWARDS) if other not in ours]
            raise RequestError("a judge must not be trained on", value=name, choices=choices)
    return _parsed(settings)


def _identity(name: str) -> str:
    """The name, of a file by where it lies."""
    path, colon, attribute = name.rpartition(":")
    return f"{Path(path).expanduser().resolve()}:{attribute}" if colon else name


def _parsed(settings: Settings) -> Composite:
    rewards = {}
    for name, given in settings.items():
        options: dict[str, Value] = dict(given) if isinstance(given, Mapping) else {"weight": given}
        weight = options.pop("weight", None)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise RequestError(f"reward {name} needs a weight", value=weight, remedy=f"as in {{{name!r}: 1.0}}")
        rewards[name] = _placed(name, options), float(weight)
    return Composite(rewards)


def build(name: str, parameters: Mapping[str, Value]) -> Reward:
    """A reward of that name in this process. Raises RequestError for what it does not take."""
    found = named(name)
    if not inspect.isclass(found):
        if parameters:
            raise RequestError(f"{name} is a function and takes no parameters", value=", ".join(parameters))
        return cast(Reward, found)
    _check(name, found, parameters)
    return cast(Reward, found(**parameters))


def named(name: str) -> Callable[..., object]:
    """The function or class of that name. Raises RequestError where there is none."""
    if known := REWARDS.get(name) or JUDGES.get(name):
        module, attribute = known
        return cast(Callable[..., object], getattr(_imported(module), attribute))
    path, colon, attribute = name.rpartition(":")
    if not colon:
        raise RequestError("unknown reward", value=name, choices=[*REWARDS, "file.py:function"])
    found = getattr(_module(Path(path).expanduser()), attribute, None)
    if not callable(found):
        raise RequestError(f"{path} has no function or class of that name", value=attribute)
    return cast(Callable[..., object], found)


def _placed(name: str, options: dict[str, Value]) -> Reward:
    """In a pool if it has workers, else here. Only with workers is a timeout the pool's."""
    if "workers" not in options:
        if "timeout" in options and "timeout" not in inspect.signature(named(name)).parameters:
            remedy = "give workers as well: a timeout is that of their answers"
            raise RequestError(f"{name} has no timeout of its own", value=options["timeout"], remedy=remedy)
        return build(name, options)
    pool = {key: options.pop(key) for key in _POOL if key in options}
    maker = _imported("pool").Pool
    _check("a pool", maker, {"name": name, "parameters": "", **pool})
    return cast(Reward, maker(name, options, **pool))


def _imported(module: str) -> ModuleType:
    """A module here. Raises BackendError where a package that it needs is not installed."""
    try:
        return importlib.import_module(f".{module}", __package__)
    except ModuleNotFoundError as error:
        remedy = "pip install 'loopwright[train]'"
        raise BackendError("a reward needs a package that is not installed", value=error.name, remedy=remedy) from error


def _module(path: Path) -> object:
    spec = importlib.util.spec_from_file_location(path.stem, path) if path.suffix == ".py" else None
    if spec is None or spec.loader is None or not path.is_file():
        raise RequestError("no such file of rewards", value=str(path), remedy="give a .py file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _check(name: str, maker: Callable[..., object], given: Mapping[str, Value]) -> None:
    """Raise where a parameter is unknown, missing or of another type."""
    known = inspect.signature(maker).parameters
    for key, value in given.items():
        if key not in known:
            raise RequestError(f"{name} takes no such parameter", value=key, choices=known)
        wanted = known[key].annotation
        kinds = (int, float) if wanted is float else wanted
        if wanted in (str, int, float, bool) and (
            not isinstance(value, kinds) or (isinstance(value, bool) and wanted is not bool)
        ):
            raise RequestError(f"{name}: {key} must be a {wanted.__name__}", value=value)
    missing = [key for key, each in known.items() if each.default is each.empty and key not in given]
    if missing:
        raise RequestError(f"{name} needs its {missing[0]}", remedy=f"give {', '.join(missing)}")
