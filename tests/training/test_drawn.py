"""Batches a run's own file draws: the same whoever draws them and whenever, and a run of them that resumes exactly."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from loopwright.data.order import Position
from loopwright.errors import RequestError, StateError
from loopwright.training import networks, session
from loopwright.training.drawn import Drawn, DrawnFeed, HeldOut, identity, opened
from loopwright.training.methods.sft import Settings as Sft
from loopwright.training.plan import make
from loopwright.training.run import Evaluation, Optimiser, Run
from loopwright.training.sinks import table
from loopwright.training.trainer import Trainer

FILE = '''
"""Latents and embeddings of nothing in particular."""
import torch
from beside import CHANNELS

class Numbers:
    def __init__(self, device, length):
        self.length, self.blank = length, torch.zeros(length, 32, device=device)

    def batch(self, step, rows, generator):
        frames = 1 if step % 3 == 2 else 2
        latent = torch.randn(rows, CHANNELS, frames, 4, 4, generator=generator)
        more = {"first_frame": latent[:, :, :1]} if step % 3 == 1 else {}
        return {"latent": latent, "cond": torch.randn(rows, self.length, 32, generator=generator), **more}

    def held_out(self):
        return [self.batch(0, 2, torch.Generator().manual_seed(99))]

def numbers(device, length=4):
    return Numbers(device, length)

def blankless(device, length):
    source = Numbers(device, length)
    source.blank = None
    return source
'''


@pytest.fixture
def drawn(tmp_path) -> Drawn:
    (tmp_path / "feeds.py").write_text(FILE)
    (tmp_path / "beside.py").write_text("CHANNELS = 48\n")
    return Drawn(str(tmp_path / "feeds.py"), "numbers", {"length": 5})


@pytest.fixture
def run(drawn, checkpoint, tmp_path) -> Run:
    return Run(
        str(checkpoint("ti2v")), str(tmp_path / "out"), drawn=drawn, steps=6, batch_size=4, device="cpu", sinks=(),
        sft=Sft(draws="batch"), optimiser=Optimiser(lr=1e-3), ema=0.9,
    )  # fmt: skip


def feed(drawn: Drawn, rank: int = 0, ranks: int = 1, parts: int = 1, seed: int = 0) -> DrawnFeed:
    group = SimpleNamespace(rank=rank, ranks=ranks, device=torch.device("cpu"))
    return DrawnFeed(opened(drawn, group.device), group, 4, parts, seed, identity(drawn))


def taken(feed: DrawnFeed, position: Position, count: int) -> list:
    return [step for step, _ in zip(feed.steps(position, 1), range(count), strict=False)]


def latents(steps: list) -> list[torch.Tensor]:
    return [batch.tensors["latent"] for step in steps for batch in step.parts]


def test_steps_continue_as_if_never_left(drawn):
    ours = feed(drawn)
    whole = taken(ours, ours.start(), 5)
    later = taken(feed(drawn), whole[1].after, 3)
    assert all(torch.equal(a, b) for a, b in zip(latents(whole)[2:], latents(later), strict=True))
    assert not torch.equal(latents(whole)[0], latents(whole)[3])


def test_processes_and_parts_draw_rows_of_their_own(drawn):
    drawn_by = [taken(feed(drawn, rank, 2, 2), feed(drawn).start(), 1)[0] for rank in range(2)]
    batches = [batch for step in drawn_by for batch in step.parts]
    assert sorted(place for batch in batches for place in batch.places) == [0, 1, 2, 3]
    rows = torch.cat([batch.tensors["latent"] for batch in batches]).flatten(1)
    assert len(torch.unique(rows, dim=0)) == 4 and all(step.rows == 4 for step in drawn_by)


def test_another_source_seed_or_size_is_another_order(drawn):
    other = replace(drawn, options={"length": 6})
    for another in (feed(other), feed(drawn, seed=1), replace(feed(drawn), rows=8)):
        with pytest.raises(StateError, match="drew other batches"):
            another.check(feed(drawn).start())
    with pytest.raises(RequestError, match="multiple of 3"):
        feed(drawn, ranks=3)


def test_held_out_batches_come_once_each(drawn):
    held = HeldOut(opened(drawn, torch.device("cpu")))
    (first,), (again,) = (list(held.steps(held.start(), 1)) for _ in range(2))
    assert torch.equal(first.parts[0].tensors["latent"], again.parts[0].tensors["latent"])
    assert first.parts[0].names == ("0/0", "0/1")


def test_a_file_or_function_that_is_not_there_is_told_before_anything(run, drawn):
    for wrong, words in ((Drawn("nowhere.py", "numbers"), "is missing"), (replace(drawn, source="letters"), "numbers")):
        with pytest.raises(RequestError, match=words):
            make(replace(run, drawn=wrong))
    with pytest.raises(RequestError, match="data, drawn"):
        replace(run, drawn=None)
    with pytest.raises(RequestError, match="give steps"):
        replace(run, steps=None, epochs=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lenght": 5}, r"drawn\.options: blankless is not called so .*'lenght'.*; choices: length"),
        ({}, r"drawn\.options: .*missing a required argument: 'length'"),
        ({"device": "cpu", "length": 5}, r"drawn\.options: .*device"),
    ],
)
def test_options_that_the_function_does_not_take_are_told_before_anything(options, message, run, drawn):
    with pytest.raises(RequestError, match=message):
        make(replace(run, drawn=replace(drawn, source="blankless", options=options)))


def test_rows_that_processes_cannot_share_evenly_are_told_before_any_is_started(run):
    assert make(run, 2).steps == 6
    with pytest.raises(RequestError, match="shared out evenly: 4; make batch_size a multiple of 3, of processes"):
        make(run, 3)
    with pytest.raises(RequestError, match="a multiple of 8"):
        make(replace(run, accumulate=4), 2)


def test_who_drops_captions_needs_the_empty_prompt_and_who_does_not_needs_none(run, drawn, monkeypatch, plotless):
    real, kept = networks.load, Sft(draws="batch", caption_dropout=0.0)
    blankless = replace(run, drawn=replace(drawn, source="blankless"), steps=1)
    monkeypatch.setattr(networks, "load", lambda *given: pytest.fail("weights were read"))
    with pytest.raises(RequestError, match=r"sft\.caption_dropout has nothing .*: 0\.1; set it to 0, or give"):
        session.train(blankless)
    monkeypatch.setattr(networks, "load", real)
    ours = weights(replace(blankless, sft=kept))
    theirs = weights(replace(run, sft=kept, steps=1, output=f"{run.output}-blank"))
    assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())


def weights(run: Run) -> dict[str, torch.Tensor]:
    outcome = session.train(run)
    assert outcome.finished and outcome.result is not None
    return load_file(outcome.result / "transformer" / "diffusion_pytorch_model.safetensors")


def test_a_run_of_drawn_batches_continues_bit_for_bit(run, tmp_path, monkeypatch):
    uninterrupted = weights(replace(run, output=str(tmp_path / "whole"), log_every=2))
    real = Trainer.train

    def cut(self):
        for metrics in real(self):
            yield metrics
            if self.step == 3:
                self.save()
                raise KeyboardInterrupt

    monkeypatch.setattr(Trainer, "train", cut)
    with pytest.raises(KeyboardInterrupt):
        session.train(run)
    monkeypatch.setattr(Trainer, "train", real)
    continued = weights(run)
    assert all(torch.equal(continued[name], tensor) for name, tensor in uninterrupted.items())


def test_metrics_are_means_over_the_steps_between(run, tmp_path):
    often, seldom = (replace(run, log_every=every, output=str(tmp_path / str(every))) for every in (1, 3))
    for each in (often, seldom):
        session.train(each)
    losses = [row["loss"] for row in table(Path(often.output) / "metrics.csv")]
    rows = table(Path(seldom.output) / "metrics.csv")
    assert [row["step"] for row in rows] == [3, 6]
    assert [row["loss"] for row in rows] == pytest.approx([sum(losses[:3]) / 3, sum(losses[3:]) / 3])


def test_held_out_batches_are_measured(run):
    session.train(replace(run, evaluation=Evaluation(every=6, draws=2)))
    last = table(Path(run.output) / "metrics.csv")[-1]
    assert 0 < last["held_out/loss"] < 10 and last["held_out/ema_loss"] != last["held_out/loss"]


def test_a_process_alone_that_compiles_computes_by_autocast_about_the_same(run, tmp_path, monkeypatch):
    monkeypatch.setattr(networks, "compile_blocks", lambda network: None)
    losses = {}
    for compiles in (False, True):
        each = replace(run, precision="bfloat16", compile=compiles, steps=1, output=str(tmp_path / str(compiles)))
        session.train(each)
        losses[compiles] = table(Path(each.output) / "metrics.csv")[0]["loss"]
    assert losses[True] == pytest.approx(losses[False], rel=0.02) and losses[True] != losses[False]
