"""Captured steps on a stand-in for CUDA graphs: same bits as eager, and everything around the bits."""

import gc
import threading
import warnings
import weakref
from dataclasses import replace

import pytest
import torch

import loopwright
from fakes import Count, Fake, Generous, add, add_lent
from loopwright.engine.execute import Call, eager
from loopwright.engine.graphs import Graphs
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.engine.ledger import Ledger, Need
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import BackendError
from loopwright.loop import Binding, Ref, Step, Unit, key_of
from standin_capture import StandIns
from support import KINDS, media_for, run, same

CPU = Binding("cpu", "float32")


@pytest.fixture
def fake() -> Fake:
    return Fake([Count()])


def call_of(fake: Fake, total: torch.Tensor, op=add, **changes) -> Call:
    """A call of the fake's step on these rows."""
    handles = {"lent": Ref("given")} if op is add_lent else {}
    step = Step(op, ("transformer",), CPU, {"total": total[:1]}, handles, {"amount": 1.0}, Unit.DENOISE)
    step = replace(step, **changes)
    storage = {"given": torch.zeros(1, total.shape[1])}
    return Call(step, key_of(step, fake.model.version, storage), {"total": total}, {}, len(total))


def lending(fake: Fake, total: torch.Tensor, lent: torch.Tensor) -> Call:
    call = call_of(fake, total, add_lent)
    call.handles = {"lent": (lent,)}
    return call


def captured(fake: Fake, calls: list[Call], graphs: Graphs | None = None) -> Graphs:
    """Graphs that have seen each of these calls twice, with eager's results both times."""
    graphs = Graphs(StandIns()) if graphs is None else graphs
    for call in calls:
        for _ in range(2):
            assert same(graphs(fake.model, call), eager(fake.model, call))
    return graphs


# --- the same bits


