"""Motion, position, colour and object as clips drawn by the embedded model's recipe have them."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from lettered import sample, word
from loopwright.errors import RequestError
from loopwright.rewards import Sample
from loopwright.rewards.drawings import Drawings
from loopwright.rewards.jpeg import JPEG
from loopwright.rewards.tracking import MOTIONS, PALETTE, Colour, Motion, Position

RUN = Path(__file__).parents[2] / "runs" / "tiny_wan"
NAMES = ("ell", "arrow", "stairs")


@pytest.fixture(scope="module")
def clips():
    """The run's module that draws clips; forgotten afterwards."""
    before = {name: sys.modules.pop(name, None) for name in ("clips", "lettering")}
    sys.path.insert(0, str(RUN))
    try:
        yield importlib.import_module("clips")
    finally:
        sys.path.remove(str(RUN))
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


@pytest.fixture(scope="module")
def sprites(tmp_path_factory) -> str:
    """Three drawings that no turn maps to themselves."""
    images = np.zeros((3, 64, 64, 4), np.uint8)
    images[0, ..., :3], images[1, ..., :3], images[2, ..., :3] = (210, 40, 200), (40, 200, 220), (120, 220, 60)
    images[0, 4:60, 6:26, 3] = images[0, 44:60, 6:60, 3] = 255
    for row in range(60):
        images[1, row, 30 - row // 3 : 34 + row // 3, 3] = 255
        images[2, row, 2 : 6 + 12 * (row // 12), 3] = 255
    path = tmp_path_factory.mktemp("sprites") / "sprites.npz"
    np.savez(path, images=images, names=np.array(NAMES))
    return str(path)


@pytest.fixture(scope="module")
def drawn(clips, sprites) -> list[Sample]:
    """Every object with every motion, backgrounds in turn."""
    triples = torch.tensor([(i, m, (i * 5 + m) % len(PALETTE)) for m in range(len(MOTIONS)) for i in range(3)])
    what = clips.scenes(clips.Objects.load(sprites), triples)
    video, _ = clips.compose_clips(what, torch.Generator().manual_seed(0))
    frames = ((video.permute(0, 2, 3, 4, 1) / 2 + 0.5) * 255).round().byte()
    facts = [{"object": NAMES[i], "motion": clips.MOTIONS[m], "background": list(PALETTE)[b]} for i, m, b in triples]
    return [Sample("a clip", each, fact) for each, fact in zip(frames, facts, strict=True)]


def turned(samples: list[Sample], fact: str, by: dict[str, str]) -> list[Sample]:
    """The same clips, asked for another thing."""
    return [Sample(s.prompt, s.frames, {**s.facts, fact: by[s.facts[fact]]}) for s in samples]


def test_each_motion_scores_high_and_every_other_low(drawn):
    assert min(Motion()(drawn)) > 0.65
    names = list(MOTIONS)
    for shift in range(1, len(names)):
        others = dict(zip(names, names[shift:] + names[:shift], strict=True))
        assert max(Motion()(turned(drawn, "motion", others))) < 0.3


def test_a_larger_picture_of_the_same_scores_the_same(drawn):
    some = drawn[1::3]
    large = [Sample(s.prompt, s.frames.repeat_interleave(4, 1).repeat_interleave(4, 2), s.facts) for s in some]
    assert np.allclose(Motion()(large), Motion()(some), atol=0.1)
    assert np.allclose(Colour()(large), Colour()(some), atol=0.01)


def test_half_a_motion_scores_less_than_all_of_it(drawn):
    moving = [s for s in drawn if s.facts["motion"] in ("left", "up", "growing")]
    some = [Sample(s.prompt, s.frames[:3], s.facts) for s in moving]
    for less, more in zip(Motion()(some), Motion()(moving), strict=True):
        assert 0.02 < less < more


def test_the_palette_is_the_models_and_its_colours_are_told_apart(clips, drawn):
    assert dict(clips.BACKGROUNDS) == dict(PALETTE)
    assert min(Colour()(drawn)) > 0.95
    names = list(PALETTE)
    for shift in range(1, len(names)):
        others = dict(zip(names, names[shift:] + names[:shift], strict=True))
        assert max(Colour()(turned(drawn, "background", others))) < 0.15


def test_colours_have_css_names_and_numbers():
    grey = np.full((1, 8, 8, 3), 105, np.uint8)
    same = [sample("x", grey[0], background=name) for name in ("dimgray", "#696969")]
    assert Colour()(same) == [1.0, 1.0]
    with pytest.raises(RequestError, match="teal"):
        Colour()([sample("x", grey[0], background="no such colour")])


def test_where_an_object_stands_is_told_by_its_middle():
    frame = np.zeros((40, 80, 3), np.uint8)
    frame[4:14, 4:14] = 255
    said = {place: Position()([sample("x", frame, position=place)])[0] for place in ("left", "right", "top", "centre")}
    assert said == {"left": 1.0, "right": 0.0, "top": 1.0, "centre": 0.0}


def test_what_is_not_seen_scores_nothing_and_what_is_not_known_is_an_error(drawn):
    nothing = np.zeros((3, 16, 16, 3), np.uint8)
    assert Motion()([sample("x", *nothing, motion="left")]) == [0.0]
    with pytest.raises(RequestError, match="growing"):
        Motion()([sample("x", *nothing, motion="sideways")])
    with pytest.raises(RequestError, match="motion"):
        Motion()([sample("x", *nothing)])
    with pytest.raises(RequestError, match="three frames"):
        Motion()([sample("x", *nothing[:1], motion="left")])


def test_the_drawing_that_is_shown_is_the_likeliest(drawn, sprites):
    score = Drawings(sprites)
    assert min(score(drawn)) > 0.9
    others = dict(zip(NAMES, NAMES[1:] + NAMES[:1], strict=True))
    assert max(score(turned(drawn, "object", others))) < 0.1
    assert np.allclose(sum(np.array(score(turned(drawn, "object", dict.fromkeys(NAMES, n)))) for n in NAMES), 1)
    with pytest.raises(RequestError, match="ell, arrow, stairs"):
        score(turned(drawn, "object", dict.fromkeys(NAMES, "fox")))


def test_a_file_without_drawings_says_so(tmp_path):
    (tmp_path / "x.npz").write_bytes(b"nothing")
    with pytest.raises(RequestError, match="drawings"):
        Drawings(str(tmp_path / "x.npz"))


def test_noise_takes_more_bits_than_a_plain_picture_at_any_size():
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    plain, detailed, larger = JPEG()([sample("x", np.zeros_like(noise)), sample("x", noise), sample("x", word("a"))])
    assert plain < larger < detailed and detailed > 8
    once, twice = JPEG()([sample("x", noise), sample("x", noise, noise)])
    assert once == twice
