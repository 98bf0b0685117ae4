"""A request saved at any step and continued, here or in another process, ends as if it had never stopped."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, safe_open, save_file

import loopwright
from loopwright.card import derive
from loopwright.engine import saved
from loopwright.engine.instance import Instance
from loopwright.engine.job import Job
from loopwright.errors import StateError
from loopwright.models import wan
from support import finished, run, same

RESUME = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
torch.set_num_threads(1)
import loopwright
from loopwright.engine.runner import Serial
from loopwright.engine.saved import restore
for folder, files in zip(sys.argv[1::2], sys.argv[2::2]):
    model = loopwright.load(folder, device="cpu").instance
    for path in sorted(Path(files).glob("*.job")):
        job, runner = restore(model, path), Serial()
        runner.submit(job)
        runner.run()
        assert job.error is None, job.error
        save_file(dict(job.output), path.with_suffix(".out"))
"""


def save_at_every_step(model: Instance, request: object, folder: Path) -> list[Path]:
    """One file before each step of a run, the first before anything ran."""
    job, paths = Job(model, request), []
    while not job.ended:
        paths.append(folder / f"{len(paths):03}.job")
        saved.save(job, paths[-1])
        job.step()
    assert job.error is None
    return paths


@pytest.mark.parametrize(
    ("kind", "scheduler"), [("t2v", "unipc"), ("i2v", "euler"), ("ti2v", "unipc"), ("v2v", "unipc")]
)
def test_a_request_continued_after_any_step_ends_the_same(kind, scheduler, ask: Callable, tmp_path: Path) -> None:
    loaded, request = ask(kind, scheduler)
    expected = run(loaded.instance, request)
    stages = set()
    for path in save_at_every_step(loaded.instance, request, tmp_path):
        job = saved.restore(loaded.instance, path)
        stages.add(job.stages[job.stage].stage.name)
        assert job.request == request
        assert same(finished(job), expected), path.name
    assert stages == {bound.stage.name for bound in Job(loaded.instance, request).stages}


