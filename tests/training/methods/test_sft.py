"""Supervised fine-tuning: the forward is serving's, bit for bit; the loss is flow matching's; the draws are as said."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import loopwright
from loopwright import catalog
from loopwright.card import Card
from loopwright.engine.instance import Store
from loopwright.errors import RequestError
from loopwright.models.wan import forward
from loopwright.training import networks
from loopwright.training.methods import Batch, Material, Moment
from loopwright.training.methods.sft import Settings, Sft, buckets, ranges
from loopwright.training.noise import grid
from support import media_for


def a14b(boundary: float = 0.875, steps: int = 1000) -> Card:
    """As much of a card with two experts as the method looks at."""
    settings = {"experts": ("high", "low"), "boundary": boundary, "train_steps": steps}
    return Card("two", "wan", dict.fromkeys(("high", "low")), {}, {}, {}, settings)


def method(card: Card, roles=("high", "low"), velocity=None, **settings: object) -> Sft:
    blank = torch.full((4, 8), -7.0)
    return Sft(Settings(**settings), Material(card, velocity, roles, torch.float32, "sdpa", blank))


def batch(rows: int = 3, **more: torch.Tensor) -> Batch:
    """Rows of random latents and embeddings."""
    source = torch.Generator().manual_seed(1)
    tensors = {
        "latent": torch.randn(rows, 2, 3, 4, 4, generator=source).half(),
        "cond": torch.randn(rows, 4, 8, generator=source).bfloat16(),
    }
    return Batch(tensors | more, tuple(f"row {i}" for i in range(rows)), tuple(range(rows)), rows)


def recorder(seen: list, answer: float = 0.0):
    """A forward that notes what it is given and says the same everywhere."""

    def velocity(network, latents, timestep, text, *, attention, **more):
        seen.append({"network": network, "latents": latents, "timestep": timestep, "text": text, **more})
        return torch.full_like(latents, answer)

    return velocity


@pytest.mark.parametrize("kind", ["t2v", "ti2v_text", "ti2v", "i2v", "a14b"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_computes_what_serving_computed(kind, dtype, checkpoint, run_of, alone, monkeypatch):
    """The same weights, the same inputs, the very same bits: float32 masters computed in either precision."""
    served: list[tuple] = []
    for name in ("velocity", "velocity_per_token"):

        def recorded(network, *given, real=getattr(forward, name), **more):
            out = real(network, *given, **more)
            if not torch.is_grad_enabled():
                served.append((given, more, out))
            return out

        monkeypatch.setattr(forward, name, recorded)
    model = loopwright.load(checkpoint(kind), device="cpu", dtype=dtype, store=Store(0))
    # Weights as mapped from a file are not aligned as allocated ones are, and float32 products on the CPU then differ.
    for parameter in model.instance.part("transformer").parameters():
        parameter.data = parameter.data.clone()
    wanted = media_for(kind) | {"num_inference_steps": 2, "output": "latents"}
    model.generate("a red fox", **wanted)
    assert len(served) == 4, "two steps with guidance"
    role = "transformer"
    run = run_of(kind, precision=dtype, gradient_checkpointing=True)
    network = networks.load(model.card, (role,), run, alone)[role]
    assert {parameter.dtype for parameter in network.parameters()} == {torch.float32}
    for given, more, out in served[:2]:
        ours = catalog.velocity(model.card)(network, *given, **more)
        assert ours.requires_grad and ours.dtype == out.dtype and torch.equal(ours, out)
    ours.float().square().mean().backward()
    grads = [parameter.grad for name, parameter in network.named_parameters() if "image" not in name]
    assert all(grad is not None and grad.dtype == torch.float32 for grad in grads)


def test_the_loss_is_that_of_the_path_from_data_to_noise():
    seen: list[dict] = []
    rows = batch()
    ours = method(a14b(), velocity=recorder(seen, answer=0.25), caption_dropout=0.0)
    losses = ours.losses({"high": "H", "low": "L"}, rows, Moment(5, 2, 0))
    (given,) = seen
    x0, sigma = rows.tensors["latent"].float(), given["timestep"] / 1000
    assert given["network"] == ("H" if bool((sigma >= 0.875).all()) else "L")
    s = sigma.view(-1, 1, 1, 1, 1)
    eps = (given["latents"] - (1 - s) * x0) / s
    expected = ((0.25 - (eps - x0)) ** 2).mean(dim=(1, 2, 3, 4))
    torch.testing.assert_close(losses.rows, expected, rtol=1e-4, atol=1e-4)
    assert given["latents"].dtype == torch.float32 and abs(float(eps.mean())) < 0.3 and 0.8 < float(eps.std()) < 1.2
    assert torch.equal(given["text"], rows.tensors["cond"].float())
    assert losses.tokens == 3 * 3 * 4 * 4


def test_what_stands_for_a_given_first_frame_weighs_nothing():
    seen: list[dict] = []
    frame = torch.zeros(3, 2, 1, 4, 4)
    velocity = recorder(seen)

    def spoilt(*given, **more):
        out = velocity(*given, **more)
        out[:, :, 0] = 1e6
        return out

    plain = method(a14b(), velocity=velocity).losses({"high": 0, "low": 0}, batch(), Moment(0, 0, 0))
    ours = method(a14b(), velocity=spoilt).losses({"high": 0, "low": 0}, batch(first_frame=frame), Moment(0, 0, 0))
    assert torch.equal(seen[1]["first_frame"], frame) and float(ours.rows.max()) < 10
    assert not torch.equal(plain.rows, ours.rows)


@pytest.mark.parametrize(("shift", "share"), [(1, 0.126), (3, 0.300), (5, 0.417), (8, 0.534), (12, 0.632)])
def test_the_share_of_high_noise_parts_is_the_one_published(shift, share):
    """Wan2.2's experts, a grid of 1000 levels, boundary 0.875.

    At shift 3 one level is the boundary itself in float32, in which serving compares, and a little below it in float64.
    """
    levels = grid(1000, shift)
    high, low = ranges(a14b(), levels).values()
    assert (high[1] - high[0]) / 1000 == pytest.approx(share, abs=1.0001e-3 if shift == 3 else 1e-9)
    assert high[0] == 0 and high[1] == low[0] and low[1] == 1000
    ours, parts = method(a14b(), sampling="uniform", shift=float(shift)), 10_000
    drawn = Counter(ours.role(Moment(0, step, part)) for step in range(parts // 4) for part in range(4))
    assert abs(drawn["high"] / parts - share) < 4 * np.sqrt(share * (1 - share) / parts)


def test_a_part_trains_one_expert_within_its_range_and_rows_draw_their_own_level():
    seen: list[dict] = []
    ours = method(a14b(), velocity=recorder(seen), sampling="uniform", shift=5.0)
    for step in range(200):
        ours.losses({"high": "H", "low": "L"}, batch(4), Moment(0, step, 0))
    for given in seen:
        assert ((given["timestep"] >= 875) == (given["network"] == "H")).all()
        assert len(set(given["timestep"].tolist())) > 1
    assert {given["network"] for given in seen} == {"H", "L"}


def test_one_expert_alone_draws_from_its_range_only():
    seen: list[dict] = []
    ours = method(a14b(), roles=("low",), velocity=recorder(seen), sampling="logit_normal")
    for step in range(100):
        ours.losses({"low": "L"}, batch(), Moment(0, step, 0))
    assert all((given["timestep"] < 875).all() for given in seen)
    assert max(float(given["timestep"].max()) for given in seen) > 800


def test_every_process_and_a_resumed_run_draw_the_same():
    """A row's draws belong to its place in the step, whoever has it and with whomever."""
    seen: list[dict] = []
    ours = method(a14b(), velocity=recorder(seen), caption_dropout=0.5)
    whole, moment = batch(4), Moment(3, 9, 1)
    all_rows = ours.losses({"high": 0, "low": 0}, whole, moment).rows
    for places in ((0, 2), (3, 1)):
        part = Batch({name: t[list(places)] for name, t in whole.tensors.items()}, ("", ""), places, 2)
        assert torch.equal(ours.losses({"high": 0, "low": 0}, part, moment).rows, all_rows[list(places)])
    other = ours.losses({"high": 0, "low": 0}, whole, replace(moment, step=10)).rows
    assert not torch.equal(all_rows, other)


