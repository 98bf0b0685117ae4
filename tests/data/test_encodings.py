"""A data set is encoded once, whoever does it and whatever happens to the files; after that nothing is."""

import os
import random
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import encoded
import loopwright
from encoded import SHAPE, encodings, write_rows
from loopwright import encoders
from loopwright.data import dataset, worker
from loopwright.data.decode import pixels
from loopwright.data.row import Condition
from loopwright.data.upkeep import verify
from loopwright.errors import DataError, RequestError

SOURCES = [str(Path(loopwright.__file__).parents[1]), str(Path(encoded.__file__).parent)]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("set"), 5)


@pytest.fixture(scope="module")
def rows(file):
    return dataset.read(file)


@pytest.fixture(scope="module")
def clean(rows, checkpoint, tmp_path_factory):
    """Encodings whose cache is complete."""
    made = encodings(tmp_path_factory.mktemp("clean"), checkpoint("t2v"))
    filled = made.fill(rows)
    assert not filled.problems
    return made


def entries(made) -> dict[str, bytes]:
    """Every entry, by its place in the cache."""
    return {str(path.relative_to(made.cache.folder)): path.read_bytes() for path in made.cache.files()}


def counts(filled) -> dict[str, int]:
    return {f"{kind} {outcome}": count for (kind, outcome), count in filled.count().items()}


@pytest.mark.parametrize("index", [0, -2])
def test_a_sample_is_what_the_encoders_make_rounded_as_the_family_says(index, clean, rows):
    row = rows[index]
    shape = SHAPE if row.kind == "video" else replace(SHAPE, num_frames=1)
    generator = torch.Generator("cpu").manual_seed(clean.keys(row)["latent"].seed)
    loaded = encoders.load_encoder(clean.card, "cpu")
    made = encoders.encode_sample(loaded, pixels(row, shape), row.prompt, generator)
    sample = clean.sample(row)
    assert torch.equal(sample["latent"], made["latent"].half())
    assert torch.equal(sample["cond"], made["cond"].bfloat16()) and sample["cond"].shape == (512, 32)


def test_the_empty_prompt_is_encoded_as_any_other_and_kept(clean, checkpoint, tmp_path, monkeypatch):
    ours = encodings(tmp_path, checkpoint("t2v"))
    made = encoders.encode_prompt(encoders.load_encoder(clean.card, "cpu"), "").bfloat16()
    assert torch.equal(ours.prompt(""), made) and made.shape == (512, 32) and made[0].any()
    monkeypatch.setattr(encoders, "load_encoder", lambda *given: pytest.fail("loaded"))
    assert torch.equal(encodings(tmp_path, checkpoint("t2v")).prompt(""), made)


def test_media_and_prompts_are_encoded_once_each(rows, checkpoint, tmp_path, monkeypatch):
    calls = {"encode_media": 0, "encode_prompt": 0, "load_encoder": 0}
    for name in calls:

        def counted(*given, name=name, real=getattr(encoders, name)):
            calls[name] += 1
            return real(*given)

        monkeypatch.setattr(encoders, name, counted)
    filled = encodings(tmp_path, checkpoint("t2v")).fill(rows)
    assert len(rows) == 7 and calls == {"encode_media": 6, "encode_prompt": 6, "load_encoder": 1}
    assert counts(filled) == {"latent encoded": 6, "cond encoded": 6}


def test_a_warm_run_loads_no_encoder(clean, rows, checkpoint, monkeypatch):
    monkeypatch.setattr(encoders, "load_encoder", lambda *given: pytest.fail("loaded"))
    warm = encodings(clean.cache.folder, checkpoint("t2v"))
    assert counts(warm.fill(rows)) == {"latent found": 6, "cond found": 6}
    assert torch.equal(warm.sample(rows[0])["latent"], clean.sample(rows[0])["latent"])


def test_what_an_entry_holds_does_not_depend_on_the_order(clean, rows, checkpoint, tmp_path):
    other = encodings(tmp_path, checkpoint("t2v"))
    for row in reversed(rows):
        other.sample(row)
    other.prompt("")
    assert entries(other) == entries(clean)


def test_threads_that_ask_at_once_encode_once(rows, checkpoint, tmp_path, monkeypatch):
    made, real, gate = [], encoders.encode_media, threading.Barrier(4)

    def slow(*given):
        made.append(1)
        threading.Event().wait(0.05)
        return real(*given)

    monkeypatch.setattr(encoders, "encode_media", slow)
    ours, out = encodings(tmp_path, checkpoint("t2v")), []

    def ask():
        gate.wait()
        out.append(ours.sample(rows[0])["latent"])

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and all(torch.equal(latent, out[0]) for latent in out) and len(out) == 4


