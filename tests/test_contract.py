"""What holds for every loop and every field of the contract, whoever wrote it."""

import ast
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import loopwright
from loopwright.card import Card, Claim, Component, Program, Recipe, Stage
from loopwright.engine.saved import _pack, _unpack
from loopwright.loop import Append, Binding, Page, PoolRef, Ref, Result, Step, Wait, Window, key_of
from loopwright.request import Frames, Request
from readers import readers, sources_of
from support import KINDS, run, same, tensors_in, watched, with_loops

PACKAGE = Path(loopwright.__file__).parent
CONTRACT = ("errors", "request", "card", "loop", "program")
CLASSES = (Card, Component, Stage, Program, Recipe, Claim, Request, Frames)
CLASSES += (Binding, Step, Ref, PoolRef, Page, Append, Window, Wait, Result)
FIELDS = [(cls.__name__, f.name) for cls in CLASSES for f in fields(cls)]
# Read by comparison: the binding as a whole is part of the key (its own test is below) and of a saved job.
COMPARED = {("Binding", "device"), ("Binding", "precision")}
DECIDING = {("Result", "host")}  # by loops that decide by numbers: those of tests/leasing.py


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str], list[str]]:
    return readers(sources_of(PACKAGE), {cls for cls, _ in FIELDS})


def test_every_field_of_the_contract_has_a_reader(found: Mapping[tuple[str, str], list[str]]) -> None:
    unread = {field for field in FIELDS if field not in found} - COMPARED - DECIDING
    listing = "\n".join(f"{cls}.{name}: {', '.join(found.get((cls, name), ['nobody']))}" for cls, name in FIELDS)
    assert not unread, f"who reads what (rules: tests/readers.py)\n{listing}"


def test_a_field_nobody_reads_is_detected(found: Mapping[tuple[str, str], list[str]]) -> None:
    made_up = {(cls, "colour") for cls, _ in FIELDS}
    assert not made_up & set(found)
    text = (PACKAGE / "card.py").read_text().replace('revision: str = ""', 'revision: str = ""\n    colour: str = ""')
    assert "colour" in text
    assert ("Component", "colour") not in readers({**sources_of(PACKAGE), "card.py": text}, {"Component"})


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ("def f(x: Card): return x.colour", True),
        ("def f(x: Other): return x.colour", False),
        ("def f(card): return card.colour", True),
        ("def f(card: Other): return self.other.colour", False),
        ("def f(x: Card):\n for name in ('size', 'colour'): print(getattr(x, name))", True),
        ("def f(x: Card):\n for name in ('size',): print(getattr(x, name))", False),
        ("def f(cards: dict[str, Card]): return [c.colour for _, c in cards.items()]", True),
        ("def f(x: Card): x.colour = 1", False),
        ("def record(x: Card): return x.colour", False),
        ("class Card:\n colour: str\n def f(self, x: Card): return x.colour", False),
    ],
)
def test_a_read_counts_only_on_a_receiver_of_that_class_and_outside_serialisation(text: str, read: bool) -> None:
    assert (("Card", "colour") in readers({"a.py": text}, {"Card"})) is read


