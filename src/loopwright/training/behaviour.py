"""The weights that sample while newer ones are trained: a copy of the networks, some updates behind.

    behaviour = Behaviour(plan, group, live, networks, sampler=None)
    behaviour.follow(3)                         # the weights as they are now, after three epochs of updates
    with behaviour.serving() as model: ...      # in any thread, while the networks are trained
    behaviour.version                           # 3

The copy is whole in this process and in the precision that serving has, so that sampling waits for nobody, and its
log-probs are those of the networks it was made of but for rounding. It shares encoders and autoencoder with the
networks, unless the run has engines: then these sample with it. What computed a step stands in its record
(`Move.versions`, one more than the epochs). Deliberately absent: captured graphs, for other threads use the device.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

from ..api import Model
from ..distributed.group import Group
from ..engine.residence import align
from .engines import Engines
from .live import Live, instance_of
from .networks import sharded
from .plan import Plan
from .sampler import Sampler
from .twins import Twins


class Behaviour:
    """The copy; it begins as what the model's files hold."""

    def __init__(
        self,
        plan: Plan,
        group: Group,
        live: Live,
        networks: Mapping[str, nn.Module],
        *,
        sampler: str | None,
        engines: Engines | None = None,
    ) -> None:
        self._twins = Twins(plan, group, networks)
        for network in [] if sharded(plan.run, group) else networks.values():
            align(network)  # as the copy is: the last bits of products depend on it
        given, dtype, device = self._twins.modules, plan.run.precision, str(group.device)
        self._instance = instance_of(
            plan.run, plan.card, given, live.store, sampler=sampler, dtype=dtype, device=device
        )
        self._name, self._engines = plan.run.output, engines
        self._version = torch.zeros((), dtype=torch.int64)

    @property
    def version(self) -> int:
        """How many epochs its weights have learnt from."""
        return int(self._version)

    def follow(self, version: int) -> None:
        """Take the weights as they are now, after so many epochs. A collective where they are sharded."""
        self._twins.follow()
        self._version.fill_(version)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps."""
        weights = {f"behaviour.{name}": tensor for name, tensor in self._twins.tensors.items()}
        return {**weights, "behaviour.version": self._version}

    @contextmanager
    def serving(self) -> Iterator[Sampler]:
        """What samples with it, for a `with` block in which it does not change."""
        if self._engines is not None:
            with self._engines.serving(self._twins.modules, self.version + 1) as sampler:
                yield sampler
            return
        for role in self._twins.modules:
            resident = self._instance.resident(role)
            self._instance.store.changed(resident, version=self.version + 1, moved=False)
        yield Model(f"{self._name} after epoch {self.version}", self._instance)