@pytest.mark.parametrize("scheduler", ["euler", "unipc"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_requests_are_bit_identical_to_eager(ask, kind: str, scheduler: str) -> None:
    model, request = ask(kind, scheduler, output="latents")
    other = replace(request, seed=4)
    graphs = Graphs(StandIns())
    jobs = [Job(model.instance, each) for each in (request, other, request)]
    for job in jobs:
        runner = Scheduler(execute=graphs)
        runner.submit(job)
        runner.run()
    assert graphs.replays > 0 and not graphs.breaks
    expected = run(model.instance, request), run(model.instance, other)
    assert same(jobs[0].output, expected[0]) and same(jobs[1].output, expected[1]) and same(jobs[2].output, expected[0])


@pytest.mark.parametrize("kind", ["t2v", "a14b", "i2v"])
def test_requests_interleaved_through_one_graph_do_not_smear(ask, kind: str) -> None:
    model = ask(kind)[0]
    requests = [model.request(f"fox {i}", **(media_for(kind) | {"seed": i, "output": "latents"})) for i in range(3)]
    graphs = Graphs(StandIns())
    jobs = [Job(model.instance, each) for each in requests]
    while any(not job.ended for job in jobs):
        for job in jobs:
            call = job.pending()
            if call is not None:
                job.run(call, graphs)
    assert graphs.replays >= 4
    for job, each in zip(jobs, requests, strict=True):
        assert same(job.output, run(model.instance, each))


def test_merged_calls_are_captured_by_their_rows_and_bit_identical_to_merged_eager(ask) -> None:
    model, request = ask("t2v", mode="throughput")
    outputs = []
    for execute in (eager, Graphs(StandIns())):
        runner = Scheduler(execute=execute, prices=Generous())
        jobs = [runner.submit(Job(model.instance, replace(request, seed=seed))) for seed in range(3)]
        runner.run()
        outputs.append([job.output for job in jobs])
    assert execute.replays > 0 and runner.merger.rows > runner.merger.calls
    assert all(map(same, *outputs))


def test_what_is_handed_out_is_the_callers_own(fake: Fake) -> None:
    graphs = captured(fake, [call_of(fake, torch.ones(1, 4))])
    first = graphs(fake.model, call_of(fake, torch.ones(1, 4)))
    kept = {name: tensor.clone() for name, tensor in first.items()}
    second = graphs(fake.model, call_of(fake, torch.full((1, 4), 9.0)))
    assert same(first, kept) and not same(first, second)
    first["total"].fill_(5.0)
    assert same(graphs(fake.model, call_of(fake, torch.ones(1, 4))), kept)


def test_noise_is_an_input(fake: Fake) -> None:
    def noisy(parts, *, total, noise, amount):
        return {"total": total + noise}

    graphs = Graphs(StandIns())
    for seed in range(4):
        noise = torch.randn(1, 4, generator=torch.Generator().manual_seed(seed))
        call = call_of(fake, torch.ones(1, 4), noisy, tensors={"total": torch.ones(1, 4), "noise": noise})
        call.tensors = call.step.tensors
        assert same(graphs(fake.model, call), eager(fake.model, call))
    assert graphs.replays == 3 and len(graphs) == 1


def test_conditioning_is_copied_only_when_it_is_another_or_was_written_to(fake: Fake, monkeypatch) -> None:
    copies = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda self, other: copies.append(other.shape) or copy(self, other))
    total, lent, other = torch.ones(1, 4), torch.full((1, 4), 10.0), torch.full((1, 4), 20.0)
    graphs = captured(fake, [lending(fake, total, lent)])

    def copied(given: torch.Tensor) -> int:
        copies.clear()
        call = lending(fake, torch.ones(1, 4), given)
        assert same(graphs(fake.model, call), eager(fake.model, call))
        return len(copies)

    usual = copied(lent)
    assert copied(lent) == usual and copied(other) == usual + 1 and copied(other) == usual
    assert copied(lent) == usual + 1
    lent.add_(1)
    assert copied(lent) == usual + 1 and copied(lent) == usual


def test_a_tensor_at_the_address_of_one_that_is_gone_is_another(fake: Fake) -> None:
    graphs = captured(fake, [lending(fake, torch.ones(1, 4), torch.zeros(1, 4))])
    for value in range(5):
        call = lending(fake, torch.ones(1, 4), torch.full((1, 4), float(value)))
        assert same(graphs(fake.model, call), eager(fake.model, call))
        del call


# --- what makes another graph


def test_everything_that_a_kernel_may_depend_on_makes_another_graph(fake: Fake) -> None:
    total = torch.ones(1, 4)
    calls = [
        call_of(fake, total),
        call_of(fake, total.repeat(2, 1)),
        call_of(fake, torch.ones(1, 8)),
        call_of(fake, total.double()),
        call_of(fake, total, static={"amount": 2.0}),
        call_of(fake, total, binding=replace(CPU, precision="bfloat16")),
        call_of(fake, total, binding=replace(CPU, attention="math")),
        call_of(fake, total, binding=replace(CPU, kernels="fused")),
        call_of(fake, total, binding=replace(CPU, compile=True)),
        lending(fake, total, total),
    ]
    graphs = captured(fake, calls)
    assert len(graphs) == len(calls) and graphs.replays == len(calls)
    assert len(captured(fake, calls, graphs)) == len(calls)


def test_branch_sets_and_experts_have_graphs_of_their_own(ask) -> None:
    model, request = ask("a14b")
    graphs = Graphs(StandIns())

    def pass_through(request) -> int:
        runner = Scheduler(execute=graphs)
        runner.submit(Job(model.instance, request))
        runner.run()
        return len(graphs)

    first = pass_through(replace(request, num_inference_steps=6))
    assert first == 2  # one an expert
    assert pass_through(replace(request, num_inference_steps=6, guidance_scale=1.0, guidance_scale_2=1.0)) == 4


def test_models_of_one_key_but_other_weights_do_not_share(checkpoint) -> None:
    graphs, outputs = Graphs(StandIns()), []
    for kind in ("t2v", "a14b"):
        model = loopwright.load(checkpoint(kind), device="cpu")
        request = model.request("a fox", **media_for(kind))
        job = Job(model.instance, request)
        runner = Scheduler(execute=graphs)
        runner.submit(job)
        runner.run()
        outputs.append(same(job.output, run(model.instance, request)))
    assert outputs == [True, True]


def test_another_store_has_other_modules_and_other_graphs(checkpoint) -> None:
    graphs = Graphs(StandIns())
    models = [loopwright.load(checkpoint("t2v"), device="cpu", store=Store(0)).instance for _ in range(2)]
    with torch.no_grad():
        next(models[1].part("transformer").parameters()).mul_(1.5)
    request = loopwright.load(checkpoint("t2v"), device="cpu").request("a fox", **(media_for("t2v")))
    for model in models:
        runner = Scheduler(execute=graphs)
        job = runner.submit(Job(model, request))
        runner.run()
        assert same(job.output, run(model, request))
    assert len(graphs) == 2


# --- what is refused


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (torch.ones(1, 4, dtype=torch.float64), "torch.float64"),
        (torch.ones(1, 5), r"\[1, 5\]"),
        (torch.ones(2, 4), r"\[2, 4\]"),
    ],
)
def test_a_tensor_of_another_dtype_or_shape_is_never_cast(fake: Fake, given: torch.Tensor, told: str) -> None:
    call = lending(fake, torch.ones(1, 4), torch.ones(1, 4))
    graphs = captured(fake, [call])
    call.tensors = {"total": given}
    with pytest.raises(BackendError, match=rf"takes total .*float32 \[1, 4\] on cpu.*{told}"):
        graphs(fake.model, call)
    call.tensors, call.handles = {"total": torch.ones(1, 4)}, {"lent": (given,)}
    with pytest.raises(BackendError, match=rf"takes lent .*{told}"):
        graphs(fake.model, call)
    call.handles = {"lent": (torch.ones(1, 4),) * 2}
    with pytest.raises(BackendError, match="2 tensors"):
        graphs(fake.model, call)
    call.handles = {}
    with pytest.raises(BackendError, match="takes tensors"):
        graphs(fake.model, call)


