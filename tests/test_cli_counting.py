"""Progress where there is no terminal: a plain line every ten seconds, by the clock."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from loopwright.cli.counting import counting
from loopwright.cli.training import display


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """`at(seconds)` sets the clock."""
    seconds = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: seconds[0])

    def set_to(now: float) -> None:
        seconds[0] = 100.0 + now

    return set_to


def told(tell: Callable[[int, int], None], at: Callable[[float], None]) -> None:
    for now, done in ((0, 0), (9, 1), (12, 6), (15, 7), (22, 7), (33, 60)):
        at(now)
        tell(done, 60)


EXPECTED = [
    "encoding 6/60, 0.5 a second, 108 s left",
    "encoding 7/60, 0.318 a second, 167 s left",
    "encoding 60/60, 1.82 a second",
]


def test_a_line_says_count_rate_and_time_left_every_ten_seconds(at, capsys):
    with counting("encoding", quiet=False) as tell:
        told(tell, at)
    output = capsys.readouterr()
    assert output.err.splitlines() == EXPECTED and output.out == ""


def test_training_says_how_far_encoding_is(at, capsys):
    with display(quiet=False) as shown:
        told(shown.encoding, at)
    assert capsys.readouterr().err.splitlines() == EXPECTED


@pytest.mark.parametrize("begun", [lambda: counting("encoding", quiet=True), lambda: display(quiet=True)])
def test_who_wants_quiet_has_it(begun: Callable[[], AbstractContextManager], at, capsys):
    with begun() as given:
        told(given if callable(given) else given.encoding, at)
    assert capsys.readouterr().err == ""


def test_what_begins_in_the_middle_is_not_counted_and_nothing_done_has_no_time_left(at, capsys):
    with counting("verifying", quiet=False) as tell:
        for now, done in ((0, 50), (10, 50), (20, 60)):
            at(now)
            tell(done, 100)
    assert capsys.readouterr().err.splitlines() == [
        "verifying 50/100, 0 a second",
        "verifying 60/100, 0.5 a second, 80 s left",
    ]
