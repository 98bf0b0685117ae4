"""Engines in processes of their own sample while this one trains, placed by Ray; weights are sent to them.

    engines = Engines(plan, group, sampler="flow_sde")
    with engines.serving(networks, version=3) as sampler:       # the weights are sent, then
        sampler.run_all(requests, recorded=True)                # whole calls are shared out
    engines.close()

They are started at the first use, on this machine, on GPUs of their own behind this process's. A row's bits depend on
no other row of its call, nor on who computes it, so samples are those that this process would make. Weights go through
memory that all see (`weights.sync`), samples as `parcel` packs them. Uses the Ray that this process is connected to,
else starts one and stops it in the end. Deliberately absent: engines on other machines, and replacing one that ends:
the run ends with it, and is continued from its last checkpoint.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import nn

from .. import catalog
from ..api import Result
from ..card import dumps
from ..distributed.group import Group
from ..request import Request, to_json
from ..weights import sync
from .parcel import unpacked
from .placed import Hired, Ray
from .plan import Plan
from .sampler import Sampler
from .settings import plain


class Engines:
    """As many as the run has. `hire` starts one, by its order. From any thread, one at a time."""

    def __init__(
        self, plan: Plan, group: Group, sampler: str | None, hire: Callable[[str], Hired] | None = None
    ) -> None:
        assert plan.run.rollout is not None
        self._plan, self._group, self._sampler = plan, group, sampler
        self._count, self._rows = plan.run.rollout.engines, plan.run.rollout.rows
        self._velocity = catalog.velocity(plan.card)
        self._ray = Ray(self._count, gpus=group.device.type == "cuda")
        self._hire = self._ray.hire if hire is None else hire
        self._threads = ThreadPoolExecutor(self._count, "engine")  # each waits for an engine
        self._engines: list[Hired] = []

    def after(self, networks: Mapping[str, nn.Module], epoch: int) -> AbstractContextManager[Sampler]:
        """As `serving`, with the weights as so many epochs have made them."""
        return self.serving(networks, epoch + 1)

    @contextmanager
    def serving(self, networks: Mapping[str, nn.Module], version: int) -> Iterator[Sampler]:
        """Engines with these weights, for a `with` block. Raises EngineError, WeightsError."""
        if not self._engines:
            self._engines = [self._hire(self._order(index)) for index in range(self._count)]
            self._each(lambda engine: engine.ready())
        for role, network in networks.items():
            delivery = sync.full(network) if self._plan.run.lora is None else sync.adapter(network)
            with sync.shared(delivery) as path:
                self._each(lambda engine, role=role, path=path: engine.take(role, str(path), version))  # type: ignore[misc]
        yield self

    def run_all(self, requests: Sequence[Request], *, recorded: bool = False) -> Iterator[Result]:
        """Results by engine. Raises EngineError for what one of them failed at."""
        assert recorded, "what is learnt from is recorded"
        calls = -(-len(requests) // self._rows)
        share = -(-calls // self._count) * self._rows
        parts = [requests[first : first + share] for first in range(0, len(requests), share)]
        texts = [json.dumps([to_json(request)[0] for request in part]) for part in parts]
        answers = self._threads.map(lambda engine, text: engine.run(text), self._engines, texts)
        for answer in answers:
            yield from unpacked(answer, self._velocity, self._group.device)

    def close(self) -> None:
        """End them."""
        for engine in self._engines:
            engine.end()
        self._engines = []
        self._threads.shutdown()
        self._ray.close()

    def _each(self, call: Callable[[Hired], None]) -> None:
        list(self._threads.map(call, self._engines))

    def _order(self, index: int) -> str:
        plan, device = self._plan, self._group.device
        order = {
            "folder": os.getcwd(),
            "run": plain(plan.run),
            "card": dumps(plan.card),
            "home": plan.card.home,
            "roles": plan.roles,
            "sampler": self._sampler,
            "device": f"cuda:{1 + index}" if device.type == "cuda" else str(device),
            "threads": torch.get_num_threads(),
        }
        return json.dumps(order)
