"""Regional compilation: what is compiled, for whom, and how close it stays. Inductor itself is slow: `-m slow`."""

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import loopwright
from loopwright.api import Model
from loopwright.backends import compile as compiling
from loopwright.backends.compile import compile_blocks, repeated_blocks, require_compiler, why_not_compile
from loopwright.backends.device import Probe
from loopwright.engine.graphs import Graphs
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.engine.scheduler import Scheduler
from loopwright.errors import BackendError, RequestError
from standin_capture import StandIns
from support import media_for, relative, same

BOUND = 1e-5  # relative, float32: fusion changes the order of sums, nothing else


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[torch.fx.GraphModule]:
    """Blocks are traced as for compiling, and run as they were traced; gives each form of them."""
    made: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: object) -> torch.fx.GraphModule:
        made.append(module)
        return module

    compile_ = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: compile_(self, backend=backend, **options))
    torch._dynamo.reset()
    return made


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Module]:
    """Nothing is compiled; gives the blocks that would be."""
    blocks: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **options: blocks.append(self))
    return blocks


def small(model: Model, **changes: object) -> object:
    return model.request("a fox", **(media_for("t2v") | {"output": "latents", "num_inference_steps": 2} | changes))


def test_one_form_serves_all_blocks_and_each_shape_and_choice_gets_its_own(checkpoint, traced) -> None:
    plain = loopwright.load(checkpoint("t2v"), device="cpu")
    model = loopwright.load(checkpoint("t2v"), device="cpu", compile=True)
    requests = [small(model), small(model, attention="math"), small(model, height=48)]
    for count, request in enumerate(requests, 1):
        latents = model.run(request).latents
        assert relative(latents, plain.run(request).latents) <= BOUND
        assert len(traced) == count
    model.run(requests[0])
    assert len(traced) == 3


def test_more_forms_than_torch_keeps_are_compiled_all_the_same_in_any_thread(checkpoint, traced) -> None:
    model = loopwright.load(checkpoint("t2v"), device="cpu", compile=True)
    requests = [small(model, height=16 * (i + 2), width=16, num_frames=1, num_inference_steps=1) for i in range(10)]
    thread = threading.Thread(target=lambda: list(map(model.run, requests)))
    thread.start()
    thread.join()
    assert len(traced) == 10


def test_compiled_blocks_are_captured_as_any(checkpoint, traced) -> None:
    model = loopwright.load(checkpoint("t2v"), device="cpu", compile=True)
    graphs, jobs = Graphs(StandIns()), []
    for _ in range(2):
        runner = Scheduler(execute=graphs)
        jobs.append(runner.submit(Job(model.instance, small(model))))
        runner.run()
    assert graphs.replays == 3 and not graphs.breaks
    assert same(jobs[0].output, jobs[1].output)
    assert torch.equal(jobs[0].output["latents"], model.run(small(model)).latents)


def test_every_block_of_every_expert_is_compiled_and_nothing_else(checkpoint, untraced) -> None:
    model = loopwright.load(checkpoint("a14b"), device="cpu", compile=True)
    for name in model.card.components:
        model.instance.part(name)
    experts = [model.instance.part(name) for name in ("transformer", "transformer_2")]
    assert untraced == [block for expert in experts for block in expert.blocks]


def test_a_compiled_and_a_plain_model_share_everything_but_the_generator(checkpoint, untraced) -> None:
    store = Store()
    plain = loopwright.load(checkpoint("t2v"), device="cpu", store=store).instance
    compiled, again = (
        loopwright.load(checkpoint("t2v"), device="cpu", store=store, compile=True).instance for _ in range(2)
    )
    shared = {name: plain.part(name) is compiled.part(name) for name in plain.card.components}
    assert shared == {name: name != "transformer" for name in plain.card.components}
    assert again.part("transformer") is compiled.part("transformer")
    assert plain.origin("transformer") != compiled.origin("transformer")


