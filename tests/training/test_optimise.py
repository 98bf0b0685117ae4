"""The optimiser is torch's, rates are those of transformers' schedules, clipping and averaging as defined."""

import pytest
import torch
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from loopwright.training.optimise import Average, adamw, clip, factor
from loopwright.training.run import Optimiser, Schedule


def parameters(seed: int = 0) -> dict[str, torch.nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    shapes = {"a": (3, 2), "b": (4,)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=source)) for name, shape in shapes.items()}


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_after_the_warm_up_rates_are_transformers(kind):
    steps, warmup = 20, 4
    optimiser = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = {
        "constant": lambda: get_constant_schedule_with_warmup(optimiser, warmup),
        "linear": lambda: get_linear_schedule_with_warmup(optimiser, warmup, steps),
        "cosine": lambda: get_cosine_schedule_with_warmup(optimiser, warmup, steps),
    }[kind]()
    expected = []
    for _ in range(steps):
        expected.append(theirs.get_last_lr()[0])
        optimiser.step()
        theirs.step()
    ours = [factor(Schedule(kind, warmup), step, steps) for step in range(steps)]
    assert ours[warmup:] == pytest.approx(expected[warmup:])
    assert ours[:warmup] == pytest.approx([1 / 5, 2 / 5, 3 / 5, 4 / 5]), "the first step is not lost on a rate of 0"


def test_a_schedule_ends_at_its_final_rate_and_never_passes_it():
    schedule = Schedule("cosine", final=0.1)
    rates = [factor(schedule, step, 100) for step in range(101)]
    assert rates[0] == 1 and rates[100] == pytest.approx(0.1) and rates == sorted(rates, reverse=True)


def test_state_made_beforehand_changes_no_bit_of_torchs_optimiser():
    ours, theirs = parameters(), parameters()
    settings = Optimiser(lr=1e-2, weight_decay=0.1)
    made = adamw(ours, settings, 1e-2)
    plain = torch.optim.AdamW(theirs.values(), lr=1e-2, weight_decay=0.1, fused=True)
    for step in range(5):
        for named, optimiser in ((ours, made), (theirs, plain)):
            for index, parameter in enumerate(named.values()):
                parameter.grad = torch.full_like(parameter, 0.1 * step - index) if step % 2 or index else None
            optimiser.step()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_one_that_meets_no_gradient_stays_where_it_is():
    ours = parameters()
    before = ours["b"].detach().clone()
    optimiser = adamw(ours, Optimiser(weight_decay=0.5), 0.1)
    ours["a"].grad = torch.ones_like(ours["a"])
    optimiser.step()
    assert torch.equal(ours["b"], before) and float(optimiser.state[ours["b"]]["step"]) == 0


def test_gradients_are_clipped_together_and_their_norm_told():
    ours = parameters()
    for parameter in ours.values():
        parameter.grad = torch.full_like(parameter, 2.0)
    before = float(torch.sqrt(torch.tensor(4.0 * 10)))
    assert float(clip(ours, None)) == pytest.approx(before)
    assert float(clip(ours, 1.0)) == pytest.approx(before)
    assert float(clip(ours, None)) == pytest.approx(1.0)
    assert float(clip(ours, 5.0)) == pytest.approx(1.0), "and a small one is left"


def test_averages_follow_their_decay_and_change_places_exactly():
    ours = parameters()
    average = Average(ours, 0.75)
    begun = {name: p.detach().clone() for name, p in ours.items()}
    with torch.no_grad():
        for parameter in ours.values():
            parameter.add_(1)
    average.update()
    average.update()
    for name, tensor in average.tensors.items():
        torch.testing.assert_close(tensor, begun[name] + 1 - 0.75**2)
    kept = {name: (p.detach().clone(), average.tensors[name].clone()) for name, p in ours.items()}
    average.swap()
    assert all(torch.equal(ours[name], kept[name][1]) for name in ours)
    average.swap()
    assert all(torch.equal(ours[n], kept[n][0]) and torch.equal(average.tensors[n], kept[n][1]) for n in ours)
