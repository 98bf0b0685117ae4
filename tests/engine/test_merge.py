"""Steps of several requests in one call: what each mode promises, and that the promises can be broken."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from fakes import Generous
from loopwright.engine import merge
from loopwright.engine.events import Artifact, Stepped
from loopwright.engine.execute import eager
from loopwright.engine.job import Job
from loopwright.engine.merge import prove
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import BackendError
from loopwright.loop import Unit
from loopwright.loops import denoise
from support import finished, relative, run, same

ROWS = 4
# Without shrinking: it takes minutes, and a schedule is no clearer for being short.
RANDOM_SCHEDULES = {
    "deadline": None,
    "derandomize": True,
    "phases": (Phase.generate,),
    "suppress_health_check": list(HealthCheck),
}


def asked(ask, seed, **changes):
    """A short text-to-video request, different from its neighbours in prompt, seed, scale and length."""
    own = {"seed": seed, "num_inference_steps": 3 + seed % 3, "guidance_scale": 3.0 + seed / 4, "output": "latents"}
    model, request = ask("t2v", "unipc", **(own | changes))
    return model.instance, replace(request, prompt=f"a fox number {seed}")


def alone(instance, request):
    """Its outputs without any neighbour, in calls of its own number of rows."""
    return driven(instance, [request])[0]


def driven(instance, requests, runner=None):
    """All submitted at once; each one's outputs."""
    runner = Scheduler(prices=Generous()) if runner is None else runner
    jobs = [runner.submit(Job(instance, request)) for request in requests]
    runner.run()
    assert [job.error for job in jobs if job.error] == []
    return [job.output for job in jobs]


def test_exact_requests_never_share_a_call(ask):
    instance, requests = ask("t2v")[0].instance, [asked(ask, seed)[1] for seed in range(3)]
    runner = Scheduler(prices=Generous())
    outputs = driven(instance, requests, runner)
    assert runner.merger.calls == 0
    assert all(same(output, run(instance, request)) for output, request in zip(outputs, requests, strict=True))


@settings(
    max_examples=8, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), derandomize=True
)
@given(
    joins=st.lists(st.integers(0, 6), min_size=5, max_size=8),
    cancels=st.dictionaries(st.integers(0, 7), st.integers(1, 12), max_size=2),
)
def test_fixed_rows_give_the_same_bits_whoever_shares_the_call(ask, joins, cancels):
    """Requests join and leave at any call; each one's bits are those of its lonely, padded run."""
    requests = [asked(ask, seed, mode="fixed", rows=ROWS)[1] for seed in range(len(joins))]
    instance = asked(ask, 0)[0]
    expected = [alone(instance, request) for request in requests]
    runner, jobs, call = Scheduler(prices=Generous()), {}, 0
    while len(jobs) < len(requests) or len(runner):
        for number, at in enumerate(joins):
            if number not in jobs and at <= call:
                jobs[number] = runner.submit(Job(instance, requests[number]))
        for number, at in cancels.items():
            if number in jobs and at <= call:
                jobs[number].cancel()
        runner.step()
        call += 1
    for number, job in jobs.items():
        assert job.status == "cancelled" or same(job.output, expected[number]), number
    assert all(job.status == "done" for number, job in jobs.items() if number not in cancels)


def test_fixed_calls_are_well_filled_under_load(ask):
    requests = [asked(ask, seed, mode="fixed", rows=8, num_inference_steps=6)[1] for seed in range(16)]
    runner = Scheduler(prices=Generous())
    driven(asked(ask, 0)[0], requests, runner)
    assert runner.merger.rows / runner.merger.calls >= 4


def test_a_padded_request_is_repeated_by_its_rows_and_differs_from_other_rows_in_rounding_only(ask):
    instance, request = asked(ask, 1, mode="fixed", rows=ROWS)
    again, other = alone(instance, request), alone(instance, replace(request, rows=2))
    assert same(alone(instance, request), again)
    assert relative(again["latents"], other["latents"]) < 1e-5


def test_throughput_merges_and_stays_close_to_serial(ask):
    instance = asked(ask, 0)[0]
    requests = [asked(ask, seed, mode="throughput", num_inference_steps=6)[1] for seed in range(7)]
    runner = Scheduler(prices=Generous())
    outputs = driven(instance, requests, runner)
    assert runner.merger.rows / runner.merger.calls > 3
    for output, request in zip(outputs, requests, strict=True):
        exact = run(instance, replace(request, mode="exact"))
        assert relative(output["latents"], exact["latents"]) < 1e-5


