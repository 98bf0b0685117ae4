"""Weights that are replaced while a server serves, and what its answers say of them.

folder = located(settings.model_roots, "fox/step-500/transformer")
weights = await Renewal(lifecycle).update(model, body, folder)
{**asked.echo, **ran_with(job)}
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..api.model import Model
from ..card import Card, experts
from ..engine.job import Job
from ..engine.store import Weights
from .bodies import WeightsBody
from .lifecycle import Lifecycle
from .refusal import Refusal


class Renewal:
    """On the event loop; one change of weights at a time."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._changing = asyncio.Lock()

    async def update(self, model: Model, body: WeightsBody, path: Path) -> tuple[str, Weights]:
        """Which component has which weights now. Goes on when whoever waits leaves. Raises as `Model.update_weights`,
        or Refusal while others are being replaced.
        """
        component = body.component or _only(model.card)
        if self._changing.locked():
            raise Refusal("weights are being replaced", status=409, code="updating", retry_after=5)
        return component, await asyncio.shield(asyncio.ensure_future(self._update(model, component, body, path)))

    async def _update(self, model: Model, component: str, body: WeightsBody, path: Path) -> Weights:
        async with self._changing:
            await self._lifecycle.ready(model)
            with self._lifecycle.using(model):
                return await asyncio.to_thread(
                    model.update_weights,
                    component,
                    path,
                    policy=body.policy,
                    version=body.version,
                    seconds=body.drain_seconds,
                )

    def give_up(self) -> None:
        """Wait no longer for requests that will not end."""
        for model in self._lifecycle.named.values():
            model.instance.crew.give_up()


def located(roots: Sequence[Path], name: str) -> Path:
    """What lies at that path in one of the roots, wherever links lead. Raises Refusal."""
    for root in roots if "\0" not in name else ():
        place = (root / name).resolve()
        if place != root.resolve() and place.is_relative_to(root.resolve()) and place.exists():
            return place
    told = f"no such weights in this server's model roots: {name[:200]!r}"
    raise Refusal(told, status=404, code="weights_not_found", param="path")


def ran_with(job: Job) -> dict[str, object]:
    """What answers say of a job that is done: version and checksum by component; earlier versions of a swap."""
    before = [_versions(weights) for weights in job.weights_before]
    checksums = {name: weights.checksum for name, weights in job.weights.items()}
    told = {"weights": _versions(job.weights), "checksums": checksums}
    return told | ({"weights_before": before} if before else {})


def listed(models: Mapping[str, Model]) -> list[dict[str, object]]:
    """The generators that are in memory, and whatever else was replaced, of every model. Blocks: reads weights."""
    return [
        {"model": name, "component": component, **weights.record(), "replaced": component in model.instance.replaced()}
        for name, model in models.items()
        for component, weights in model.instance.weights().items()
    ]


def versions(models: Mapping[str, Model]) -> dict[str, Mapping[str, int]]:
    """Of the components that are in memory and have weights."""
    return {
        name: {c: version for c, version in model.instance.loaded.items() if model.card.components[c].dtype}
        for name, model in models.items()
    }


def _versions(weights: Mapping[str, Weights]) -> dict[str, int]:
    return {name: one.version for name, one in weights.items()}


def _only(card: Card) -> str:
    generators = experts(card)
    if len(generators) > 1:
        raise Refusal(
            f"the model has several generators: say which; choices: {', '.join(generators)}", param="component"
        )
    return generators[0]
