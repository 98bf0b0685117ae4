"""What a run needs of a machine is told before anything is loaded: devices, processes, who encodes where."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loopwright.data import encodings, pool
from loopwright.data.pool import Slot
from loopwright.errors import BackendError, RequestError
from loopwright.training import machine
from loopwright.training.plan import encoded, make
from loopwright.training.session import train
from loopwright.training.sinks import table


@pytest.fixture
def gpus(monkeypatch):
    """A machine with so many GPUs."""

    def install(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(pool, "pick", lambda device: device)

    return install


def test_a_device_that_processes_cannot_share_work_on_is_told(run_of, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(BackendError, match="device: training does not run there: 'mps'; choices: cpu, cuda"):
        make(run_of(device="auto"))


def test_more_processes_than_gpus_are_told(gpus, run_of, checkpoint):
    gpus(2)
    with pytest.raises(RequestError, match="processes need a GPU each: 3; start 2 at most, or set device to cpu"):
        machine.check(run_of(), None, "cuda", here=3)
    with pytest.raises(RequestError, match="device names one of several: 'cuda:1'"):
        machine.check(run_of(), None, "cuda:1", here=2)


def test_what_several_processes_cannot_do_is_told_by_one(rollout_of):
    assert make(rollout_of(), 2).steps == 4
    with pytest.raises(RequestError, match=r"rollout\.groups are shared out to processes: 2; 3 have it"):
        make(rollout_of(), 3)


def test_dedicated_encoders_leave_training_its_gpu(gpus, run_of):
    data = replace(run_of().data, dedicated=True, workers=2)
    gpus(3)
    machine.check_workers(data, "cuda", processes=1)
    with pytest.raises(
        RequestError, match=r"data\.dedicated takes training's own GPU: 'cuda:1, .*; lower data\.workers"
    ):
        machine.check_workers(data, "cuda:1", processes=1)
    with pytest.raises(RequestError, match=r"data\.dedicated is for one training process: '2 processes'; encode ahead"):
        machine.check_workers(data, "cuda", processes=2)
    with pytest.raises(RequestError, match=r"data\.dedicated: dedicated encoders need a GPU each: '4 on cuda'"):
        machine.check_workers(replace(data, workers=4), "cuda", processes=1)


def test_dedicated_encoders_without_gpus_are_told(run_of):
    with pytest.raises(RequestError, match=r"data\.dedicated: dedicated encoders need a GPU each: '1 on cpu'"):
        make(run_of(data={"dedicated": True}))


def test_encoders_of_a_run_are_where_and_what_its_data_says(gpus, run_of, monkeypatch):
    given = []
    monkeypatch.setattr(encodings, "pool_of", lambda card, cache, where, *, park: given.append((*where, park)))
    gpus(4)
    data = run_of().data
    for changes, device in (({}, "cuda:1"), ({"workers": 2, "park": True}, "cuda:1"), ({"dedicated": True}, "cuda:0")):
        encoded(replace(data, **changes), device)
    shared = Slot("cuda:1", pool.SHARE)
    assert given == [(Slot("cuda:1", 0.0), False), (shared, shared, True), (Slot("cuda:3", 1.0), False)]


@pytest.mark.slow
def test_a_run_whose_encodings_several_processes_make_is_the_same(run_of, tmp_path, plotless):
    losses = []
    for workers, park in ((1, False), (2, True)):
        data = {"cache": str(tmp_path / f"cold-{workers}"), "workers": workers, "park": park}
        run = run_of(steps=2, data=data, output=str(tmp_path / f"out-{workers}"))
        train(run)
        rows = table(Path(run.output) / "metrics.csv")
        assert rows[0]["cache_misses"] >= 11
        losses.append([row["loss"] for row in rows])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"data": {"geometry": ["8x8"]}}, r"data\.geometry: not a bucket: '8x8'"),
        ({"lora": {"targets": ["to_z"]}}, r"lora\.targets: no linear layer has a name that ends so: 'to_z'"),
        ({"schedule": {"warmup": 9}}, r"schedule\.warmup does not end within the run: 9; the run has 6 steps"),
    ],
)
def test_what_does_not_fit_is_named_by_its_setting(settings, message, run_of):
    with pytest.raises(RequestError, match=message):
        make(run_of(**settings))


def test_an_expert_that_no_noise_level_reaches_is_told_before_anything_is_encoded(run_of):
    settings = {"sft": {"logit_mean": -40.0, "logit_std": 0.1}, "data": {"dataset": "nowhere"}}
    with pytest.raises(RequestError, match="no noise level is ever drawn for an expert: 'transformer'"):
        make(run_of("a14b", **settings))