def test_entries_that_are_not_right_are_told_and_redone(clean, rows, checkpoint, tmp_path):
    said: list[str] = []
    ours = encodings(tmp_path, checkpoint("t2v"), say=said.append)
    ours.fill(rows)
    paths = list(ours.cache.files())
    paths[0].write_bytes(paths[0].read_bytes()[:100])
    paths[1].write_bytes(paths[2].read_bytes())
    paths[-1].write_bytes(b"nonsense")
    filled = ours.fill(rows)
    assert counts(filled) == {"latent found": 5, "latent redone": 1, "cond found": 4, "cond redone": 2}
    assert {line.split()[0] for line in said} == {str(paths[0]), str(paths[1]), str(paths[-1])}
    assert all(line.endswith("encoded anew") for line in said)
    assert entries(ours) == entries(clean)


def test_two_processes_one_killed_and_files_damaged_leave_what_one_alone_makes(clean, file, rows, checkpoint, tmp_path):
    chance = random.Random()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(SOURCES)}
    code = f"import encoded; encoded.main({str(file)!r}, {str(tmp_path)!r}, {str(checkpoint('t2v'))!r})"
    command = [sys.executable, "-c", code]
    ours = encodings(tmp_path, checkpoint("t2v"))
    workers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(2)]
    try:
        for worker in workers:
            assert worker.stdout.readline() == b"begun\n"
        while workers[0].poll() is None and len(list(ours.cache.files())) < chance.randrange(1, 6):
            threading.Event().wait(0.002)
        workers[0].kill()
        while workers[1].poll() is None:
            damage(list(ours.cache.files()), chance)
            threading.Event().wait(0.01)
        assert workers[1].returncode == 0
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdout.close()
    damage(list(ours.cache.files()), chance)
    assert ours.fill(rows).problems == []
    assert entries(ours) == entries(clean)
    assert verify(ours.cache, ()).wrong == []


def damage(paths: list[Path], chance: random.Random) -> None:
    """Cut a file short, write over its middle, or put another in its place. Not atomically, as accidents are."""
    if not paths:
        return
    path = chance.choice(paths)
    data = bytearray(path.read_bytes())
    match chance.randrange(3):
        case 0:
            path.write_bytes(data[: chance.randrange(len(data) + 1)])
        case 1:
            data[-20:] = chance.randbytes(20)
            path.write_bytes(data)
        case 2:
            path.write_bytes(chance.choice(paths).read_bytes())


def test_rows_that_cannot_be_encoded_are_told_in_their_order_and_hinder_none(file, rows, checkpoint, tmp_path):
    broken = tmp_path / "broken.mp4"
    broken.write_bytes(b"no video")
    picture = Condition("image", rows[-2].path, "first_frame")
    bad = [replace(rows[0], path=broken, line=90), replace(rows[0], conditions=(picture,), line=91)]
    ours = encodings(tmp_path / "cache", checkpoint("t2v"))
    filled = ours.fill([bad[0], *rows, bad[1]])
    assert [problem.where for problem in filled.problems] == [f"{file}:90", f"{file}:91"]
    assert "makes no videos of a first frame" in str(filled.problems[1])
    assert len(entries(ours)) == 12


def test_media_that_cannot_be_read_are_the_problem_of_each_row_that_has_them(rows, checkpoint, tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / f"{name}.mp4").write_bytes(b"no video")
    read, real = [], worker.pixels
    monkeypatch.setattr(worker, "pixels", lambda *given: (read.append(1), real(*given))[1])
    bad = [
        replace(rows[0], prompt=name, path=tmp_path / f"{name}.mp4", line=line) for name, line in (("a", 90), ("b", 91))
    ]
    filled = encodings(tmp_path / "cache", checkpoint("t2v")).fill(bad)
    assert [problem.where.rpartition(":")[2] for problem in filled.problems] == ["90", "91"] and len(read) == 1
    assert counts(filled) == {"cond encoded": 3}, "their prompts are fine"


def test_latents_beyond_the_stored_precision_are_an_error(rows, checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "encode_media", lambda *given: torch.full((1, 1, 1, 1), 1e5))
    with pytest.raises(DataError, match="latent is beyond what float16 holds"):
        encodings(tmp_path, checkpoint("t2v")).sample(rows[0])


def test_rows_of_several_shapes_share_a_cache(rows, checkpoint, tmp_path):
    wide = replace(SHAPE, width=64)
    ours = encodings(tmp_path, checkpoint("t2v"), shapes=[SHAPE, wide])
    assert ours.sample(rows[0])["latent"].shape == (16, 2, 4, 4)
    assert encodings(tmp_path, checkpoint("t2v"), shapes=[wide]).sample(rows[0])["latent"].shape == (16, 2, 4, 8)


def test_shapes_the_encoders_cannot_take_are_refused_before_anything_is_read(checkpoint, tmp_path):
    with pytest.raises(RequestError, match="num_frames must be a multiple of 4 plus 1: 6"):
        encodings(tmp_path, checkpoint("t2v"), shapes=[replace(SHAPE, num_frames=6)])
    assert list(tmp_path.iterdir()) == []
