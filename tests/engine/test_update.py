"""Weights replaced while requests run: each ends with the weights it may end with, and with no others."""

import copy
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import loopwright
from loopwright.api import Model
from loopwright.engine import saved
from loopwright.engine.graphs import Graphs
from loopwright.engine.instance import Instance
from loopwright.engine.job import Job
from loopwright.engine.scheduler import Scheduler
from loopwright.engine.store import Store
from loopwright.errors import (
    BackendError,
    CapacityError,
    CardError,
    LoopwrightError,
    RequestError,
    StateError,
    WeightsError,
)
from loopwright.request import Request
from loopwright.weights import lora, sync
from lora_files import written
from standin_capture import StandIns
from support import media_for, run, same

NAME = "transformer"


def altered(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """A module in training: a copy with other weights."""
    other = copy.deepcopy(module)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return other


@pytest.fixture
def load(checkpoint: Callable) -> Callable[..., Model]:
    """A model of its own, whose weights may change."""
    return lambda **options: loopwright.load(checkpoint("t2v"), device="cpu", **({"store": Store()} | options))


@pytest.fixture
def sources(load: Callable) -> list[torch.nn.Module]:
    """Weights of the first version, and of three more."""
    first = copy.deepcopy(load().instance.part(NAME))
    return [first, *(altered(first, seed) for seed in range(3))]


@pytest.fixture
def model(load: Callable, sources: list[torch.nn.Module]) -> Model:
    """At version 1, with weights in memory of their own: at the addresses of a file some last bits are others."""
    model = load()
    model.instance.resident(NAME).version = 0
    model.update_weights(NAME, sources[0])
    return model


@pytest.fixture
def request_(model: Model) -> Request:
    return model.request("a fox", **(media_for("t2v") | {"output": "latents"}))


@pytest.fixture
def serial(load: Callable, sources: list[torch.nn.Module]) -> Callable[[Request, int], dict[str, torch.Tensor]]:
    """What a model gives that has had these weights and no others, requests or company."""
    made: dict[int, Instance] = {}

    def outputs(request: Request, index: int) -> dict[str, torch.Tensor]:
        if index not in made:
            alone = load(store=Store(0))
            alone.update_weights(NAME, sources[index])
            made[index] = alone.instance
        return run(made[index], request)

    return outputs


def steps(runner: Scheduler, count: int) -> None:
    with torch.no_grad():
        for _ in range(count):
            runner.step()


def meanwhile(work: Callable[[], object]) -> Callable[[], object]:
    """Do it in another thread; what is returned waits for its end, and gives what it gave or raised."""
    out: list[object] = []

    def do() -> None:
        try:
            out.append(work())
        except Exception as error:
            out.append(error)

    thread = threading.Thread(target=do)
    thread.start()

    def end() -> object:
        thread.join(30)
        return out[0]

    return end


# --- who runs with which weights


def test_an_update_changes_what_is_made_and_says_which_weights_made_it(model, request_, sources, serial) -> None:
    before = model.run(request_)
    weights = model.update_weights(NAME, sources[1])
    after = model.run(request_)
    assert (weights.version, len(weights.checksum)) == (2, 32)
    assert after.record["weights"] == {NAME: {"version": 2, "checksum": weights.checksum}}
    assert before.record["weights"][NAME]["version"] == 1
    assert weights.checksum == sync.checksum(sources[1].state_dict()) != before.record["weights"][NAME]["checksum"]
    assert torch.equal(after.latents, serial(request_, 1)["latents"])
    assert not torch.equal(after.latents, before.latents)


def test_what_diffusers_computes_with_the_new_weights_is_what_comes_out(model, request_, sources, checkpoint) -> None:
    import tiny

    model.update_weights(NAME, sources[2])
    pipeline = tiny.reference(checkpoint("t2v"), "t2v")
    pipeline.transformer.load_state_dict(sources[2].state_dict())
    theirs = pipeline(
        "a fox", negative_prompt="bad", height=32, width=32, num_frames=9, num_inference_steps=3,
        max_sequence_length=32, output_type="latent", generator=torch.Generator("cpu").manual_seed(3),
    ).frames  # fmt: skip
    ours = model.run(request_).latents
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-5


def test_drained_requests_end_with_their_weights_while_others_wait_for_the_new(
    model, request_, sources, serial
) -> None:
    runner = model.scheduler()
    old = runner.submit(Job(model.instance, request_))
    steps(runner, 3)
    end = meanwhile(lambda: model.update_weights(NAME, sources[1], policy="drain"))
    while model.instance.crew._open:
        time.sleep(0.001)
    new = runner.submit(Job(model.instance, request_))
    steps(runner, 1)
    assert new.held and not old.ended
    runner.run()
    assert end().version == 2
    assert same(old.output, serial(request_, 0)) and same(new.output, serial(request_, 1))
    assert (old.weights[NAME].version, new.weights[NAME].version) == (1, 2)


def test_a_request_that_waits_for_weights_can_be_cancelled(model, request_, sources) -> None:
    runner = model.scheduler()
    with model.instance.crew.closed():
        job = runner.submit(Job(model.instance, request_))
        steps(runner, 2)
        assert job.held
        job.cancel()
        steps(runner, 2)
        assert job.status == "cancelled" and len(runner) == 0


def test_draining_gives_up_in_time_and_all_goes_on_as_before(model, request_, sources, serial) -> None:
    runner = model.scheduler()
    job = runner.submit(Job(model.instance, request_))
    steps(runner, 2)
    with pytest.raises(StateError, match=r"have not ended in 0\.01 seconds: '1 of them'"):
        model.update_weights(NAME, sources[1], seconds=0.01)
    runner.run()
    assert same(job.output, serial(request_, 0)) and model.instance.version(NAME) == 1
    abandoned = Job(model.instance, request_)
    assert abandoned.pending() is not None
    del abandoned
    assert model.update_weights(NAME, sources[1], seconds=1).version == 2


def test_requests_under_way_finish_on_a_copy_and_new_ones_take_the_new(model, request_, sources, serial) -> None:
    runner, first = model.scheduler(), model.instance
    jobs = [runner.submit(Job(model.instance, request_))]
    waiting = Job(model.instance, request_)  # made, not begun
    steps(runner, 2)
    count = len(first.store)
    for index in (1, 2):
        steps(runner, 1)
        assert model.update_weights(NAME, sources[index], policy="finish").version == index + 1
        jobs.append(runner.submit(Job(model.instance, request_)))
    jobs.append(runner.submit(waiting))
    assert len(first.store) == count + 2
    runner.run()
    for job, index in zip(jobs, (0, 1, 2, 2), strict=True):
        assert same(job.output, serial(request_, index)) and job.weights[NAME].version == index + 1
    assert len(first.store) == count and len(first.store.residence._residents) == 2
    assert model.instance is not first and first.loaded == {}


def test_frozen_requests_forbid_a_swap_unless_they_follow(model, request_, sources, serial) -> None:
    runner = model.scheduler()
    job = runner.submit(Job(model.instance, request_))
    steps(runner, 3)
    with pytest.raises(StateError, match="must end with the weights they began with: '1 of them'"):
        model.update_weights(NAME, sources[1], policy="freeze")
    runner.run()
    assert same(job.output, serial(request_, 0))
    assert model.update_weights(NAME, sources[1], policy="freeze").version == 2
    assert same(run(model.instance, request_), serial(request_, 1))


def test_a_swap_in_the_middle_gives_neither_versions_output_and_the_record_says_so(
    model, request_, sources, serial
) -> None:
    """The control: this is what the other policies are there to prevent."""
    runner = model.scheduler()
    job = runner.submit(Job(model.instance, request_, follows=True))
    steps(runner, 3)
    model.update_weights(NAME, sources[1], policy="freeze")
    runner.run()
    assert job.status == "done"
    assert not same(job.output, serial(request_, 0)) and not same(job.output, serial(request_, 1))
    record = model.result(job).record
    assert [weights[NAME]["version"] for weights in record["weights_before"]] == [1]
    assert record["weights"][NAME]["version"] == 2


def test_a_swap_waits_for_the_step_that_is_running(model, sources) -> None:
    entered, written = threading.Event(), threading.Event()

    def write() -> None:
        entered.set()
        model.update_weights(NAME, sources[1], policy="freeze")
        written.set()

    with model.instance.using((NAME,)) as parts:
        end = meanwhile(write)
        entered.wait(10)
        assert not written.wait(0.1) and torch.equal(*map(first_of, (parts[NAME], sources[0])))
    end()
    assert written.is_set() and torch.equal(*map(first_of, (parts[NAME], sources[1])))


def first_of(module: torch.nn.Module) -> torch.Tensor:
    return next(module.parameters())


# --- what else has the component, and what came of it


def test_another_model_that_shares_the_component_keeps_its_weights(checkpoint, request_, sources, serial) -> None:
    store = Store()
    one, two = (loopwright.load(checkpoint("t2v"), device="cpu", store=store) for _ in range(2))
    assert one.instance.part(NAME) is two.instance.part(NAME)
    one.update_weights(NAME, sources[1])
    assert same(run(one.instance, request_), serial(request_, 1))
    assert same(run(two.instance, request_), run(loopwright.load(checkpoint("t2v"), device="cpu").instance, request_))
    three = loopwright.load(checkpoint("t2v"), device="cpu", store=store)
    assert three.instance.part(NAME) is two.instance.part(NAME) and three.instance.version(NAME) == 1
    assert one.instance.part("vae") is two.instance.part("vae")


def test_who_loads_the_files_again_gets_what_they_hold(checkpoint, request_, sources) -> None:
    store = Store()
    one = loopwright.load(checkpoint("t2v"), device="cpu", store=store)
    expected = run(one.instance, request_)
    graphs = Graphs(StandIns())
    runner = one.scheduler(execute=graphs)
    runner.submit(Job(one.instance, request_))
    runner.run()
    assert len(graphs) == 1
    one.update_weights(NAME, sources[1])
    assert len(graphs) == 0  # what was mapped from its file has moved
    two = loopwright.load(checkpoint("t2v"), device="cpu", store=store)
    assert same(run(two.instance, request_), expected) and not same(run(one.instance, request_), expected)


@pytest.mark.parametrize("policy", ["drain", "freeze", "finish"])
def test_embeddings_of_a_frozen_text_encoder_survive_every_sync_of_the_transformer(
    model, request_, sources, policy
) -> None:
    features = model.instance.store.features
    model.run(request_)
    misses = features.misses
    for index in (1, 2, 3):
        model.update_weights(NAME, sources[index], policy=policy)
        model.run(request_)
    assert features.misses == misses and len(features) == misses
    text = altered(model.instance.part("text_encoder"), 9)
    model.update_weights("text_encoder", text, policy=policy)
    after = model.run(request_)
    assert features.misses == 2 * misses and len(features) == misses
    assert after.record["weights"]["text_encoder"]["version"] == 2


def test_graphs_outlive_weights_written_in_place_and_compute_with_the_new(model, request_, sources, serial) -> None:
    graphs = Graphs(StandIns())

    def generated() -> dict[str, torch.Tensor]:
        runner = model.scheduler(execute=graphs)
        job = runner.submit(Job(model.instance, request_))
        runner.run()
        return job.output

    generated()
    made, replays = len(graphs._capture.made), graphs.replays
    for index in (1, 2, 3):
        model.update_weights(NAME, sources[index])
        assert same(generated(), serial(request_, index))
    assert len(graphs._capture.made) == made and graphs.replays > replays and len(graphs) == 1
    model.update_weights(NAME, sources[2], policy="finish")
    assert len(graphs) == 0 and same(generated(), serial(request_, 2))


def test_replaying_a_graph_is_using_its_components(model, request_, sources) -> None:
    graphs, resident = Graphs(StandIns()), model.instance.resident(NAME)
    runner = model.scheduler(execute=graphs)
    runner.submit(Job(model.instance, request_))
    runner.run()
    (entry,) = [entry for entry in graphs._entries.values() if entry.graph is not None]
    seen, replay = [], entry.graph.replay
    entry.graph.replay = lambda call: (seen.append(resident.users), replay(call))[1]
    runner.submit(Job(model.instance, request_))
    runner.run()
    assert set(seen) == {1} and (resident.users, resident.kept) == (0, 1)


@pytest.mark.parametrize("kind", ["full", "merged", "adapter"])
def test_every_form_of_weights_arrives(kind: str, load, checkpoint, request_, tmp_path: Path) -> None:
    trained = copy.deepcopy(load().instance.part(NAME))
    file = written(tmp_path / "a.safetensors", trained)
    if kind == "full":
        trained = altered(trained, 1)
        expected, model = lambda: sync.checksum(trained.state_dict()), load()
    else:
        lora.inject(
            trained, rank=4, alpha=4, targets=(r"attn\d\.to_[qkv]", r"to_out\.0", r"ffn\.net\.0\.proj", r"ffn\.net\.2")
        )
        for name, parameter in trained.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter.data, std=0.1)
        model = load() if kind == "merged" else load(lora=file)
    weights = model.update_weights(NAME, trained)
    own = load(store=Store(0))
    own.instance.put(NAME, trained.eval())
    outputs = model.run(request_).latents, run(own.instance, request_)["latents"]
    if kind == "full":
        assert weights.checksum == expected()
    assert float((outputs[0] - outputs[1]).norm() / outputs[1].norm()) < 1e-5
    if kind != "merged":  # unmerged, the same operations in the same order
        assert torch.equal(*outputs) or kind == "full"


