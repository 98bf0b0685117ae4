"""The pieces of tiny-wan's runs that could be wrong without a word: captions, pixels, what is held out, the judge."""

import importlib
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from loopwright.models.wan.whole_clip import WholeClip
from loopwright.rewards.recogniser import Recogniser

RUNS = Path(__file__).parents[2] / "runs" / "tiny_wan"
MODULES = ("clips", "evaluate", "feeds", "lettering", "networks", "start", "text")


@pytest.fixture(scope="module")
def parts():
    """The run's modules, which import each other by their short names; forgotten afterwards."""
    before = {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path.insert(0, str(RUNS))
    try:
        yield {name: importlib.import_module(name) for name in MODULES}
    finally:
        sys.path.remove(str(RUNS))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def sprites(tmp_path_factory) -> str:
    """Three drawings that no turn maps to themselves: an L, an arrow, a staircase."""
    images = np.zeros((3, 64, 64, 4), np.uint8)
    for image, colour in zip(images, ((210, 40, 200), (40, 200, 220), (250, 250, 60)), strict=True):
        image[..., :3] = colour
    images[0, 4:60, 6:26, 3] = images[0, 44:60, 6:60, 3] = 255
    for row in range(60):
        images[1, row, 30 - row // 3 : 34 + row // 3, 3] = 255
        images[2, row, 2 : 6 + 12 * (row // 12), 3] = 255
    images[1, 40:60, 4:20, 3] = 255
    path = tmp_path_factory.mktemp("sprites") / "sprites.npz"
    np.savez(path, images=images, names=np.array(["fox", "orange", "ship"]))
    return str(path)


def asked_of(parts, names: list[str], words: list[str]) -> list:
    """Every object and word with every motion, backgrounds in turn."""
    evaluate, clips = parts["evaluate"], parts["clips"]
    things = [*((index, "") for index in range(len(names))), *((-1, word) for word in words)]
    pairs = [(thing, motion) for thing in things for motion in range(len(clips.MOTIONS))]
    return [
        evaluate.Asked(index, word, motion, at * 5 % len(clips.BACKGROUNDS))
        for at, ((index, word), motion) in enumerate(pairs)
    ]


def test_the_judge_reads_in_drawn_clips_what_their_captions_say(parts, sprites):
    evaluate, lettering = parts["evaluate"], parts["lettering"]
    objects = parts["clips"].Objects.load(sprites)
    asked = asked_of(parts, objects.names[:5], lettering.split()[1][:8])
    video, coverage = evaluate.drawn(objects, asked)
    analyst, shown = evaluate.Analyst(objects), video.transpose(1, 2) / 2 + 0.5
    figures = evaluate.score(shown, asked, asked, analyst)
    assert figures["word"] >= 0.95 and figures["object"] >= 0.95, figures
    assert figures["motion"] >= 0.97 and figures["background"] == 1, figures
    assert coverage.amin(dim=(1, 2, 3, 4)).eq(0).all() and coverage.amax(dim=(1, 2, 3, 4)).gt(0.9).all()
    shuffled = asked[37:] + asked[:37]
    chance = evaluate.score(shown, asked, shuffled, analyst)
    assert chance["motion"] < 0.4 and chance["word"] < 0.3 and chance["background"] < 0.4


def test_words_are_spelled_letter_by_letter(parts):
    lettering = parts["lettering"]
    words = [word for word in lettering.short() if len(word) == 4][:20]
    pictures = lettering.spelled(lettering.glyphs(), lettering.letters(words))
    shown = (255 - pictures * 255).byte().permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()
    assert sum(a == b for a, b in zip(Recogniser().read(list(shown)), words, strict=True)) >= 19
    halves = lettering.spelled(lettering.glyphs(), lettering.letters(["abc", "abcde"]))
    assert torch.equal(halves[0, :, :, 14:50], halves[1, :, :, 2:38])


def test_nothing_held_out_is_trained_on(parts, sprites):
    clips, feeds, lettering, evaluate = (parts[name] for name in ("clips", "feeds", "lettering", "evaluate"))
    names, tones = clips.Objects.load(sprites).names, list(clips.BACKGROUNDS)
    triples, words = feeds.combinations(names, 3000)
    share = sum(map(bool, words)) / len(words)
    assert abs(share - feeds.SPELLED) < 0.05
    for (index, motion, background), word in zip(triples, words, strict=True):
        name = clips.quoted(word) if word else names[index]
        assert not clips.is_held_out(name, clips.MOTIONS[motion], tones[background])
        assert (index == -1) == bool(word) and not (word and lettering.is_held_out(word))
    seen = {(index, word, motion, background) for (index, motion, background), word in zip(triples, words, strict=True)}
    asked = evaluate.questions(names, 60)
    assert len({a.prompt(names) for a in asked}) == 60 and sum(bool(a.word) for a in asked) == 12
    assert not seen & {(a.index, a.word, a.motion, a.background) for a in asked}


def test_captions_name_what_is_drawn(parts, sprites):
    clips = parts["clips"]
    rng = random.Random(0)
    for motion, phrases in clips.MOTION_PHRASES.items():
        text = clips.caption(clips.quoted("lamp"), motion, "orange", rng).lower()
        assert 'the word "lamp"' in text and any(phrase in text for phrase in phrases)
    assert clips.caption("the digit 7", "left", "red") == "the digit 7 moving left on a red background"
    longest = max((name for name in (RUNS / "sprites.txt").read_text().splitlines()), key=len)
    texts = [clips.caption(longest, motion, "orange", rng) for motion in clips.MOTIONS for _ in range(300)]
    assert max(len(text.encode()) for text in texts) < parts["networks"].TEXT_LENGTH


def test_the_text_encoder_spells_unseen_words(parts):
    text, networks, clips = parts["text"], parts["networks"], parts["clips"]
    encoder = networks.load_text_encoder()
    names = [name for name in (RUNS / "sprites.txt").read_text().splitlines() if name][:40]
    figures = text.quality(encoder, encoder, names)
    assert figures["letters"] > 0.98 and figures["places"] > 0.98 and figures["words"] > 0.9
    said = text.said("word", "zebra", 3, 4, random.Random(0))
    cell, place = torch.zeros(99, 28), torch.zeros(99, 8)
    text.spell(said, cell, place)
    first = said.text.index("zebra")
    assert (
        cell[first].argmax() == 25
        and cell[first + 4].argmax() == 0
        and place[first + 2].nonzero().flatten().tolist() == [2, 7]
    )
    assert cell.sum() == 15 and clips.MOTIONS[said.motion] == "down"


def test_byte_ids_and_states_are_those_of_the_tokenizer_and_the_pipeline(parts):
    networks = parts["networks"]
    texts = ['the word "lamp" moving left', "a café", ""]
    tokens = networks.build_tokenizer()(
        texts, padding="max_length", max_length=networks.TEXT_LENGTH, return_tensors="pt"
    )
    assert torch.equal(networks.byte_ids(texts).long(), tokens.input_ids)
    states = networks.encode_text(networks.load_text_encoder(), tokens.input_ids)
    assert states[0, len(texts[0]) + 1 :].abs().max() == 0
    assert states[..., networks.WRITTEN :].abs().max() == 0


def test_latents_are_those_of_the_clips_and_steps_take_their_turns(parts, sprites, tmp_path, monkeypatch):
    feeds, networks, clips, start = (parts[name] for name in ("feeds", "networks", "clips", "start"))
    small = {**networks.AUTOENCODER, "base_dim": 4, "decoder_base_dim": 4, "num_res_blocks": 1}
    monkeypatch.setattr(networks, "AUTOENCODER", small)
    vae = networks.build_autoencoder()
    monkeypatch.setattr(start, "MEASURED_BATCH", 4)
    start.measure(vae, Path(sprites), torch.device("cpu"), 2)
    vae.save_pretrained(tmp_path / "vae")
    source = feeds.latents(torch.device("cpu"), sprites, str(tmp_path / "vae"), str(tmp_path / "cache"), 12)
    stored = source._latents
    assert abs(stored.float().mean()) < 0.5 and 0.5 < stored.float().std() < 2
    monkeypatch.setattr(feeds, "encode", None)  # what is kept is not made again
    again = feeds.latents(torch.device("cpu"), sprites, str(tmp_path / "vae"), str(tmp_path / "cache"), 12)
    assert torch.equal(again._latents, stored)

    triples, words = feeds.combinations(clips.Objects.load(sprites).names, 12)
    objects = clips.Objects.load(sprites)
    spelled = parts["lettering"].letters([word or "aaa" for word in words])
    what = clips.scenes(objects, torch.tensor(triples), spelled)
    video, _ = clips.compose_clips(what, torch.Generator().manual_seed(0))
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    with torch.no_grad():
        ours = (WholeClip(vae).encode(video)[0] - mean) / std
    torch.testing.assert_close(stored.float(), ours, rtol=0, atol=5e-3)

    kinds = [source.batch(step, 3, torch.Generator().manual_seed(step)) for step in range(10)]
    assert [each["latent"].shape[2] for each in kinds] == [1] + [3] * 9
    assert [step for step, each in enumerate(kinds) if "first_frame" in each] == [3, 6, 9]
    assert torch.equal(kinds[3]["first_frame"], kinds[3]["latent"][:, :, :1])
    assert kinds[1]["cond"].shape == (3, networks.TEXT_LENGTH, 160) and source.blank.shape == (
        networks.TEXT_LENGTH,
        160,
    )


def test_temporal_layers_that_begin_as_copies_pass_frames_through(parts):
    """A still clip's latents do not know how long it has been still; the first is the picture's alone."""
    networks = parts["networks"]
    torch.manual_seed(0)
    vae = networks.build_autoencoder()
    networks.start_temporal_layers_as_copies(vae)
    picture = torch.rand(1, 3, 1, 32, 32) * 2 - 1
    with torch.no_grad():
        alone, _ = WholeClip(vae).encode(picture)
        together, _ = WholeClip(vae).encode(picture.expand(-1, -1, 9, -1, -1))
        longer, _ = WholeClip(networks.build_autoencoder()).encode(picture.expand(-1, -1, 9, -1, -1))
    torch.testing.assert_close(together[:, :, :1], alone, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(together[:, :, 1], together[:, :, 2], rtol=1e-3, atol=1e-4)
    assert (longer[:, :, 1] - longer[:, :, 2]).abs().max() > 1e-2, "as those of other kernels do"


def test_drawings_are_the_generators_and_hold_out_what_is_held_out(parts, sprites):
    feeds = parts["feeds"]
    source = feeds.clips(torch.device("cpu"), sprites)
    first, again, other = (source.batch(0, 6, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first["video"], again["video"]) and not torch.equal(first["video"], other["video"])
    assert first["video"].shape == (6, 3, 9, 64, 64) and first["focus"].shape == (6, 1, 9, 64, 64)
    assert first["video"].abs().max() <= 1 and first["focus"].amax(dim=(1, 2, 3, 4)).gt(0.9).all()
    assert (
        feeds.frames(torch.device("cpu"), sprites).batch(0, 6, torch.Generator().manual_seed(1))["video"].shape[2] == 1
    )
