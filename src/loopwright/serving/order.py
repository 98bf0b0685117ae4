"""What a server is to be, as text that any process can make one of.

order = Order(("loopwright/tiny-wan",), {"device": "cpu"}, threads=1, settings=Settings())
service = Order.loads(order.dumps()).service()
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .. import api
from ..engine.store import Store
from ..files import cache_folder
from .lifecycle import Load
from .service import Service
from .settings import Limits, Settings

OF_ONE = ("revision", "lora")  # options that belong to one model, not to those that are loaded later
Option = str | float | bool | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """Models by their sources, the options of `api.load` for them, CPU threads, and the server's settings."""

    models: tuple[str, ...]
    options: Mapping[str, Option]
    threads: int | None
    settings: Settings

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self), default=_tagged)

    @classmethod
    def loads(cls, text: str) -> "Order":
        """The inverse of `dumps`."""
        given = _untagged(json.loads(text))
        assert isinstance(given, dict)
        settings = given["settings"]
        limits = Limits(**settings["limits"])
        return cls(**given | {"settings": Settings(**settings | {"limits": limits})})

    def load(self) -> tuple[list[api.Model], Load]:
        """The models, which share their components, and how others are loaded."""
        store = Store(prices=cache_folder() / "prices")
        models = [api.load(name, store=store, **self.options) for name in self.models]  # type: ignore[arg-type]
        others = {name: value for name, value in self.options.items() if name not in OF_ONE}
        return models, lambda folder: api.load(folder, store=store, **others)  # type: ignore[arg-type]

    def service(self, say: Callable[[str], None] = lambda line: None) -> Service:
        """The server's parts, weights read; `say` hears of what takes long before it begins."""
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        models, load = self.load()
        say(f"loading {len(models)} model{'s' * (len(models) > 1)}")
        return Service(models, self.settings, load)


def _tagged(value: object) -> object:
    if isinstance(value, Path):
        return {"path": str(value)}
    raise TypeError(f"{value!r} has no place in an order")


def _untagged(value: object) -> object:
    if isinstance(value, dict):
        if set(value) == {"path"}:
            return Path(value["path"])
        return {name: _untagged(item) for name, item in value.items()}
    return tuple(map(_untagged, value)) if isinstance(value, list) else value
