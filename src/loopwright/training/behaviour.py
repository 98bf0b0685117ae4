"""The weights that sample while newer ones are trained: a copy of the networks, some updates behind.

    behaviour = Behaviour(plan, group, live, networks, sampler=None)
    behaviour.follow(3)                         # the weights as they are now, after three epochs of updates
    with behaviour.serving() as model: ...      # in any thread, while the networks are trained
    behaviour.version                           # 3

The copy is whole in this process and in the precision that serving has, so that sampling waits for nobody, and its
log-probs are those of the networks it was made of but for rounding. It shares encoders and autoencoder with the
networks. What it computes with is recorded in every step (`Move.versions`, one more than the epochs). Deliberately
absent: captured graphs, for other threads use the device meanwhile.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from ..api import Model, Result
from ..distributed.group import Group
from ..engine.instance import Instance
from ..engine.job import Listener
from ..engine.residence import align
from ..request import Request
from .live import Live, instance_of
from .networks import sharded
from .plan import Plan
from .twins import Twins


class Stopped(Exception):
    """Samples that nobody wants any more are not made."""


class Behaviour:
    """The copy; it begins as what the model's files hold."""

    def __init__(
        self, plan: Plan, group: Group, live: Live, networks: Mapping[str, nn.Module], sampler: str | None
    ) -> None:
        self._twins = Twins(plan, group, networks)
        for network in [] if sharded(plan.run, group) else networks.values():
            align(network)  # as the copy is: the last bits of products depend on it
        self._instance = instance_of(plan, group, self._twins.modules, live.store, sampler)
        self._name, self._roles, self._stop = plan.run.output, tuple(networks), threading.Event()
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
    def serving(self) -> Iterator[Model]:
        """A model that samples with it, for a `with` block in which it does not change."""
        for role in self._roles:
            resident = self._instance.resident(role)
            self._instance.store.changed(resident, version=self.version + 1, moved=False)
        yield _Stoppable(f"{self._name} after epoch {self.version}", self._instance, self._stop)

    def stop(self) -> None:
        """Whoever samples with it is to end soon, by `Stopped`."""
        self._stop.set()


class _Stoppable(Model):
    """Takes no more requests once it is told to stop."""

    def __init__(self, source: str, instance: Instance, stop: threading.Event) -> None:
        super().__init__(source, instance)
        self._stop = stop

    def run_all(
        self, requests: Sequence[Request], *, listener: Listener | None = None, recorded: bool = False
    ) -> Iterator[Result]:
        """As it does, unless it was told. Raises Stopped."""
        if self._stop.is_set():
            raise Stopped
        return super().run_all(requests, listener=listener, recorded=recorded)
