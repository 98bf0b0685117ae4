"""The host runs ahead of the device: flags come late, and yet nothing that is not finite is told, kept or passed on."""

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from fakes import Count, Fake, Generous
from loopwright.engine.events import Artifact, Stepped
from loopwright.engine.execute import eager
from loopwright.engine.flags import Flags
from loopwright.engine.job import Job
from loopwright.engine.prices import Prices, label
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import ModelError
from loopwright.loop import Unit
from support import run, same


@pytest.fixture
def late(monkeypatch):
    """As on a device that is always busy: who wants to know has to wait."""
    monkeypatch.setattr(Flags, "ready", property(lambda self: False))


def listened(instance, requests, execute=eager):
    """The jobs, run together, and what each one's listener heard, tensors left out."""
    scheduler, heard = Scheduler(prices=Generous(), execute=execute), {}
    jobs = []
    for request in requests:
        events = []
        jobs.append(Job(instance, request, listener=events.append))
        heard[jobs[-1].id] = events
    for job in jobs:
        scheduler.submit(job)
    scheduler.run()
    assert len(scheduler) == 0
    return jobs, [[shape(event) for event in heard[job.id]] for job in jobs]


def shape(event):
    return type(event).__name__, getattr(event, "stage", ""), getattr(event, "index", 0), getattr(event, "total", 0)


@pytest.mark.parametrize("mode", [{"mode": "exact"}, {"mode": "fixed", "rows": 3}, {"mode": "throughput"}])
def test_results_and_events_are_the_same_whether_flags_come_at_once_or_late(ask, mode, monkeypatch):
    requests = []
    for seed in range(3):
        model, request = ask("t2v", "unipc", seed=seed, **mode)
        requests.append(request)
    at_once, told = listened(model.instance, requests)
    monkeypatch.setattr(Flags, "ready", property(lambda self: False))
    later, told_later = listened(model.instance, requests)
    assert told == told_later and all(events[-1][0] == "Done" for events in told)
    assert all(same(one.output, other.output) for one, other in zip(at_once, later, strict=True))


@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("mode", ["exact", "throughput"])
def test_the_request_that_is_not_finite_fails_at_its_step_and_its_neighbours_are_untouched(ask, late, mode, at):
    requests = [ask("t2v", "euler", seed=seed, mode=mode, num_inference_steps=3)[1] for seed in range(3)]
    instance = ask("t2v", "euler")[0].instance
    expected = [run(instance, request) for request in requests]
    seen = {}

    def execute(model, call):
        """Row by row, so that the victim is known whatever its place: its noise says who it is."""
        tensors = dict(eager(model, call))
        if call.step.unit is Unit.DENOISE:
            for place in range(call.rows):
                before = call.tensors["latents"][place]
                steps = seen.get(before.data_ptr(), seen.get(before.sum().item(), 0)) + 1
                if steps == 1 and not torch.equal(before, noise):
                    continue
                seen[tensors["latents"][place].sum().item()] = steps
                if steps == at:
                    tensors["finite"] = tensors["finite"].clone()
                    tensors["finite"][place] = False
        return tensors

    victim = Job(instance, requests[1])
    while "latents" not in (call := victim.pending()).tensors:
        victim.run(call)
    noise = call.tensors["latents"][0]
    jobs, told = listened(instance, requests, execute)
    assert [job.status for job in jobs] == ["done", "failed", "done"]
    assert isinstance(jobs[1].error, ModelError) and f"denoising step {at} of 3" in str(jobs[1].error)
    denoised = [index for kind, stage, index, _ in told[1] if kind == "Stepped" and stage == "denoise"]
    assert denoised == list(range(1, at)) and told[1][-1][0] == "Failed" and "decode" not in {e[1] for e in told[1]}
    for place in (0, 2):
        if mode == "exact":
            assert same(jobs[place].output, expected[place])
        assert jobs[place].output["latents"].isfinite().all()


def test_what_is_emitted_is_told_with_its_step_and_not_before(late):
    fake, events = Fake([Count(steps=3, emits=True)]), []
    scheduler = Scheduler()
    scheduler.submit(Job(fake.model, fake.request(), listener=events.append))
    scheduler.step()
    assert not any(isinstance(event, Stepped) for event in events)
    scheduler.run()
    kinds = [type(event) for event in events if isinstance(event, (Stepped, Artifact))]
    assert kinds == [Stepped, Artifact] * 3


def test_prices_are_what_the_device_took_though_the_host_is_ahead(monkeypatch):
    """The device takes two seconds a call, one after the other; asking for one takes the host a tenth."""
    now, done = [0.0], [0.0]

    class Slow(Flags):
        def __init__(self, step, tensors):
            now[0] += 0.1
            done[0] = max(done[0], now[0]) + 2.0
            self._at = done[0]
            super().__init__(step, tensors)

        ready = property(lambda self: False)

        def wait(self):
            now[0] = max(now[0], self._at)
            return super().wait()

    monkeypatch.setattr("loopwright.engine.job.Flags", Slow)
    prices, fake, keys = Prices(), Fake([Count(steps=8)]), set()

    def execute(model, call):
        keys.add(label(call.key))
        return eager(model, call)

    scheduler = Scheduler(prices=prices, clock=lambda: now[0], execute=execute)
    scheduler.submit(Job(fake.model, fake.request()))
    scheduler.run()
    assert [prices.seconds(key, 1) for key in keys] == [pytest.approx(2.0)]
    assert now[0] == pytest.approx(16.1)  # as long as the device took, not as host and device in turn


def test_a_request_cancelled_while_its_step_is_under_way_leaves_nothing(late):
    fake, scheduler, events = Fake([Count(steps=5)]), Scheduler(), []
    job = scheduler.submit(Job(fake.model, fake.request(), listener=events.append))
    scheduler.step()
    job.cancel()
    scheduler.run()
    assert job.status == "cancelled" and not any(isinstance(event, Stepped) for event in events)
    gone = weakref.ref(job)
    del job
    gc.collect()
    assert gone() is None


def test_an_error_of_the_device_that_comes_late_fails_the_requests_of_its_call(late, monkeypatch):
    fake, scheduler = Fake([Count(steps=2)]), Scheduler()
    job = scheduler.submit(Job(fake.model, fake.request()))
    scheduler.step()

    def fails(self: Flags) -> None:
        raise RuntimeError("the device has fallen off")

    monkeypatch.setattr(Flags, "wait", fails)
    scheduler.run()
    assert job.status == "failed" and "fallen off" in str(job.error) and len(scheduler) == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_flags_of_a_device_come_by_themselves(ask: Callable) -> None:
    from loopwright.loop import Step

    x = torch.tensor([True, False], device="cuda")
    flags = Flags(Step(print, (), None, {}, finite="a step"), {"finite": x})  # type: ignore[arg-type]
    assert flags.wait() == [True, False] and flags.ready