def test_throughput_error_on_the_shipped_model_is_below_the_bound():
    import loopwright

    model = loopwright.load("loopwright/tiny-wan", device="cpu")
    prompts = ["a fox moving left on a blue background", "a car growing on a red background", "a pizza spinning"]
    small = {"num_inference_steps": 4, "output": "latents"}
    requests = [model.request(prompt, seed=i, mode="throughput", **small) for i, prompt in enumerate(prompts)]
    for output, request in zip(driven(model.instance, requests), requests, strict=True):
        exact = run(model.instance, replace(request, mode="exact"))
        assert relative(output["latents"], exact["latents"]) < 1e-5


def test_only_equal_keys_share(ask):
    """Another size, one branch instead of two, another number of rows: none of them may be in one call."""
    instance = asked(ask, 0)[0]
    requests = [
        asked(ask, 0, mode="throughput")[1],
        asked(ask, 3, mode="throughput", height=48)[1],
        asked(ask, 6, mode="throughput", guidance_scale=1.0)[1],
        asked(ask, 9, mode="fixed", rows=1)[1],
    ]
    runner = Scheduler(prices=Generous())
    outputs = driven(instance, requests, runner)
    assert runner.merger.rows == runner.merger.calls
    assert all(same(output, alone(instance, request)) for output, request in zip(outputs, requests, strict=True))


def test_conditioning_is_put_together_once_for_a_group_and_given_back(ask, monkeypatch):
    seen, true = [], denoise.denoise_step

    def watched(parts, **arguments):
        seen.append(arguments["text"][0])
        return true(parts, **arguments)

    monkeypatch.setattr(denoise, "denoise_step", watched)
    instance = asked(ask, 0)[0]
    requests = [asked(ask, seed, mode="throughput", num_inference_steps=5)[1] for seed in (0, 3, 6)]
    runner = Scheduler(prices=Generous())
    jobs = [runner.submit(Job(instance, request)) for request in requests]
    runner.run()
    full = [text for text in seen if text.shape[0] == 3]
    assert len(full) >= 4 and all(text is full[0] for text in full)
    assert runner.merger._groups == {} and len(runner) == 0
    assert all(job.slots == {} and job.state is None for job in jobs)


def test_a_request_holds_its_own_row_and_not_the_calls_buffers(ask):
    requests = [asked(ask, seed, mode="throughput", num_inference_steps=3)[1] for seed in (0, 3, 6)]
    for output in driven(asked(ask, 0)[0], requests):
        latents = output["latents"]
        assert latents.untyped_storage().nbytes() == latents.numel() * latents.element_size()


def meddling(parts, *, latents, **arguments):
    """An op whose rows read each other."""
    out = denoise_step(parts, latents=latents, **arguments)
    return {**out, "latents": out["latents"] + 1e-6 * latents.mean()}


denoise_step = denoise.denoise_step


def test_what_is_proved_of_a_model_is_not_proved_again_by_the_next_who_runs_it(ask, monkeypatch):
    model, request = ask("t2v", mode="fixed", rows=2, output="latents")
    proofs = []
    monkeypatch.setattr(model.instance, "proved", set())
    monkeypatch.setattr(merge, "prove", lambda *given: proofs.append(given))
    for seed in range(3):
        list(model.run_all([replace(request, seed=seed)]))
    assert len(proofs) == 1


def test_rows_that_read_each_other_are_found_before_fixed_mode_is_used(ask, monkeypatch):
    monkeypatch.setattr(denoise, "denoise_step", meddling)
    instance, request = asked(ask, 1, mode="fixed", rows=ROWS)
    with pytest.raises(BackendError, match=r"depend on its neighbours on cpu.*: 4; use mode=.exact. or .throughput."):
        finished_batched(instance, request)
    job = Job(instance, request)
    while job.pending().step.op is not meddling:
        job.step()
    with pytest.raises(BackendError):
        prove(instance, job.pending(), ROWS)
    monkeypatch.setattr(denoise, "denoise_step", denoise_step)
    prove(instance, job.pending(), ROWS)


def finished_batched(instance, request):
    runner = Scheduler(prices=Generous())
    job = runner.submit(Job(instance, request))
    runner.run()
    if job.error:
        raise job.error