def test_an_error_while_conditioning_is_copied_leaves_none_of_it_trusted(fake: Fake) -> None:
    lent = torch.ones(1, 4)
    call = lending(fake, torch.ones(1, 4), lent)
    graphs = captured(fake, [call])
    call.handles = {"lent": (torch.ones(1, 9),)}
    with pytest.raises(BackendError):
        graphs(fake.model, call)
    call.handles = {"lent": (lent,)}
    with pytest.raises(BackendError):  # it does not know what lies there any more
        graphs(fake.model, call)


def test_a_graph_writes_to_the_pool_it_was_captured_with_and_to_no_other(fake: Fake) -> None:
    def writes(parts, *, total, pool, amount):
        pool["pages"][:1].add_(total)
        return {"total": pool["pages"][:1] * amount}

    mine, eagerly, other = ({"pages": torch.zeros(2, 4)} for _ in range(3))
    graphs = Graphs(StandIns(), after=2)
    for value in range(5):
        call, twin = (call_of(fake, torch.full((1, 4), float(value)), writes) for _ in range(2))
        call.storage, twin.storage = {"pool": mine}, {"pool": eagerly}
        graphs(fake.model, call)
        eager(fake.model, twin)
        if len(graphs) and not graphs.replays:
            mine["pages"].copy_(eagerly["pages"])  # capturing ran the step again, which adding up is not made for
    assert graphs.replays == 3 and torch.equal(mine["pages"], eagerly["pages"])
    call.storage = {"pool": other}
    with pytest.raises(BackendError, match=r"takes pool .*another pool"):
        graphs(fake.model, call)
    assert not other["pages"].any()


def test_a_step_that_looks_at_a_value_runs_eagerly_and_is_named(fake: Fake) -> None:
    def looks(parts, *, total, amount):
        return {"total": total + total.sum().item()}

    graphs = Graphs(StandIns())
    with pytest.warns(RuntimeWarning, match="looks.*not permitted when stream is capturing"):
        graphs(fake.model, call_of(fake, torch.ones(1, 4), looks))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert graphs(fake.model, call_of(fake, torch.ones(1, 4), looks))["total"].sum() == 20
    ((title, reason),) = graphs.breaks.items()
    assert title.startswith("1 x ") and "looks" in title and reason.startswith("RuntimeError: operation not permitted")
    assert len(graphs) == 0 and graphs.bytes == 0
    fake.model.changed("transformer")  # another version breaks for the same reason, and need not be tried
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphs(fake.model, call_of(fake, torch.ones(1, 4), looks))
    assert len(graphs.breaks) == 1