def test_captions_are_dropped_at_their_rate_and_become_the_empty_prompt():
    seen: list[dict] = []
    ours = method(a14b(), velocity=recorder(seen), caption_dropout=0.3)
    for step in range(300):
        ours.losses({"high": 0, "low": 0}, batch(5), Moment(0, step, 0))
    texts = torch.cat([given["text"] for given in seen])
    dropped = (texts == -7).flatten(1).all(dim=1)
    assert abs(float(dropped.float().mean()) - 0.3) < 4 * np.sqrt(0.21 / 1500)
    assert not (texts[~dropped] == -7).any()


def test_min_snr_weighs_the_error_of_the_clean_sample():
    """SNR min(.., gamma) on x0's error is sigma^2 min(snr, gamma) on the velocity's."""
    seen: list[dict] = []
    plain, weighed = (
        method(a14b(), velocity=recorder(seen), min_snr=gamma).losses({"high": 0, "low": 0}, batch(), Moment(0, 1, 0))
        for gamma in (None, 5.0)
    )
    sigma = seen[0]["timestep"].double() / 1000
    snr = ((1 - sigma) / sigma) ** 2
    expected = plain.rows.double() * sigma**2 * snr.clamp(max=5.0)
    torch.testing.assert_close(weighed.rows.double(), expected, rtol=1e-4, atol=1e-6)


def test_held_out_losses_are_the_same_whenever_and_with_whomever_they_are_taken():
    seen: list[dict] = []
    ours, networks_ = method(a14b(), velocity=recorder(seen), caption_dropout=1.0), {"high": 0, "low": 0}
    whole = batch(4)
    first = [ours.held_out(networks_, whole, draw, 4).rows for draw in range(4)]
    assert [torch.equal(a, ours.held_out(networks_, whole, d, 4).rows) for d, a in enumerate(first)] == [True] * 4
    one = Batch({name: t[2:3] for name, t in whole.tensors.items()}, ("row 2",), (0,), 1)
    assert torch.equal(ours.held_out(networks_, one, 1, 4).rows, first[1][2:3])
    assert len({float(given["timestep"][0]) for given in seen}) == 4
    assert torch.equal(seen[0]["text"], whole.tensors["cond"].float()), "no caption is dropped"


def test_losses_are_told_by_tenths_of_the_noise():
    rows, sigma = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.05, 1.0, 0.55])
    told = buckets(rows, sigma)
    assert len(told) == 10
    assert told["loss/sigma_0.0"].nan_to_num(-1).tolist() == [1, -1, -1]
    assert told["loss/sigma_0.9"].nan_to_num(-1).tolist() == [-1, 2, -1]
    assert told["loss/sigma_0.5"].nan_to_num(-1).tolist() == [-1, -1, 3]


def test_an_expert_that_no_level_reaches_is_refused():
    with pytest.raises(RequestError, match="no noise level is ever drawn for an expert: 'high'"):
        method(a14b(), sampling="logit_normal", logit_mean=-40.0, logit_std=0.1)
