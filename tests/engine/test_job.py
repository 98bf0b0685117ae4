"""A job tells what happens, in order; ends for itself alone; and holds nothing once it has ended."""

import gc
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import loopwright
from fakes import Boom, Count, Fake, Receive
from loopwright.engine.events import Artifact, Cancelled, Done, Event, Failed, Queued, Started, Stepped
from loopwright.engine.execute import Call, eager
from loopwright.engine.instance import Instance
from loopwright.engine.job import Job
from loopwright.engine.runner import Interleaved, Serial
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import ModelError, StateError
from loopwright.loop import Key, Result, Step, Tensors, Unit
from loopwright.request import Request
from support import finished, run, same, tensors_in


def told(model: Instance, request: Request, **options: object) -> tuple[Job, list[Event]]:
    """A job run to its end and what its listener heard."""
    events: list[Event] = []
    job = Job(model, request, listener=events.append, **options)
    while not job.ended:
        job.step()
    return job, events


def test_events_come_in_order_with_their_contents(ask: Callable) -> None:
    loaded, request = ask("ti2v", "unipc")
    job, events = told(loaded.instance, request)
    assert all(event.job == job.id for event in events)
    shape = [
        (type(e).__name__, getattr(e, "stage", ""), getattr(e, "index", 0), getattr(e, "total", 0)) for e in events
    ]
    assert shape == [
        ("Queued", "", 0, 0),
        ("Started", "text", 0, 0), ("Stepped", "text", 1, 2), ("Stepped", "text", 2, 2),
        ("Started", "condition", 0, 0), ("Stepped", "condition", 1, 3), ("Stepped", "condition", 2, 3),
        ("Stepped", "condition", 3, 3),
        ("Started", "denoise", 0, 0), ("Stepped", "denoise", 1, 3), ("Stepped", "denoise", 2, 3),
        ("Stepped", "denoise", 3, 3),
        ("Started", "pin", 0, 0), ("Stepped", "pin", 1, 1),
        ("Started", "decode", 0, 0), ("Stepped", "decode", 1, 4),
        ("Stepped", "decode", 2, 4), ("Artifact", "decode", 0, 0),
        ("Stepped", "decode", 3, 4), ("Artifact", "decode", 0, 0),
        ("Stepped", "decode", 4, 4), ("Artifact", "decode", 0, 0),
        ("Done", "", 0, 0),
    ]  # fmt: skip
    units = {e.stage: e.unit for e in events if isinstance(e, Stepped)}
    assert units == {"text": Unit.EMBED, "condition": Unit.ENCODE, "denoise": Unit.DENOISE, "pin": Unit.ENCODE,
                     "decode": Unit.DECODE}  # fmt: skip
    assert all(e.seconds > 0 for e in events if isinstance(e, Stepped))


def test_artifacts_are_the_frames_as_they_come_and_done_holds_all_of_them(ask: Callable) -> None:
    loaded, request = ask("t2v")
    job, events = told(loaded.instance, request)
    frames = [e.tensors["frames"] for e in events if isinstance(e, Artifact)]
    assert [f.shape for f in frames] == [(1, 1, 32, 32, 3), (1, 4, 32, 32, 3), (1, 4, 32, 32, 3)]
    done = events[-1]
    assert isinstance(done, Done) and job.status == "done"
    assert torch.equal(torch.cat(frames, 1), done.tensors["frames"])
    assert set(done.tensors) == {"frames", "latents"} and same(done.tensors, job.output)
    stepped = sum(e.seconds for e in events if isinstance(e, Stepped))
    assert stepped <= done.seconds == job.seconds < 10 * stepped + 1


def test_a_request_for_latents_decodes_nothing(ask: Callable) -> None:
    loaded, request = ask("t2v", output="latents")
    _, events = told(loaded.instance, request)
    assert [e.stage for e in events if isinstance(e, Started)] == ["text", "denoise"]
    assert set(events[-1].tensors) == {"latents"}


def test_jobs_have_ids_of_their_own(ask: Callable) -> None:
    loaded, request = ask("t2v")
    assert len({Job(loaded.instance, request).id for _ in range(50)}) == 50