def test_a_compiled_step_has_a_key_of_its_own_and_the_record_says_so(checkpoint, untraced) -> None:
    plain, compiled = (loopwright.load(checkpoint("t2v"), device="cpu", compile=each) for each in (False, True))
    bindings = [model.instance.bind(small(model)) for model in (plain, compiled)]
    assert bindings[1] == replace(bindings[0], compile=True)
    records = [model.record(small(model)) for model in (plain, compiled)]
    assert records[1] == records[0] | {"compile": True} and records[0]["compile"] is False


def test_where_nothing_can_be_compiled_it_is_said_before_work_starts(checkpoint, monkeypatch) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: None)
    with pytest.raises(BackendError, match=r"cannot be compiled on cpu \(it needs a compiler: install g\+\+"):
        loopwright.load(checkpoint("t2v"), device="cpu", compile=True)


def test_each_thing_that_inductor_lacks_is_named(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compiling.shutil, "which", lambda name: name)
    monkeypatch.setattr(compiling.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    assert "headers of Python" in why_not_compile("cpu")
    (tmp_path / "Python.h").touch()
    assert why_not_compile("cpu") == ""
    monkeypatch.setattr(compiling, "probe", lambda device: Probe(device, "cuda", (9, 0)))
    assert "triton" in why_not_compile("cuda:0")
    monkeypatch.setattr(
        compiling, "probe", lambda device: Probe(device, "cuda", (9, 0), packages=frozenset({"triton"}))
    )
    assert why_not_compile("cuda:0") == ""
    with pytest.raises(BackendError, match=r"mps.*cpu or cuda"):
        require_compiler("mps")


def test_a_named_compiler_must_exist(monkeypatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert "or name one in CXX" in why_not_compile("cpu")


def test_a_module_without_named_blocks_is_refused() -> None:
    with pytest.raises(BackendError, match="Linear"):
        compile_blocks(torch.nn.Linear(2, 2))
    assert list(repeated_blocks(torch.nn.Linear(2, 2))) == []


@pytest.mark.parametrize("options", [{"compile": True}, {"graphs": "always"}])
def test_weights_that_come_and_go_are_refused_with_compiling_and_graphs(checkpoint, options: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=r"weights that stay.*memory high"):
        loopwright.load(checkpoint("t2v"), device="cpu", memory="low", **options)


def test_graphs_are_for_cuda_and_off_elsewhere(checkpoint) -> None:
    assert loopwright.load(checkpoint("t2v"), device="cpu").graphs is None
    assert loopwright.load(checkpoint("t2v"), device="cpu", graphs="never").graphs is None
    with pytest.raises(BackendError, match="CUDA device: 'cpu'"):
        loopwright.load(checkpoint("t2v"), device="cpu", graphs="always")
    with pytest.raises(RequestError, match=r"unknown graphs.*auto, always, never"):
        loopwright.load(checkpoint("t2v"), device="cpu", graphs="yes")


def test_a_model_runs_its_steps_through_its_graphs(checkpoint) -> None:
    plain = loopwright.load(checkpoint("t2v"), device="cpu")
    model = Model("tiny", plain.instance, Graphs(StandIns()))
    first, second = model.run(small(model)), model.run(small(model))
    assert model.graphs.replays == 3
    assert torch.equal(first.latents, second.latents) and torch.equal(first.latents, plain.run(small(plain)).latents)
    assert model._relief() and len(model.graphs) == 0
    assert model.rows(small(model, mode="fixed", rows=1), limit=2) in (1, 2)
    assert len(model.graphs) == 2  # rows are priced as they will run


@pytest.mark.slow
@pytest.mark.skipif(bool(why_not_compile("cpu")), reason=f"inductor cannot compile here: {why_not_compile('cpu')}")
def test_inductor_stays_close_to_eager(checkpoint) -> None:
    torch._dynamo.reset()
    plain, compiled = (loopwright.load(checkpoint("t2v"), device="cpu", compile=each) for each in (False, True))
    assert 0 < relative(compiled.run(small(compiled)).latents, plain.run(small(plain)).latents) <= BOUND
