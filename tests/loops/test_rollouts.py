"""Stochastic samplers through the engine: what a rollout draws, that it repeats, and that training can recompute it."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import loopwright
from fakes import Generous
from loopwright.engine.job import Job
from loopwright.engine.saved import restore, save
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import RequestError
from loopwright.sampling.stochastic import STEPPERS
from support import media_for, relative, run, same

SMALL = media_for("t2v") | {"num_inference_steps": 4, "output": "latents"}


@pytest.fixture(scope="module")
def model(checkpoint):
    return loopwright.load(checkpoint("t2v"), device="cpu", sampler="flow_sde")


def rollout(model, **changes):
    """The moves of a request."""
    (result,) = model.run_all([model.request("a red fox", **SMALL | changes)], recorded=True)
    return result.trajectory.moves


def recomputed(model, moves, index, known="sample"):
    """The log-prob of a recorded step by the step's own op, of its sample, or wrongly of its noise."""
    move = moves[index]
    given = {name: tensor for name, tensor in move.rows.items() if name != "noise"}
    given[known] = move.after if known == "sample" else move.rows["noise"]
    lent = {name: (tensor,) for name, tensor in move.lent.items()}
    with model.instance.using((move.static["model"],)) as parts:
        return move.op(parts, **given, **lent, **move.static)["log_prob"]


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_log_probs_recomputed_from_the_record_are_the_rollouts_bit_for_bit(checkpoint, stepper, scale):
    model = loopwright.load(checkpoint("t2v"), device="cpu", sampler=stepper)
    moves = rollout(model, guidance_scale=scale)
    with torch.no_grad():
        for index, move in enumerate(moves):
            assert torch.equal(recomputed(model, moves, index), move.log_prob)
    values = [move.log_prob.item() for move in moves]
    assert all(value != 0 for value in values[:-1]) and values[-1] == 0


def slopes(model, moves, known):
    """How the log-prob changes along its gradient at the sample: by the gradient of it, and by finite differences."""
    weight = model.instance.part("transformer").proj_out.weight.requires_grad_(True)
    (towards,) = torch.autograd.grad(recomputed(model, moves, 1).sum(), weight)
    direction = towards / towards.norm()
    (gradient,) = torch.autograd.grad(recomputed(model, moves, 1, known).sum(), weight)
    moved = []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * 1e-2 * direction
            moved.append(recomputed(model, moves, 1).double().sum().item())
            weight -= sign * 1e-2 * direction
    return (gradient * direction).sum().item(), (moved[0] - moved[1]) / 2e-2


def test_the_log_probs_gradient_is_that_of_finite_differences_and_noise_in_the_samples_place_has_none(checkpoint):
    model = loopwright.load(checkpoint("t2v"), device="cpu", sampler="flow_sde")
    moves = rollout(model, guidance_scale=1.0)
    gradient, difference = slopes(model, moves, "sample")
    assert gradient > 0 and gradient == pytest.approx(difference, rel=2e-2)
    gradient, difference = slopes(model, moves, "noise")
    assert abs(gradient) < 1e-5 * difference


def test_without_noise_the_latents_are_eulers_bit_for_bit(checkpoint, model):
    euler = loopwright.load(checkpoint("t2v"), device="cpu", sampler="euler")
    quiet = model.generate("a red fox", **SMALL, noise_steps=0)
    assert torch.equal(quiet.latents, euler.generate("a red fox", **SMALL).latents)
    assert not torch.equal(quiet.latents, model.generate("a red fox", **SMALL).latents)


def test_a_window_draws_in_its_steps_alone(model):
    moves = rollout(model, noise_start=1, noise_steps=2)
    assert [bool(move.log_prob) for move in moves] == [False, True, True, False]


def test_noise_is_of_the_seed_and_the_step_whoever_shares_the_call(model):
    requests = [model.request(f"a fox {seed}", **SMALL | {"seed": seed}) for seed in (3, 4, 3)]
    alone = [run(model.instance, request) for request in requests]
    assert not torch.equal(alone[0]["latents"], alone[1]["latents"])
    scheduler = Scheduler(prices=Generous())
    jobs = [scheduler.submit(Job(model.instance, replace(request, mode="throughput"))) for request in requests]
    scheduler.run()
    assert scheduler.merger.rows / scheduler.merger.calls == 3
    assert all(relative(job.output["latents"], one["latents"]) < 1e-5 for job, one in zip(jobs, alone, strict=True))


