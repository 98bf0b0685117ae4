"""An engine that samples in a process of its own: the model as served, with the weights that it is sent.

    engine = Engine(order)                              # as `engines` writes it
    engine.take("transformer", "/dev/shm/...", 3)       # weights, as `weights.sync` shares them, and their version
    answer = engine.run(requests)

Text and bytes come in and go out; the bytes are safetensors.
"""

import json
import os

import torch

from ..api import Model
from ..card import loads
from ..engine.residence import align
from ..engine.store import Store
from ..request import from_json
from ..weights import sync
from .live import instance_of
from .networks import copied
from .parcel import packed
from .run import Run
from .settings import build


class Engine:
    """`order` is JSON: the run's settings, its card and where that lies, sampler, networks, device, threads, folder."""

    def __init__(self, order: str) -> None:
        given = json.loads(order)
        os.chdir(given["folder"])  # paths mean here what they mean there
        torch.set_num_threads(given["threads"])  # the last bits of a product depend on them
        run, device = build(Run, given["run"]), given["device"]
        card = loads(given["card"], home=given["home"])
        self._networks = {role: copied(card, role, run, device) for role in given["roles"]}
        for network in self._networks.values():
            align(network)
        self._instance = instance_of(
            run, card, self._networks, Store(), sampler=given["sampler"], dtype=run.precision, device=device
        )
        self._model = Model(run.output, self._instance)

    def ready(self) -> None:
        """Answers once there is an engine."""

    def take(self, role: str, path: str, version: int) -> None:
        """Have these weights from now on. Raises WeightsError for what does not fit."""
        delivery = sync.read(path, self._instance.card.components[role])
        sync.write(sync.bind(self._networks[role], delivery))
        self._instance.store.changed(self._instance.resident(role), version=version, moved=False)

    def run(self, requests: str) -> bytes:
        """Recorded results of JSON requests, as `parcel` packs them."""
        asked = [from_json(values, {}) for values in json.loads(requests)]
        return packed(list(self._model.run_all(asked, recorded=True)))
