"""What all tests share: one thread, no network, and tiny checkpoints built once a session."""

import os
import tempfile

os.environ["OMP_NUM_THREADS"] = "1"
# The tiny checkpoints' rows are 24 floats wide, no multiple of what torch takes at once with AVX-512, and what is left
# it rounds otherwise: a row's bits would depend on its place, and fixed mode refuse to run. Real models' are multiples.
os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
os.environ["LOOPWRIGHT_CACHE"] = tempfile.mkdtemp(prefix="loopwright-tests-")

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers.utils import logging as diffusers_logging
from transformers.utils import logging as transformers_logging

import loopwright
import tiny
from loopwright.api import Model
from loopwright.engine.instance import Store
from support import media_for

torch.set_num_threads(1)
for _logging in (diffusers_logging, transformers_logging):
    _logging.disable_progress_bar()
    _logging.set_verbosity_error()

Checkpoint = Callable[..., Path]
Load = Callable[..., Model]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The folder of a tiny checkpoint; "v2v" is a task of the text-to-video one, "ti2v_text" of the ti2v one."""
    built: dict[tuple[str, str], Path] = {}

    def folder(kind: str, scheduler: str = "euler") -> Path:
        kind = {"v2v": "t2v", "ti2v_text": "ti2v"}.get(kind, kind)
        if (kind, scheduler) not in built:
            path = tmp_path_factory.mktemp("checkpoints") / f"{kind}-{scheduler}"
            built[kind, scheduler] = tiny.build(path, kind, scheduler)
        return built[kind, scheduler]

    return folder


@pytest.fixture(scope="session")
def model(checkpoint: Checkpoint) -> Load:
    """A loaded model on the CPU in float32 that remembers no embeddings, shared: never change its weights."""
    loaded: dict[tuple[str, str], Model] = {}

    def load(kind: str, scheduler: str = "euler") -> Model:
        path = checkpoint(kind, scheduler)
        return loaded.setdefault((path.name, scheduler), loopwright.load(path, device="cpu", store=Store(0)))

    return load


@pytest.fixture(scope="session")
def ask(model: Load) -> Callable[..., object]:
    """`ask(kind, scheduler, **changes)`: the model and a small complete request of that kind."""

    def request(kind: str, scheduler: str = "euler", **changes: object):
        loaded = model(kind, scheduler)
        return loaded, loaded.request("a red fox", **(media_for(kind) | changes))

    return request