def test_an_adapter_that_was_merged_does_not_stay_beside_another(model, sources) -> None:
    def merged(*layers: str) -> sync.Delivery:
        state = sources[1].state_dict()
        return sync.Delivery.of("merged", {f"blocks.0.attn1.{layer}.weight": state[f"blocks.0.attn1.{layer}.weight"]
                                           for layer in layers})  # fmt: skip

    model.update_weights(NAME, merged("to_q", "to_k"))
    for policy in ("drain", "finish"):
        with pytest.raises(WeightsError, match=r"would stay so: 'blocks\.0\.attn1\.to_k\.weight'"):
            model.update_weights(NAME, merged("to_q", "to_v"), policy=policy)
        model.update_weights(NAME, merged("to_q", "to_k", "to_v"), policy=policy)
        model.update_weights(NAME, sources[0], policy=policy)
        model.update_weights(NAME, merged("to_k"), policy=policy)
        model.update_weights(NAME, merged("to_q", "to_k"), policy=policy)


def test_files_and_shared_memory_arrive_as_modules_do(model, load, request_, sources, serial, tmp_path: Path) -> None:
    sources[1].save_pretrained(tmp_path / NAME)
    model.update_weights(NAME, tmp_path)
    assert same(run(model.instance, request_), serial(request_, 1))
    with sync.shared(sync.full(sources[2]), tmp_path) as path:
        model.update_weights(NAME, path)
    assert same(run(model.instance, request_), serial(request_, 2))


