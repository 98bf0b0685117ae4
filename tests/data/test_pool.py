"""Where workers compute, and what this process alone does."""

import importlib.util

import pytest
import torch

from encoded import encodings, write_rows
from loopwright.data import dataset, pool
from loopwright.data.pool import SHARE, Slot, slots
from loopwright.encoders.encoder import Encoder
from loopwright.errors import BackendError, RequestError


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs."""

    def install(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(pool, "pick", lambda device: "cuda" if device == "auto" else device)

    return install


def devices(found) -> list[str]:
    return [slot.device for slot in found]


def test_one_worker_is_where_the_device_says():
    assert slots("cpu") == (Slot("cpu", 0.0),) and slots("cpu", 3) == (Slot("cpu", 0.0),) * 3


def test_colocated_workers_take_the_gpus_in_turn(gpus):
    gpus(2)
    assert slots("auto") == (Slot("cuda", 0.0),)
    assert devices(slots("auto", 3)) == ["cuda:0", "cuda:1", "cuda:0"]
    assert {slot.share for slot in slots("auto", 3)} == {SHARE}
    assert devices(slots("cuda:1", 2)) == ["cuda:1", "cuda:1"]
    with pytest.raises(RequestError, match="too many workers for the GPUs: 7; 6 at most"):
        slots("auto", 7)


def test_dedicated_workers_have_the_last_gpus_to_themselves(gpus):
    gpus(8)
    assert slots("auto", 2, dedicated=True) == (Slot("cuda:6", 1.0), Slot("cuda:7", 1.0))
    with pytest.raises(RequestError, match="dedicated encoders need a GPU each: '9 on cuda'; there are 8 GPUs"):
        slots("auto", 9, dedicated=True)


def test_without_gpus_none_can_be_dedicated():
    with pytest.raises(RequestError, match="dedicated encoders need a GPU each: '1 on cpu'; there are 0 GPUs"):
        slots("cpu", 1, dedicated=True)


def test_devices_and_counts_that_are_none_are_refused_before_anything_is_encoded(checkpoint, tmp_path):
    with pytest.raises(RequestError, match="no such device: 'abacus'"):
        slots("abacus")
    with pytest.raises(RequestError, match="workers must be at least 1: 0"):
        encodings(tmp_path, checkpoint("t2v"), workers=0)


def test_several_workers_without_ray_are_an_error_with_its_remedy(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, real=importlib.util.find_spec: None if name == "ray" else real(name)
    )
    with pytest.raises(BackendError, match=r"need Ray, which is not installed; pip install 'loopwright\[train\]'"):
        encodings(tmp_path, checkpoint("t2v"), workers=2)
    encodings(tmp_path, checkpoint("t2v"))


def test_parked_encoders_leave_after_a_burst_and_come_back_for_the_next(checkpoint, tmp_path, monkeypatch):
    (tmp_path / "set").mkdir()
    rows = dataset.read(write_rows(tmp_path / "set", 2))
    here: list[list[bool]] = []
    plain = Encoder.park

    def park(self) -> None:
        before = [resident.here for resident in self.instance.store._residents.values() if resident.home]
        plain(self)
        here.append([*before, *(r.here for r in self.instance.store._residents.values() if r.home)])

    monkeypatch.setattr(Encoder, "park", park)
    ours = encodings(tmp_path / "parked", checkpoint("t2v"), park=True)
    ours.fill(rows[:1])
    assert here == [[True, True, False, False]]  # autoencoder and text encoder
    ours.fill(rows)
    assert here[1] == [True, True, False, False]
    other = encodings(tmp_path / "plain", checkpoint("t2v"))
    other.fill(rows)
    assert [p.read_bytes() for p in ours.cache.files()] == [p.read_bytes() for p in other.cache.files()]
    assert len(here) == 2
