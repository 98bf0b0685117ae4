"""Rollouts by captured graphs, on a stand-in for CUDA's: the record of eager ones, also of weights updated since."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_training_rollouts import Parts

from loopwright.distributed.shard import local, trained
from loopwright.errors import BackendError
from loopwright.training import live, plan, twins
from loopwright.training.run import Lora
from loopwright.training.session import train
from loopwright.training.sinks import table
from standin_capture import StandIn

SMALL = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 3, "max_sequence_length": 32,
         "guidance_scale": 1.0}  # fmt: skip


class Addressed(StandIn):
    """As a device's graph does, it reads weights at the addresses they had when it was recorded."""

    def __init__(self, modules: list[torch.nn.Module]) -> None:
        super().__init__()
        self._modules = modules

    def record(self, run):
        parameters = [parameter for module in self._modules for parameter in module.parameters()]
        then, recorded = [parameter.data for parameter in parameters], super().record(run)
        replay = recorded.replay

        def placed() -> None:
            now = [parameter.data for parameter in parameters]
            for parameter, data in zip(parameters, then, strict=True):
                parameter.data = data
            replay()
            for parameter, data in zip(parameters, now, strict=True):
                parameter.data = data

        recorded.replay = placed
        return recorded


class Captures:
    """Makes them for the modules that it is told of."""

    def __init__(self) -> None:
        self.modules, self.made = [], []

    def __call__(self, device: str) -> Addressed:
        self.made.append(Addressed(self.modules))
        return self.made[-1]

    @property
    def followed(self) -> int:
        """How often a recording was replayed."""
        return sum(capture.followed for capture in self.made)


@pytest.fixture
def captures(monkeypatch) -> Captures:
    """Captures for runs with graphs."""
    found = Captures()
    monkeypatch.setattr(plan, "require_capture", lambda device: None)
    monkeypatch.setattr(live, "capture_on", found)
    return found


@pytest.fixture
def run_with(rollout_of, checkpoint):
    """`run_with("always")`: a run on a transformer with attention, in shared calls."""

    def make(graphs: str, *, compiling: bool = False, **settings):
        given = {"model": str(checkpoint("t2v")), "sleep": "nobody", **settings}
        rollout = {"rows": 2, "graphs": graphs, "compile": compiling, "parameters": SMALL}
        return rollout_of(rollout=rollout, **given)

    return make


def parts_of(run, alone, captures) -> Parts:
    parts = Parts(run, alone)
    twins = parts.live._twins
    captures.modules[:] = (parts.networks if twins is None else twins.modules).values()
    return parts


def update(parts: Parts) -> None:
    with torch.no_grad():
        for parameter in trained(parts.networks).values():
            local(parameter).add_(0.01)


def records(drawn) -> list[torch.Tensor]:
    return [
        tensor
        for scored in drawn.samples
        for move in scored.sample.moves
        for tensor in (*move.rows.values(), *move.lent.values(), move.after, move.log_prob)
    ]


def same(a, b) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


@pytest.mark.parametrize(
    "settings",
    [{"precision": "bfloat16"}, {"precision": "bfloat16", "lora": Lora(rank=2)}, {"parallel": "replicate"}],
)
def test_a_captured_rollouts_record_is_the_eager_ones_also_after_an_update(run_with, alone, captures, settings):
    eager, captured = (parts_of(run_with(graphs, **settings), alone, captures) for graphs in ("never", "always"))
    assert (captured.live._twins is None) == ("replicate" in settings.values())
    before, first = (records(each.rollouts.epoch(0)) for each in (eager, captured))
    assert same(before, first) and captures.followed > 0
    update(eager)
    update(captured)
    drawn = captured.rollouts.epoch(0)
    after = records(eager.rollouts.epoch(0))
    assert same(after, records(drawn)) and not same(before, after)
    assert len(captures.made) == 1, "weights were written in place: one graph serves all"
    assert drawn.metrics["logp_gap"] == 0


