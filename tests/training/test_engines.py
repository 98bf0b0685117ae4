"""Engines that sample in processes of their own: the samples of this process, whatever is sent and by whom."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from learnt import WAN, weights
from safetensors.torch import load, save

import loopwright
from loopwright.catalog import velocity
from loopwright.errors import RequestError, WeightsError
from loopwright.training import placed, plan
from loopwright.training.engine import Engine
from loopwright.training.engines import Engines
from loopwright.training.parcel import packed, unpacked
from loopwright.training.placed import Actor, EngineError
from loopwright.training.run import Lora
from loopwright.training.session import train
from loopwright.training.sinks import table

pytestmark = pytest.mark.usefixtures("plotless")


class Near(Engine):
    """An engine in this process, which otherwise takes the same path."""

    asked: ClassVar[list[int]] = []
    loading = threading.Lock()  # which transformers does for one thread at a time

    def run(self, requests: str) -> bytes:
        self.asked.append(requests.count('"seed"'))
        with self.loading:
            return super().run(requests)

    def end(self) -> None: ...


@pytest.fixture
def near(monkeypatch):
    """Runs have engines of this process; how many requests each call of one brought."""
    monkeypatch.setattr(Near, "asked", [])
    real = Engines.__init__
    monkeypatch.setattr(Engines, "__init__", lambda self, *given: real(self, *given, hire=Near))
    return Near.asked


def told(run):
    words = ("seconds", "per_second", "bytes", "cache_misses")
    rows = table(Path(run.output) / "metrics.csv")
    return [{k: v for k, v in row.items() if not any(word in k for word in words)} for row in rows]


@pytest.mark.parametrize(
    ("method", "settings", "staleness"),
    [("grpo", {"lora": Lora(rank=2)}, 0), ("nft", {}, 0), ("grpo", {}, 1)],
)
def test_a_run_with_engines_is_the_run_without_bit_for_bit(
    rollout_of, checkpoint, tmp_path, near, method, settings, staleness
):
    """The same metrics and weights, whole networks, adapters and an old policy that samples; in calls of equal rows."""
    run = rollout_of(
        method, model=str(checkpoint("t2v")), parallel="replicate", **settings,
        rollout={"rows": 2, "parameters": WAN, "staleness": staleness},
    )  # fmt: skip
    apart = replace(run, output=str(tmp_path / "apart"), rollout=replace(run.rollout, engines=2))
    here, there = weights(run), weights(apart)
    assert near == [4, 4] * 2
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    assert told(run) == told(apart)


def test_what_is_unpacked_is_what_was_packed_and_no_tensor_travels_twice(checkpoint):
    model = loopwright.load(str(checkpoint("t2v")), device="cpu", sampler="flow_sde")
    small = {**WAN, "mode": "fixed", "rows": 2}
    requests = [model.request("a fox", seed=seed, **small) for seed in range(2)]
    results = list(model.run_all(requests, recorded=True))
    data, forward = packed(results), velocity(model.card)
    again = unpacked(data, forward, torch.device("cpu"))
    for ours, theirs in zip(results, again, strict=True):
        assert (ours.request, ours.seconds, ours.record) == (theirs.request, theirs.seconds, theirs.record)
        assert torch.equal(ours.latents, theirs.latents) and (ours.video == theirs.video).all()
        for one, other in zip(ours.trajectory.moves, theirs.trajectory.moves, strict=True):
            assert (one.op, one.static, one.versions) == (other.op, other.static, other.versions)
            for name in ("rows", "lent"):
                given, got = getattr(one, name), getattr(other, name)
                assert given.keys() == got.keys() and all(torch.equal(t, got[n]) for n, t in given.items())
            assert torch.equal(one.after, other.after) and torch.equal(one.log_prob, other.log_prob)
            assert all(tensor.data_ptr() % 64 == 0 for tensor in (other.after, *other.rows.values()))
    first, second = (result.trajectory.moves for result in again)
    assert first[0].lent["text"] is second[0].lent["text"] and first[1].rows["latents"] is first[0].after
    largest = results[0].trajectory.moves[0].lent["text"].shape
    assert sum(tensor.shape == largest for tensor in load(data).values()) == 1


def test_what_an_engine_fails_at_is_text_and_ends_the_run(rollout_of, checkpoint, alone):
    """Without Ray: what its actor answers, and what is made of that."""
    made = plan.make(rollout_of(model=str(checkpoint("t2v")), rollout={"rows": 2, "parameters": WAN, "engines": 1}))
    engines = Engines(made, alone, "flow_sde")
    actor = Actor(engines._order(0))
    assert actor.ready() == ""
    assert "no such weights" in actor.take("transformer", "/nowhere.safetensors", 2)
    problem, nothing = actor.run('[{"prompt": "a fox"}]')
    assert "TypeError" in problem and nothing == b""
    with pytest.raises(EngineError, match="TypeError"):
        placed._require(problem)
    assert "KeyError" in Actor("{}").ready()
    engines.close()


def test_weights_that_do_not_fit_are_refused_and_change_nothing(rollout_of, checkpoint, alone, tmp_path):
    made = plan.make(rollout_of(model=str(checkpoint("t2v")), rollout={"rows": 2, "parameters": WAN, "engines": 1}))
    engines = Engines(made, alone, "flow_sde")
    engine = Engine(engines._order(0))
    before = {name: tensor.clone() for name, tensor in engine._networks["transformer"].state_dict().items()}
    (tmp_path / "part.safetensors").write_bytes(save({"proj_out.bias": torch.zeros(3)}))
    with pytest.raises(WeightsError, match="missing"):
        engine.take("transformer", str(tmp_path / "part.safetensors"), 2)
    after = engine._networks["transformer"].state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    assert engine._instance.version("transformer") == 1
    engines.close()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engines": -1}, "rollout.engines must be at least 0"),
        ({"engines": 1, "graphs": "always"}, "engines capture nothing"),
        ({"engines": 1, "mode": "throughput"}, "engines capture nothing, and call in fixed mode: 'throughput'"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(rollout_of, changes, said):
    with pytest.raises(RequestError, match=said):
        plan.make(rollout_of(rollout=changes))


def test_engines_compute_as_training_does(rollout_of, checkpoint):
    run = rollout_of(model=str(checkpoint("t2v")), rollout={"engines": 1, "parameters": WAN | {"attention": "math"}})
    with pytest.raises(RequestError, match="engines compute as training does"):
        plan.make(run)
    plan.make(replace(run, attention="math"))


def test_several_training_processes_have_no_engines(rollout_of, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match="engines are one training process's: '2 processes'"):
        plan.make(rollout_of(rollout={"engines": 1}, parallel="replicate"))


def test_a_run_may_be_continued_with_engines_or_without(rollout_of, near):
    run = rollout_of(epochs=1)
    train(run)
    outcome = train(replace(run, epochs=2, rollout=replace(run.rollout, engines=1)))
    assert outcome.finished and outcome.step == 4 and near == [8]


@pytest.mark.slow
def test_engines_of_ray_make_the_run_of_one_process_and_end_with_it(rollout_of, checkpoint, tmp_path):
    import ray

    run = rollout_of(
        model=str(checkpoint("t2v")), parallel="replicate", rollout={"rows": 2, "parameters": WAN, "staleness": 1}
    )
    apart = replace(run, output=str(tmp_path / "apart"), rollout=replace(run.rollout, engines=2))
    here, there = weights(run), weights(apart)
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items()) and told(run) == told(apart)
    assert not ray.is_initialized()


@pytest.mark.slow
def test_an_engine_that_dies_ends_the_run_with_its_cause_and_the_run_can_be_continued(
    rollout_of, checkpoint, tmp_path, monkeypatch
):
    run = rollout_of(model=str(checkpoint("t2v")), parallel="replicate", epochs=2,
                     rollout={"rows": 2, "parameters": WAN, "engines": 1})  # fmt: skip
    whole = weights(replace(run, output=str(tmp_path / "whole"), rollout=replace(run.rollout, engines=0)))
    real = Engines.serving

    def serving(self, networks, version):
        if version == 2:
            self._engines[0].end()
        return real(self, networks, version)

    with monkeypatch.context() as patch:
        patch.setattr(Engines, "serving", serving)
        with pytest.raises(EngineError, match="an engine that samples has ended"):
            train(run)
    continued = weights(run)
    assert all(torch.equal(tensor, continued[name]) for name, tensor in whole.items())
