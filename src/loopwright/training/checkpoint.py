"""Checkpoints of a run: whole or not at all, checked before they are trusted, the last few kept.

    checkpoints = Checkpoints(output / "checkpoints", keep=2, group=group)
    checkpoints.save(500, tensors, {"position": ...})
    about = checkpoints.load(tensors, say)          # of the newest that is whole, into `tensors`; None if there is none

A checkpoint is a folder `step-00000500`: tensors by torch's distributed checkpointing in safetensors, so that another
number of processes can read them and nothing is pickled; `state.json`; and `manifest.json` with the sha256 of each
file. It is written under another name and renamed. Deliberately absent: generators, for all random numbers of training
are functions of seed, step and place.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from ..distributed.group import Group
from ..errors import StateError
from ..files import replacing

_STATE, _MANIFEST = "state.json", "manifest.json"
_NONE, _DAMAGED = -1, -2  # in place of a step
About = Mapping[str, object]
Say = Callable[[str], None]


class Checkpoints:
    """Those of one run, in one folder that all processes see."""

    def __init__(self, folder: Path, keep: int, group: Group) -> None:
        self._folder, self._keep, self._group = folder, keep, group

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], about: About) -> Path:
        """Write the checkpoint after so many steps. A collective; when it returns the checkpoint is there."""
        target = self._folder / _name(step)
        unfinished = target.with_name(f".unfinished-{target.name}")
        if self._group.first:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        self._group.wait()
        save(dict(tensors), storage_writer=HuggingFaceStorageWriter(str(unfinished), save_distributed=True))
        self._group.wait()
        if self._group.first:
            (unfinished / _STATE).write_text(json.dumps(about), encoding="utf-8")
            (unfinished / _MANIFEST).write_text(json.dumps(_digests(unfinished)), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(unfinished, target)
            self._forget(step)
        self._group.wait()
        return target

    def load(self, tensors: Mapping[str, torch.Tensor], say: Say) -> About | None:
        """Fill the tensors from the newest whole checkpoint. `say` hears of each that is not.

        A collective. Raises StateError if none of those there are is whole, and if the newest whole one holds other
        tensors.
        """
        step = self._group.told(self._newest(say) if self._group.first else _NONE)
        if step == _NONE:
            return None
        if step == _DAMAGED:
            remedy = "bring one back from a copy; to begin anew, move the folder away or choose another output"
            raise StateError("every checkpoint is damaged", value=str(self._folder), remedy=remedy)
        path = self._folder / _name(step)
        reader = HuggingFaceStorageReader(str(path))
        stored = reader.read_metadata().state_dict_metadata
        if set(stored) != set(tensors):
            (first, *_) = sorted(set(stored) ^ set(tensors))
            raise StateError(f"{path} is of another run", value=first, remedy="choose another output folder")
        load(dict(tensors), storage_reader=reader)
        about: About = json.loads((path / _STATE).read_text(encoding="utf-8"))
        return about

    def _newest(self, say: Say) -> int:
        """The step of the newest that is whole, or why there is none."""
        wrong: list[str] = []
        for path in self._all():
            if what := damage(path):
                wrong.append(f"{path} is damaged ({what})")
                continue
            for line in wrong:
                say(f"{line}; {path.name} is used")
            return _step(path)
        for line in wrong:
            say(line)
        return _DAMAGED if wrong else _NONE

    def _forget(self, step: int) -> None:
        """All but the last up to this step. What lies above it was found damaged, and crowds out nothing."""
        for old in [path for path in self._all() if _step(path) <= step][self._keep :]:
            shutil.rmtree(old)

    def _all(self) -> list[Path]:
        return found(self._folder)


def found(folder: Path) -> list[Path]:
    """The checkpoints of a folder, the newest first, looked into or not."""
    return sorted((path for path in folder.glob("step-*") if path.name[5:].isdigit()), reverse=True)


def damage(path: Path) -> str:
    """What is wrong with a checkpoint's files; "" if they are as they were written."""
    try:
        written = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        here = _digests(path)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    for name, digest in written.items():
        if name not in here:
            return f"{name} is missing"
        if here[name] != digest:
            return f"{name} is not what was written"
    return ""


def _step(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def _name(step: int) -> str:
    return f"step-{step:08}"


def _digests(folder: Path) -> dict[str, str]:
    """The sha256 of each file but the manifest."""
    files = sorted(path for path in folder.iterdir() if path.name != _MANIFEST)
    with ThreadPoolExecutor() as readers:
        return dict(zip((path.name for path in files), readers.map(_digest, files), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, values: Mapping[str, object]) -> None:
    """A JSON file, whole or not at all."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
