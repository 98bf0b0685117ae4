"""Rollouts of weights one update old, sampled while the next are made: which weights, which ratios, what ends a run."""

import threading
from dataclasses import replace

import pytest
import torch
import workers
from learnt import WAN, WEIGHTS, metrics, stopped, weights
from safetensors.torch import load_file

from loopwright.distributed.launch import launch
from loopwright.errors import RequestError
from loopwright.training import rollouts
from loopwright.training.methods.nft import Nft
from loopwright.training.plan import make as plan_of
from loopwright.training.run import Evaluation, Lora, text
from loopwright.training.session import train
from loopwright.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("plotless")


@pytest.fixture
def overlapping(rollout_of):
    """A run of four epochs of two steps, on samples one update old."""

    def make(*, rollout: dict | None = None, **settings):
        own = {"grpo": {"clip": 1e-2}} if settings.get("method", "grpo") == "grpo" else {}
        given = {"epochs": 4, "parallel": "replicate", "checkpoints": {"every": 4}, **own, **settings}
        return rollout_of(rollout={"staleness": 1, **(rollout or {})}, **given)

    return make


@pytest.fixture
def seen(monkeypatch):
    """Which weights sampled each epoch, by the records of its steps, and what the networks were at each update."""
    found = {"sampled": {}, "by": {}, "weights": {}, "main": set()}
    real_sample, real_step = rollouts.Rollouts.sample, Trainer._stepped

    def sample(self, epoch, serving):
        sampled = real_sample(self, epoch, serving)
        found["sampled"][epoch] = {m.versions["transformer"] for made in sampled.made for m in made.moves}
        found["by"][epoch] = [ours.clone() for ours in serving.__self__._twins.tensors.values()]
        found["main"].add(threading.current_thread() is threading.main_thread())
        return sampled

    def stepped(self, step):
        if step.after.offset:  # the first of an epoch's two steps
            found["weights"][self.position.epoch] = [p.detach().clone() for p in self.parameters.values()]
        return real_step(self, step)

    monkeypatch.setattr(rollouts.Rollouts, "sample", sample)
    monkeypatch.setattr(Trainer, "_stepped", stepped)
    return found


def test_epoch_n_is_sampled_of_the_weights_before_the_update_before(overlapping, seen):
    run = overlapping()
    train(run)
    assert seen["sampled"] == {0: {1}, 1: {1}, 2: {2}, 3: {3}} and seen["main"] == {False}
    for epoch, sampling in seen["by"].items():
        assert all(map(torch.equal, sampling, seen["weights"][max(epoch - 1, 0)]))
        assert epoch == 0 or not all(map(torch.equal, sampling, seen["weights"][epoch]))
    assert [row["staleness"] for row in metrics(run) if "staleness" in row] == [0, 1, 1, 1]