# --- what is refused


@pytest.mark.parametrize(
    ("change", "error", "told"),
    [
        ({"component": "tokenizer"}, CardError, "no such component with weights: 'tokenizer'; choices: .*transformer"),
        ({"component": "engine", "source": "nowhere"}, CardError, "no such component: 'engine'"),
        ({"policy": "hurry"}, RequestError, "'hurry'; choices: drain, freeze, finish"),
        ({"version": 1}, RequestError, "larger than the present one, 1: 1"),
        ({"source": torch.nn.Linear(1, 1)}, WeightsError, "are missing"),
        ({"source": "nowhere"}, WeightsError, "no such weights"),
    ],
)
@pytest.mark.parametrize("policy", ["drain", "finish"])
def test_what_cannot_be_is_refused_and_all_is_as_it_was(model, request_, sources, change, error, told, policy) -> None:
    before, count = run(model.instance, request_), len(model.instance.store)
    given = {"component": NAME, "source": sources[1], "policy": policy} | change
    with pytest.raises(error, match=told):
        model.update_weights(given.pop("component"), given.pop("source"), **given)
    assert same(run(model.instance, request_), before) and model.instance.version(NAME) == 1
    assert len(model.instance.store) == count
    assert model.update_weights(NAME, sources[1], version=7).version == 7


