"""Requests that lease pages: what they compute, alone and together, and that nothing of it stays."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import leasing
import loopwright
from fakes import Boom, Generous
from leasing import Skip, Tokens, Video, leased, plain_skip, plain_tokens, plain_video, served
from loopwright.caches.pool import page_bytes
from loopwright.engine import saved
from loopwright.engine.calibrate import choose_rows
from loopwright.engine.events import Stepped
from loopwright.engine.execute import eager
from loopwright.engine.graphs import Graphs
from loopwright.engine.instance import Resident, Store
from loopwright.engine.job import Job
from loopwright.engine.ledger import Ledger, Need
from loopwright.engine.merge import prove
from loopwright.engine.prices import Prices
from loopwright.engine.runner import Interleaved, Serial
from loopwright.engine.scheduler import Scheduler
from loopwright.engine.sizes import _sized, outline
from loopwright.errors import BackendError, CapacityError, StaleError
from loopwright.loop import Unit, Window, key_of
from standin_capture import StandIns
from support import finished, run, same

SEEDS = (1, 2, 3, 5)  # prompts of 3, 4, 5 and 2 tokens
LOOPS = {"tokens": Tokens(), "video": Video(), "skip": Skip()}
PLAIN = {
    "tokens": lambda seed: plain_tokens(seed, Tokens().count),
    "video": lambda seed: plain_video(seed, Video().chunks, Video().window),
    "skip": lambda seed: plain_skip(seed, Skip().steps),
}
CLOSE = 1e-6  # of values around 1: sums over masked places are ordered otherwise


def requests(fake, seeds=SEEDS, **changes):
    return [fake.request(seed, **changes) for seed in seeds]


def together(fake, wanted, runner):
    """The outputs of requests that run at once; nothing stays leased."""
    jobs = [runner.submit(Job(fake.model, request)) for request in wanted]
    runner.run()
    assert [job.error for job in jobs if job.error] == []
    assert leased(fake.model) == 0
    return [job.output for job in jobs]


@pytest.mark.parametrize("kind", LOOPS)
def test_cached_equals_recomputed(kind):
    fake = served(LOOPS[kind])
    for seed in range(6):
        made, plain = run(fake.model, fake.request(seed))["latents"], PLAIN[kind](seed)
        assert made.shape == plain.shape and float((made - plain).abs().max()) < CLOSE
        if kind == "tokens":
            assert torch.equal(made.argmax(-1), plain.argmax(-1))
    assert leased(fake.model) == 0


@pytest.mark.parametrize("window", [Window(1), Window(3), Window(2, 2), Window(0, 1)])
def test_a_window_of_any_size_equals_attention_over_those_chunks(window):
    fake = served(Video(window=window))
    made = run(fake.model, fake.request(7))["latents"]
    assert float((made - plain_video(7, Video().chunks, window)).abs().max()) < CLOSE


@pytest.mark.parametrize("kind", LOOPS)
def test_interleaved_requests_are_bit_identical_to_serial_ones(kind):
    fake = served(LOOPS[kind])
    serial = together(fake, requests(fake), Serial())
    assert all(map(same, together(fake, requests(fake), Interleaved()), serial))
    assert all(map(same, together(fake, requests(fake), Scheduler(prices=Generous())), serial))


@pytest.mark.parametrize("kind", LOOPS)
def test_a_shared_call_of_different_lengths_equals_each_alone(kind):
    fake = served(LOOPS[kind])
    runner, alone = Scheduler(prices=Generous()), together(fake, requests(fake), Serial())
    shared = together(fake, requests(fake, mode="throughput"), runner)
    assert runner.merger.rows == 4 * runner.merger.calls > 0
    for a, b in zip(shared, alone, strict=True):
        assert float((a["latents"] - b["latents"]).abs().max()) < CLOSE


@pytest.mark.parametrize("kind", LOOPS)
def test_fixed_rows_are_bit_identical_whoever_shares_the_call(kind):
    fake = served(LOOPS[kind])
    wanted = requests(fake, range(6), mode="fixed", rows=4)
    alone = [together(fake, [request], Scheduler(prices=Generous()))[0] for request in wanted]
    runner = Scheduler(prices=Generous())
    assert all(map(same, together(fake, wanted, runner), alone)) and runner.merger.rows > runner.merger.calls
    late = Scheduler(prices=Generous())
    jobs = []
    for request in wanted:
        jobs.append(late.submit(Job(fake.model, request)))
        late.step()
        late.step()
    late.run()
    assert all(same(job.output, output) for job, output in zip(jobs, alone, strict=True))


def pending(fake, seed=2, steps=3, **changes):
    """A request under way, and its next call."""
    job = Job(fake.model, fake.request(seed, **changes))
    for _ in range(steps):
        job.step()
    return job, job.pending()


def test_proving_a_key_writes_to_nobodys_pages_and_sees_what_rows_write():
    fake = served(Tokens())
    job, call = pending(fake, mode="fixed", rows=4)
    before = {name: tensor.clone() for name, tensor in call.storage["kv"].items()}
    prove(fake.model, call, 4)
    assert all(
        torch.equal(tensor.nan_to_num(), before[name].nan_to_num()) for name, tensor in call.storage["kv"].items()
    )

    def leaky(parts, **arguments):
        made = leasing.next_token(parts, **arguments)
        arguments["kv"]["v"][arguments["kv_pages"][:, 0].long()] += arguments["kv_length"].sum()
        return made

    call.step = replace(call.step, op=leaky)
    with pytest.raises(BackendError, match="neighbours"):
        prove(fake.model, call, 4)
    assert job.status == "running"


def test_lengths_do_not_split_keys_but_kinds_of_pages_and_widths_do():
    fake, keys = served(Tokens()), set()
    for seed in SEEDS:
        keys |= {pending(fake, seed, steps)[1].key for steps in range(1, 8)}
    assert len(keys) == 1
    others = [Tokens(page=2), Tokens(limit=60)]
    assert len(keys | {pending(served(loop))[1].key for loop in others}) == 3
    assert pending(served(Tokens(limit=30)))[1].key != pending(served(Tokens(limit=33)))[1].key
    assert pending(served(Tokens(limit=30)))[1].key[1:] == pending(served(Tokens(limit=32)))[1].key[1:]


def test_the_storage_of_a_call_is_the_pool_itself_shared_by_all_requests():
    fake = served(Tokens())
    (_, a), (_, b) = pending(fake, 1), pending(fake, 2)
    assert all(a.storage["kv"][name] is b.storage["kv"][name] for name in ("k", "v"))
    assert not a.handles and set(a.tensors) == {"tokens", "kv_pages", "kv_length"}
    assert a.key == key_of(a.step, fake.model.version, {})


@pytest.mark.parametrize("kind", LOOPS)
def test_captured_steps_write_to_the_pool_itself_and_give_the_same_bits(kind):
    fake, graphs = served(LOOPS[kind]), Graphs(StandIns(), units=(Unit.DENOISE, Unit.TOKEN, Unit.CHUNK))
    expected = together(fake, requests(fake), Serial())
    assert all(map(same, together(fake, requests(fake), Scheduler(execute=graphs)), expected))
    assert graphs.replays > 10 and not graphs.breaks


@pytest.mark.parametrize("kind", LOOPS)
def test_a_step_may_be_asked_for_and_run_any_number_of_times(kind):
    fake = served(LOOPS[kind])
    job = Job(fake.model, fake.request(3))
    while (call := job.pending()) is not None:
        held = leased(fake.model)
        again = job.pending()
        assert call.key == again.key and same(call.tensors, again.tensors)
        first, second = eager(fake.model, call), eager(fake.model, again)
        assert same(first, second) and leased(fake.model) == held
        job.run(again)
    assert same(job.output, run(fake.model, fake.request(3)))


def test_an_op_that_spoils_what_it_may_write_and_raises_leaves_its_retry_correct():
    fake = served(Tokens(op=leasing.failing_token))
    leasing.FAILING.clear()
    expected = run(fake.model, fake.request(2))
    job = Job(fake.model, fake.request(2))
    while (call := job.pending()) is not None:
        leasing.FAILING.append("once")
        with pytest.raises(Boom):
            eager(fake.model, call)
        job.run(job.pending())
    assert same(job.output, expected)


def test_a_shared_call_that_fails_after_it_wrote_is_run_again_in_halves_and_costs_nobody_anything():
    fake = served(Tokens(op=leasing.failing_token))
    leasing.FAILING.clear()
    wanted = requests(fake, mode="throughput")
    expected = together(fake, wanted, Scheduler(prices=Generous()))
    runner = Scheduler(prices=Generous())
    jobs = [runner.submit(Job(fake.model, request)) for request in wanted]
    while runner.step():
        shared = sum(job.status == "running" for job in jobs) == len(jobs) and all(
            len(job.state.logits) > 2 for job in jobs
        )
        if shared and not leasing.FAILING:
            leasing.FAILING.append("once")
    leasing.FAILING.clear()
    for job, output in zip(jobs, expected, strict=True):
        assert job.error is None and float((job.output["latents"] - output["latents"]).abs().max()) < CLOSE
    assert leased(fake.model) == 0


@pytest.mark.parametrize("kind", LOOPS)
def test_cancelling_at_any_step_gives_the_pages_back_within_one_step_and_harms_nobody(kind):
    fake = served(LOOPS[kind])
    expected, steps = run(fake.model, fake.request(1)), 0
    while True:
        job, other = Job(fake.model, fake.request(2)), Job(fake.model, fake.request(1))
        for _ in range(steps):
            job.step()
            other.step()
        call, held = job.pending(), leased(fake.model)
        if call is None:
            break
        eager(fake.model, call)  # in the middle of a step: it has written, and nobody will hear of it
        job.cancel()
        job.step()
        assert job.status == "cancelled" and not job.leases
        mine = held - leased(fake.model)
        assert mine > 0
        assert same(finished(other), expected) and leased(fake.model) == 0
        steps += 1
    assert steps > 5


def test_a_thousand_finished_cancelled_and_failed_requests_leave_nothing():
    fake = served(Tokens(count=3, op=leasing.failing_token))
    leasing.FAILING.clear()
    ended = {"done": 0, "cancelled": 0, "failed": 0}
    for batch in range(50):
        jobs = [Job(fake.model, fake.request(20 * batch + i)) for i in range(20)]
        runner = Interleaved()
        for job in jobs:
            runner.submit(job)
        for i, job in enumerate(jobs):
            runner.step()
            if i % 3 == 0:
                job.cancel()
            elif i % 3 == 1:
                leasing.FAILING.append("once")
        runner.run()
        leasing.FAILING.clear()
        for job in jobs:
            ended[job.status] += 1
            assert not job.leases
    assert sum(ended.values()) == 1000 and min(ended.values()) > 100, ended
    assert leased(fake.model) == 0 and len(list(fake.model.store.pools)) == 1


def test_a_job_that_is_dropped_without_ending_leaves_nothing():
    fake = served(Tokens())
    job, call = pending(fake)
    assert leased(fake.model) > 0
    del job, call
    assert leased(fake.model) == 0


def test_leases_end_with_their_stage():
    fake = leasing.Fake([Tokens(), Video()], [("logits",), ("latents",)], [(), ("logits",)])
    fake.model._residents["transformer"].part = leasing.net()
    events, seen = [], []
    job = Job(fake.model, fake.request(1), listener=events.append)
    while not job.ended:
        seen.append(tuple(lease.pool.page.tokens for lease in job.leases.values()))
        job.step()
    assert set(seen) == {(), (4,), (3,)} and leased(fake.model) == 0
    assert sum(isinstance(event, Stepped) for event in events) == Tokens().count + 2 * Video().chunks


def test_a_pool_too_small_fails_the_request_that_asks_for_more_and_no_other():
    page = page_bytes(pending(served(Tokens()))[1].step.leases["kv"].page)
    fake = served(Tokens(), pool_bytes=5 * page)
    expected = run(fake.model, fake.request(3))
    runner = Interleaved()
    jobs = [runner.submit(Job(fake.model, fake.request(seed))) for seed in (2, 3)]
    runner.run()
    assert [job.status for job in jobs] == ["failed", "done"] and same(jobs[1].output, expected)
    assert isinstance(jobs[0].error, CapacityError) and "'1 needed, 0 free'" in str(jobs[0].error)
    assert leased(fake.model) == 0


def test_new_weights_void_what_was_computed_by_that_component_and_nothing_else():
    fake = served(Tokens())
    stale, other = pending(fake)[0], served(Tokens())
    kept = pending(other)[0]
    fake.model.changed("transformer")
    stale.step()
    assert stale.status == "failed" and isinstance(stale.error, StaleError) and "transformer" in str(stale.error)
    assert leased(fake.model) == 0
    assert same(finished(kept), run(other.model, other.request(2)))
    assert finished(Job(fake.model, fake.request(2)))["latents"].shape == (1, 9, leasing.VOCABULARY)


# --- saved and continued


def save_at_every_step(fake, seed, folder):
    job, paths = Job(fake.model, fake.request(seed)), []
    while not job.ended:
        paths.append(folder / f"{len(paths):03}.job")
        saved.save(job, paths[-1])
        job.step()
    assert job.error is None
    return paths, job.output


@pytest.mark.parametrize("kind", LOOPS)
def test_a_request_continued_after_any_step_ends_the_same(kind, tmp_path):
    fake = served(LOOPS[kind])
    paths, expected = save_at_every_step(fake, 4, tmp_path)
    elsewhere = served(LOOPS[kind])
    elsewhere.model.store.pools.limit = 2**18
    blocker = pending(elsewhere, 1)[0]  # others' pages lie where ours lay
    for path in paths:
        job = saved.restore(elsewhere.model, path)
        assert same(finished(job), expected), path.name
    blocker.cancel()
    blocker.step()
    assert leased(elsewhere.model) == 0
    half = load_file(paths[len(paths) // 2])
    assert any(name.startswith("leases/") for name in half)


RESUME = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
torch.set_num_threads(1)
from leasing import Tokens, Video, Skip, served
from loopwright.engine.saved import restore
from support import finished
for kind, folder in zip(("tokens", "video", "skip"), sys.argv[1:]):
    fake = served({"tokens": Tokens, "video": Video, "skip": Skip}[kind]())
    for path in sorted(Path(folder).glob("*.job")):
        save_file(dict(finished(restore(fake.model, path))), path.with_suffix(".out"))
"""