@pytest.mark.parametrize("steps", range(1, 5))
def test_a_rollout_continued_from_a_file_draws_the_same_noise(model, tmp_path, steps):
    request = model.request("a red fox", **SMALL)
    job = Job(model.instance, request)
    for _ in range(steps):
        job.step()
    save(job, tmp_path / "job.safetensors")
    again = restore(model.instance, tmp_path / "job.safetensors")
    while not again.ended:
        again.step()
    assert same(again.output, run(model.instance, request))


@pytest.mark.parametrize(
    ("given", "said"),
    [({"noise_level": -0.1}, "noise_level is out of range: -0.1"), ({"noise_start": 4}, "noise_start .*: 4; 0 to 3"),
     ({"noise_start": 2, "noise_steps": 3}, "noise_steps .*: 3; 0 to 2"), ({"noise_level": "much"}, "noise_level"),
     ({"noise_steps": 1.5}, "noise_steps")],
)  # fmt: skip
def test_noise_that_cannot_be_is_refused(model, given, said):
    with pytest.raises(RequestError, match=said):
        model.request("a", **SMALL, **given)


def test_a_sampler_without_noise_refuses_it_and_a_stochastic_one_says_what_it_takes(checkpoint, model):
    euler = loopwright.load(checkpoint("t2v"), device="cpu", sampler="euler")
    with pytest.raises(RequestError, match=r"noise_level: the model's sampler draws no noise: 0.7; leave it out, or"):
        euler.request("a", **SMALL, noise_level=0.7)
    request = model.request("a", **SMALL)
    assert (request.noise_level, request.noise_start, request.noise_steps) == (0.7, 0, 3)


def test_a_recorded_request_is_the_plain_one_with_its_moves_end_to_end(model):
    request = model.request("a red fox", **SMALL)
    (plain,), (recorded,) = (list(model.run_all([request], recorded=kept)) for kept in (False, True))
    assert plain.trajectory is None and torch.equal(plain.latents, recorded.latents)
    moves = recorded.trajectory.moves
    assert len(moves) == 4 and torch.equal(moves[-1].after, recorded.latents)
    assert all(ahead.rows["latents"] is move.after for move, ahead in pairwise(moves))
    assert {move.versions["transformer"] for move in moves} == {1}


@pytest.mark.parametrize("rows", [1, 2])
def test_requests_recorded_in_shared_calls_are_recomputed_at_as_many_rows_bit_for_bit(model, rows):
    """With gradients, as training computes: the ratio to the rollout is exactly 1."""
    fixed = {"mode": "fixed", "rows": rows, "guidance_scale": 1.0}
    requests = [model.request("a red fox", **SMALL | fixed | {"seed": seed}) for seed in range(4)]
    results = list(model.run_all(requests, recorded=True))
    assert len({id(result.trajectory.moves[0].lent["text"]) for result in results}) == 1  # encoded once
    network = model.instance.part("transformer").requires_grad_(True)
    try:
        found = ratios(network, [result.trajectory.moves[1] for result in results], rows)
        assert found.requires_grad and torch.equal(found, torch.ones(4))
    finally:
        network.requires_grad_(False)


@pytest.mark.parametrize(("recorded", "learnt"), [(2, 1), (2, 3), (2, 5), (4, 1), (4, 3)])
def test_at_another_number_of_rows_the_ratio_is_one_within_a_millionth(model, recorded, learnt):
    """At every step that drew noise, the last of which rounding moves most."""
    fixed = {"mode": "fixed", "rows": recorded, "guidance_scale": 1.0}
    requests = [model.request("a red fox", **SMALL | fixed | {"seed": seed}) for seed in range(6)]
    results = list(model.run_all(requests, recorded=True))
    network = model.instance.part("transformer")
    with torch.no_grad():
        for index in range(SMALL["num_inference_steps"] - 1):
            found = ratios(network, [result.trajectory.moves[index] for result in results], learnt)
            assert (found - 1).abs().max() <= 1e-6, index


def ratios(network, moves, rows):
    """Of these moves, recomputed so many at a time as training does."""
    found = []
    for first in range(0, len(moves), rows):
        part = moves[first : first + rows]
        given = {name: torch.cat([move.rows[name] for move in part]) for name in ("latents", "row")}
        given["sample"] = torch.cat([move.after for move in part])
        lent = {name: (torch.cat([move.lent[name] for move in part]),) for name in part[0].lent}
        again = part[0].op({"transformer": network}, **given, **lent, **part[0].static)["log_prob"]
        found.append((again - torch.cat([move.log_prob for move in part])).exp())
    return torch.cat(found)
