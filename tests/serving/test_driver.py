"""The engine's thread: it sleeps without work, ends with the server, and takes nobody with it unheard."""

import threading
from collections.abc import Iterator

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


def test_a_job_is_saved_at_each_stages_end_and_every_so_often(tmp_path):
    now = [0.0]
    fake = Fake([Count(steps=4, slot="given"), Count(steps=4)], [("given",), ("latents",)], [(), ("given",)])
    saver, job, path = Saver(10.0, clock=lambda: now[0]), Job(fake.model, fake.request()), tmp_path / "a.job"
    saved.save(job, path)
    saver.keep(job, path)
    places = []
    for _ in range(7):
        job.step()
        now[0] += 4.0
        saver()
        again = saved.restore(fake.model, path)
        places.append((again.stage, again.index))
    assert places == [(0, 0), (0, 0), (0, 3), (0, 3), (1, 1), (1, 1), (1, 1)]
    now[0] += 4.0
    saver()
    assert saved.restore(fake.model, path).index == 3
    while not job.ended:
        job.step()
    saver.save_all()
    assert saved.restore(fake.model, path).index == 3


def test_a_job_that_cannot_be_saved_fails(tmp_path):
    fake = Fake([Count(steps=4)])
    saver, job = Saver(0.0), Job(fake.model, fake.request())
    saver.keep(job, tmp_path / "file" / "a.job")
    (tmp_path / "file").write_text("in the way")
    job.step()
    saver()
    assert job.status == "failed" and isinstance(job.error, OSError)
