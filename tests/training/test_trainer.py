"""A step is the mean over its rows however it is divided, and what is reported is what was differentiated."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from loopwright.backends import attention, registry
from loopwright.models.wan.choice import choice_of
from loopwright.training import session
from loopwright.training.methods import Losses, Moment
from loopwright.training.methods.sft import Sft
from loopwright.training.run import Run
from loopwright.training.session import train
from loopwright.training.sinks import table
from loopwright.training.tally import Tally


def result(run: Run) -> dict[str, torch.Tensor]:
    return load_file(train(run).result / "transformer" / "diffusion_pytorch_model.safetensors")


def column(run: Run, name: str) -> list[float]:
    return [row[name] for row in table(Path(run.output) / "metrics.csv") if name in row]


@pytest.mark.parametrize("change", [{"accumulate": 3}, {"gradient_checkpointing": True}])
def test_accumulated_parts_and_recomputed_layers_change_rounding_alone(change, run_of, tmp_path):
    plain = run_of(steps=3, optimiser={"lr": 1e-4}, output=str(tmp_path / "plain"))
    other = replace(plain, **change, output=str(tmp_path / "other"))
    ours, theirs = result(other), result(plain)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=2e-6)
    assert column(other, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)
    assert column(other, "grad_norm") == pytest.approx(column(plain, "grad_norm"), rel=1e-4)


@pytest.mark.slow
def test_compiled_blocks_change_rounding_alone(run_of, tmp_path):
    plain = run_of(steps=2, optimiser={"lr": 1e-4}, output=str(tmp_path / "plain"), gradient_checkpointing=True)
    compiled = replace(plain, compile=True, output=str(tmp_path / "compiled"))
    ours, theirs = result(compiled), result(plain)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=1e-5)
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)


def test_a_choice_of_attention_holds_when_layers_are_recomputed(run_of, tmp_path, monkeypatch):
    """Each self-attention of the two blocks is called once forward and once more in the backward pass."""
    calls: list[bool] = []

    def counted(*given, real=attention.plain):
        calls.append(torch.is_grad_enabled())
        return real(*given)

    monkeypatch.setattr(attention, "plain", counted)
    for cached in (registry.load, choice_of):
        cached.cache_clear()
    run = run_of(steps=1, attention="math", output=str(tmp_path / "once"))
    once = result(run)
    assert len(calls) == 4, "self- and cross-attention"
    calls.clear()
    again = result(replace(run, gradient_checkpointing=True, output=str(tmp_path / "again")))
    assert len(calls) == 8 and all(torch.equal(again[name], once[name]) for name in once)
    for cached in (registry.load, choice_of):
        cached.cache_clear()


def test_the_loss_reported_is_the_loss_differentiated(run_of, monkeypatch):
    """A row's loss times c moves the report and the gradient by c alike; a row that is filled up moves neither."""

    class Scaled(Sft):
        def losses(self, networks, batch, moment):
            losses = super().losses(networks, batch, moment)
            return replace(losses, rows=losses.rows * self.factor)

    monkeypatch.setitem(session.METHODS, "sft", lambda run, material: Scaled(run.sft, material))
    norms, losses = [], []
    for factor in (1.0, 4.0):
        Scaled.factor = factor
        run = run_of(steps=1, optimiser={"clip": None})
        run = replace(run, output=f"{run.output}-{factor}")
        train(run)
        norms += column(run, "grad_norm")
        losses += column(run, "loss")
    assert losses[1] == 4 * losses[0] and norms[1] == pytest.approx(4 * norms[0], rel=1e-6)


def test_all_processes_of_a_part_train_the_same_expert_and_both_get_their_turn(run_of, monkeypatch):
    """The expert is a function of the run's seed, the step and the part: nothing of a process is in it.

    That two processes train two experts as one does is shown in `test_session`.
    """
    moments: list[tuple[Moment, str]] = []
    real = Sft.role

    def noted(self, moment):
        moments.append((moment, real(self, moment)))
        return moments[-1][1]

    monkeypatch.setattr(Sft, "role", noted)
    run = run_of("a14b", steps=6, accumulate=2, sft={"shift": 5.0, "sampling": "uniform"}, optimiser={"lr": 1e-3})
    before = [load_file(Path(run.model) / role / "diffusion_pytorch_model.safetensors") for role in _EXPERTS]
    trained = train(run).result
    assert {role for _, role in moments} == set(_EXPERTS) and {m.part for m, _ in moments} == {0, 1}
    for role, weights in zip(_EXPERTS, before, strict=True):
        after = load_file(trained / role / "diffusion_pytorch_model.safetensors")
        assert not any(torch.equal(after[name], weights[name]) for name in after if "norm" not in name)


_EXPERTS = ("transformer", "transformer_2")


def test_an_expert_that_is_not_trained_is_not_loaded_and_stays_as_it_was(run_of, monkeypatch):
    from loopwright.training import networks

    loaded: list[str] = []
    real = networks.load_component

    def noted(component, folder, device):
        loaded.append(component.subfolder)
        return real(component, folder, device)

    monkeypatch.setattr(networks, "load_component", noted)
    run = run_of("a14b", steps=2, train=["transformer_2"], optimiser={"lr": 1e-3})
    trained = train(run).result
    assert loaded == ["transformer_2"]
    name = "diffusion_pytorch_model.safetensors"
    assert (trained / "transformer" / name).read_bytes() == (Path(run.model) / "transformer" / name).read_bytes()
    assert (trained / "transformer_2" / name).read_bytes() != (Path(run.model) / "transformer_2" / name).read_bytes()


def test_held_out_rows_are_never_trained_on_and_their_loss_falls(run_of, monkeypatch):
    names: dict[str, set[str]] = {"losses": set(), "held_out": set()}
    for kind, seen in names.items():

        def noted(self, networks, batch, *given, real=getattr(Sft, kind), seen=seen):
            seen.update(batch.names[: batch.real])
            return real(self, networks, batch, *given)

        monkeypatch.setattr(Sft, kind, noted)
    run = run_of(epochs=12, data={"held_out": 0.5}, evaluation={"every": 8}, optimiser={"lr": 3e-3}, ema=0.5)
    train(run)
    assert names["losses"] and names["held_out"] and not names["losses"] & names["held_out"]
    held = column(run, "held_out/loss")
    assert len(held) >= 3 and held[-1] < 0.9 * held[0], "the first is from before training"
    assert table(Path(run.output) / "metrics.csv")[0].keys() >= {"step", "held_out/loss"}
    assert column(run, "held_out/ema_loss")[-1] < column(run, "held_out/ema_loss")[0]


def test_fillers_and_rows_that_say_nothing_do_not_count(alone):
    tally = Tally()
    nothing = float("nan")
    tally.add(Losses(torch.tensor([1.0, 3.0, 99.0]), {"part": torch.tensor([nothing, 5.0, 99.0])}, tokens=30), real=2)
    tally.add(Losses(torch.tensor([5.0]), {"part": torch.tensor([nothing])}, tokens=10), real=1)
    assert tally.reduced(alone) == ({"loss": 3.0, "part": 5.0}, 30)
    empty = Tally()
    empty.add(Losses(torch.tensor([5.0]), {"part": torch.tensor([nothing])}), real=1)
    assert empty.reduced(alone) == ({"loss": 5.0}, 0)
