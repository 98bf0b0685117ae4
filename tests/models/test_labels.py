"""Label-conditional models are models like others: cards, samplers, batches and refusals."""

import numpy as np
import pytest
import torch

import loopwright
from loopwright.card import dumps
from loopwright.errors import BackendError, RequestError
from loopwright.models.labels import describe
from loopwright.models.labels.network import LabelFlow
from loopwright.sampling.schedules import euler_flow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("labels")
    torch.manual_seed(0)
    LabelFlow(["one", "two"], size=4, channels=3, width=16, depth=1).save_pretrained(folder / "transformer")
    (folder / "card.json").write_text(dumps(describe(folder)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return loopwright.load(folder, device="cpu")


def test_what_is_generated_is_eulers_integral_of_the_network(model):
    result = model.generate("two", seed=3, num_inference_steps=4)
    network, schedule = model.instance.part("transformer"), euler_flow(4, shift=3.0)
    x = torch.randn(1, 3, 1, 4, 4, generator=torch.Generator().manual_seed(3))
    label = torch.tensor([[0.0, 1.0]])
    for s, after, timestep in zip(schedule.sigmas, schedule.sigmas[1:], schedule.timesteps, strict=False):
        v = network(x.flatten(1), torch.tensor([timestep]).float(), label).view_as(x)
        x = x + (float(after) - float(s)) * v
    torch.testing.assert_close(result.latents, x)
    expected = (x[0].clamp(-1, 1) * 127.5 + 127.5).round().permute(1, 2, 3, 0).byte().numpy()
    np.testing.assert_array_equal(result.video, expected)


def test_a_label_and_guidance_matter_and_none_is_the_unconditional(model):
    one, two, none = (model.generate(label, seed=0, output="latents").latents for label in ("one", "two", ""))
    assert not torch.equal(one, two) and not torch.equal(one, none)
    guided = model.generate("one", seed=0, guidance_scale=3.0, output="latents").latents
    assert not torch.equal(guided, one)


@pytest.mark.parametrize("sampler", ["unipc", "flow_sde"])
def test_shared_calls_of_a_fixed_number_of_rows_give_the_same_bits_whoever_shares(folder, sampler):
    model = loopwright.load(folder, device="cpu", sampler=sampler)
    ask = [model.request("one", seed=seed, mode="fixed", rows=4, output="latents") for seed in range(4)]
    alone = {request: next(iter(model.run_all([request]))).latents for request in ask}
    assert all(torch.equal(result.latents, alone[result.request]) for result in model.run_all(ask))


def test_what_the_model_cannot_make_is_refused(model):
    with pytest.raises(RequestError, match="not one of the model's labels: 'three'; choices: one, two"):
        model.generate("three")
    with pytest.raises(RequestError, match="one size"):
        model.generate("one", height=8, width=8)
    with pytest.raises(BackendError, match="no choice of kernels"):
        model.generate("one", attention="math")
