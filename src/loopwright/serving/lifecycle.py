"""Which models a server has, whether their weights are here, and how they come and go while it serves.

    lifecycle = Lifecycle(models, driver, load=load, roots=roots, idle_seconds=600.0)
    with lifecycle.using(model): ...               # it stays for so long
    await lifecycle.unload("tiny-wan")             # when nobody uses it any more
    await lifecycle.load("tiny-wan")               # or a folder of one of the roots

A model is loaded, loading, draining (taken from once nobody uses it), unloaded (until it is loaded again), or idle: let
go because nobody has asked for it in a while, and loaded by the next who does. One whose weights were changed in memory
is never idle: they are nowhere else.
"""

import asyncio
import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from ..api.model import Model
from ..backends.usage import trim
from ..engine.instance import Instance
from ..engine.job import out_of_memory
from ..engine.store import is_own
from ..errors import CapacityError, RequestError
from .driver import Driver
from .refusal import Refusal

LOADED, LOADING, DRAINING, UNLOADED, IDLE = "loaded", "loading", "draining", "unloaded", "idle"
Load = Callable[[str], Model]


@dataclass(slots=True, eq=False)
class _Served:
    """A model, and who uses it: how many, and when last. `changing` is held while its weights come or go."""

    model: Model
    state: str
    users: int = 0
    used: float = field(default_factory=time.monotonic)
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)


def by_name(models: Sequence[Model]) -> dict[str, Model]:
    """Models by what clients call them. Raises RequestError where that is not one model."""
    named: dict[str, Model] = {}
    for model in models:
        if model.card.name in named:
            raise RequestError("two models have one name", value=model.card.name, remedy="rename one's folder")
        named[model.card.name] = model
    return named


def read_weights(model: Model) -> None:
    """Read every component that a task uses now, rather than at its first request; and have the memory for them."""
    instance = model.instance
    ledger = instance.store.ledger(instance.binding.device)
    if ledger is not None:
        instance.set_aside(ledger)
    stages = [stage for program in model.card.programs.values() for stage in program.stages]
    for name in dict.fromkeys(name for stage in stages for name in stage.uses):
        instance.part(name)
    instance.weights()  # answers say their checksums