def test_weights_that_come_and_go_are_not_captured(checkpoint) -> None:
    model = loopwright.load(checkpoint("t2v"), device="cpu", memory="low", store=Store(0))
    request = model.request("a fox", **media_for("t2v"))
    graphs = Graphs(StandIns())
    runner = Scheduler(execute=graphs)
    with pytest.warns(RuntimeWarning, match="weights that stay where they are"):
        job = runner.submit(Job(model.instance, request))
        runner.run()
    assert job.status == "done" and len(graphs) == 0 and len(graphs.breaks) == 1


def test_only_units_worth_it_are_captured_and_only_after_so_many_eager_calls(fake: Fake) -> None:
    graphs = Graphs(StandIns(), after=3)
    encode = call_of(fake, torch.ones(1, 4), unit=Unit.ENCODE)
    sizes = []
    for _ in range(4):
        graphs(fake.model, encode)
        graphs(fake.model, call_of(fake, torch.ones(1, 4)))
        sizes.append(len(graphs))
    assert sizes == [0, 0, 1, 1] and graphs.replays == 1
    every = Graphs(StandIns(), units=tuple(Unit))
    assert len(captured(fake, [encode], every)) == 1


# --- memory


def shapes(fake: Fake, *widths: int) -> list[Call]:
    return [call_of(fake, torch.ones(1, width)) for width in widths]


def test_the_pool_longest_unused_leaves_when_graphs_hold_more_than_the_limit(fake: Fake) -> None:
    captures = StandIns()
    graphs = Graphs(captures, limit=2100)
    captured(fake, shapes(fake, 4, 5), graphs)
    assert len(graphs) == 2 and graphs.bytes == 2000 + 4 * (4 + 5)
    graphs(fake.model, shapes(fake, 4)[0])
    captured(fake, shapes(fake, 6), graphs)
    assert len(graphs) == 2 and graphs.bytes == 2000 + 4 * (4 + 6) <= 2100
    assert [capture.released for capture in captures.made] == [False, True, False]


def test_who_had_to_leave_waits_longer_before_it_is_captured_again(fake: Fake) -> None:
    graphs = Graphs(StandIns())
    call = shapes(fake, 4)[0]
    captured(fake, [call], graphs)
    assert graphs.relief() and not graphs.relief() and len(graphs) == 0 and graphs.bytes == 0
    sizes = []
    for _ in range(4):
        graphs(fake.model, call)
        sizes.append(len(graphs))
    assert sizes == [0, 0, 0, 1]


def test_who_rests_gives_everything_back_and_is_captured_again_as_soon_as_at_first(fake: Fake) -> None:
    ledger, captures = Ledger(10_000), StandIns()
    graphs = Graphs(captures, ledger=ledger)
    call = shapes(fake, 4)[0]
    for _ in range(3):
        captured(fake, [call], graphs)
        assert len(graphs) == 1 and ledger.reserved == graphs.bytes > 0
        graphs.rest()
        assert len(graphs) == 0 and ledger.reserved == graphs.bytes == 0 and captures.made[-1].released


def test_a_graph_larger_than_the_limit_runs_eagerly_and_is_named(fake: Fake) -> None:
    graphs = Graphs(StandIns(), limit=500)
    with pytest.warns(RuntimeWarning, match="the limit is"):
        captured(fake, shapes(fake, 4), graphs)
    assert len(graphs) == 0 and graphs.bytes == 0 and len(graphs.breaks) == 1


def test_steps_of_one_shape_share_a_pool(fake: Fake) -> None:
    captures, total = StandIns(), torch.ones(1, 4)
    calls = [call_of(fake, total), call_of(fake, total.repeat(3, 1)), call_of(fake, total, static={"amount": 2.0})]
    captured(fake, calls, Graphs(captures))
    assert len(captures.made) == 1 and captures.made[0].followed == 3


def test_the_ledger_knows_what_graphs_hold_and_gets_it_back(fake: Fake) -> None:
    ledger = Ledger(10_000)
    graphs = Graphs(StandIns(), ledger=ledger)
    captured(fake, shapes(fake, 4, 5), graphs)
    assert ledger.reserved == graphs.bytes == 2036
    fake.model.changed("transformer")
    assert ledger.reserved == graphs.bytes == 0
    captured(fake, shapes(fake, 4), graphs)
    assert ledger.reserved == graphs.bytes == 1016
    assert graphs.relief() and ledger.reserved == 0