def test_of_diffusion_nft_the_old_policy_of_then_samples(overlapping, seen, monkeypatch):
    """Epoch n by what the old policy was before the last renewal."""
    olds, real = {}, Nft.renew

    def renew(self, steps):
        olds[steps // 2 - 1] = [tensor.clone() for tensor in self._old.tensors.values()]
        real(self, steps)

    monkeypatch.setattr(Nft, "renew", renew)
    train(overlapping(method="nft"))
    assert seen["sampled"] == {0: {1}, 1: {1}, 2: {2}, 3: {3}} and seen["main"] == {False}
    for epoch in (1, 2, 3):
        assert all(map(torch.equal, olds[epoch - 1], seen["by"][epoch]))
        assert not all(map(torch.equal, olds[epoch - 1], seen["weights"][epoch]))


@pytest.mark.parametrize(
    ("staleness", "settings"), [(0, {}), (1, {}), (1, {"lora": Lora(rank=2)}), (1, {"parallel": "shard"})]
)
def test_the_ratio_is_to_the_weights_that_sampled(overlapping, checkpoint, staleness, settings):
    """On policy every epoch begins at 1; a step behind, only the first does."""
    run = overlapping(
        model=str(checkpoint("t2v")), epochs=2, **settings,
        rollout={"rows": 2, "staleness": staleness, "parameters": WAN},
    )  # fmt: skip
    train(run)
    first, _, second, _ = metrics(run)
    assert first["ratio"] == pytest.approx(1, abs=1e-6) and first["grad_norm"] > 0
    if staleness:
        assert second["logp_abs_diff/step_0"] > 1e-5 and second["ratio_std"] > 0
    else:
        assert second["ratio"] == 1 and second["logp_abs_diff/step_0"] == second["ratio_std"] == 0


@pytest.mark.parametrize("settings", [{}, {"method": "nft"}, {"lora": Lora(rank=2)}])
def test_a_run_stopped_and_continued_is_the_uninterrupted_one_bit_for_bit(
    overlapping, checkpoint, tmp_path, monkeypatch, settings
):
    """It goes on with the weights that were to sample, which are not those that are trained."""
    small = {"model": str(checkpoint("t2v")), "rollout": {"rows": 2, "parameters": WAN}} if "lora" in settings else {}
    run = overlapping(**small, **settings, epochs=3)
    whole = replace(run, output=str(tmp_path / "whole"))
    uninterrupted = weights(whole)
    outcome = stopped(run, monkeypatch, after=3)  # of two steps an epoch
    assert not outcome.finished and outcome.step == 4
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]
    continued = weights(run)
    assert continued.keys() == uninterrupted.keys()
    assert all(torch.equal(tensor, continued[name]) for name, tensor in uninterrupted.items())
    told = [[row.get("reward_mean") for row in metrics(each)] for each in (run, whole)]
    assert told[0] == told[1] and len(told[0]) == 6


def test_a_longer_run_goes_on_where_a_finished_one_ended(overlapping, tmp_path):
    run = overlapping(epochs=1)
    train(run)
    longer = weights(replace(run, epochs=3))
    whole = weights(replace(run, epochs=3, output=str(tmp_path / "whole")))
    assert all(torch.equal(tensor, longer[name]) for name, tensor in whole.items())


def test_the_next_epoch_is_sampled_while_this_one_is_learnt_from(overlapping, monkeypatch):
    """Each waits for the other to have begun: in turns neither would."""
    sampling, updating = threading.Event(), threading.Event()
    real_sample, real_step = rollouts.Rollouts.sample, Trainer._stepped

    def sample(self, epoch, serving):
        if epoch == 1:
            sampling.set()
            assert updating.wait(60)
        return real_sample(self, epoch, serving)

    def stepped(self, step):
        updating.set()
        assert sampling.wait(60)
        return real_step(self, step)

    monkeypatch.setattr(rollouts.Rollouts, "sample", sample)
    monkeypatch.setattr(Trainer, "_stepped", stepped)
    run = overlapping(epochs=2)
    train(run)
    assert all(row["seconds/rollout_waited"] > 0 for row in metrics(run) if "staleness" in row)


def test_scores_are_awaited_while_the_next_wave_is_sampled(rollout_of, monkeypatch, tmp_path):
    """The first wave's scorer waits until the second has been sampled."""
    shown, sampled, real = [], threading.Event(), rollouts.Model.run_all

    def run_all(self, requests, **named):
        shown.append(len(requests))
        results = list(real(self, requests, **named))
        if len(shown) == 2:
            sampled.set()
        return iter(results)

    def parts(self, samples):
        assert sampled.wait(60), "sampling waits for scores"
        return real_parts(self, samples)

    real_parts = rollouts.Composite.parts
    monkeypatch.setattr(rollouts.Model, "run_all", run_all)
    monkeypatch.setattr(rollouts.Composite, "parts", parts)
    run = rollout_of(epochs=1, rollout={"rows": 1})
    train(run)
    assert shown == [4, 4]


def test_judging_while_the_next_epoch_is_sampled_changes_nothing(overlapping, tmp_path):
    run = overlapping(epochs=3)
    judged = replace(run, output=str(tmp_path / "judged"), evaluation=Evaluation(every=1, draws=2))
    plain, watched = weights(run), weights(judged)
    assert all(torch.equal(tensor, watched[name]) for name, tensor in plain.items())
    assert len([row for row in metrics(judged) if "held_out/reward" in row]) == 7


