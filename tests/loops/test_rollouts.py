"""Stochastic samplers through the engine: what a rollout draws, that it repeats, and that training can recompute it."""

from dataclasses import replace

import pytest
import torch

import loopwright
from fakes import Generous
from loopwright.engine.job import Job
from loopwright.engine.saved import restore, save
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import RequestError
from loopwright.loop import Unit
from loopwright.loops.denoise import transition
from loopwright.sampling.stochastic import STEPPERS, log_prob
from support import media_for, relative, run, same

SMALL = media_for("t2v") | {"num_inference_steps": 4, "output": "latents"}


@pytest.fixture(scope="module")
def model(checkpoint):
    return loopwright.load(checkpoint("t2v"), device="cpu", sampler="flow_sde")


class Recorded:
    """Each denoising step of a rollout: the step, and what it gave."""

    def __init__(self):
        self.steps, self.handles = [], {}

    def on_step(self, job, step, key, result):
        if step.unit is Unit.DENOISE:
            self.steps.append((step, result.tensors))
            self.handles = {name: (job.slots[ref.slot],) for name, ref in step.handles.items()}


def rollout(model, **changes):
    recorded = Recorded()
    job = Job(model.instance, model.request("a red fox", **SMALL | changes), observers=[recorded])
    while not job.ended:
        job.step()
    assert job.error is None
    return job, recorded


def recomputed(model, recorded, index):
    step, result = recorded.steps[index]
    with model.instance.using(step.uses) as parts:
        mean, std = transition(parts, **step.tensors, **recorded.handles, **step.static)
    return log_prob(result["latents"], mean, std)


@pytest.mark.parametrize("stepper", STEPPERS)
@pytest.mark.parametrize("scale", [1.0, 5.0])
def test_log_probs_recomputed_from_the_record_are_the_rollouts_bit_for_bit(checkpoint, stepper, scale):
    model = loopwright.load(checkpoint("t2v"), device="cpu", sampler=stepper)
    _, recorded = rollout(model, guidance_scale=scale)
    with torch.no_grad():
        for index, (_, result) in enumerate(recorded.steps):
            assert torch.equal(recomputed(model, recorded, index), result["log_prob"])
    values = [result["log_prob"].item() for _, result in recorded.steps]
    assert all(value != 0 for value in values[:-1]) and values[-1] == 0


def test_the_log_probs_gradient_is_that_of_finite_differences(checkpoint):
    model = loopwright.load(checkpoint("t2v"), device="cpu", sampler="flow_sde")
    _, recorded = rollout(model, guidance_scale=1.0)
    network = model.instance.part("transformer")
    weight = network.proj_out.weight.requires_grad_(True)
    recomputed(model, recorded, 1).sum().backward()
    direction = weight.grad / weight.grad.norm()
    slope = (weight.grad * direction).sum().item()
    assert slope > 0
    moved = []
    with torch.no_grad():
        for sign in (1, -1):
            weight += sign * 1e-2 * direction
            moved.append(recomputed(model, recorded, 1).double().sum().item())
            weight -= sign * 1e-2 * direction
    assert (moved[0] - moved[1]) / 2e-2 == pytest.approx(slope, rel=2e-2)


def test_without_noise_the_latents_are_eulers_bit_for_bit(checkpoint, model):
    euler = loopwright.load(checkpoint("t2v"), device="cpu", sampler="euler")
    quiet = model.generate("a red fox", **SMALL, noise_steps=0)
    assert torch.equal(quiet.latents, euler.generate("a red fox", **SMALL).latents)
    assert not torch.equal(quiet.latents, model.generate("a red fox", **SMALL).latents)


def test_a_window_draws_in_its_steps_alone(model):
    _, recorded = rollout(model, noise_start=1, noise_steps=2)
    assert [bool(result["log_prob"]) for _, result in recorded.steps] == [False, True, True, False]


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