def test_a_request_continued_in_a_fresh_process_ends_the_same(tmp_path):
    expected = {}
    for kind, loop in LOOPS.items():
        (tmp_path / kind).mkdir()
        paths, output = save_at_every_step(served(loop), 4, tmp_path / kind)
        expected |= dict.fromkeys(paths, output)
    python = os.pathsep.join([str(Path(loopwright.__file__).parents[1]), str(Path(__file__).parents[1])])
    command = [sys.executable, "-c", RESUME, *(str(tmp_path / kind) for kind in LOOPS)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": python}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for path, output in expected.items():
        assert same(load_file(path.with_suffix(".out")), output), path


def test_a_saved_request_is_not_continued_under_weights_that_changed_meanwhile(tmp_path):
    fake = served(Tokens())
    job, _ = pending(fake)
    saved.save(job, tmp_path / "job")
    fake.model.changed("transformer")
    again = saved.restore(fake.model, tmp_path / "job")
    again.step()
    assert isinstance(again.error, StaleError)


def test_a_saved_request_that_finds_no_pages_says_so_and_takes_none(tmp_path):
    fake = served(Tokens())
    job, _ = pending(fake, steps=8)
    saved.save(job, tmp_path / "job")
    small = served(Tokens(), pool_bytes=2 * page_bytes(job.leases["past"].pool.page))
    with pytest.raises(CapacityError, match="needed, 2 free"):
        saved.restore(small.model, tmp_path / "job")
    assert leased(small.model) == 0


# --- known before it runs


def sized(fake, request):
    """What the request needs. The outline of a fake has no files to read its modules' shapes from."""
    without_storage = outline(fake.model)
    without_storage._residents["transformer"] = Resident(("fake",), leasing.net().to("meta"))
    return _sized(Job(without_storage, request))


@pytest.mark.parametrize("kind", LOOPS)
def test_what_a_request_leases_is_part_of_what_it_needs_and_the_pool_is_not(kind):
    fake = served(LOOPS[kind], pool_bytes=2**26)
    need = sized(fake, fake.request(2))
    job, most = Job(fake.model, fake.request(2)), 0
    while not job.ended:
        most = max(most, sum(lease.bytes for lease in job.leases.values()))
        job.step()
    assert 0 < most <= need.resident < most + 2**14 and need.peak < 2**20


def test_a_request_that_no_pool_will_ever_hold_is_refused_before_it_runs():
    page = page_bytes(pending(served(Tokens()))[1].step.leases["kv"].page)
    with pytest.raises(CapacityError, match=r"2 pages on meta .*'1 needed, 0 free'"):
        fake = served(Tokens(), pool_bytes=2 * page)
        sized(fake, fake.request(2))


def test_idle_pages_are_nobodys_memory_and_leased_ones_their_requests():
    fake, ledger = served(Tokens(), pool_bytes=2**16), Ledger(2**20)
    ledger.set_aside("pools", lambda: fake.model.store.pools.idle_bytes("cpu"))
    assert ledger.room == 2**20
    job, _ = pending(fake)
    held = sum(lease.bytes for lease in job.leases.values())
    assert 0 < held < 2**16 and ledger.room == 2**20 - 2**16 + held
    assert ledger.reserve("a", Need(held, 0)) and not ledger.reserve("b", Need(2**20 - 2**16 + 1, 0))


def test_calibration_measures_on_pages_of_its_own_and_gives_them_back():
    fake = served(Tokens())
    bystander, expected = pending(fake, 3)[0], run(fake.model, fake.request(3))
    others, calls = leased(fake.model), []

    def execute(model, call):
        calls.append(call)
        assert leased(model) > others
        return eager(model, call)

    assert choose_rows(fake.model, fake.request(1), Prices(), 2, execute) in (1, 2) and calls
    assert same(finished(bystander), expected) and leased(fake.model) == 0


def test_a_store_gives_pools_the_bytes_it_was_told():
    assert Store(0, pool_bytes=123).pools.limit == 123