def test_an_error_in_a_call_ends_the_request_it_belongs_to_alone_and_keeps_nothing(ask, monkeypatch):
    instance = asked(ask, 0)[0]
    requests = [asked(ask, seed, mode="throughput", guidance_scale=2.0 + (seed == 6))[1] for seed in (0, 3, 6, 9)]
    expected = [alone(instance, request) for request in requests]
    calls = []

    def broken(parts, *, latents, row, **arguments):
        calls.append((len(latents), weakref.ref(latents)))
        if (row[:, 1] == 3.0).any():
            raise RuntimeError("out of luck")
        return denoise_step(parts, latents=latents, row=row, **arguments)

    monkeypatch.setattr(denoise, "denoise_step", broken)
    runner = Scheduler(prices=Generous())
    jobs = [runner.submit(Job(instance, request)) for request in requests]
    gc.disable()
    try:
        runner.run()
        assert [job.status for job in jobs] == ["done", "done", "failed", "done"]
        assert [rows for rows, _ in calls[:5]] == [4, 2, 2, 1, 1]
        assert all(reference() is None for rows, reference in calls if rows > 1)
    finally:
        gc.enable()
    assert "out of luck" in str(jobs[2].error) and runner.merger._groups == {}
    for job, output in zip(jobs, expected, strict=True):
        assert job.status == "failed" or relative(job.output["latents"], output["latents"]) < 1e-5


def test_events_count_each_requests_own_steps(ask):
    instance = asked(ask, 0)[0]
    events = {0: [], 3: []}
    runner = Scheduler(prices=Generous())
    for seed, heard in events.items():
        runner.submit(Job(instance, asked(ask, seed, mode="throughput")[1], listener=heard.append))
    runner.run()
    for heard in events.values():
        steps = [event for event in heard if isinstance(event, Stepped) and event.stage == "denoise"]
        assert [event.index for event in steps] == list(range(1, steps[0].total + 1))


@settings(
    max_examples=3, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), derandomize=True
)
@given(order=st.randoms(use_true_random=False))
def test_exact_mode_is_serial_for_32_mixed_requests_that_join_leave_and_fail(ask, model, order):
    kinds = ("t2v", "i2v", "ti2v", "v2v")
    mixed = [ask(kinds[i % 4], ("euler", "unipc")[i % 2], seed=i % 5, output="latents") for i in range(32)]
    known: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    runner, jobs, waiting = Scheduler(prices=Generous()), [], list(range(32))
    order.shuffle(waiting)
    cancelled, failed = set(order.sample(range(32), 4)), set(order.sample(range(32), 3))
    while waiting or len(runner):
        for _ in range(order.randint(0, 4)):
            if waiting:
                number = waiting.pop()
                owner, request = mixed[number]
                jobs.append((number, runner.submit(Job(owner.instance, request))))
        for number, job in jobs:
            if number in cancelled and order.random() < 0.2:
                job.cancel()
            if number in failed and job.status == "running" and order.random() < 0.2:
                job.fail(RuntimeError("planned"))
        for _ in range(order.randint(1, 8)):
            runner.step()
    for number, job in jobs:
        assert job.ended
        if job.status == "done":
            owner, request = mixed[number]
            if (number % 4, request.seed) not in known:
                known[number % 4, request.seed] = finished(Job(owner.instance, request))
            assert same(job.output, known[number % 4, request.seed])
    assert sum(job.status == "done" for _, job in jobs) >= 25


def test_clips_are_decoded_together_in_throughput_mode_and_alone_in_fixed(ask):
    """The same frames but for rounding, and each listener hears of its own."""
    instance = asked(ask, 0)[0]
    for mode, together in (({"mode": "throughput"}, 3), ({"mode": "fixed", "rows": 3}, 1)):
        requests = [asked(ask, seed, output="video", num_inference_steps=2, **mode)[1] for seed in range(3)]
        rows, heard = [], {}

        def counting(model, call, rows=rows):
            if call.step.unit is Unit.DECODE:
                rows.append(call.rows)
            return eager(model, call)

        scheduler = Scheduler(prices=Generous(), execute=counting)
        jobs = []
        for request in requests:
            frames = []
            job = Job(instance, request, listener=lambda e, f=frames: isinstance(e, Artifact) and f.append(e.tensors))
            heard[job.id] = frames
            jobs.append(scheduler.submit(job))
        scheduler.run()
        assert set(rows) == {together}
        for job, request in zip(jobs, requests, strict=True):
            expected = run(instance, replace(request, mode="exact", rows=1))["frames"]
            shown = torch.cat([part["frames"] for part in heard[job.id]], dim=1)
            assert torch.equal(shown, job.output["frames"])
            assert (shown.int() - expected.int()).abs().max() <= 1
