"""The OCR reward is the CTC likelihood of the wanted text: smooth where exact matches jump, the same in any batch."""

import importlib.util
import itertools
import math
import os
import shutil

import numpy as np
import openvino
import pytest

from lettered import sample, word
from loopwright.errors import BackendError, RequestError
from loopwright.rewards import judges
from loopwright.rewards.judge import Tesseract
from loopwright.rewards.ocr import OCR, likelihoods, similarity
from loopwright.rewards.recogniser import Recogniser

WORDS = ("lamp", "sun", "apple", "zero", "book")


@pytest.fixture(scope="module")
def ocr() -> OCR:
    return OCR()


def asked(said: str, shown: str, **look) -> object:
    return sample(f'the word "{said}" on a blue background', word(shown, **look))


def enumerated(probabilities: np.ndarray, text: list[int]) -> float:
    """The probability of a text by adding up every path that says it."""
    total = 0.0
    for path in itertools.product(range(probabilities.shape[1]), repeat=len(probabilities)):
        said = [sign for sign, _ in itertools.groupby(path) if sign]
        if said == text:
            total += math.prod(float(row[sign]) for row, sign in zip(probabilities, path, strict=True))
    return total


def test_the_likelihood_is_the_sum_over_all_alignments():
    columns = np.random.default_rng(0).dirichlet(np.ones(4), 5).astype(np.float32)
    for text in ([1], [1, 2], [2, 2], [3, 1, 3]):
        (score,) = likelihoods(columns[None], [[[0], *([sign] for sign in text)]])
        assert score == pytest.approx(enumerated(columns, text) ** (1 / len(text)), rel=1e-5)


def test_letters_of_both_cases_count_as_one_and_spaces_as_nothing():
    columns = np.random.default_rng(1).dirichlet(np.ones(5), 5).astype(np.float32)  # blank, a, A, b, space
    merged = np.stack([columns[:, 0] + columns[:, 4], columns[:, 1] + columns[:, 2], columns[:, 3]], axis=1)
    (score,) = likelihoods(columns[None], [[[0, 4], [1, 2], [3]]])
    assert score == pytest.approx(enumerated(merged, [1, 2]) ** 0.5, rel=1e-5)


def test_a_text_longer_than_the_columns_has_no_likelihood():
    columns = np.full((1, 2, 3), 1 / 3, np.float32)
    assert likelihoods(columns, [[[0], [1], [2], [1]]]) == [0.0]


def test_words_that_are_there_score_high_and_others_low(ocr):
    assert min(ocr([asked(each, each) for each in WORDS])) > 0.9
    assert max(ocr([asked(each, other) for each, other in itertools.pairwise(WORDS)])) < 0.1


def test_it_falls_smoothly_where_exact_matches_jump(ocr):
    levels = (0.0, 0.2, 0.3, 0.35, 0.4, 0.5, 0.7)
    means = [np.mean(ocr([asked(w, w, noise=level, seed=s) for w in WORDS for s in range(3)])) for level in levels]
    assert means == sorted(means, reverse=True)
    assert means[0] > 0.95 and means[-1] < 0.1
    assert sum(0.1 < mean < 0.9 for mean in means) >= 2


def test_a_score_does_not_depend_on_who_is_scored_with_it(ocr):
    samples = [asked(each, each, size=size, noise=0.3) for size, each in zip((12, 20, 14, 18, 16), WORDS, strict=True)]
    alone = [ocr([one])[0] for one in samples]
    assert np.allclose(ocr(samples), alone, atol=1e-4)


def test_of_a_video_its_most_legible_frame_counts(ocr):
    empty, said = np.zeros((64, 64, 3), np.uint8), word("lamp")
    assert ocr([sample('the word "lamp"', empty, said, empty)])[0] == pytest.approx(ocr([asked("lamp", "lamp")])[0])
    assert ocr([sample('the word "lamp"', empty, empty)]) == [0.0]


def test_the_text_is_a_fact_or_stands_in_quotes(ocr):
    assert ocr([sample("a lamp", word("lamp"), text="LAMP")])[0] > 0.9
    with pytest.raises(RequestError, match="text"):
        ocr([sample("a lamp", word("lamp"))])
    with pytest.raises(RequestError, match="sign"):
        ocr([sample("a lamp", word("lamp"), text="la\x01mp")])


def test_edit_is_the_share_of_letters_that_are_right():
    assert similarity("kitten", "sitting") == pytest.approx(1 - 3 / 7)
    assert OCR("edit")([asked("lamp", "lamp"), asked("lamb", "lamp")]) == [1.0, 0.75]
    with pytest.raises(RequestError, match="ctc, edit"):
        OCR("words")


