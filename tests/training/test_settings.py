"""Settings are what they are declared to be, or an error that names them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest
import yaml

from loopwright.errors import RequestError
from loopwright.training.settings import build, change, leaves, plain


@dataclass(frozen=True)
class Inner:
    rate: float | None = None
    pair: tuple[float, float] = (0.5, 0.9)


@dataclass(frozen=True)
class Outer:
    name: str
    count: int = 1
    kind: Literal["plain", "fancy"] = "plain"
    inner: Inner = field(default_factory=Inner)
    more: Inner | None = None
    names: tuple[str, ...] = ()
    free: Mapping[str, str | int | float] = field(default_factory=dict)
    on: bool = False


def test_values_become_what_the_class_declares():
    built = build(Outer, {"name": "a", "inner": {"rate": "1e-4", "pair": [0, 1]}, "names": ["x"], "free": {"n": 3}})
    assert built == Outer("a", inner=Inner(1e-4, (0.0, 1.0)), names=("x",), free={"n": 3})
    assert isinstance(built.inner.pair[0], float)


def test_plain_values_build_the_same_again_through_yaml():
    whole = Outer("ü: yes", 7, "fancy", Inner(3e-5), Inner(), ("a", "b"), {"x": 0.5, "y": "no"}, True)
    assert build(Outer, yaml.safe_load(yaml.safe_dump(plain(whole)))) == whole


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "name is missing; add it"),
        ({"name": "a", "cuont": 3}, "no such setting: 'cuont'; choices: count"),
        ({"name": "a", "inner": {"rat": 3}}, "no such setting: 'inner.rat'; choices: rate"),
        ({"name": "a", "count": 1.5}, "count must be a whole number: 1.5"),
        ({"name": "a", "count": True}, "count must be a whole number: True"),
        ({"name": "a", "on": 1}, "on must be true or false: 1"),
        ({"name": 3}, "name must be text: 3"),
        ({"name": "a", "inner": {"rate": "fast"}}, "inner.rate must be a number: 'fast'"),
        ({"name": "a", "inner": {"pair": [1]}}, "inner.pair must have 2 values: [1]"),
        ({"name": "a", "inner": 3}, "inner must be settings by name: 3"),
        ({"name": "a", "names": "x"}, "names must be a list: 'x'; write [x]"),
        ({"name": "a", "names": ["x", 3]}, "names[1] must be text: 3"),
        ({"name": "a", "kind": "odd"}, "unknown kind: 'odd'; choices: plain, fancy"),
        ({"name": "a", "free": {"n": [1]}}, "free.n must be a number or text: [1]"),
        ({"name": None}, "name must be text"),
        ([], "a run must be settings by name: []"),
    ],
)
def test_what_does_not_fit_is_named(values, message):
    with pytest.raises(RequestError) as error:
        build(Outer, values)
    assert message in str(error.value)


def test_leaves_are_named_by_their_paths():
    assert leaves({"a": 1, "b": {"c": [2], "d": {"e": None}}}) == {"a": 1, "b.c": [2], "b.d.e": None}


def test_a_setting_is_changed_by_its_path_and_read_as_yaml():
    values = {"name": "a", "inner": {"rate": 1.0, "pair": [0, 1]}}
    assert change(values, "inner.rate=3e-4")["inner"] == {"rate": "3e-4", "pair": [0, 1]}
    assert build(Outer, change(values, "inner.rate=3e-4")).inner.rate == 3e-4
    assert build(Outer, change(values, "more.rate=2")).more == Inner(2.0)
    assert build(Outer, change(values, "inner.rate=null")).inner.rate is None
    assert build(Outer, change(values, "names=[x, y]")).names == ("x", "y")
    assert values == {"name": "a", "inner": {"rate": 1.0, "pair": [0, 1]}}


@pytest.mark.parametrize("text", ["inner.rate", "=3", "name.first=3", "names=[x"])
def test_a_change_that_is_none_is_refused(text):
    with pytest.raises(RequestError):
        build(Outer, change({"name": "a"}, text))