def test_what_ends_the_sampling_ends_the_run_with_its_cause(overlapping, monkeypatch):
    real = rollouts.Rollouts.sample

    def sample(self, epoch, serving):
        if epoch == 2:
            raise ZeroDivisionError("in the sampler")
        return real(self, epoch, serving)

    monkeypatch.setattr(rollouts.Rollouts, "sample", sample)
    run = overlapping()
    with pytest.raises(ZeroDivisionError, match="in the sampler"):
        train(run)
    assert [row["step"] for row in metrics(run)] == [1, 2, 3, 4], "what had been sampled was learnt from"
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rollout")]


def test_what_ends_the_training_ends_the_sampling_after_its_wave(overlapping, monkeypatch):
    waves, real_run, real_stop = [], rollouts.Model.run_all, rollouts.Rollouts.stop
    begun, told = threading.Event(), threading.Event()

    def run_all(self, requests, **named):
        waves.append(self.source)
        if len(waves) == 3:  # the first of the next epoch, of two
            begun.set()
            assert told.wait(60)
        return real_run(self, requests, **named)

    def stop(self):
        real_stop(self)
        told.set()

    def stepped(self, step):
        assert begun.wait(60)
        raise ZeroDivisionError("in the update")

    monkeypatch.setattr(rollouts.Rollouts, "stop", stop)
    monkeypatch.setattr(rollouts.Model, "run_all", run_all)
    monkeypatch.setattr(Trainer, "_stepped", stepped)
    with pytest.raises(ZeroDivisionError, match="in the update"):
        train(overlapping(rollout={"rows": 1}))
    assert len(waves) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sleep": "serving"}, "nobody sleeps where sampling and training overlap: 'serving'"),
        ({"rollout": {"staleness": 2}}, "unknown rollout.staleness: 2"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(overlapping, changes, said):
    with pytest.raises(RequestError, match=said):
        plan_of(overlapping(**changes))


def test_who_sleeps_is_nobody_where_all_work_at_once(overlapping):
    assert plan_of(overlapping()).run.sleep == "nobody"
    assert plan_of(overlapping(rollout={"staleness": 0})).run.sleep == "serving"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "settings"), [("grpo", {"clip": 0.05, "kl": 0.0}), ("nft", {"kl": 0.0})])
def test_a_reward_is_learnt_from_samples_one_update_old(overlapping, method, settings):
    run = overlapping(
        method=method, epochs=12, batch_size=12, checkpoints={"every": 48}, **{method: settings},
        rollout={"groups": 4, "group_size": 12, "rows": 16, "parameters": {"num_inference_steps": 4}},
    )  # fmt: skip
    train(run)
    rewards = [row["reward_mean"] for row in metrics(run) if "reward_mean" in row]
    assert sum(rewards[-3:]) / 3 - rewards[0] > 0.1


@pytest.mark.slow
def test_two_processes_sample_ahead_and_are_one_but_for_rounding(overlapping, labels, tmp_path):
    """Weights are sharded, the copies are whole, and no collective is the sampling thread's."""
    run = overlapping(parallel="shard", epochs=3, rollout={"groups": 4, "group_size": 4}, batch_size=8)
    one, two = (replace(run, output=str(tmp_path / name)) for name in ("one", "two"))
    alone, before = weights(one), load_file(labels / "transformer" / WEIGHTS)
    (tmp_path / "two.yaml").write_text(text(two))
    assert launch(2, workers.whole, (str(tmp_path / "two.yaml"),)) == 0
    together = load_file(tmp_path / "two" / "model" / "transformer" / WEIGHTS)
    for name, tensor in alone.items():
        assert (together[name] - tensor).norm() <= 1e-2 * (tensor - before[name]).norm()
    told = [[(row.get("staleness"), row["ratio"]) for row in metrics(each)] for each in (one, two)]
    assert told[1] == [(staleness, pytest.approx(ratio, rel=1e-4)) for staleness, ratio in told[0]]
