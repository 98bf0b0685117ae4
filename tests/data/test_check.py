"""`loopwright data check` tells all that is wrong in one pass, and what is there."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from footage import film, grey, jsonl
from loopwright import media
from loopwright.cli import generate, main
from loopwright.cli.geometry import SIZE, TRAINING

Said = Callable[..., tuple[int, str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Said:
    """Exit status, stdout and stderr of a check run in a folder with two films and a photo."""
    monkeypatch.chdir(tmp_path)
    film(tmp_path / "long.mp4", grey(20))
    film(tmp_path / "short.mp4", grey(6))
    media.write("sea.png", grey(3)[2].swapaxes(0, 1), fps=1, metadata={})

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["data", "check", *arguments])
        return status, *capsys.readouterr()

    return run


def rows() -> list[dict[str, object]]:
    return [
        {"prompt": "a", "video": "long.mp4"},
        {"prompt": "b", "video": "short.mp4"},
        {"prompt": "c", "image": "sea.png"},
    ]


def test_a_good_data_set_is_counted(said: Said, tmp_path: Path):
    jsonl(tmp_path / "rows.jsonl", rows())
    status, out, err = said(
        "rows.jsonl", "--bucket", "32x48x5", "--bucket", "32x48x17", "--bucket", "48x32x5", "--json"
    )
    assert (status, err) == (0, "")
    assert json.loads(out) == {
        "rows": 3, "images": 1, "videos": 2, "problems": 0,
        "sizes": {"32x48": 2, "48x32": 1}, "lengths": {"1": 1, "20": 1, "6": 1},
        "buckets": {"32x48x17": 1, "32x48x5": 1, "48x32x1": 1},
    }  # fmt: skip
    status, out, _ = said("rows.jsonl")
    lines = [line.split() for line in out.splitlines()]
    assert status == 0 and lines[-1] == ["nothing", "wrong"]
    assert ["images", "1"] in lines and ["videos", "2"] in lines and ["size", "32x48", "2"] in lines
    assert "bucket" not in out


def test_everything_wrong_is_told_in_one_pass(said: Said, tmp_path: Path):
    (tmp_path / "words.mp4").write_text("these are not pixels, only words")
    (tmp_path / "copy.png").write_bytes((tmp_path / "sea.png").read_bytes())
    cut = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    media.write("cut.png", cut, fps=1, metadata={})
    (tmp_path / "cut.png").write_bytes((tmp_path / "cut.png").read_bytes()[:3000])
    condition = {"type": "image", "uri": "words.mp4", "role": "first_frame"}
    bad = [
        {"prompt": "", "video": "long.mp4"},
        {"prompt": "d", "video": "gone.mp4"},
        {"prompt": "e", "video": "words.mp4"},
        {"prompt": "f", "image": "copy.png"},
        {"prompt": "g", "image": "cut.png"},
        {"prompt": "h", "image": "sea.png", "fps": 1},
        {"text": "i", "target": {"visual": "long.mp4"}, "conditions": [condition]},
    ]
    jsonl(tmp_path / "rows.jsonl", [*rows(), *bad])
    status, out, err = said("rows.jsonl", "--height", "32", "--width", "32", "--num-frames", "9", "--json")
    *problems, summary = [json.loads(line) for line in out.splitlines()]
    assert (status, err) == (2, "") and summary["problems"] == len(problems)
    told = [(problem["where"], re.split(r"[:;]| \(", problem["problem"])[0]) for problem in problems]
    assert told == [
        ("rows.jsonl:2", "short.mp4 is too short"),
        ("rows.jsonl:4", "empty prompt"),
        ("rows.jsonl:5", "no such file"),
        ("rows.jsonl:6", "cannot read words.mp4"),
        ("rows.jsonl:7", "the same media as in another row"),
        ("rows.jsonl:8", "cannot read cut.png"),
        ("rows.jsonl:9", "unknown key"),
        ("rows.jsonl:10", "cannot read words.mp4"),
        ("rows.jsonl:10", "the same media as in another row"),
    ]
    status, out, _ = said("rows.jsonl")
    assert (
        status == 2
        and "too short" not in out
        and "cannot read cut.png" in out
        and out.splitlines()[-1].endswith("problems")
    )


def test_conditions_that_encoding_refuses_are_told(said: Said, tmp_path: Path):
    def row(target: str, *conditions: tuple[str, str, str]) -> dict[str, object]:
        given = [{"type": kind, "uri": uri, "role": role} for kind, uri, role in conditions]
        return {"text": "a", "target": {"visual": target}, "conditions": given}

    image = ("image", "sea.png", "first_frame")
    jsonl(
        tmp_path / "rows.jsonl",
        [
            row("long.mp4", image),
            row("short.mp4", ("image", "sea.png", "frist_frame"), ("video", "long.mp4", "first_frame")),
            row("sea.png", image, image),
        ],
    )
    status, out, _ = said("rows.jsonl", "--json")
    *problems, _ = [json.loads(line) for line in out.splitlines()]
    assert status == 2 and [(each["where"], each["problem"]) for each in problems] == [
        ("rows.jsonl:2", "unknown role of a condition: 'frist_frame'; choices: first_frame"),
        ("rows.jsonl:2", "a first frame is an image: 'video'"),
        ("rows.jsonl:3", "more than one first frame; keep one"),
    ]


def test_all_files_of_a_row_are_looked_into(said: Said, tmp_path: Path):
    for name in ("target.mp4", "first.png"):
        (tmp_path / name).write_text(f"{name}: words")
    condition = {"type": "image", "uri": "first.png", "role": "first_frame"}
    jsonl(tmp_path / "rows.jsonl", [{"text": "a", "target": {"visual": "target.mp4"}, "conditions": [condition]}])
    _, out, _ = said("rows.jsonl", "--json")
    *problems, summary = [json.loads(line) for line in out.splitlines()]
    assert [each["problem"].split(" (")[0].split(":")[0] for each in problems] == [
        "cannot read first.png",
        "cannot read target.mp4",
    ]
    assert summary["rows"] == 0


def test_many_sizes_are_summed_up(said: Said, tmp_path: Path):
    for index in range(12):
        media.write(f"many/{index}.png", np.full((index + 1, 8, 3), index, np.uint8), fps=1, metadata={})
        (tmp_path / "many" / f"{index}.txt").write_text("a")
    status, out, _ = said("many")
    assert status == 0 and "size (4 more)  4" in out and out.count("size ") == 9


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--crop", "top"), "unknown crop: 'top'; choices: center, none"),
        (("--height", "32"), "half a geometry; add --width, --num-frames, or give --bucket"),
        (("--frame-stride", "2"), "half a geometry; add --height, --width, --num-frames, or give --bucket"),
        (("--bucket", "8x8x1", "--width", "8"), "two geometries: '--bucket and --width'; give one of them"),
        (("--bucket", "8x8"), "not a bucket: '8x8'"),
        (("--bucket", "8x8x1", "--crop", "top"), "unknown crop: 'top'; choices: center, none"),
        (("--bucket", "8x8x1", "--frame-stride", "0"), "frame_stride must be at least 1: 0"),
    ],
)
def test_flags_that_are_no_geometry_are_one_line(flags: tuple[str, ...], message: str, said: Said):
    status, out, err = said(".", *flags)
    assert (status, out) == (2, "") and message in err and len(err.splitlines()) == 1


def test_one_definition_of_the_shape_serves_generating_and_training():
    assert set(SIZE) <= set(generate.FLAGS) and set(SIZE) <= set(TRAINING)
    assert [flag.name for flag in SIZE] == ["height", "width", "num_frames"]


def test_the_same_rows_pass_again_for_any_shape_that_passed(said: Said, tmp_path: Path):
    jsonl(tmp_path / "rows.jsonl", rows())
    assert said("rows.jsonl", "--bucket", "16x16x6", "--crop", "none")[0] == 0
    assert said("rows.jsonl", "--bucket", "16x16x6", "--frame-stride", "2")[0] == 2