@pytest.mark.parametrize("adapters", [True, False])
def test_a_twin_shares_what_is_not_trained_and_has_copies_of_the_rest(run_with, alone, captures, adapters):
    parts = Parts(run_with("always", lora=Lora(rank=2) if adapters else None), alone)
    twin = parts.live._twins.modules["transformer"]
    shared = {
        name: twin.get_parameter(name).data_ptr() == local(parameter.detach()).data_ptr()
        for name, parameter in parts.networks["transformer"].named_parameters()
    }
    assert any("lora_" in name for name in shared) == adapters
    assert all(same_place == (adapters and "lora_" not in name) for name, same_place in shared.items())


def moved(parameters) -> None:
    """New weights elsewhere."""
    for parameter in parameters:
        parameter.data = parameter.data * 1.5


@pytest.mark.parametrize("parallel", ["shard", "replicate"])
def test_a_graph_of_weights_that_have_moved_is_found_out(run_with, alone, captures, monkeypatch, parallel):
    parts = parts_of(run_with("always", parallel=parallel), alone, captures)
    parts.rollouts.epoch(0)
    module = captures.modules[0]
    if parallel == "shard":
        monkeypatch.setattr(parts.live._twins, "follow", lambda: moved(module.parameters()))
    else:
        moved(module.parameters())
    with pytest.raises(BackendError, match=r"log-probs of rollouts.*rollout\.graphs"):
        parts.rollouts.epoch(0)


@pytest.mark.parametrize("method", ["grpo", pytest.param("nft", marks=pytest.mark.slow)])
def test_a_run_with_graphs_is_the_run_without(rollout_of, captures, tmp_path, method):
    found = {}
    for graphs in ("never", "always"):
        run = rollout_of(method, output=str(tmp_path / graphs), rollout={"graphs": graphs}, sleep="nobody")
        result = train(run).result
        rows = table(Path(run.output) / "metrics.csv")
        (file,) = result.rglob("*.safetensors")
        found[graphs] = load_file(file), [row.get("loss") for row in rows]
        gaps = [row["logp_gap"] for row in rows if "logp_gap" in row]
        assert gaps == [0.0, 0.0] * (graphs == "always" and run.method == "grpo")
    (a, losses), (b, others) = found.values()
    assert captures.followed > 0 and losses == others
    assert all(torch.equal(tensor, b[name]) for name, tensor in a.items())
    train(replace(run, epochs=3, rollout=replace(run.rollout, graphs="never")))  # which is free to change


def test_what_samples_is_compiled_and_what_is_trained_is_not(run_with, alone, monkeypatch):
    compiled = []
    monkeypatch.setattr(twins, "compile_blocks", compiled.append)
    for parallel in ("shard", "replicate"):
        run = run_with("never", parallel=parallel, compiling=True)
        parts = Parts(run, alone)
        with parts.live.serving("a test", sampler="flow_sde") as model:
            assert model.instance.part("transformer") is compiled.pop() is not parts.networks["transformer"]
            assert model.instance.binding.compile and not compiled


@pytest.mark.slow
def test_compiled_rollouts_differ_by_rounding_which_is_measured(run_with, tmp_path):
    run = run_with("never", compiling=True, precision="bfloat16", grpo={"clip": 1e-2})
    train(run)
    row = table(Path(run.output) / "metrics.csv")[0]
    assert 0 < row["logp_gap"] < 1e-3 and row["ratio"] == pytest.approx(1, abs=1e-3)
    with pytest.raises(BackendError, match="log-probs of rollouts"):
        train(replace(run, output=str(tmp_path / "narrow"), grpo=replace(run.grpo, clip=1e-12)))


def test_the_autoencoder_decodes_in_the_precision_asked_for(rollout_of, checkpoint, alone):
    given = {"rows": 2, "parameters": SMALL, "dtype": {"vae": "bfloat16"}}
    parts = Parts(rollout_of(model=str(checkpoint("t2v")), rollout=given), alone)
    with parts.live.serving("a test", sampler="flow_sde") as model:
        dtypes = {name: next(model.instance.part(name).parameters()).dtype for name in ("vae", "transformer")}
    assert dtypes == {"vae": torch.bfloat16, "transformer": torch.float32}


def test_graphs_are_refused_where_there_are_none(run_with):
    with pytest.raises(BackendError, match="captured graphs need a CUDA device"):
        plan.make(run_with("always"))
    assert plan.make(run_with("auto")).run.rollout.graphs == "never"