def test_pictures_are_read_in_their_order():
    pictures = [word(each, size=size) for size, each in zip((12, 20, 14, 18, 16), WORDS, strict=True)]
    assert [said.lower() for said in Recogniser().read([*pictures, np.zeros((9, 9, 3), np.uint8)])] == [*WORDS, ""]


def noisy(said: str, deviation: float) -> np.ndarray:
    noise = np.random.default_rng(int(deviation)).normal(0, deviation, (64, 64, 3))
    return (word(said) + noise).clip(0, 255).astype(np.uint8)


def in_bfloat16() -> bool:
    return "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@pytest.mark.skipif(not in_bfloat16(), reason="this processor has no bfloat16")
def test_bfloat16_reads_as_float32_does():
    pictures = [noisy(each, deviation) for each in WORDS for deviation in (0.0, 40.0, 90.0)]
    samples = [sample("", picture, text=WORDS[place // 3]) for place, picture in enumerate(pictures)]
    exact, rounded = (np.array(OCR(frames=1, precision=each)(samples)) for each in ("float32", "bfloat16"))
    assert exact.min() < 0.9 < exact.max()
    assert 0 < abs(rounded - exact).max() < 0.15 and abs(rounded - exact).mean() < 0.02
    clear = list(range(0, len(pictures), 3))
    assert abs(rounded[clear] - exact[clear]).max() < 0.01
    read = Recogniser(precision="bfloat16").read([pictures[place] for place in clear])
    assert [said.lower() for said in read] == list(WORDS)


@pytest.mark.skipif(in_bfloat16(), reason="this processor has bfloat16")
def test_a_processor_without_bfloat16_is_told_so():
    with pytest.raises(BackendError, match="does not compute in bfloat16"):
        OCR(precision="bfloat16")


def test_what_bfloat16_needs_is_named(monkeypatch):
    monkeypatch.setattr(
        "loopwright.rewards.recogniser.find_spec",
        lambda name: None if name == "openvino" else importlib.util.find_spec(name),
    )
    with pytest.raises(BackendError, match=r"openvino"):
        OCR(precision="bfloat16")
    assert OCR()([asked("lamp", "lamp")])[0] > 0.9
    with pytest.raises(RequestError, match="float32, bfloat16"):
        OCR(precision="float16")


@pytest.mark.skipif(shutil.which("tesseract") is None, reason="tesseract is not installed")
def test_the_judge_reads_what_is_there():
    judge = Tesseract()
    seen = judge.exact([asked(each, each) for each in WORDS])
    assert sum(seen) >= 4
    assert judge.exact([asked("lamp", "book")]) == [False]
    assert judge.read([np.zeros((64, 64, 3), np.uint8)]) == [""]
    named = judges({"tesseract": 1.0}, trained={"ocr": 1.0})
    assert named([asked(each, each) for each in WORDS]) == list(map(float, seen))
    with pytest.raises(RequestError, match="text"):
        named.require([sample("a lamp", np.zeros((8, 8, 3), np.uint8))])


def test_a_reading_that_fails_or_hangs_is_no_score_of_the_judge_and_is_counted(monkeypatch, tmp_path):
    program = tmp_path / "tesseract"
    program.write_text(
        "#!/bin/sh\ncd $(dirname $0)\necho x >> count\ncase $(wc -l < count) in\n"
        "1) echo lamp ;;\n2) echo broken >&2; exit 3 ;;\n3) exec sleep 600 ;;\n*) printf 'la\\377mp' ;;\nesac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    named = judges({"tesseract": {"weight": 1.0, "timeout": 0.5}}, trained={"ocr": 1.0})
    assert named([asked("lamp", "lamp")] * 4) == [1.0, None, None, 0.0]
    assert named.failures == {
        "tesseract: tesseract failed with status 3: 'broken'": 1,
        "tesseract: tesseract gives no answer in time: '0.5 s'": 1,
    }
    (tmp_path / "count").write_text("x\n")
    with pytest.raises(BackendError, match="status 3"):
        Tesseract().exact([asked("lamp", "lamp")])
    judge = Tesseract()
    program.unlink()
    assert judge([asked("lamp", "lamp")]) == [None] and "cannot be run" in str(judge.failures)
    for wrong in ({"frames": 0}, {"timeout": 0}):
        with pytest.raises(RequestError):
            Tesseract(**wrong)


def test_without_the_program_the_judge_says_how_to_get_it(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BackendError, match="tesseract-ocr"):
        Tesseract()
