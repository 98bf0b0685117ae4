"""Workers in processes of their own leave the cache that one process leaves, and cost no row what another does."""

import json
import os
import sys
import threading
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import ray

import deadly
import loopwright
from deadly import Deadly
from encoded import encodings, write_rows
from loopwright.card import dumps
from loopwright.data import dataset, fleet
from loopwright.data.cache import Cache, CacheError
from loopwright.data.pool import Slot
from loopwright.data.worker import Worker
from loopwright.encoders import find
from loopwright.errors import DataError

SOURCES = [str(Path(loopwright.__file__).parents[1]), str(Path(deadly.__file__).parent)]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return dataset.read(write_rows(tmp_path_factory.mktemp("set"), 2))


def entries(made) -> dict[str, bytes]:
    return {str(path.relative_to(made.cache.folder)): path.read_bytes() for path in made.cache.files()}


def started() -> set[int]:
    """The processes that come from this one and are not at their end."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if state != "Z":
            parents[int(status.parent.name)] = int(parent)
    found, generation = set[int](), {os.getpid()}
    while generation := {pid for pid, parent in parents.items() if parent in generation}:
        found |= generation
    return found


def test_actors_that_die_are_replaced_and_the_cache_is_that_of_one_process(rows, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "Actor", Deadly)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(SOURCES))
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    deadly_once = replace(rows[1], prompt=f"deadly once {tmp_path / 'mark'}")
    bad = replace(rows[0], path=tmp_path / "broken.mp4", line=90)
    alone = encodings(tmp_path / "alone", checkpoint("t2v"))
    alone.fill([*rows, deadly_once])
    before = started()
    with encodings(tmp_path / "cache", checkpoint("t2v"), workers=2) as ours:
        assert not ray.is_initialized()
        told: list[tuple[int, int]] = []
        filled = ours.fill([bad, *rows, deadly_once], lambda *counts: told.append(counts))
        fresh = started() - before
        assert len(fresh) > 2 and (tmp_path / "mark").exists()
        (problem,) = filled.problems
        assert problem.where == bad.where and problem.problem.startswith(f"cannot read {bad.path}")
        assert entries(ours) == entries(alone)
        assert told == sorted(told) and told[-1] == (len(rows) + 2, len(rows) + 2)
    assert not ray.is_initialized()
    for _ in range(100):
        if not any(Path(f"/proc/{pid}").exists() for pid in fresh):
            break
        threading.Event().wait(0.1)
    assert [pid for pid in fresh if Path(f"/proc/{pid}").exists()] == []


class StandIn:
    """What `fleet` uses of Ray, within this process. `fate(pid, want)` says whether a worker dies of a want."""

    def __init__(self, fate: Callable[[int, str], bool]) -> None:
        self.fate, self.started, self.killed, self.room = fate, 0, 0, 99
        self.asked: list[tuple[int, str]] = []
        self.options: list[dict[str, object]] = []
        self.exceptions = types.SimpleNamespace(RayActorError=RuntimeError, OutOfMemoryError=MemoryError)
        self.__spec__ = ray.__spec__

    def is_initialized(self) -> bool:
        return True

    def remote(self, cls):
        def hire(order: str):
            self.started += 1
            return _Handle(self, self.started, cls(order))

        def options(**given):
            self.options.append(given)
            return types.SimpleNamespace(remote=hire)

        return types.SimpleNamespace(options=options)

    def wait(self, calls, num_returns, timeout=None):
        ready = [call for call in calls if call.name != "ready" or call.worker <= self.room][:num_returns]
        return ready, [call for call in calls if call not in ready]

    def get(self, call):
        return [self.get(each) for each in call] if isinstance(call, list) else call.answer()

    def kill(self, actor) -> None:
        self.killed += 1


class _Handle:
    def __init__(self, standin: StandIn, worker: int, actor: fleet.Actor) -> None:
        self._standin, self._worker, self._actor = standin, worker, actor

    def __getattr__(self, name: str):
        return types.SimpleNamespace(
            remote=lambda *given: _Call(self._standin, self._worker, name, getattr(self._actor, name), given)
        )


class _Call:
    def __init__(self, standin, worker, name, function, given) -> None:
        self.standin, self.worker, self.name, self.function, self.given = standin, worker, name, function, given

    def answer(self):
        if self.name != "make":
            self.standin.asked.append((self.worker, self.name))
            return self.function(*self.given)
        want = json.loads(self.given[0])["prompt"]
        self.standin.asked.append((self.worker, want))
        if self.standin.fate(self.worker, want):
            raise RuntimeError("the worker died\nmore")
        return self.function(*self.given)


@pytest.fixture
def standin(monkeypatch) -> Callable[..., StandIn]:
    def install(fate: Callable[[int, str], bool] = lambda worker, want: False) -> StandIn:
        ours = StandIn(fate)
        monkeypatch.setitem(sys.modules, "ray", ours)
        return ours

    return install


def test_workers_are_hired_for_the_first_want_and_kept(rows, checkpoint, tmp_path, standin):
    ours, cache = standin(), tmp_path / "cache"
    made = encodings(cache, checkpoint("t2v"), workers=2, park=True)
    assert ours.started == 0
    made.sample(rows[0])
    assert ours.started == 2 and [name for _, name in ours.asked].count("park") == 2 * 2  # latents, then the prompt
    made.fill(rows)
    assert ours.started == 2 and {worker for worker, _ in ours.asked} == {1, 2}
    made.close()
    assert ours.killed == 2
    ours.asked.clear()
    warm = encodings(cache, checkpoint("t2v"), workers=2)
    assert not warm.fill(rows).problems and (ours.started, ours.asked) == (2, [])


def test_a_want_that_costs_two_workers_is_its_rows_problem_in_fill_and_in_sample(rows, checkpoint, tmp_path, standin):
    ours = standin(lambda worker, want: want == rows[0].prompt)
    made = encodings(tmp_path, checkpoint("t2v"), workers=2)
    filled = made.fill(rows)
    sharing = [row.where for row in rows if row.prompt == rows[0].prompt]
    assert [problem.where for problem in filled.problems] == sharing and len(sharing) == 2
    assert ours.started == 4
    with pytest.raises(DataError, match=r"rows.jsonl:1: ended 2 encoder workers \(the worker died\)"):
        made.sample(rows[0])
    assert ours.killed == 0, "the others are kept"


def test_workers_that_all_die_end_the_burst(rows, checkpoint, tmp_path, standin):
    ours = standin(lambda worker, want: True)
    with pytest.raises(fleet.PoolError, match=r"encoder workers keep dying \(the worker died\)"):
        encodings(tmp_path, checkpoint("t2v"), workers=2).fill(rows)
    assert ours.started == 2 + 2 * fleet.DEATHS - 1 and ours.killed == 2


def test_workers_for_whom_there_is_no_room_are_told(rows, checkpoint, tmp_path, standin):
    ours = standin()
    ours.room = 1
    with pytest.raises(fleet.PoolError, match="no room for the encoder workers: '1 wait'"):
        encodings(tmp_path, checkpoint("t2v"), workers=2).fill(rows)
    assert ours.killed == 2


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [(CacheError("no space"), fleet.PoolError, "no space"), (KeyError("x"), RuntimeError, "KeyError: 'x'")],
)
def test_what_is_no_rows_fault_ends_all(error, raised, message, rows, checkpoint, tmp_path, standin, monkeypatch):
    def fail(self, want):
        raise error

    monkeypatch.setattr(Worker, "make", fail)
    ours = standin()
    with pytest.raises(raised, match=message):
        encodings(tmp_path, checkpoint("t2v"), workers=2).fill(rows)
    assert ours.killed == 2


def test_workers_on_gpus_have_the_one_their_slot_names_and_count_as_its_share(checkpoint, tmp_path, standin):
    ours = standin()
    where = (Slot("cuda:0", 0.3), Slot("cuda:1", 0.3))
    hired = fleet.Fleet(find(checkpoint("t2v")), Cache(tmp_path), where, park=False).hired()
    assert [handle._actor._worker._device for handle in hired.values()] == ["cuda:0", "cuda:1"]
    assert [given["num_gpus"] for given in ours.options] == [0.3, 0.3]
    kept = {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
    assert all(given["runtime_env"] == kept for given in ours.options), "each worker sees every GPU, by its own name"


def test_an_order_is_the_card_where_it_lies(checkpoint, tmp_path):
    card = find(checkpoint("t2v"))
    here = {"folder": os.getcwd(), "card": dumps(card), "home": card.home}
    actor = fleet.Actor(json.dumps({**here, "cache": str(tmp_path), "device": "cpu", "threads": 1}))
    assert actor._worker._card == card and actor._worker._card.home == card.home