class Lifecycle:
    """`enter`, `leave` and `using` from any thread, all else on the event loop. The models' weights have been read.

    `load` makes a model of a folder below one of the `roots`; without roots no model comes that was not there.
    """

    def __init__(
        self,
        models: Sequence[Model],
        driver: Driver,
        *,
        load: Load | None = None,
        roots: Sequence[Path] = (),
        idle_seconds: float | None = None,
    ) -> None:
        self._served = {name: _Served(model, LOADED) for name, model in by_name(models).items()}
        self._driver, self._load, self._roots, self._idle_seconds = driver, load, roots, idle_seconds
        self._lock = threading.Lock()
        self._adding = asyncio.Lock()

    @property
    def named(self) -> Mapping[str, Model]:
        """Every model, whether its weights are here or not."""
        return {name: served.model for name, served in self._served.items()}

    def state(self, name: str) -> str:
        """Of the model of that name."""
        return self._served[name].state

    # --- who uses a model

    def enter(self, model: Instance) -> None:
        """Use the model until `leave`. Raises Refusal if it is leaving or gone."""
        served = self._served[model.card.name]
        with self._lock:
            if served.state in (DRAINING, UNLOADED):
                raise _gone(model.card.name, served.state)
            if served.state == IDLE:  # whoever was let in before it went loads it by using it
                served.state = LOADED
            served.users += 1

    def leave(self, model: Instance, *, used: bool = True) -> None:
        """The end of what `enter` began. Unless it was `used`, that keeps no model from being idle."""
        served = self._served[model.card.name]
        with self._lock:
            served.users -= 1
            served.used = time.monotonic() if used else served.used

    @contextmanager
    def using(self, model: Model) -> Iterator[None]:
        """Use it for the `with` block."""
        self.enter(model.instance)
        try:
            yield
        finally:
            self.leave(model.instance)

    # --- how weights come and go

    async def ready(self, model: Model) -> None:
        """Have the weights here, if they were only let go for a while. Raises Refusal if they are not served now."""
        served = self._served[model.card.name]
        served.used = time.monotonic()
        if served.state == LOADED:
            return
        if served.state in (DRAINING, UNLOADED):
            raise _gone(model.card.name, served.state)
        async with served.changing:
            if served.state == IDLE:
                await self._come(served, otherwise=IDLE)

    async def load(self, name: str) -> Model:
        """Load a model again, or one of the roots' for the first time. Raises Refusal or a LoopwrightError."""
        async with self._adding:
            served = self._served.get(name) or await self._added(name)
        async with served.changing:
            if served.state in (UNLOADED, IDLE):
                await self._come(served, otherwise=served.state)
        return served.model

    async def unload(self, name: str) -> None:
        """Take nothing new for the model, wait until nobody uses it, and let its weights go."""
        served = self._served[name]
        async with served.changing:
            if served.state == UNLOADED:
                return
            served.state = DRAINING
            try:
                while served.users:
                    await asyncio.sleep(_POLL)
                await self._go(served, UNLOADED)
            finally:
                served.state = LOADED if served.state == DRAINING else served.state

    async def evict(self) -> None:
        """Let go of what nobody has asked for in so long."""
        if self._idle_seconds is None:
            return
        for served in list(self._served.values()):
            if self._is_idle(served):
                async with served.changing:
                    if self._is_idle(served):
                        await self._go(served, IDLE)

    def _is_idle(self, served: _Served) -> bool:
        assert self._idle_seconds is not None
        since = time.monotonic() - served.used
        idle = served.state == LOADED and not served.users and since >= self._idle_seconds
        return idle and not _changed(served.model.instance)

    async def _come(self, served: _Served, *, otherwise: str) -> None:
        served.state = LOADING
        try:
            await asyncio.to_thread(_read, served.model)
        except BaseException:
            await asyncio.wrap_future(self._driver.call(served.model.instance.unload))
            served.state = otherwise
            raise
        served.state, served.used = LOADED, time.monotonic()

    async def _go(self, served: _Served, state: str) -> None:
        """Between two steps, and only if nobody has come meanwhile."""

        def unload() -> None:
            with self._lock:
                if served.users:
                    return
                served.state = state
            served.model.instance.unload()
            gc.collect()  # hooks and modules know each other
            trim(served.model.instance.binding.device)

        await asyncio.wrap_future(self._driver.call(unload))

    async def _added(self, name: str) -> _Served:
        """A model of one of the roots, its weights still to be read."""
        folder = self._folder(name)
        assert self._load is not None
        model = await asyncio.to_thread(self._load, str(folder))
        if model.card.name in self._served:
            known = model.card.name
            raise Refusal(f"a model of that name is served already: {known!r}", status=409, code="model_exists")
        served = self._served[model.card.name] = _Served(model, UNLOADED)
        return served

    def _folder(self, name: str) -> Path:
        """The model's folder, which lies in one of the roots wherever links lead. Raises Refusal."""
        for root in self._roots:
            folder = (root / name).resolve() if "\0" not in name else root
            if folder != root.resolve() and folder.is_relative_to(root.resolve()) and _holds_model(folder):
                return folder
        there = [path.name for root in self._roots for path in sorted(root.iterdir()) if _holds_model(path)]
        choices = ", ".join([*self._served, *there])
        raise Refusal(f"no such model: {name!r}; choices: {choices}", status=404, code="model_not_found", param="model")


_POLL = 0.02  # seconds between two looks at who still uses a model that is to go


def _holds_model(folder: Path) -> bool:
    return any(os.path.isfile(folder / name) for name in ("card.json", "model_index.json"))  # False for any odd name


def _changed(instance: Instance) -> bool:
    """Whether it has weights that are in no file."""
    return any(version > 1 or is_own(instance.resident(name)) for name, version in instance.loaded.items())


def _read(model: Model) -> None:
    try:
        read_weights(model)
    except Exception as error:
        if out_of_memory(error):
            raise CapacityError(
                f"there is no memory for {model.card.name}", remedy="unload another model first"
            ) from error
        raise


def _gone(name: str, state: str) -> Refusal:
    told = f"the model {name!r} is {'being unloaded' if state == DRAINING else 'not loaded'}"
    return Refusal(told, status=404, code="model_not_loaded", param="model")
