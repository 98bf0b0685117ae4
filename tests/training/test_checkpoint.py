"""Checkpoints are whole or not there, checked before use, and the last few kept."""

import json
import os
from pathlib import Path

import pytest
import torch

from loopwright.errors import StateError
from loopwright.training.checkpoint import Checkpoints, damage, found


def tensors(value: float = 0.0) -> dict[str, torch.Tensor]:
    return {"weights.a": torch.full((3, 2), value), "optimiser.a.step": torch.tensor(value)}


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.fixture
def store(tmp_path, alone) -> Checkpoints:
    return Checkpoints(tmp_path, 2, alone)


def test_what_was_saved_is_loaded_in_place_and_the_last_are_kept(store, tmp_path):
    for step in (5, 10, 15):
        store.save(step, tensors(step), {"step": step})
    assert names(tmp_path) == ["step-00000010", "step-00000015"]
    into = tensors()
    assert store.load(into, print) == {"step": 15}
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors(15.0).items())


def test_without_a_checkpoint_nothing_is_loaded(store):
    into = tensors(3.0)
    assert store.load(into, print) is None and float(into["optimiser.a.step"]) == 3


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("spoil", [cut, flip, Path.unlink])
@pytest.mark.parametrize("file", ["safetensors", "state.json", "manifest.json"])
def test_a_damaged_newest_is_told_and_the_one_before_used(spoil, file, store, tmp_path):
    store.save(1, tensors(1.0), {"step": 1})
    store.save(2, tensors(2.0), {"step": 2})
    spoil(next(path for path in (tmp_path / "step-00000002").iterdir() if path.name.endswith(file)))
    said: list[str] = []
    into = tensors()
    assert store.load(into, said.append) == {"step": 1} and float(into["optimiser.a.step"]) == 1
    assert len(said) == 1 and "step-00000002 is damaged" in said[0] and said[0].endswith("; step-00000001 is used")


def test_where_all_are_damaged_nothing_begins_anew(store, tmp_path):
    for step in (1, 2):
        store.save(step, tensors(step), {"step": step})
        cut(tmp_path / f"step-0000000{step}" / "state.json")
    said: list[str] = []
    into = tensors(3.0)
    with pytest.raises(StateError, match=r"every checkpoint is damaged: '.*'; bring one back .* choose another output"):
        store.load(into, said.append)
    assert float(into["optimiser.a.step"]) == 3 and names(tmp_path) == ["step-00000001", "step-00000002"]
    assert len(said) == 2 and "step-00000002 is damaged" in said[0] and not any("used" in line for line in said)


def test_a_damaged_one_of_a_later_step_crowds_out_none_of_those_written_after_it(tmp_path, alone):
    store = Checkpoints(tmp_path, 1, alone)
    store.save(9, tensors(9.0), {"step": 9})
    cut(tmp_path / "step-00000009" / "state.json")
    for step in (4, 6):
        store.save(step, tensors(step), {"step": step})
    assert store.load(tensors(), print) == {"step": 6}
    assert names(tmp_path) == ["step-00000006", "step-00000009"]
    store.save(10, tensors(10.0), {"step": 10})
    assert names(tmp_path) == ["step-00000010"]


def test_what_a_killed_process_left_half_written_is_none(store, tmp_path):
    store.save(1, tensors(1.0), {"step": 1})
    half = tmp_path / ".unfinished-step-00000002"
    half.mkdir()
    (half / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"half")
    assert store.load(tensors(), print) == {"step": 1}
    store.save(2, tensors(2.0), {"step": 2})
    assert names(tmp_path) == ["step-00000001", "step-00000002"] and damage(tmp_path / "step-00000002") == ""


def test_a_checkpoint_of_other_tensors_is_refused(store):
    store.save(1, tensors(), {"step": 1})
    with pytest.raises(StateError, match=r"is of another run: 'ema.a'"):
        store.load({**tensors(), "ema.a": torch.zeros(2)}, print)


def test_nothing_in_it_is_a_pickle(store, tmp_path):
    store.save(1, tensors(), {"step": 1})
    (path,) = found(tmp_path)
    assert {file.suffix for file in path.iterdir()} == {".safetensors", ".json"}
    assert set(json.loads((path / "manifest.json").read_text())) == set(names(path)) - {"manifest.json"}