def held(job: Job) -> list[weakref.ref[torch.Tensor]]:
    """Weak references to all that a job holds now."""
    return [weakref.ref(tensor) for tensor in tensors_in((job.state, job.slots))]


def alive(references: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(reference() is not None for reference in references)


@pytest.mark.parametrize("kind", ["t2v", "ti2v"])
def test_cancelling_at_any_step_gives_everything_back_within_one_step(kind: str, ask: Callable) -> None:
    loaded, request = ask(kind, "unipc")
    gc.disable()  # nothing may wait for the collector
    try:
        for steps in range(100):
            events: list[str] = []
            runner = Serial()
            job = runner.submit(Job(loaded.instance, request, listener=lambda e: events.append(type(e).__name__)))
            for _ in range(steps):
                runner.step()
            if job.ended:
                break
            references = held(job)
            assert alive(references) == len(references) and (steps == 0 or references)
            job.cancel()
            assert not job.ended and alive(references) == len(references)  # at the boundary, not before
            assert runner.step()
            assert job.status == "cancelled" and job.output is None and job.error is None
            assert job.state is None and job.slots == {} and len(runner) == 0
            assert alive(references) == 0, steps
            assert events[-1] == "Cancelled" and events.count("Cancelled") == 1
            assert events.count("Stepped") == steps
    finally:
        gc.enable()
    assert steps >= 10


def test_a_cancelled_job_stays_cancelled_and_a_done_one_done() -> None:
    fake = Fake([Count()])
    events: list[Event] = []
    job = Job(fake.model, fake.request(), listener=events.append)
    job.cancel()
    for _ in range(3):
        job.step()
    assert [type(e) for e in events] == [Queued, Cancelled]
    job, events = told(fake.model, fake.request())
    before = list(events)
    job.cancel()
    job.step()
    assert job.status == "done" and job.output is not None and events == before


def test_a_done_job_holds_its_outputs_and_nothing_else(ask: Callable) -> None:
    loaded, request = ask("i2v", "unipc")
    job = Job(loaded.instance, request)
    references: list[weakref.ref[torch.Tensor]] = []
    while not job.ended:
        references += held(job)
        job.step()
    assert job.state is None and job.slots == {}
    kept = {id(reference()) for reference in references if reference() is not None}
    assert kept <= {id(tensor) for tensor in job.output.values()}


def test_slots_that_no_later_stage_reads_are_given_back_at_once(ask: Callable) -> None:
    loaded, request = ask("ti2v")
    seen: dict[str, set[str]] = {}
    job = Job(loaded.instance, request)
    embeds = None
    while not job.ended:
        name = job.stages[job.stage].stage.name
        seen[name] = set(job.slots)
        if name == "denoise" and embeds is None:
            embeds = weakref.ref(job.slots["prompt_embeds"])
        if name == "pin":
            assert embeds() is None
        job.step()
    assert seen == {
        "text": set(),
        "condition": {"prompt_embeds", "negative_embeds"},
        "denoise": {"prompt_embeds", "negative_embeds", "first_frame"},
        "pin": {"latents", "first_frame"},
        "decode": {"latents"},
    }


def test_a_failing_op_ends_its_job_alone_and_its_neighbours_are_bit_identical() -> None:
    good, bad = Fake([Count(steps=5)]), Fake([Count(steps=5, fails=2)])
    alone = [run(good.model, good.request(seed)) for seed in (1, 2)]
    for runner in (Serial(), Interleaved()):
        events: list[Event] = []
        jobs = [Job(good.model, good.request(1)), Job(bad.model, bad.request(9), listener=events.append),
                Job(good.model, good.request(2))]  # fmt: skip
        for job in jobs:
            runner.submit(job)
        runner.run()
        assert [job.status for job in jobs] == ["done", "failed", "done"] and len(runner) == 0
        assert same(jobs[0].output, alone[0]) and same(jobs[2].output, alone[1])
        assert isinstance(jobs[1].error, Boom) and jobs[1].output is None
        assert [type(e) for e in events] == [Queued, Started, Stepped, Stepped, Failed]
        assert events[-1].error is jobs[1].error


def test_a_failed_job_holds_nothing_though_its_error_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A traceback keeps the variables of its frames; those of the failed step must not stay in memory."""
    import fakes

    references: list[weakref.ref[torch.Tensor]] = []
    monkeypatch.setattr(fakes, "_hold", lambda tensor: references.append(weakref.ref(tensor)) or "held")
    fake = Fake([Count(steps=3, fails=1)])
    events: list[Event] = []
    job = Job(fake.model, fake.request(), listener=events.append)
    gc.disable()
    try:
        job.step()
        references += held(job)
        job.step()
        assert job.status == "failed" and isinstance(events[-1], Failed)
        assert len(references) == 2 and alive(references) == 0
    finally:
        gc.enable()
    assert job.state is None and job.slots == {}
    assert "in fail" in job.error.__notes__[0]  # where it failed is still known
    assert isinstance(job.error.__cause__, KeyError)


@pytest.mark.parametrize(
    ("part", "match"),
    [
        ("text_encoder", "NaN or infinity in prompt_embeds"),
        ("transformer", "NaN or infinity in denoising step 1 of 3"),
        ("vae", "NaN or infinity in frames, step 1 of 3"),
    ],
)
def test_nan_ends_the_job_with_an_error_that_names_the_step(
    part: str, match: str, checkpoint: Callable, ask: Callable
) -> None:
    own = loopwright.load(checkpoint("t2v"), device="cpu").instance
    with torch.no_grad():
        for parameter in own.part(part).parameters():
            parameter.fill_(float("nan"))
    job, _ = told(own, ask("t2v")[1])
    assert isinstance(job.error, ModelError) and job.status == "failed"
    assert match in str(job.error) and "dtype=float32" in str(job.error)


class Explode:
    """Fails in one of a loop's methods."""

    def __init__(self, loop: object, method: str) -> None:
        self._loop, self._method = loop, method

    def __getattr__(self, name: str) -> object:
        if name == self._method:
            raise Boom(name)
        return getattr(self._loop, name)


@pytest.mark.parametrize("method", ["init", "next", "outlook", "advance", "finish"])
def test_an_error_anywhere_in_a_loop_ends_its_job_alone(method: str) -> None:
    bad, good = Fake([Explode(Count(), method)]), Fake([Count()])
    runner = Interleaved()
    jobs = [runner.submit(Job(f.model, f.request())) for f in (bad, good)]
    runner.run()
    assert [job.status for job in jobs] == ["failed", "done"] and str(jobs[0].error) == method
    assert jobs[0].slots == {} and jobs[0].state is None


@pytest.mark.parametrize("when", [Started, Stepped, Artifact])
def test_a_listener_that_fails_ends_its_job_alone(when: type[Event]) -> None:
    """Such as one whose client has gone away."""
    fake = Fake([Count(emits=True)])

    def listener(event: Event) -> None:
        if isinstance(event, (when, Failed)):
            raise Boom("the client is gone")

    runner = Interleaved()
    jobs = [runner.submit(Job(fake.model, fake.request(), listener=heard)) for heard in (listener, None)]
    runner.run()
    assert [job.status for job in jobs] == ["failed", "done"]
    assert isinstance(jobs[0].error, Boom) and jobs[0].slots == {} and jobs[0].state is None


@pytest.mark.parametrize(("end", "event"), [("done", Done), ("failed", Failed), ("cancelled", Cancelled)])
def test_a_listener_that_fails_at_the_end_changes_nothing_of_it(end: str, event: type[Event]) -> None:
    """The result is kept, the others run on, and the listener's error is told."""
    fake, bad = Fake([Count()]), Fake([Count()])

    def listener(heard: Event) -> None:
        if isinstance(heard, event):
            raise Boom("the client is gone")

    def execute(model: Instance, call: Call) -> Tensors:
        if model is bad.model:
            raise Boom("the op fails")
        return eager(model, call)

    scheduler = Scheduler(execute=execute)
    first = bad if end == "failed" else fake
    jobs = [scheduler.submit(Job(first.model, first.request(), listener=listener)),
            scheduler.submit(Job(fake.model, fake.request()))]  # fmt: skip
    if end == "cancelled":
        jobs[0].cancel()
    with pytest.warns(RuntimeWarning, match=f"which is {end}, raised Boom: the client is gone"):
        scheduler.run()
    assert [job.status for job in jobs] == [end, "done"] and len(scheduler) == 0


def test_items_fed_from_another_thread_are_each_counted_once() -> None:
    """While the driver takes results and looks at what is next."""
    fake, number = Fake([Receive()]), 300
    scheduler = Scheduler()
    job = scheduler.submit(Job(fake.model, fake.request()))
    scheduler.step()

    def feed() -> None:
        for index in range(number):
            job.feed("in", {"amount": torch.tensor(float(index))})
        job.feed("in", None)

    thread = threading.Thread(target=feed)
    thread.start()
    while not job.ended:
        scheduler.step()
    thread.join()
    assert job.status == "done" and job.output is not None
    assert job.output["latents"][0, 0].item() == sum(range(number))


class Log:
    """An observer that keeps what it saw."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.keys: list[Key] = []
        self.results: list[Result] = []

    def on_step(self, job: Job, step: Step, key: Key, result: Result) -> None:
        self.steps.append(step)
        self.keys.append(key)
        self.results.append(result)


def log_of(model: Instance, request: Request) -> Log:
    log = Log()
    run(model, request, observers=(log,))
    return log


def test_an_observer_sees_every_step_and_what_it_gave(ask: Callable) -> None:
    loaded, request = ask("t2v", "unipc")
    log = Log()
    job, events = told(loaded.instance, request, observers=(log, log))
    assert len(log.steps) == 2 * sum(isinstance(e, Stepped) for e in events)
    denoised = [r.tensors["latents"] for s, r in zip(log.steps, log.results, strict=True) if s.unit is Unit.DENOISE]
    assert torch.equal(denoised[-1], job.output["latents"])


def test_an_observer_that_fails_ends_its_job_alone() -> None:
    class Bad:
        def on_step(self, *seen: object) -> None:
            raise Boom("observer")

    fake = Fake([Count()])
    runner = Interleaved()
    jobs = [runner.submit(Job(fake.model, fake.request(), observers=o)) for o in ((Bad(),), ())]
    runner.run()
    assert [job.status for job in jobs] == ["failed", "done"]


def test_steps_run_without_gradients_and_without_inference_mode(ask: Callable) -> None:
    """Training differentiates the same op, on tensors a rollout has made."""
    loaded, request = ask("t2v", "unipc")
    for result in log_of(loaded.instance, request).results:
        for tensor in result.tensors.values():
            assert not tensor.requires_grad and not tensor.is_inference()


def test_keys_are_equal_for_requests_of_one_shape_whatever_else_differs(ask: Callable) -> None:
    loaded, request = ask("t2v", "unipc")
    others = [replace(request, seed=99), replace(request, prompt="something else", negative_prompt=""),
              replace(request, guidance_scale=7.0), replace(request, flow_shift=9.0)]  # fmt: skip
    keys = log_of(loaded.instance, request).keys
    assert all(hash(key) is not None for key in keys)
    for other in others:
        assert log_of(loaded.instance, other).keys == keys
    steps = log_of(loaded.instance, replace(request, num_inference_steps=5)).keys
    assert set(steps) == set(keys) and len(steps) == len(keys) + 2


def denoise_keys(model: Instance, request: Request) -> set[Key]:
    log = log_of(model, replace(request, output="latents"))
    return {key for step, key in zip(log.steps, log.keys, strict=True) if step.unit is Unit.DENOISE}


def test_every_denoising_step_of_a_request_has_one_key(ask: Callable) -> None:
    for kind, scheduler in (("t2v", "euler"), ("t2v", "unipc"), ("i2v", "unipc"), ("ti2v", "unipc")):
        loaded, request = ask(kind, scheduler)
        assert len(denoise_keys(loaded.instance, request)) == 1
    loaded, request = ask("a14b", "unipc", num_inference_steps=6)
    assert len(denoise_keys(loaded.instance, request)) == 2  # an expert each


@pytest.mark.parametrize(
    "changes",
    [{"height": 48}, {"width": 16}, {"num_frames": 5}, {"guidance_scale": 1.0}, {"max_sequence_length": 64}],
    ids=str,
)
def test_keys_differ_where_the_call_would(changes: dict[str, object], ask: Callable) -> None:
    loaded, request = ask("t2v", "unipc")
    assert not denoise_keys(loaded.instance, request) & denoise_keys(loaded.instance, replace(request, **changes))


def test_keys_differ_between_solvers_tasks_and_precisions(ask: Callable, checkpoint: Callable) -> None:
    loaded, request = ask("t2v", "unipc")
    narrow = loopwright.load(checkpoint("t2v", "unipc"), device="cpu", dtype="bfloat16").instance
    euler = loopwright.load(checkpoint("t2v", "unipc"), device="cpu", sampler="euler").instance
    found = [denoise_keys(model, request) for model in (loaded.instance, narrow, euler)]
    other, image_request = ask("i2v", "unipc")
    found.append(denoise_keys(other.instance, image_request))
    assert len(set().union(*found)) == 4


@pytest.mark.parametrize("part", ["text_encoder", "transformer", "vae"])
def test_new_weights_change_the_keys_of_that_components_steps_alone(
    part: str, checkpoint: Callable, ask: Callable
) -> None:
    own = loopwright.load(checkpoint("t2v"), device="cpu").instance
    request = ask("t2v")[1]
    before = log_of(own, request)
    own.changed(part)
    after = log_of(own, request)
    assert own.version(part) == 2
    for step, old, new in zip(before.steps, before.keys, after.keys, strict=True):
        assert (old != new) is (part in step.uses)
    assert any(part in step.uses for step in before.steps)


def test_a_lent_slot_is_handed_to_the_op_and_its_shape_is_in_the_key() -> None:
    fake = Fake(
        [Count(slot="given", steps=1), Count("count/v1", steps=2)], [("given",), ("latents",)], [(), ("given",)]
    )
    log = Log()
    out = run(fake.model, fake.request(10), observers=(log,))
    assert torch.equal(out["latents"], torch.full((1, 4), 10.0 + 2 * (1.0 + 11.0)))
    assert "'lent'" not in str(log.keys[0]) and "'lent', torch.Size([1, 4])" in str(log.keys[1])


def test_a_loop_waits_until_it_is_fed_and_ends_when_the_port_closes() -> None:
    fake = Fake([Receive()])
    job = Job(fake.model, fake.request())
    with pytest.raises(StateError, match="not running: 'queued'"):
        job.feed("in", None)
    job.step()
    assert job.status == "waiting" and not job.runnable
    job.step()
    assert job.status == "waiting"
    job.feed("in", {"amount": torch.tensor(2.0)})
    job.feed("in", {"amount": torch.tensor(3.0)})
    assert job.status == "running" and job.runnable
    job.step()
    job.step()
    job.step()
    assert job.status == "waiting"
    with pytest.raises(ValueError, match="no port 'out'"):
        job.feed("out", None)
    job.feed("in", None)
    job.step()
    assert job.status == "done" and torch.equal(job.output["latents"], torch.full((1, 4), 5.0))
    with pytest.raises(StateError, match="not running: 'done'"):
        job.feed("in", None)


def test_a_loop_that_takes_no_food_says_so(ask: Callable) -> None:
    loaded, request = ask("ti2v")
    job, refused = Job(loaded.instance, request), set()
    while not job.ended:
        if job.state is not None:
            with pytest.raises(ValueError, match="has no port 'x'"):
                job.feed("x", None)
            refused.add(job.stage)
        job.step()
    assert len(refused) == len(job.stages) and job.status == "done"


def test_a_stage_that_writes_an_undeclared_slot_is_a_bug_that_ends_the_job() -> None:
    fake = Fake([Count(slot="surprise")], [("latents", "more")])
    job, _ = told(fake.model, fake.request())
    assert isinstance(job.error, AssertionError) and "surprise" in str(job.error)


def test_a_stage_with_one_slot_names_it_as_it_likes() -> None:
    fake = Fake([Count(slot="whatever", steps=2)], [("latents",)])
    assert torch.equal(finished(Job(fake.model, fake.request(1)))["latents"], torch.full((1, 4), 3.0))
