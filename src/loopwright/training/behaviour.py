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
from ..distributed.shard import whole
from ..engine.instance import Instance
from ..engine.job import Listener
from ..engine.residence import align
from ..request import Request
from . import networks as loading
from .live import Live, instance_of
from .plan import Plan


class Stopped(Exception):
    """Samples that nobody wants any more are not made."""


class Behaviour:
    """The copy; it begins as what the model's files hold."""

    def __init__(
        self, plan: Plan, group: Group, live: Live, networks: Mapping[str, nn.Module], sampler: str | None
    ) -> None:
        copies = {role: loading.copied(plan.card, role, plan.run, group) for role in networks}
        self._pairs = {
            f"{role}.{name}": (copies[role].get_parameter(name), parameter)
            for role, network in networks.items()
            for name, parameter in network.named_parameters()
            if parameter.requires_grad
        }
        for network in (*copies.values(), *([] if loading.sharded(plan.run, group) else networks.values())):
            align(network)  # the last bits of products depend on it
        self._instance = instance_of(plan, group, copies, live.store, sampler)
        self._name, self._roles, self._stop = plan.run.output, tuple(copies), threading.Event()
        self._version = torch.zeros((), dtype=torch.int64)

    @property
    def version(self) -> int:
        """How many epochs its weights have learnt from."""
        return int(self._version)

    @torch.no_grad()
    def follow(self, version: int) -> None:
        """Take the weights as they are now, after so many epochs. A collective where they are sharded."""
        for ours, theirs in self._pairs.values():
            ours.copy_(whole(theirs.detach()))
        self._version.fill_(version)

    def tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint keeps."""
        weights = {f"behaviour.{name}": ours.detach() for name, (ours, _) in self._pairs.items()}
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
