"""A small data set, its encodings by a tiny checkpoint, and runs on them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from encoded import write_rows
from loopwright.card import dumps
from loopwright.distributed.group import Group, joined
from loopwright.models.labels import describe
from loopwright.models.labels.network import LabelFlow
from loopwright.training import session
from loopwright.training.run import Run
from loopwright.training.settings import build

RunOf = Callable[..., Run]


@pytest.fixture(scope="session")
def rows_file(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("clips"), 5)


@pytest.fixture(scope="session")
def warm_caches(tmp_path_factory) -> Path:
    """Folders of encodings, by the kind of the checkpoint that made them; filled by whichever run comes first."""
    return tmp_path_factory.mktemp("encodings")


@pytest.fixture
def run_of(rows_file, checkpoint, warm_caches, tmp_path) -> RunOf:
    """`run_of(kind, **settings)`: a run of a few steps on the CPU, with settings of the data by `data={...}`."""

    def make(kind: str = "t2v", data: dict | None = None, **settings: object) -> Run:
        folder = str(checkpoint(kind))
        given = {
            "dataset": str(rows_file),
            "encoder_checkpoint": folder,
            "cache": str(warm_caches / kind),
            "geometry": ["32x32x5"],
            **(data or {}),
        }
        length = {} if {"steps", "epochs"} & set(settings) else {"epochs": 2}
        plain = {"model": folder, "output": str(tmp_path / "out"), "batch_size": 3, "device": "cpu", "sinks": []}
        return build(Run, {**plain, **length, **settings, "data": given})

    return make


@pytest.fixture
def alone() -> Iterator[Group]:
    """This process as a group."""
    with joined("cpu") as group:
        yield group


@pytest.fixture
def copied() -> Callable[[Path, Path], Path]:
    return lambda source, target: Path(shutil.copytree(source, target))


@pytest.fixture
def plotless(monkeypatch) -> None:
    """No page about each run: plots take longer than all else."""
    monkeypatch.setattr(session.summary, "write", lambda plan: None)


@pytest.fixture(scope="session")
def labels(tmp_path_factory) -> Path:
    """The folder of a random model of two labels."""
    folder = tmp_path_factory.mktemp("labels")
    torch.manual_seed(0)
    LabelFlow(["light", "dark"], size=4, channels=1, width=16, depth=1).save_pretrained(folder / "transformer")
    (folder / "card.json").write_text(dumps(describe(folder)), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def rewards_file(tmp_path_factory) -> Path:
    """Functions that score."""
    path = tmp_path_factory.mktemp("rewards") / "scores.py"
    path.write_text(
        "def bright(samples): return [float(s.frames.float().mean()) / 255 for s in samples]\n"
        "def halting(samples): return [None if int(s.frames.sum()) % 5 == 0 else b for s, b in"
        " zip(samples, bright(samples))]\n"
        "def shuffled(samples):\n"
        "    import torch\n"
        "    scores, seed = bright(samples), sum(int(s.frames.sum()) for s in samples)\n"
        "    order = torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))\n"
        "    return [scores[place] for place in order.tolist()]\n"
        "def dim(samples): return [1 - b for b in bright(samples)]\n"
        "def same(samples): return [0.5] * len(samples)\n"
        "def broken(samples): return [float('nan') if int(s.frames.sum()) % 5 == 0 else 0.5 for s in samples]\n"
        "def only_light(samples): return [b if s.prompt == 'light' else None for s, b in"
        " zip(samples, bright(samples))]\n"
        "def mute(samples): return [float('nan')] * len(samples)\n"
        "def nothing(samples): return [None] * len(samples)\n"
    )
    return path


@pytest.fixture
def rollout_of(labels, rewards_file, tmp_path) -> RunOf:
    """`rollout_of(method, **settings)`: a run that learns from its own samples, with `reward` and `rollout={...}`."""

    def make(method: str = "grpo", *, reward: str = "bright", rollout: dict | None = None, **settings: object) -> Run:
        prompts = tmp_path / "prompts.txt"
        prompts.write_text("light\ndark\n")
        small = {"groups": 2, "group_size": 4, "rows": 8, "parameters": {"num_inference_steps": 3}}
        plain = {
            "model": str(labels), "output": str(tmp_path / "out"), "method": method, "device": "cpu", "sinks": [],
            "epochs": 2, "batch_size": 4, "checkpoints": {"every": 2}, "optimiser": {"lr": 1e-2},
            "rewards": {f"{rewards_file}:{reward}": 1.0},
            "rollout": {"prompts": str(prompts), **small, **(rollout or {})},
        }  # fmt: skip
        return build(Run, {**plain, **settings})

    return make
