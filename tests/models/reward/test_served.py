"""A scorer as a card: what transformers computes, in the engine, and interchangeable with a function that calls it."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel, PreTrainedTokenizerFast

import loopwright
from lettered import sample, word
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.errors import CardError, LoopwrightError, RequestError
from loopwright.rewards import Composite, Sample, parse
from loopwright.rewards.served import Served

LENGTH = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny CLIP of random weights, with a tokenizer of bytes and its image processor, as transformers saves them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    path = tmp_path_factory.mktemp("clip")
    alphabet = ["<pad>", "<start>", "<end>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {sign: number for number, sign in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<start>", eos_token="<end>", model_max_length=LENGTH
    )
    torch.manual_seed(0)
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        **layers,
        "vocab_size": len(alphabet),
        "max_position_embeddings": LENGTH,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = CLIPConfig(
        text_config={**layers, **text}, vision_config={**layers, "image_size": 32, "patch_size": 8}, projection_dim=16
    )
    model = CLIPModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4) if parameter.ndim > 1 else None
    model.save_pretrained(path)
    fast.save_pretrained(path)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size=32).save_pretrained(path)
    return path


def samples(frames: int = 3) -> list[Sample]:
    said = ("lamp", "sun", "apple", "zero", "book")
    return [sample(f"a {each}", *[word(each, noise=0.05 * n, seed=n) for n in range(frames)]) for each in said]


@pytest.fixture(scope="module")
def function(folder):
    """The same reward as a function that knows transformers alone: one clip after another."""
    model = CLIPModel.from_pretrained(folder).eval()
    tokenizer, processor = AutoTokenizer.from_pretrained(folder), CLIPImageProcessor.from_pretrained(folder)

    @torch.no_grad()
    def score(batch) -> list[float]:
        scores = []
        for each in batch:
            padded = {"padding": "max_length", "truncation": True, "max_length": LENGTH, "return_tensors": "pt"}
            tokens = tokenizer([each.prompt], **padded)
            pixels = processor(images=list(each.frames.numpy()), return_tensors="pt")
            text = model.get_text_features(**tokens).pooler_output
            seen = model.get_image_features(**pixels).pooler_output
            text, seen = (v / v.square().sum(dim=-1, keepdim=True).sqrt() for v in (text, seen))
            scores.append((seen * text).sum(dim=-1).mean().item())
        return scores

    return score


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
        tokens = tokenizer([each.prompt], padding="max_length", max_length=LENGTH, return_tensors="pt")
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
