"""The pieces of runs/two_steps: what is held out, what prompts tell rewards, what controls are, and who judges."""

import importlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from loopwright import rewards
from loopwright.rewards import Sample
from loopwright.rewards.ocr import OCR
from loopwright.training.prompts import read
from loopwright.training.run import read as read_run
from loopwright.training.session import train

RUNS = Path(__file__).parents[2] / "runs"
WORDS = RUNS / "two_steps" / "words.yaml"


@pytest.fixture
def parts(monkeypatch):
    """The folder's modules, and those of tiny_wan that they use."""
    names = ("clips", "lettering", "prompts", "controls", "judge", "adapters")
    for folder in ("tiny_wan", "two_steps"):
        monkeypatch.syspath_prepend(str(RUNS / folder))
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


@pytest.fixture
def sprites(tmp_path) -> Path:
    path = tmp_path / "sprites.npz"
    np.savez(path, images=np.full((2, 64, 64, 4), 255, np.uint8), names=np.array(["fox", "ship"]))
    return path


def quoted(prompt: str) -> str:
    return prompt.split('"')[1]


def test_held_out_words_are_all_those_of_the_model_and_no_other_is_asked_for_in_training(parts):
    learnt, unseen = parts["prompts"].words(500, random.Random(0))
    assert [quoted(prompt) for prompt in unseen] == parts["lettering"].split()[1]
    assert len(learnt) == 500 and not {quoted(p) for p in learnt} & {quoted(p) for p in unseen}
    listed = set(parts["lettering"].short())
    assert 0.3 < sum(quoted(prompt) in listed for prompt in learnt) / 500 < 0.7


def test_clips_held_out_are_combinations_that_the_model_was_not_trained_on_and_rewards_can_read_all(
    parts, sprites, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["prompts.py", "--output", str(tmp_path), "--sprites", str(sprites),
                                      "--count", "40", "--judged", "5"])  # fmt: skip
    parts["prompts"].main()
    names = {"drawings": {"weight": 1.0, "sprites": str(sprites)}, "motion": 1.0, "colour": 1.0}
    for file, kind, count in (("clips", names, 40), ("clips_held_out", names, 5)):
        found = read(str(tmp_path / f"{file}.jsonl"))
        assert len(found) == count
        rewards.parse(kind).require([Sample(p.text, torch.zeros(1, 8, 8, 3), p.facts) for p in found])
        held = [parts["clips"].is_held_out(*(p.facts[k] for k in ("object", "motion", "background"))) for p in found]
        assert held == [file == "clips_held_out"] * count
    words = read(str(tmp_path / "words.txt"))
    rewards.parse({"ocr": 1.0}).require([Sample(p.text, torch.zeros(1, 8, 8, 3), p.facts) for p in words])


def test_the_shuffled_control_tells_true_scores_of_other_samples(parts):
    lettering = parts["lettering"]
    words = ["lamp", "sun", "boat", "tree", "milk", "fish"]
    pictures = lettering.spelled(lettering.glyphs(), lettering.letters(words))
    shown = (255 - pictures * 255).byte().permute(0, 2, 3, 1).expand(-1, -1, -1, 3)
    asked = [w if i % 2 else "zzz" for i, w in enumerate(words)]
    samples = [Sample(f'the word "{word}"', frame[None]) for word, frame in zip(asked, shown, strict=True)]
    true, told = OCR(frames=1)(samples), parts["controls"].shuffled(samples)
    assert sorted(told) == sorted(true) and told != true
    assert told == parts["controls"].shuffled(samples), "the same however often it is asked"
    assert set(parts["controls"].constant(samples)) == {0.5}


@pytest.mark.slow
def test_a_run_is_judged_before_and_after_on_what_it_holds_out(parts, tmp_path, monkeypatch):
    for name, words in (("learnt", ["lamp", "sun"]), ("held", ["boat", "tree"])):
        (tmp_path / f"{name}.txt").write_text("".join(f'the word "{w}" on a blue background\n' for w in words))
    changes = [f"output={tmp_path / 'out'}", f"rollout.prompts={tmp_path / 'learnt.txt'}", "rollout.groups=2",
               f"rollout.held_out={tmp_path / 'held.txt'}", "rollout.group_size=2", "rollout.rows=4", "device=cpu",
               "batch_size=4", "epochs=1", "checkpoints.every=1", "evaluation=null",
               'rewards={"ocr": {"weight": 1.0, "frames": 1}}']  # fmt: skip
    assert train(read_run(WORDS, changes)).finished
    given = [argument for change in changes for argument in ("--set", change)]
    monkeypatch.setattr(sys, "argv", ["judge.py", str(WORDS), *given, "--draws", "2"])
    parts["judge"].main()
    judged = json.loads((tmp_path / "out" / "judged.json").read_text())
    assert list(judged) == ["before", "after", "in the usual steps"]
    assert all(set(found) == {"ocr", "diversity"} for found in judged.values())
    assert judged["before"] != judged["after"] and judged["in the usual steps"]["ocr"] > judged["before"]["ocr"]
    assert (tmp_path / "out" / "judged.png").stat().st_size > 1000
    kept = tmp_path / "kept"
    monkeypatch.setattr(sys, "argv", ["adapters.py", str(tmp_path / "out"), "--output", str(kept)])
    parts["adapters"].main()
    (last, *_), own = sorted(kept.glob("*"), reverse=True), next((tmp_path / "out" / "lora").glob("*.safetensors"))
    assert {n: t.tolist() for n, t in load_file(last).items()} == {n: t.tolist() for n, t in load_file(own).items()}
    monkeypatch.setattr(sys, "argv", ["judge.py", str(WORDS), *given, "--draws", "2", "--adapters", str(last)])
    parts["judge"].main()
    again = json.loads((tmp_path / "out" / "judged.json").read_text())
    assert list(again) == ["before", last.stem, "in the usual steps"]
    assert again[last.stem] == pytest.approx(judged["after"], abs=1e-3), "but for the rounding of shared calls"
