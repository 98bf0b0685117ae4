"""Runs that learn from their own samples: on policy at first, exact when continued, unmoved where nothing is learnt."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import workers
from learnt import WAN, WEIGHTS, metrics, stopped, weights
from safetensors.torch import load_file

from loopwright.distributed.launch import launch
from loopwright.errors import RequestError, StateError
from loopwright.training import held_out
from loopwright.training.checkpoint import found
from loopwright.training.methods.grpo import Settings as Grpo
from loopwright.training.plan import make
from loopwright.training.run import Evaluation, Lora, text
from loopwright.training.session import train
from loopwright.training.trainer import Trainer

THREE = {**WAN, "num_inference_steps": 3}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("adapters", [True, False])
@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_at_the_first_update_after_sampling_every_ratio_is_exactly_one(rollout_of, checkpoint, adapters, scale):
    """On a transformer with attention, in shared calls filled up to their rows, with and without guidance."""
    run = rollout_of(
        model=str(checkpoint("t2v")), rollout={"rows": 2, "parameters": THREE | {"guidance_scale": scale}},
        lora=Lora(rank=2) if adapters else None, epochs=2, grpo={"clip": 1e-2, "kl": 0.01},
    )  # fmt: skip
    train(run)
    rows = metrics(run)
    for first, second in (rows[:2], rows[2:]):
        assert first["ratio"] == 1.0 and first["ratio_std"] == 0.0 and first["approx_kl"] == 0.0
        assert first["logp_abs_diff/step_0"] == first["logp_abs_diff/step_1"] == 0.0 and first["grad_norm"] > 0
        assert second["logp_abs_diff/step_0"] > 0, "the policy has moved"


def test_in_throughput_mode_ratios_are_one_but_for_rounding_and_the_gap_is_measured(rollout_of, checkpoint):
    fast = {"rows": 3, "mode": "throughput", "dtype": {"vae": "bfloat16"}, "parameters": THREE}
    run = rollout_of(model=str(checkpoint("t2v")), rollout=fast, grpo={"clip": 1e-2})
    train(run)
    for row in metrics(run)[::2]:
        assert row["ratio"] == pytest.approx(1, abs=1e-5) and row["approx_kl"] < 1e-10
        assert row["logp_gap"] < 1e-5


@pytest.mark.parametrize("settings", [{"method": "grpo", "lora": Lora(rank=2)}, {"method": "grpo", "ema": 0.9},
                                      {"method": "nft", "lora": Lora(rank=2)}, {"method": "nft"}])  # fmt: skip
def test_a_run_stopped_and_continued_is_the_uninterrupted_one_bit_for_bit(
    rollout_of, checkpoint, tmp_path, monkeypatch, settings
):
    """With window, old policy, reference and averages; stopped within an epoch, it goes on to the epoch's end."""
    model = {"model": str(checkpoint("t2v")), "rollout": {"rows": 2, "parameters": THREE}} if "lora" in settings else {}
    run = rollout_of(**model, **settings, epochs=3, parallel="replicate")
    whole = replace(run, output=str(tmp_path / "whole"))
    uninterrupted = weights(whole)
    outcome = stopped(run, monkeypatch, after=3)  # of two steps an epoch
    assert not outcome.finished and outcome.step == 4
    assert same(weights(run), uninterrupted)
    assert untimed(run) == untimed(whole)
    if run.ema is not None:
        averages = [load_file(Path(r.output) / "model-ema/transformer" / WEIGHTS) for r in (run, whole)]
        assert same(*averages)


