"""The engine's thread: it sleeps without work, ends with the server, and takes nobody with it unheard."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fakes import Count, Fake
from loopwright.engine import saved
from loopwright.engine.events import Done, Failed
from loopwright.engine.job import Job
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import RequestError
from loopwright.serving.driver import Driver
from loopwright.serving.refusal import Refusal
from loopwright.serving.saver import Saver


class Counted(Scheduler):
    """A scheduler that counts how often it was asked for a step, and can break."""

    asked, broken = 0, False

    def step(self) -> bool:
        self.asked += 1
        if self.broken:
            raise RuntimeError("a bug")
        return super().step()


@pytest.fixture
def driver() -> Iterator[Driver]:
    started = Driver(Counted(), between=lambda: None)
    yield started
    started.close(lambda: None)


def ended(fake: Fake) -> tuple[Job, threading.Event, list[object]]:
    """A job, what is set at its end, and what it was told."""
    told, end = [], threading.Event()

    def listen(event: object) -> None:
        told.append(event)
        if isinstance(event, (Done, Failed)):
            end.set()

    return Job(fake.model, fake.request(seed=1), listener=listen), end, told


def test_jobs_run_and_then_nothing_is_asked_for(driver):
    for _ in range(3):
        job, end, _ = ended(Fake([Count(steps=5)]))
        driver.submit(job)
        assert end.wait(5) and float(job.output["latents"][0, 0]) == 6
    assert driver.call(lambda: threading.current_thread().name).result(5) == "engine"
    seen = driver.scheduler.asked
    assert not threading.Event().wait(0.1) and driver.scheduler.asked <= seen + 1


def test_a_call_that_raises_is_its_callers_alone(driver):
    def wrong() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        driver.call(wrong).result(5)
    assert driver.call(lambda: 3).result(5) == 3


def test_what_cannot_be_queued_is_told_to_who_asked(driver):
    job, _, _ = ended(Fake([Count()]))
    with pytest.raises(RequestError, match="unknown priority: 'urgent'"):
        driver.submit(job, priority="urgent")


def test_when_the_engine_breaks_its_jobs_hear_of_it_and_nobody_is_taken_in(driver):
    job, end, told = ended(Fake([Count(steps=10**9)]))
    driver.submit(job)
    driver.scheduler.broken = True
    assert end.wait(5) and "the engine has ended (RuntimeError: a bug)" in str(told[-1].error)
    for ask in (lambda: driver.submit(ended(Fake([Count()]))[0]), lambda: driver.call(lambda: 1), driver.require):
        with pytest.raises(Refusal, match="the engine has ended"):
            ask()


def test_closing_stops_at_a_step_and_leaves_no_thread():
    driver, last = Driver(Counted(), between=lambda: None), []
    job, _, _ = ended(Fake([Count(steps=10**9)]))
    driver.submit(job)
    while not job.index:
        pass
    driver.close(lambda: last.append(job.index))
    assert last == [job.index] and not job.ended
    assert not driver._thread.is_alive()
    with pytest.raises(Refusal, match="is being stopped"):
        driver.submit(job)


def staged(saver: Saver, path: Path) -> Job:
    """A job of two stages of four steps, kept by `saver`."""
    fake = Fake([Count(steps=4, slot="given"), Count(steps=4)], [("given",), ("latents",)], [(), ("given",)])
    job = Job(fake.model, fake.request(), observers=[saver])
    saved.save(job, path)
    saver.keep(job, path)
    return job


def place(job: Job, path: Path) -> tuple[int, int]:
    again = saved.restore(job.model, path)
    return again.stage, again.index


def test_a_job_is_saved_at_each_stages_end_and_every_so_often(tmp_path):
    now, path = [0.0], tmp_path / "a.job"
    saver = Saver(10.0, clock=lambda: now[0])
    job, places = staged(saver, path), []
    for _ in range(7):
        job.step()
        now[0] += 4.0
        saver()
        saver._writer.submit(lambda: None).result()
        places.append(place(job, path))
    assert places == [(0, 0), (0, 0), (0, 3), (0, 3), (1, 1), (1, 1), (1, 1)]
    now[0] += 4.0
    saver.save_all()
    assert place(job, path) == (1, 3)


def test_no_step_is_taken_before_the_state_ahead_of_it_is_on_disk(tmp_path, monkeypatch):
    path, write = tmp_path / "a.job", saved.Snapshot.write

    def slow(snapshot: saved.Snapshot, path: Path) -> None:
        time.sleep(0.05)
        write(snapshot, path)

    monkeypatch.setattr(saved.Snapshot, "write", slow)
    saver, behind = Saver(0.0), []

    class Seen:
        def on_step(self, job: Job, *rest: object) -> None:
            stage, index = place(job, path)
            behind.append((job.stage * 4 + job.index) - (stage * 4 + index))

    job = staged(saver, path)
    job._observers += (Seen(),)
    while not job.ended:
        job.step()
        saver()
    assert behind == [0] * 8
    saver.save_all()


def test_a_copy_is_what_the_job_was_whatever_becomes_of_it(tmp_path):
    saver, path = Saver(0.0), tmp_path / "a.job"
    job = staged(saver, path)
    job.step()
    copy = saved.snapshot(job)
    for tensor in copy.tensors.values():
        assert tensor.data_ptr() != job.state.total.data_ptr()
    while not job.ended:
        job.step()
    copy.write(path)
    again = saved.restore(job.model, path)
    while not again.ended:
        again.step()
    assert again.output["latents"].equal(job.output["latents"])


def test_what_takes_long_to_write_is_saved_less_often(tmp_path, monkeypatch):
    now, path = [0.0], tmp_path / "a.job"
    monkeypatch.setattr("loopwright.serving.saver._RATE", 4)  # bytes a second: its four numbers take 4 s
    saver = Saver(0.0, clock=lambda: now[0])
    job, indices = staged(saver, path), []
    for _ in range(3):
        job.step()
        saver()
        saver._writer.submit(lambda: None).result()
        indices.append(place(job, path)[1])
        now[0] += 2.5
    assert indices == [1, 1, 3]


def test_what_is_dropped_is_not_written_any_more(tmp_path):
    saver, path = Saver(0.0), tmp_path / "a.job"
    job = staged(saver, path)
    job.step()
    saver()
    saver.drop(path)
    path.unlink()
    job.step()
    saver()
    saver.save_all()
    assert not path.exists()


def test_a_job_that_cannot_be_saved_fails(tmp_path):
    fake, saver = Fake([Count(steps=4)]), Saver(0.0)
    job = Job(fake.model, fake.request(), observers=[saver])
    saver.keep(job, tmp_path / "file" / "a.job")
    (tmp_path / "file").write_text("in the way")
    while not job.ended:
        job.step()
        saver()
    assert job.status == "failed" and isinstance(job.error, OSError) and job.index < 3
