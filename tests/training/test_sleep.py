"""Training and serving take turns on a device: how much is on it, who is away when, and that no bit tells."""

import functools
import sys
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from learnt import WAN
from safetensors.torch import load_file

import clip_scorer
from loopwright import rewards
from loopwright.distributed.shard import local
from loopwright.engine.residence import size_of, tensors_of
from loopwright.engine.store import Store
from loopwright.rewards.served import Served
from loopwright.training import live, session
from loopwright.training.run import Evaluation
from loopwright.training.sleep import Offloaded
from loopwright.training.trainer import Trainer

pytestmark = pytest.mark.usefixtures("plotless")

SERVING = ("text", "vae")


@dataclass(eq=False)
class Home:
    """A component on a device that counts; what is away holds NaN, so that nothing can be computed with it."""

    module: torch.nn.Module
    device: "Device"
    exclusive: bool = False
    kept: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        return 0 if self.kept else sum(map(size_of, tensors_of(self.module)))

    def bring(self) -> None:
        for tensor, data in self.kept.items():
            tensor.data = data
        self.kept = {}
        self.device.look()

    def send(self) -> int:
        freed = self.bytes
        self.kept = {tensor: tensor.data for tensor in tensors_of(self.module)}
        for tensor in self.kept:
            tensor.data = torch.full_like(tensor.data, torch.nan if tensor.is_floating_point() else 0)
        return freed

    def changed(self) -> None: ...


class Device:
    """A stand-in: what homes and the trainer have on it, and the most in each phase."""

    def __init__(self) -> None:
        self.homes: list[Home] = []
        self.idle: list[torch.Tensor] = []
        self.phase, self.peaks = "update", {"update": 0, "rollout": 0}

    def home(self, module: torch.nn.Module, device: str, layered: bool) -> Home:
        self.homes.append(Home(module, self))
        self.look()
        return self.homes[-1]

    def look(self) -> None:
        state = sum(tensor.untyped_storage().nbytes() for tensor in self.idle)
        now = sum(home.bytes for home in self.homes) + state
        self.peaks[self.phase] = max(self.peaks[self.phase], now)


@pytest.fixture
def device(monkeypatch) -> Device:
    """What a run is on: it looks at every update, and whenever a component comes."""
    device = Device()
    real_update, real_serving, real_init = Trainer._update, live.Turns.serving, Trainer.__init__

    def update(self, rate):
        device.look()
        real_update(self, rate)

    def init(self, *args, **named):
        real_init(self, *args, **named)
        device.idle = [local(tensor) for tensor in self.idle()]

    @contextmanager
    def phase(turns):
        with real_serving(turns):
            device.phase = "rollout"
            device.look()
            try:
                yield
            finally:
                device.look()
        device.phase = "update"

    monkeypatch.setattr(live, "Store", functools.partial(Store, 0, homes=device.home))
    monkeypatch.setattr(Trainer, "_update", update)
    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr(live.Turns, "serving", phase)
    return device


@pytest.fixture
def run_with(rollout_of, checkpoint, tmp_path):
    def make(sleep: str, **settings):
        return rollout_of(
            model=str(checkpoint("t2v")), rollout={"rows": 2, "parameters": WAN}, sleep=sleep,
            output=str(tmp_path / sleep), **settings,
        )  # fmt: skip

    return make


def finished(run, device: Device) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    """The weights that a run leaves, and the most bytes on its device in each phase."""
    device.homes, device.peaks = [], {"update": 0, "rollout": 0}
    assert session.train(run).finished
    return load_file(Path(run.output) / "model/transformer/diffusion_pytorch_model.safetensors"), device.peaks


def test_sleeping_changes_no_bit_and_the_peak_of_each_phase_falls_by_what_is_away(run_with, device):
    settings = {
        "ema": 0.9,
        "evaluation": Evaluation(every=2, draws=1),
        "parallel": "replicate",
        "checkpoints": {"every": 4},
    }
    (whole, all_here), (slept, without_serving), (both, turns) = (
        finished(run_with(sleep, **settings), device) for sleep in ("nobody", "serving", "both")
    )
    served = [home for home in device.homes if not isinstance(home.module, device.homes[0].module.__class__)]
    serving = sum(sum(map(size_of, tensors_of(home.module))) for home in served)
    idle = sum(map(size_of, device.idle))
    assert len(served) == 2 and idle == 3 * sum(map(size_of, device.homes[0].module.parameters()))
    assert all_here["update"] - without_serving["update"] == serving > 0
    assert without_serving["rollout"] == all_here["rollout"] == all_here["update"]
    assert without_serving["rollout"] - turns["rollout"] == idle and turns["update"] == without_serving["update"]
    for name, tensor in whole.items():
        assert torch.equal(tensor, slept[name]) and torch.equal(tensor, both[name])


def test_what_is_away_comes_back_as_it_was_and_takes_no_memory_meanwhile():
    tensors = [torch.randn(3, 5), torch.randn(7).to(torch.bfloat16), torch.randn(4, 2, 3, 3).transpose(0, 1)]
    before = [tensor.clone() for tensor in tensors]
    away = Offloaded(tensors)
    assert away.send() == sum(map(size_of, tensors)) and away.send() == 0
    assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
    for _ in range(2):
        away.bring()
        assert all(torch.equal(*pair) for pair in zip(tensors, before, strict=True))


def test_what_was_away_is_back_when_sampling_fails(run_with, device, monkeypatch):
    def broken(self, *given, **named):
        assert not any(tensor.untyped_storage().nbytes() for tensor in device.idle)
        raise RuntimeError("no samples")

    monkeypatch.setattr(session.Rollouts, "epoch", _within(broken))
    with pytest.raises(RuntimeError, match="no samples"):
        session.train(run_with("both"))
    assert all(tensor.untyped_storage().nbytes() for tensor in device.idle)


def _within(function):
    def epoch(self, epoch):
        with self._live.serving("broken"):
            function(self)

    return epoch


def test_a_served_scorer_leaves_too_and_scores_the_same_when_it_is_asked_again(tmp_path):
    import loopwright

    device = Device()
    folder = clip_scorer.build(tmp_path)
    model = loopwright.load(str(folder), device="cpu", store=Store(homes=device.home))
    score = rewards.Composite({"clip": (Served(model), 1.0), "other": (lambda s: [1.0], 1.0)})
    sample = [rewards.Sample("a fox", torch.randint(0, 255, (1, 32, 32, 3), dtype=torch.uint8))]
    first = score(sample)
    assert sum(home.bytes for home in device.homes) > 0
    score.sleep()
    assert sum(home.bytes for home in device.homes) == 0
    assert score(sample) == first and first[0] is not None


def test_continuing_a_run_may_change_who_sleeps(rollout_of):
    run = rollout_of(sleep="nobody", epochs=1)
    session.train(run)
    assert session.train(replace(run, epochs=2, sleep="both")).step == 4


def test_networks_in_training_stay_whatever_has_to_make_room(run_with, device, monkeypatch):
    """As a request does that has run out of memory."""
    real = session.Rollouts.sample

    def sample(self, epoch, serving):
        sampled = real(self, epoch, serving)
        (instance,) = self._live._instances.values()
        assert instance.store.release("cpu", sys.maxsize) > 0
        away = {type(home.module).__name__ for home in device.homes if not home.bytes}
        assert away == {"UMT5EncoderModel", "AutoencoderKLWan"}
        return sampled

    monkeypatch.setattr(session.Rollouts, "sample", sample)
    assert session.train(run_with("nobody", epochs=1, parallel="replicate")).finished