def untimed(run):
    """What was measured of each step but seconds, bytes, and what is told once a session."""
    left_out = ("seconds", "per_second", "bytes", "cache_misses")
    return [{k: v for k, v in row.items() if not any(word in k for word in left_out)} for row in metrics(run)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "parallel", "mode"),
    [("grpo", "shard", "fixed"), ("grpo", "shard", "throughput"), ("nft", "replicate", "fixed")],
)
def test_two_processes_that_share_out_groups_are_one_but_for_rounding(
    rollout_of, labels, tmp_path, method, parallel, mode
):
    run = rollout_of(method, parallel=parallel, reward="halting", epochs=2, checkpoints={"every": 4},
                     evaluation=Evaluation(every=2, draws=3),
                     rollout={"groups": 4, "group_size": 4, "mode": mode})  # fmt: skip
    one, two = (replace(run, output=str(tmp_path / name)) for name in ("one", "two"))
    alone = weights(one)
    (tmp_path / "two.yaml").write_text(text(two))
    assert launch(2, workers.whole, (str(tmp_path / "two.yaml"),)) == 0
    together, before = (
        load_file(tmp_path / "two" / "model" / "transformer" / WEIGHTS),
        load_file(labels / "transformer" / WEIGHTS),
    )
    for name, tensor in alone.items():
        assert (together[name] - tensor).norm() <= 1e-2 * (tensor - before[name]).norm()
    for ours, theirs in zip(metrics(two), metrics(one), strict=True):
        for name in ("loss", "reward_mean", "not_scored", "grad_norm", "held_out/reward", "held_out/diversity_ratio"):
            assert (name in ours) == (name in theirs)
            assert ours.get(name, 0) == pytest.approx(theirs.get(name, 0), rel=1e-3, abs=1e-6)


def test_a_checkpoint_holds_the_old_policy(rollout_of):
    run = rollout_of("nft")
    train(run)
    folder = found(Path(run.output) / "checkpoints")[0]
    kept = {name for file in folder.glob("*.safetensors") for name in load_file(file)}
    assert {name for name in kept if name.startswith("method.old.transformer.")} and len(kept) % 5 == 0


def test_a_constant_reward_moves_nothing_and_says_so(rollout_of, labels):
    run = rollout_of(reward="same", grpo={"kl": 0.0})
    before = load_file(labels / "transformer" / WEIGHTS)
    assert same(weights(run), before)
    assert all("loss" not in row for row in metrics(run)) and metrics(run)[0]["zero_std_ratio"] == 1


@pytest.mark.parametrize(("method", "settings"), [("grpo", {"clip": 0.05, "kl": 0.0}), ("nft", {"kl": 0.0})])
@pytest.mark.parametrize(
    ("reward", "learns"), [("bright", True), pytest.param("shuffled", False, marks=pytest.mark.slow)]
)
def test_a_method_learns_a_reward_in_seconds_and_nothing_from_one_given_to_others(
    rollout_of, method, settings, reward, learns
):
    run = rollout_of(
        method, reward=reward, epochs=10, batch_size=12, checkpoints={"every": 40}, parallel="replicate",
        rollout={"groups": 4, "group_size": 12, "rows": 16, "parameters": {"num_inference_steps": 4}},
        **{method: settings},
    )  # fmt: skip
    train(run)
    rewards = [row["reward_mean"] for row in metrics(run) if "reward_mean" in row]
    gained = sum(rewards[-3:]) / 3 - rewards[0]
    assert gained > 0.1 if learns else abs(gained) < 0.05


@pytest.mark.parametrize("method", ["grpo", "nft"])
def test_what_a_rollout_leaves_out_is_what_is_known_to_work(rollout_of, checkpoint, method):
    small = {"height": 32, "width": 32, "num_frames": 1, "max_sequence_length": 32}
    run = rollout_of(method, model=str(checkpoint("t2v")), lora=Lora(rank=2), batch_size=None, optimiser={},
                     rollout={"parameters": small})  # fmt: skip
    plan = make(run)
    assert plan.run.batch_size == plan.run.rollout.samples // 2
    assert plan.run.optimiser.lr == 3e-4 and make(replace(run, lora=None)).run.optimiser.lr == 1e-5
    assert plan.asked.num_inference_steps == 10
    assert (plan.asked.guidance_scale == 1.0) == (method == "nft")
    given = rollout_of(method, rollout={"parameters": {"num_inference_steps": 4}})
    assert make(given).asked.num_inference_steps == 4
    assert (Grpo().most, Grpo(guard=True).most, Grpo(clip=1e-2, guard=True).most) == (1e-4, 3e-6, 1e-2)


def test_held_out_samples_may_be_made_in_other_ways_than_those_that_are_learnt_from(rollout_of, monkeypatch):
    run = rollout_of(evaluation=Evaluation(every=2, draws=2, parameters={"num_inference_steps": 6}))
    steps, real = [], held_out.results

    def results(model, asked, **given):
        steps.extend(each.request.num_inference_steps for each in asked)
        return real(model, asked, **given)

    monkeypatch.setattr(held_out, "results", results)
    assert train(run).finished and set(steps) == {6}
    assert make(run).asked.num_inference_steps == 3
    with pytest.raises(RequestError, match="num_inference_steps"):
        make(replace(run, evaluation=Evaluation(parameters={"num_inference_steps": 0})))


