"""What is held out depends on content alone."""

from pathlib import Path

import pytest

from loopwright.data.row import Row
from loopwright.data.split import is_held_out, split
from loopwright.errors import RequestError


@pytest.fixture
def rows(tmp_path: Path) -> list[Row]:
    """Sixty files."""
    for index in range(60):
        (tmp_path / f"{index}.png").write_text(str(index))
    return [Row("t", tmp_path / f"{index}.png", "image", tmp_path / "a.jsonl", index + 1) for index in range(60)]


def test_a_row_stays_on_its_side_when_others_are_added(rows: list[Row]):
    training, held = split(rows, 0.3, 5)
    assert [row for row in rows if row in training or row in held] == rows and not set(training) & set(held)
    fewer, kept = split(rows[::-2], 0.3, 5)
    assert set(fewer) <= set(training) and set(kept) <= set(held)


def test_all_captions_of_one_film_are_on_one_side(rows: list[Row], tmp_path: Path):
    (tmp_path / "copy.png").write_text("7")
    twins = [
        Row(text, tmp_path / name, "image", tmp_path / "b.jsonl", 1)
        for text, name in (("a", "7.png"), ("b", "copy.png"))
    ]
    for seed in range(20):
        _, held = split([*rows, *twins], 0.5, seed)
        assert len({row in held for row in (rows[7], *twins)}) == 1


def test_about_the_fraction_is_held_out_and_a_larger_one_adds():
    names = [f"content-{index}" for index in range(5000)]
    small, large = ({name for name in names if is_held_out(name, f, 0)} for f in (0.05, 0.2))
    assert 200 < len(small) < 300 and 900 < len(large) < 1100 and small < large
    assert {name for name in names if is_held_out(name, 0.05, 1)} != small


def test_nothing_is_held_out_unless_asked_and_no_file_is_read(rows: list[Row]):
    for row in rows:
        row.path.unlink()
    assert split(rows, 0, 0) == (rows, [])


def test_a_side_that_would_be_empty_is_refused(rows: list[Row]):
    for fraction in (-0.1, 1, float("nan")):
        with pytest.raises(RequestError, match="at least 0 and below 1"):
            split(rows, fraction, 0)
    with pytest.raises(RequestError, match=r"no row of 2 falls to the held-out part at fraction: 1e-09; take another"):
        split(rows[:2], 1e-9, 0)
    with pytest.raises(RequestError, match="falls to training"):
        split(rows[:2], 1 - 1e-9, 0)