@pytest.mark.parametrize("module", CONTRACT)
def test_the_contract_imports_the_standard_library_and_itself_alone_at_run_time(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    tree.body = [
        node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            assert all(name.name.split(".")[0] in sys.stdlib_module_names for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            assert str(node.module).split(".")[0] in sys.stdlib_module_names
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 1 and node.module in CONTRACT


def test_importing_the_package_the_contract_and_a_family_imports_no_torch() -> None:
    script = "import sys, loopwright, loopwright.models.wan\n"
    script += "".join(f"import loopwright.{module}\n" for module in CONTRACT)
    script += "print(sorted({'torch', 'numpy', 'diffusers', 'transformers'} & set(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


class Launches(TorchDispatchMode):
    """Counts tensor operations, views apart: what a device would have to do."""

    def __init__(self) -> None:
        super().__init__()
        self.counted: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            self.counted[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def launching_only(*names: str) -> Iterator[None]:
    """Fails if tensor operations other than these, or any random draw, happen inside."""
    before = torch.get_rng_state()
    with Launches() as launches:
        yield
    assert set(launches.counted) <= set(names), launches.counted
    assert torch.equal(before, torch.get_rng_state())


def equal_tensors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].data_ptr() == b[k].data_ptr() for k in a)


def assert_same_step(a: Step | Wait | None, b: Step | Wait | None) -> None:
    if not isinstance(a, Step) or not isinstance(b, Step):
        assert a == b
        return
    for name in ("op", "uses", "binding", "handles", "static", "unit", "reads", "leases"):
        assert getattr(a, name) == getattr(b, name), name
    assert equal_tensors(a.tensors, b.tensors)


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
@pytest.mark.parametrize("kind", KINDS)
def test_next_is_pure_at_every_state_of_a_run(kind: str, scheduler: str, ask: Callable) -> None:
    seen = Counter()

    def twice(loop: object, state: object) -> None:
        seen[loop.semantics] += 1
        held = [tensor.clone() for tensor in tensors_in(state)]
        with launching_only():
            first, second = loop.next(state), loop.next(state)
        assert_same_step(first, second)
        assert all(torch.equal(a, b) for a, b in zip(held, tensors_in(state), strict=True))

    loaded, request = ask(kind, scheduler)
    outputs = run(watched(loaded.instance, twice), request)
    assert sum(seen.values()) > 10
    assert same(outputs, run(loaded.instance, request))


class Silent:
    """A loop whose `advance` and `finish` may launch nothing but owned copies."""

    def __init__(self, loop: object) -> None:
        self._loop = loop

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)

    def advance(self, state: object, result: Result) -> object:
        with launching_only():
            return self._loop.advance(state, result)

    def finish(self, state: object) -> object:
        with launching_only("cat", "clone"):
            return self._loop.finish(state)


@pytest.mark.parametrize("kind", KINDS)
def test_advance_and_finish_launch_nothing_but_owned_copies(kind: str, ask: Callable) -> None:
    loaded, request = ask(kind, "unipc")
    run(with_loops(loaded.instance, {name: Silent(loop) for name, loop in loaded.instance.loops.items()}), request)


@pytest.mark.parametrize("kind", KINDS)
def test_the_outlook_counts_exactly_the_steps_that_follow(kind: str, ask: Callable) -> None:
    promised: dict[str, list[int]] = {}

    def look(loop: object, state: object) -> None:
        promised.setdefault(loop.semantics, []).append(sum(count for _, count in loop.outlook(state)))

    loaded, request = ask(kind)
    run(watched(loaded.instance, look), request)
    assert all(left == list(range(len(left)))[::-1] for left in promised.values()), promised


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_state_round_trips_through_a_saved_job(kind: str, scheduler: str, ask: Callable) -> None:
    def round_trip(loop: object, state: object) -> None:
        tensors: dict[str, torch.Tensor] = {}
        again = _unpack(_pack(state, "state", tensors), loop.state_type, tensors)
        assert type(again) is type(state) is loop.state_type
        assert_alike(state, again)
        assert_same_step(loop.next(state), loop.next(again))

    loaded, request = ask(kind, scheduler)
    run(watched(loaded.instance, round_trip), request)


def assert_alike(a: object, b: object) -> None:
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert a is b
    elif isinstance(a, Mapping):
        assert list(a) == list(b)
        for name in a:
            assert_alike(a[name], b[name])
    elif hasattr(a, "__dataclass_fields__"):
        for name in a.__dataclass_fields__:
            assert_alike(getattr(a, name), getattr(b, name))
    else:
        assert a == b


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.float32, b"bytes", {1: "a key that is no text"}])
def test_what_does_not_serialise_is_refused_by_name(value: object) -> None:
    with pytest.raises(TypeError, match="state/odd"):
        _pack({"odd": value}, "state", {})


def test_what_a_step_is_bound_to_is_part_of_its_key() -> None:
    def key(binding: Binding) -> object:
        return key_of(Step(tensors_in, (), binding, {}), lambda name: 1, {})

    choices = [("cpu", "cuda"), ("float32", "bfloat16"), ("sdpa", "flash"), ("plain", "fused")]
    assert len({key(Binding(*binding)) for binding in itertools.product(*choices)}) == 16