def test_a_second_copy_needs_room_beside_the_requests_and_weights_that_stay(
    load, request_, sources, monkeypatch
) -> None:
    model = load()
    resident = model.instance.resident(NAME)
    monkeypatch.setattr("loopwright.engine.store.total_bytes", lambda device: 2**31)
    model.run(request_)
    ledger = model.instance.store.ledger("cpu")
    room = ledger.room
    runner = model.scheduler()
    job = runner.submit(Job(model.instance, request_))
    steps(runner, 3)
    model.update_weights(NAME, sources[1], policy="finish")
    assert ledger.room == room - resident.bytes
    runner.run()
    assert job.status == "done" and ledger.reserved == 0
    model.run(request_)
    assert ledger.room == room
    ledger.set_aside("others", room - 100)
    with pytest.raises(CapacityError, match="no room for a second copy"):
        model.update_weights(NAME, sources[2], policy="finish")
    assert model.update_weights(NAME, sources[2], policy="drain").version == 3
    low = load(memory="low")
    with pytest.raises(BackendError, match="weights that stay on the device"):
        low.update_weights(NAME, sources[1], policy="finish")
    low.update_weights(NAME, sources[1])
    assert same(run(low.instance, request_), run(low.instance, request_))


def test_weights_that_come_and_go_are_replaced_where_they_are(load, request_, sources, serial) -> None:
    low = load(memory="low")
    run(low.instance, request_)
    low.update_weights(NAME, sources[1])
    ours, theirs = run(low.instance, request_)["latents"], serial(request_, 1)["latents"]
    assert float((ours - theirs).norm() / theirs.norm()) < 1e-6  # at the odd addresses of their file


