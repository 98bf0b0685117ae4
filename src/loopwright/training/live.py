"""The networks in training as the engine serves them: no copy, no transfer, always the weights as they are.

    live = Live(plan, group, networks)
    with live.serving("after step 500") as model:                   # as the card says
        model.run(request)
    with live.serving("epoch 3", sampler="flow_sde") as model: ...

A network is put into an `Instance` as it is, sharded or with adapters, and computes what it would when served. Each
time its version is raised, so that nothing that was made of older weights is used again; what frozen encoders have
computed stays. Encoders and autoencoder are loaded at first use; between two servings they may leave (`sleep`).

Rollouts run by captured graphs (`rollout.graphs`), which read weights where they lie: updates write them in place. A
sharded network has its weights nowhere for longer than a call, so its twin is served instead (`twins`).
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from torch import nn

from .. import catalog
from ..api import Model
from ..backends.capture import capture_on
from ..card import Card, derive, experts
from ..distributed.group import Group
from ..engine.graphs import Graphs
from ..engine.instance import Instance
from ..engine.store import Store
from .networks import served, sharded
from .plan import Plan
from .run import Run
from .sleep import Turns
from .twins import Twins


class Live:
    """The networks of a run, served."""

    def __init__(self, plan: Plan, group: Group, networks: Mapping[str, nn.Module]) -> None:
        self._plan, self._group, self._networks = plan, group, networks
        self.store = Store()
        self._instances: dict[str | None, Instance] = {}
        self._graphs, self._twins = self._captured(), None
        rollout = plan.run.rollout
        # processes that share shards have to call them equally often, which free batches do not
        free = rollout is not None and rollout.mode == "throughput"
        parted = sharded(plan.run, group) and (self._graphs is not None or free)
        if parted or (rollout is not None and rollout.compile):
            self._twins = Twins(plan, group, networks)
        assert plan.run.sleep is not None, "a plan resolves it"
        self.turns = Turns(plan.run.sleep)
        self.turns.serves(self._leave)

    @contextmanager
    def serving(self, name: str, *, sampler: str | None = None) -> Iterator[Model]:
        """A model of that name for a `with` block, in which the weights must not change."""
        instance = self._instances.get(sampler)
        if instance is None:
            given = self._networks if self._twins is None else self._twins.modules
            instance = self._instances[sampler] = self._instance(given, sampler)
        if self._twins is not None:
            self._twins.follow()
        for role, network in self._networks.items():
            instance.changed(role, moved=False)
            network.eval()
        try:
            with self.turns.serving():
                yield Model(f"{self._plan.run.output} {name}", instance, self._graphs)
        finally:
            for network in self._networks.values():
                network.train()

    def _instance(self, given: Mapping[str, nn.Module], sampler: str | None) -> Instance:
        run, device = self._plan.run, str(self._group.device)
        dtype = run.precision if sharded(run, self._group) else "float32"
        return instance_of(run, self._plan.card, given, self.store, sampler=sampler, dtype=dtype, device=device)

    def _captured(self) -> Graphs | None:
        """What captures steps; None where they run eagerly."""
        rollout, device = self._plan.run.rollout, str(self._group.device)
        if rollout is None or rollout.graphs != "always":
            return None
        return Graphs(capture_on, ledger=self.store.ledger(device))

    def _leave(self) -> None:
        """Take what only serving needs off the device, whatever instance has it."""
        if self._graphs is not None:
            self._graphs.rest()
        self.store.release(str(self._group.device), sys.maxsize)


def instance_of(
    run: Run,
    card: Card,
    networks: Mapping[str, nn.Module],
    store: Store,
    *,
    sampler: str | None,
    dtype: str,
    device: str,
) -> Instance:
    """An instance of the run's model, under that sampler, that computes with these networks in that precision."""
    card = served(card, sampler)
    others = {} if run.rollout is None else run.rollout.dtype
    precisions = {**others, **dict.fromkeys(experts(card), dtype)}
    card = derive(card, components={n: replace(card.components[n], dtype=dtype) for n, dtype in precisions.items()})
    instance = Instance(
        card,
        catalog.loops(card),
        store,
        device=device,
        locate=catalog.locate,
        prepare=catalog.preparation(card),
        compile=run.rollout is not None and run.rollout.compile,
    )
    for role, network in networks.items():
        instance.put(role, network)
    # who trains them has them where they are, also when memory is short
    store.residence.keep([instance.resident(role) for role in networks], 1)
    return instance