def test_a_request_continued_in_a_fresh_process_ends_the_same(
    ask: Callable, checkpoint: Callable, tmp_path: Path
) -> None:
    arguments: list[str] = []
    expected: dict[Path, dict[str, torch.Tensor]] = {}
    for kind, scheduler in (("t2v", "unipc"), ("i2v", "euler")):
        loaded, request = ask(kind, scheduler)
        folder = tmp_path / kind
        folder.mkdir()
        result = run(loaded.instance, request)
        expected |= {path: result for path in save_at_every_step(loaded.instance, request, folder)}
        arguments += [str(checkpoint(kind, scheduler)), str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(Path(loopwright.__file__).parents[1])}
    command = [sys.executable, "-c", RESUME, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(expected) > 20
    for path, result in expected.items():
        assert same(load_file(path.with_suffix(".out")), result), path


def test_a_continued_request_can_be_saved_again(ask: Callable, tmp_path: Path) -> None:
    loaded, request = ask("t2v", "unipc")
    job = Job(loaded.instance, request)
    while not job.ended:
        saved.save(job, tmp_path / "job")
        job = saved.restore(loaded.instance, tmp_path / "job")
        job.step()
    assert same(job.output, run(loaded.instance, request))


def test_a_continued_request_counts_its_steps_on_and_its_own_seconds(ask: Callable, tmp_path: Path) -> None:
    loaded, request = ask("t2v")
    paths = save_at_every_step(loaded.instance, request, tmp_path)
    for path in (paths[4], paths[-2]):
        steps: list[tuple[int, int]] = []
        job = saved.restore(loaded.instance, path, listener=lambda e: steps.append((e.index, e.total))
                            if type(e).__name__ == "Stepped" else None)  # fmt: skip
        finished(job)
        assert steps[0][0] > 1
        assert steps[-1] == (4, 4)  # opening and three latent frames
        assert 0 < job.seconds < 60


@pytest.fixture
def half(ask: Callable, tmp_path: Path) -> tuple[Instance, Path]:
    """A model and a file of a request in the middle of denoising, with a video."""
    loaded, request = ask("v2v", "unipc")
    job = Job(loaded.instance, request)
    while job.stages[job.stage].stage.name != "denoise" or job.index < 1:
        job.step()
    path = tmp_path / "half.job"
    saved.save(job, path)
    return loaded.instance, path


def rewritten(path: Path, change: Callable[[dict, dict], object]) -> None:
    """Edit a saved job's head and tensors in place."""
    with safe_open(path, framework="pt") as file:
        head = json.loads(file.metadata()["job"])
    tensors = load_file(path)
    changed = change(head, tensors)
    save_file(tensors, path, metadata={"job": changed if changed in ("{", "[1]") else json.dumps(head)})


def refused(model: Instance, path: Path, match: str) -> None:
    with pytest.raises(StateError, match=match) as caught:
        saved.restore(model, path)
    assert path.name in str(caught.value) and "\n" not in str(caught.value)


def test_the_saved_file_is_good_as_it_is_and_after_rewriting(half: tuple[Instance, Path]) -> None:
    model, path = half
    rewritten(path, lambda head, tensors: None)
    assert finished(saved.restore(model, path))


@pytest.mark.parametrize("keep", [0, 1, 7, 8, 100, -1, -1000])
def test_a_truncated_file_is_refused(half: tuple[Instance, Path], keep: int) -> None:
    model, path = half
    path.write_bytes(path.read_bytes()[:keep])
    refused(model, path, "is not a saved job")


@pytest.mark.parametrize("content", [b"", b"garbage" * 100, b"\0" * 64])
def test_a_file_of_something_else_is_refused(half: tuple[Instance, Path], content: bytes) -> None:
    model, path = half
    path.write_bytes(content)
    refused(model, path, "is not a saved job")


def test_a_missing_file_and_a_file_of_plain_tensors_are_refused(half: tuple[Instance, Path], tmp_path: Path) -> None:
    refused(half[0], tmp_path / "none.job", "is not a saved job")
    save_file({"x": torch.zeros(2)}, tmp_path / "plain.job")
    refused(half[0], tmp_path / "plain.job", "is not a saved job")


HEADS = {
    "not json": (lambda head, tensors: "{", "is not a saved job"),
    "a list": (lambda head, tensors: "[1]", "has another format"),
    "another format": (lambda head, tensors: head.update(format=99), "has another format: 99; choices: 5"),
    "no format": (lambda head, tensors: head.pop("format"), "has another format"),
    "another card": (lambda head, tensors: head.update(card="feed"), "belongs to another card: 'feed'; choices: "),
    "no card": (lambda head, tensors: head.pop("card"), "belongs to another card"),
    "no request": (lambda head, tensors: head.pop("request"), "is damaged"),
    "an unknown parameter": (lambda head, tensors: head["request"].update(colour="red"), "is damaged"),
    "an unknown task": (lambda head, tensors: head["request"].update(task="dream"), "is damaged"),
    "no state": (lambda head, tensors: head.pop("state"), "is damaged"),
    "a state of another kind": (lambda head, tensors: head.update(state={"x": 1}), "is damaged"),
    "a stage too far": (lambda head, tensors: head.update(stage=99), "is damaged"),
    "a missing tensor": (lambda head, tensors: tensors.pop("state/latents"), "is damaged"),
    "a missing slot": (lambda head, tensors: tensors.pop("slots/prompt_embeds"), "is damaged"),
    "missing pixels": (lambda head, tensors: tensors.pop("pixels/video"), "is damaged"),
    "pixels of another shape": (lambda head, tensors: head["pixels"]["video"][0].__setitem__(0, 5), "is damaged"),
    "another device": (
        lambda head, tensors: head["state"]["binding"].update(device="cuda"), "saved on another device or precision"),
}  # fmt: skip


@pytest.mark.parametrize("damage", HEADS)
def test_a_file_that_does_not_continue_is_refused_with_the_reason(half: tuple[Instance, Path], damage: str) -> None:
    model, path = half
    change, match = HEADS[damage]
    rewritten(path, change)
    refused(model, path, match)


def test_another_precision_or_setting_is_another_card(half: tuple[Instance, Path]) -> None:
    model, path = half
    narrow = replace(model.card.components["vae"], dtype="bfloat16")
    for changes in ({"settings": {"guidance": "batched"}}, {"components": {"vae": narrow}}):
        card = derive(model.card, **changes)
        other = Instance(card, wan.loops(card), model.store, device="cpu", locate=model.locate)
        refused(other, path, "belongs to another card")


def test_a_job_that_has_ended_is_not_saved(ask: Callable, tmp_path: Path) -> None:
    loaded, request = ask("t2v", output="latents")
    job = Job(loaded.instance, request)
    finished(job)
    with pytest.raises(StateError, match="only a job under way can be saved: 'done'"):
        saved.save(job, tmp_path / "job")
    assert not list(tmp_path.iterdir())


def test_saving_is_atomic(half: tuple[Instance, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash half-way leaves the older file as it was and nothing beside it."""
    model, path = half
    before = path.read_bytes()

    def crash(tensors: object, target: str | Path, metadata: object) -> None:
        Path(target).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(saved, "save_file", crash)
    with pytest.raises(OSError, match="disk full"):
        saved.save(saved.restore(model, path), path)
    assert path.read_bytes() == before and list(path.parent.iterdir()) == [path]


def test_saving_changes_nothing_for_the_running_job(ask: Callable, tmp_path: Path) -> None:
    loaded, request = ask("ti2v", "unipc")
    job = Job(loaded.instance, request)
    while not job.ended:
        saved.save(job, tmp_path / "job")
        job.step()
    assert same(job.output, run(loaded.instance, request))


def test_a_file_holds_each_tensor_once_and_no_more_than_the_job_holds(half: tuple[Instance, Path]) -> None:
    """A view is saved on its own, not with the storage it is a part of."""
    _, path = half
    tensors = load_file(path)
    assert path.stat().st_size < sum(t.numel() * t.element_size() for t in tensors.values()) + 20_000


@dataclass(frozen=True)
class Inner:
    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    nothing: str | None
    tensor: torch.Tensor | None
    inner: Inner
    many: tuple[Inner, ...]
    tensors: dict[str, torch.Tensor]
    nested: dict[str, dict[str, torch.Tensor]]
    table: dict[str, tuple[int, ...]]


NAME = st.text(max_size=6)
NUMBER = st.floats(allow_nan=False)
INNER = st.builds(Inner, NAME, st.lists(NUMBER, max_size=3).map(tuple))
TENSOR = st.integers(0, 9).map(lambda n: torch.full((2, n), float(n)))
OUTER = st.builds(
    Outer,
    st.integers(),
    st.booleans(),
    st.none() | NAME,
    st.none() | TENSOR,
    INNER,
    st.lists(INNER, max_size=3).map(tuple),
    st.dictionaries(NAME, TENSOR, max_size=3),
    st.dictionaries(NAME, st.dictionaries(NAME, TENSOR, max_size=2), max_size=2),
    st.dictionaries(NAME, st.lists(st.integers(), max_size=3).map(tuple), max_size=2),
)


def plain(value: object) -> object:
    """A value with its tensors as lists, for comparison."""
    if isinstance(value, torch.Tensor):
        return ("tensor", value.shape, value.tolist())
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if hasattr(value, "__dataclass_fields__"):
        return type(value), [plain(getattr(value, name)) for name in value.__dataclass_fields__]
    return value


@given(OUTER)
def test_any_state_of_plain_values_and_tensors_round_trips_through_json(state: Outer) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(saved._pack(state, "state", tensors)))
    assert plain(saved._unpack(packed, Outer, tensors)) == plain(state)


@pytest.mark.parametrize("names", [("tensor",), ("tensor", "state"), ("a/b", "")])
def test_slots_and_fields_may_have_any_name(names: tuple[str, ...]) -> None:
    tensors: dict[str, torch.Tensor] = {}
    value = {name: torch.ones(i) for i, name in enumerate(names)}
    packed = json.loads(json.dumps(saved._pack(value, "slots", tensors)))
    assert plain(saved._unpack(packed, dict[str, torch.Tensor], tensors)) == plain(value)
