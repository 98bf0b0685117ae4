"""Runners decide whose step is next, and nothing else: order, waiting, cancelling, joining."""

import threading

import pytest
import torch

from fakes import Count, Fake, Receive
from loopwright.engine.events import Stepped
from loopwright.engine.job import Job
from loopwright.engine.runner import Interleaved, Serial

RUNNERS = (Serial, Interleaved)


def counting(order: list[int], number: int, steps: int = 3) -> Job:
    """A job that writes its number at each step."""
    fake = Fake([Count(steps=steps)])
    return Job(
        fake.model, fake.request(number), listener=lambda e: order.append(number) if isinstance(e, Stepped) else None
    )


def waiting(**options: object) -> Job:
    fake = Fake([Receive()])
    return Job(fake.model, fake.request(), **options)


def test_serial_finishes_one_before_the_next() -> None:
    order: list[int] = []
    runner = Serial()
    for number in (1, 2, 3):
        runner.submit(counting(order, number))
    runner.run()
    assert order == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_interleaved_gives_each_a_step_in_turn() -> None:
    order: list[int] = []
    runner = Interleaved()
    for number, steps in ((1, 2), (2, 4), (3, 3)):
        runner.submit(counting(order, number, steps))
    runner.run()
    assert order == [1, 2, 3, 1, 2, 3, 2, 3, 2]


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_step_runs_at_most_one_step_and_says_whether_there_was_one(kind: type[Serial]) -> None:
    order: list[int] = []
    runner = kind()
    assert runner.step() is False and len(runner) == 0
    job = runner.submit(counting(order, 1))
    for steps in (1, 2, 3):
        assert runner.step() is True
        assert len(order) == steps and len(runner) == 1
    assert runner.step() is True  # nothing left but to end
    assert job.status == "done" and len(runner) == 0 and runner.step() is False


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_waiting_job_lets_the_others_pass_and_goes_on_when_fed(kind: type[Serial]) -> None:
    order: list[int] = []
    runner = kind()
    job = runner.submit(waiting())
    others = [runner.submit(counting(order, number)) for number in (1, 2)]
    runner.run()
    assert job.status == "waiting" and [o.status for o in others] == ["done", "done"]
    assert sorted(order) == [1, 1, 1, 2, 2, 2] and len(runner) == 1
    job.feed("in", {"amount": torch.tensor(4.0)})
    runner.run()
    assert job.status == "waiting"
    job.feed("in", None)
    runner.run()
    assert job.status == "done" and torch.equal(job.output["latents"], torch.full((1, 4), 4.0)) and len(runner) == 0


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_waiting_job_can_be_cancelled_and_is_gone_within_one_step(kind: type[Serial]) -> None:
    runner = kind()
    jobs = [runner.submit(waiting()) for _ in range(3)]
    runner.run()
    assert runner.step() is False
    jobs[1].cancel()
    assert runner.step() is True
    assert [job.status for job in jobs] == ["waiting", "cancelled", "waiting"]
    assert jobs[1].state is None and len(runner) == 2
    for job in jobs:
        job.cancel()
    runner.run()
    assert len(runner) == 0


@pytest.mark.parametrize("kind", RUNNERS)
def test_a_queued_job_that_is_cancelled_never_runs(kind: type[Serial]) -> None:
    order: list[int] = []
    runner = kind()
    jobs = [runner.submit(counting(order, number)) for number in (1, 2)]
    jobs[0].cancel()
    runner.run()
    assert [job.status for job in jobs] == ["cancelled", "done"] and order == [2, 2, 2]


@pytest.mark.parametrize("kind", RUNNERS)
def test_jobs_may_be_submitted_by_a_listener_and_by_other_threads(kind: type[Serial]) -> None:
    order: list[int] = []
    runner = kind()
    fake = Fake([Count(steps=1)])
    followers: list[Job] = []
    first = Job(fake.model, fake.request(), listener=lambda e: followers.append(runner.submit(counting(order, 7)))
                if isinstance(e, Stepped) else None)  # fmt: skip
    runner.submit(first)
    runner.run()
    assert first.status == "done" and [job.status for job in followers] == ["done"] and order == [7, 7, 7]

    jobs: list[Job] = []
    threads = [threading.Thread(target=lambda: jobs.extend(runner.submit(counting(order, 8)) for _ in range(20)))
               for _ in range(4)]  # fmt: skip
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) or len(runner):
        runner.step()
    assert len(jobs) == 80 and all(job.status == "done" for job in jobs)


@pytest.mark.parametrize("kind", RUNNERS)
def test_several_threads_may_step_one_runner(kind: type[Serial]) -> None:
    """No job is stepped by two at once: each counts exactly its steps."""
    runner = kind()
    fake = Fake([Count(steps=20)])
    jobs = [runner.submit(Job(fake.model, fake.request(seed))) for seed in range(12)]

    def work() -> None:
        while not all(job.ended for job in jobs):
            runner.step()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert all(torch.equal(job.output["latents"], torch.full((1, 4), seed + 20.0)) for seed, job in enumerate(jobs))
    assert len(runner) == 0