def test_a_module_of_somebody_elses_is_not_written_to(load, sources) -> None:
    model = load()
    model.instance.put(NAME, sources[1])
    with pytest.raises(StateError, match="somebody else's"):
        model.update_weights(NAME, sources[2])


def test_a_saved_job_goes_on_with_its_own_weights_alone(model, load, request_, sources, serial, tmp_path) -> None:
    model.update_weights(NAME, sources[1])
    runner = model.scheduler()
    job = runner.submit(Job(model.instance, request_))
    steps(runner, 3)
    saved.save(job, tmp_path / "job.safetensors")
    fresh = load()
    with pytest.raises(StateError, match="began with other weights than the model has now"):
        saved.restore(fresh.instance, tmp_path / "job.safetensors")
    fresh.update_weights(NAME, sources[1])
    again = saved.restore(fresh.instance, tmp_path / "job.safetensors")
    with pytest.raises(StateError, match="1 of them"):
        fresh.update_weights(NAME, sources[2], policy="freeze")
    other = fresh.scheduler()
    other.submit(again)
    other.run()
    assert same(again.output, serial(request_, 1))
    with fresh.instance.crew.closed(), pytest.raises(LoopwrightError, match="are being replaced"):
        saved.restore(fresh.instance, tmp_path / "job.safetensors")


def test_threads_that_generate_all_the_time_get_one_version_each_time(model, request_, sources, serial) -> None:
    results, stop = [], threading.Event()
    numbers = {1: 0}

    def generate() -> None:
        while not stop.is_set():
            results.append(model.run(request_))

    ends = [meanwhile(generate) for _ in range(3)]
    for number, policy in ((1, "drain"), (2, "finish"), (3, "drain"), (1, "finish"), (2, "finish"), (3, "drain")):
        count = len(results)
        numbers[model.update_weights(NAME, sources[number], policy=policy).version] = number
        while len(results) < count + 2:
            time.sleep(0.001)
    stop.set()
    assert [end() for end in ends] == [None] * 3
    seen = [result.record["weights"][NAME]["version"] for result in results]
    assert set(seen) >= set(numbers) - {1}
    for result, version in zip(results, seen, strict=True):
        assert torch.equal(result.latents, serial(request_, numbers[version])["latents"])
    assert len(model.instance.store.residence._residents) == 2
