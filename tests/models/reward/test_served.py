"""A scorer as a card: what transformers computes, in the engine, and interchangeable with a function that calls it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

import clip_scorer
import loopwright
from lettered import sample, word
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.errors import CardError, LoopwrightError, RequestError
from loopwright.rewards import Composite, Sample, parse
from loopwright.rewards.served import Served


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return clip_scorer.build(tmp_path_factory.mktemp("clip"))


def samples(frames: int = 3) -> list[Sample]:
    said = ("lamp", "sun", "apple", "zero", "book")
    return [sample(f"a {each}", *[word(each, noise=0.05 * n, seed=n) for n in range(frames)]) for each in said]


@pytest.fixture(scope="module")
def function(folder) -> clip_scorer.Plain:
    """The same reward as a function that knows transformers alone."""
    return clip_scorer.Plain(str(folder))


@pytest.fixture(scope="module")
def served(folder) -> Served:
    return Served(loopwright.load(folder, device="cpu", store=Store()))


def test_scores_are_the_functions_bit_for_bit(served, function):
    assert served(samples()) == function(samples())
    assert len({round(score, 4) for score in served(samples())}) == 5, "clips differ"


def test_scores_are_those_of_the_librarys_own_forward(served, folder):
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), CLIPImageProcessor.from_pretrained(folder)
    for each, score in zip(samples(1), served(samples(1)), strict=True):
        tokens = tokenizer([each.prompt], padding="max_length", max_length=clip_scorer.LENGTH, return_tensors="pt")
        pixels = processor(images=list(each.frames.numpy()), return_tensors="pt")
        with torch.no_grad():
            logits = model(**tokens, **pixels).logits_per_image / model.logit_scale.exp()
        assert score == pytest.approx(logits.item(), abs=1e-6)


def test_rows_shared_in_fixed_mode_do_not_know_each_other(served):
    shared = Served(served.model, rows=4)
    together = shared(samples())
    assert together == [shared([each])[0] for each in samples()]
    assert together == pytest.approx(served(samples()), abs=1e-5)


def test_calls_are_shared_and_a_prompts_vector_is_computed_once(folder):
    store, calls = Store(), []
    model = loopwright.load(folder, device="cpu", store=store)

    def watched(instance, call):
        calls.append((call.step.op.__name__, call.rows))
        return model.execute(instance, call)

    scheduler, reward = model.scheduler(execute=watched), Served(model, rows=4)
    clips = [Sample("a lamp", each.frames) for each in samples()[:4]]
    for each in clips:
        scheduler.submit(Job(model.instance, reward._request(each)))
    scheduler.run()
    assert calls == [("embed_text", 1), ("score", 4)]


def test_a_run_cannot_tell_the_served_scorer_from_the_function(served, function):
    """What a group of samples would be given, and what becomes of a policy that follows it."""
    totals = [Composite({"clip": (each, 2.0)})(samples()) for each in (served, function)]
    assert totals[0] == totals[1]


def test_run_files_name_a_served_scorer(folder, function):
    score = parse({"served": {"weight": 1.0, "model": str(folder), "device": "cpu"}})
    assert score(samples()) == function(samples())


def test_a_score_that_is_no_number_is_a_failure_and_told(folder):
    model = loopwright.load(folder, device="cpu", store=Store())
    reward = Served(model)
    weights = model.instance.parts(("model",))["model"].vision_model.embeddings.patch_embedding.weight
    black, white = (sample("a lamp", np.full((32, 32, 3), level, np.uint8)) for level in (0, 255))
    weights[:] = torch.inf
    assert reward([black, white]) == [None, None]
    ((reason, count),) = reward.failures.items()
    assert "scores" in reason and count == 2


def test_long_videos_are_looked_at_in_some_frames(served, function):
    (long,) = [sample("a lamp", *[word("lamp", noise=0.1, seed=n) for n in range(10)])]
    seen = Sample(long.prompt, long.frames[[0, 3, 6, 9]])
    assert served([long]) == function([seen])


def test_what_is_no_scorer_says_so(checkpoint, tmp_path, folder):
    with pytest.raises(RequestError, match="no scorer"):
        Served(str(checkpoint("t2v")))
    (tmp_path / "config.json").write_text('{"architectures": ["BertModel"]}')
    with pytest.raises(LoopwrightError, match="model_index"):
        loopwright.load(tmp_path)
    with pytest.raises(CardError, match="denoises"):
        loopwright.load(folder, device="cpu").generate("a lamp", video=np.zeros((1, 8, 8, 3), np.uint8), output="score")