def test_held_out_prompts_are_judged_by_the_same_samples_each_time(rollout_of, tmp_path):
    (tmp_path / "held.txt").write_text("dark\n")
    run = rollout_of(rollout={"held_out": str(tmp_path / "held.txt")}, evaluation=Evaluation(every=2, draws=3))
    train(run)
    rows = metrics(run)
    assert [row["step"] for row in rows if "held_out/reward" in row] == [0, 2, 4]
    plots = {path.stem for path in (Path(run.output) / "plots").iterdir()}
    assert "reward" in plots and "reward-and-judge" not in plots, "without a judge there is nothing to compare"
    still = replace(run, output=str(tmp_path / "still"), optimiser=replace(run.optimiser, lr=1e-30))
    train(still)
    judged = [row["held_out/reward"] for row in metrics(still) if "held_out/reward" in row]
    assert judged == [rows[0]["held_out/reward"]] * 3


def test_a_run_is_continued_with_the_prompts_it_began_with_wherever_they_lie(rollout_of, tmp_path):
    run = rollout_of(epochs=1)
    assert train(run).finished
    (tmp_path / "moved.txt").write_text("light\ndark\n")
    longer = replace(run, epochs=2)
    assert train(replace(longer, rollout=replace(run.rollout, prompts=str(tmp_path / "moved.txt")))).step == 4
    Path(run.rollout.prompts).write_text("dark\nlight\n")
    with pytest.raises(StateError, match="sampled otherwise"):
        train(replace(run, epochs=3))


def test_a_run_is_not_continued_within_an_epoch(rollout_of, monkeypatch):
    run, real = rollout_of(), Trainer.train

    def cut(self):
        for measured in real(self):
            yield measured
            if self.step == 3:
                self.save()
                raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train", cut)
        with pytest.raises(KeyboardInterrupt):
            train(run)
    with pytest.raises(StateError, match="sampled otherwise"):
        train(run)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_size": 3}, "batch_size must be a divisor of groups times group_size"),
        ({"checkpoints": {"every": 3}}, "checkpoints.every must be whole epochs, a multiple of 2"),
        ({"epochs": None, "steps": 3}, "steps must be whole epochs"),
        ({"lora": {"dropout": 0.1}}, "rollouts take no lora.dropout"),
        ({"train_only": True}, "rollouts take no train_only"),
        ({"rewards": {}}, "rollouts and rewards go together"),
        ({"method": "sft"}, "method and rollout do not go together"),
        ({"rewards": {"nowhere.py:f": 1.0}}, "no such file of rewards"),
        ({"evaluation": {"judges": {"tesseract": 1.0}}}, "'light' does not say its text"),
        (
            {"rewards": {"jpeg": 1.0}, "evaluation": {"judges": {"jpeg": {"weight": 1.0, "quality": 50}}}},
            "a judge must not be trained on: 'jpeg'; choices: tesseract, ocr",
        ),
        ({"rollout": {"sampler": "euler"}}, "grpo learns from noise, and the sampler draws none: 'euler'"),
        ({"rollout": {"window": 3}}, "rollout.window leaves no step"),
        ({"rollout": {"prompts": "nowhere.txt"}}, "cannot read prompts"),
        ({"rollout": {"dtype": {"transformer": "bfloat16"}}}, "rollout.dtype: no such encoder or autoencoder"),
        ({"rollout": {"staleness": 1, "graphs": "always"}}, "not captured: 'always'"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size must be at least 2"),
        ({"rollout": {"parameters": {"seed": 1}}}, "rollout.parameters takes no seed"),
        ({"rollout": {"parameters": {"prompt": "a cat"}}}, "rollout.parameters takes no prompt"),
        ({"rollout": {"parameters": {"image": "first.png"}}}, "rollout.parameters takes no image"),
        ({"evaluation": {"parameters": {"output": "latents"}}}, "evaluation.parameters takes no output"),
        ({"evaluation": {"parameters": {"video": "clip.mp4"}}}, "evaluation.parameters takes no video"),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(rollout_of, tmp_path, changes, said):
    with pytest.raises(RequestError, match=said):
        make(rollout_of(**changes))
    assert not (tmp_path / "out").exists()
