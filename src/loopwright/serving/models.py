"""The models of a server, and requests of them: resolved, within limits, with the rows that fixed mode keeps.

models = Models(lifecycle, driver, limits, guard)
asked = await models.resolve(None, "a fox", None, {}, {"seed": 7})
asked.request.rows, asked.echo["card"]
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from ..api.model import Model, Parameter, sampler_of
from ..card import experts
from ..program import bind
from ..request import Frames, Request
from .driver import Driver
from .lifecycle import Lifecycle
from .refusal import Refusal
from .safety import Guard
from .settings import Limits

_ADAPTER = ("component", "digest", "scale")


@dataclass(frozen=True, slots=True)
class Asked:
    """A request that can be queued, and what every answer says of it."""

    model: Model
    request: Request
    echo: Mapping[str, object]


class Models:
    """Of one device, which `driver` drives."""

    def __init__(self, lifecycle: Lifecycle, driver: Driver, limits: Limits, guard: Guard) -> None:
        self.lifecycle, self._guard = lifecycle, guard
        self._driver, self._limits = driver, limits
        self._rows: dict[object, int] = {}

    @property
    def named(self) -> Mapping[str, Model]:
        """By what clients call them."""
        return self.lifecycle.named

    def get(self, name: str | None) -> Model:
        """The model of that name; without one, the only one there is."""
        if name is None and len(self.named) == 1:
            return next(iter(self.named.values()))
        if name is None or name not in self.named:
            what = "no model named" if name is None else f"no such model: {name!r}"
            choices = ", ".join(self.named)
            raise Refusal(f"{what}; choices: {choices}", status=404, code="model_not_found", param="model")
        return self.named[name]

    async def resolve(
        self,
        name: str | None,
        prompt: str,
        task: str | None,
        media: Mapping[str, Frames],
        parameters: Mapping[str, Parameter],
    ) -> Asked:
        """Raises Refusal or a LoopwrightError; afterwards nothing of the request is in doubt."""
        model = self.get(name)
        await self.lifecycle.ready(model)
        with self.lifecycle.using(model):
            return await self._resolve(model, prompt, task, media, parameters)

    async def _resolve(
        self,
        model: Model,
        prompt: str,
        task: str | None,
        media: Mapping[str, Frames],
        parameters: Mapping[str, Parameter],
    ) -> Asked:
        mode, rows = parameters.get("mode") or "fixed", parameters.get("rows")
        measured = mode == "fixed" and rows is None
        settled = {**parameters, "mode": mode, "rows": 1 if measured else rows}
        heavy = bool(media)  # pixels are copied and hashed; without any, to wake a thread would be most of the work
        make = partial(
            model.request,
            prompt,
            task=task,
            image=media.get("image"),
            video=media.get("video"),
            **settled,  # type: ignore[arg-type]
        )
        request = await asyncio.to_thread(make) if heavy else make()
        self._limits.check(request)
        bind(model.card, request, model.instance.loops)
        if self._guard.watching:
            await asyncio.to_thread(self._guard.prompt, prompt)
        if measured:
            request = replace(request, rows=await self.rows(model, request))
        echo = partial(_echo, model, request)
        return Asked(model, request, await asyncio.to_thread(echo) if heavy else echo())

    async def rows(self, model: Model, request: Request) -> int:
        """The rows of fixed mode for requests of this shape: measured once, between two steps, and kept.

        A CPU is filled by one request.
        """
        if model.instance.binding.device == "cpu":
            return 1
        shape = (model.instance.digest, _shape(request))
        if shape not in self._rows:
            work = self._driver.call(lambda: model.rows(request, limit=self._limits.rows))
            self._rows[shape] = await asyncio.wrap_future(work)
        return self._rows[shape]


def _shape(request: Request) -> tuple[object, ...]:
    """What of a request decides the shapes of its denoising steps, and by what they are computed."""
    media = [frames and frames.shape for frames in (request.image, request.video)]
    size = (request.task, request.height, request.width, request.num_frames, request.max_sequence_length)
    return (*size, request.guidance_scale > 1, request.attention, request.kernels, *media)


def _echo(model: Model, request: Request) -> dict[str, object]:
    record = {name: value for name, value in request.record().items() if name not in ("model", "prompt")}
    return {
        "model": model.card.name,
        "prompt": request.prompt,
        "seed": request.seed,
        "mode": request.mode,
        "rows": request.rows,
        "size": f"{request.width}x{request.height}",
        "parameters": record,
        "card": model.instance.digest,
        "weights": {name: model.instance.version(name) for name in experts(model.card)},
        "revision": model.revision,
        "sampler": sampler_of(model.card),
        "lora": adapters(model),
    }


def adapters(model: Model) -> list[dict[str, object]]:
    """The model's, as clients hear of them: nothing of where their files lie."""
    return [{name: use.record()[name] for name in _ADAPTER} for use in model.instance.adapters]