def test_without_room_in_the_ledger_others_leave_first_then_the_step_runs_eagerly_until_there_is(fake: Fake) -> None:
    ledger = Ledger(2500)
    graphs = Graphs(StandIns(), ledger=ledger)
    captured(fake, shapes(fake, 4, 5), graphs)
    captured(fake, shapes(fake, 6), graphs)
    assert len(graphs) == 2 and ledger.reserved == graphs.bytes
    graphs.relief()
    assert ledger.reserve("request", Need(2000, 0))
    call = shapes(fake, 7)[0]
    captures = graphs._capture.made
    captured(fake, [call], graphs)
    assert len(graphs) == 0 and not graphs.breaks and ledger.reserved == 2000
    before = len(captures)
    for _ in range(8):
        graphs(fake.model, call)
    assert len(captures) == before, "captured in vain although the ledger says how much is missing"
    ledger.refund("request")
    graphs(fake.model, call)
    assert len(graphs) == 1 and ledger.reserved == graphs.bytes


def test_a_scheduler_in_need_of_memory_gets_that_of_the_graphs(fake: Fake) -> None:
    ledger = Ledger(3000)
    graphs = Graphs(StandIns(), ledger=ledger)
    captured(fake, shapes(fake, 5, 6), graphs)
    runner = Scheduler(execute=graphs, relief=graphs.relief, ledger=ledger, need=lambda job: Need(2500, 100))
    job = runner.submit(Job(fake.model, fake.request()))
    runner.run()
    assert job.status == "done" and ledger.reserved == graphs.bytes


# --- weights and lifetimes


def test_a_change_of_weights_removes_the_graphs_of_that_component_alone(checkpoint) -> None:
    model = loopwright.load(checkpoint("a14b"), device="cpu", store=Store(0))
    request = model.request("a fox", **(media_for("a14b") | {"num_inference_steps": 6}))
    graphs = Graphs(StandIns())

    def generated() -> Job:
        runner = Scheduler(execute=graphs)
        job = runner.submit(Job(model.instance, request))
        runner.run()
        return job

    before = generated().output
    assert len(graphs) == 2
    with torch.no_grad():
        next(model.instance.part("transformer_2").parameters()).mul_(1.5)
    model.instance.changed("transformer_2")
    assert len(graphs) == 1
    model.instance.changed("vae")
    assert len(graphs) == 1
    job = generated()
    assert len(graphs) == 2 and same(job.output, run(model.instance, request)) and not same(job.output, before)


def test_graphs_keep_their_weights_in_place_and_let_them_go(fake: Fake) -> None:
    resident = fake.model._resident("transformer")
    graphs = captured(fake, shapes(fake, 4, 5))
    assert resident.kept == 2
    graphs.relief()
    assert resident.kept == 0
    captured(fake, shapes(fake, 6), graphs)
    fake.model.changed("transformer")
    assert resident.kept == 0


def test_nothing_of_a_request_stays_but_the_graphs(ask) -> None:
    model, request = ask("t2v")
    graphs = Graphs(StandIns())

    def watched() -> list[weakref.ref]:
        runner = Scheduler(execute=graphs)
        job = runner.submit(Job(model.instance, request))
        gone = [weakref.ref(job)]
        while job.pending() is not None and not job.ended:
            gone += [weakref.ref(tensor) for tensor in job.slots.values()]
            runner.step()
        runner.run()
        return gone

    for _ in range(2):
        gone = watched()
        gc.collect()
        assert len(gone) > 4 and not any(ref() is not None for ref in gone)
    held = graphs.bytes
    watched()
    assert graphs.bytes == held


def test_a_store_keeps_no_graphs_alive(fake: Fake) -> None:
    graphs = weakref.ref(captured(fake, shapes(fake, 4)))
    gc.collect()
    assert graphs() is None
    fake.model.changed("transformer")


def test_threads_share_graphs(fake: Fake) -> None:
    graphs, wrong = Graphs(StandIns()), []

    def work(seed: int) -> None:
        for i in range(30):
            call = lending(fake, torch.full((1, 4 + i % 2), float(seed * i)), torch.full((1, 4 + i % 2), float(seed)))
            if not same(graphs(fake.model, call), eager(fake.model, call)):
                wrong.append((seed, i))
            if i % 10 == 9:
                graphs.relief()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and graphs.replays > 0
