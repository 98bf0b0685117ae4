"""Loops without a model: they count, wait, fail and misbehave, so that the engine can be tested by itself."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from loopwright.card import Card, Component, Program, Recipe, Stage
from loopwright.engine.instance import Instance, Resident, Store
from loopwright.engine.prices import Prices
from loopwright.loop import Binding, Ref, Result, Step, Tensors, Unit, Wait
from loopwright.models import wan
from loopwright.program import resolve
from loopwright.request import Request

TASK = "text_to_video"
DEFAULTS = {**wan.KNOWN[0].defaults[TASK], "height": 16, "width": 16, "num_frames": 1}


class Generous(Prices):
    """Prices by which a larger call always pays."""

    def rows(self, label: str, waiting: int, limit: int) -> int:
        return min(waiting, limit)


class Boom(Exception):
    """What a fake op raises."""


def add(parts: Mapping[str, object], *, total: torch.Tensor, amount: float) -> Tensors:
    """One more."""
    return {"total": total + amount, "seen": total.sum(1), "finite": total.isfinite().all(1)}


def add_lent(
    parts: Mapping[str, object], *, total: torch.Tensor, lent: tuple[torch.Tensor, ...], amount: float
) -> Tensors:
    """One more, and what is lent."""
    return {"total": total + amount + torch.cat(lent), "seen": total.sum(1), "finite": total.isfinite().all(1)}


def fail(parts: Mapping[str, object], *, total: torch.Tensor, amount: float) -> Tensors:
    """Fails with a large tensor in a local variable and another one in the error it is raised from."""
    big = total + 1
    try:
        raise KeyError(_hold(big))
    except KeyError as error:
        raise Boom("the op failed") from error


def _hold(tensor: torch.Tensor) -> str:
    return str(tensor.shape)


@dataclass(frozen=True, slots=True)
class CountState:
    """How far, and the sum so far."""

    binding: Binding
    done: int
    total: torch.Tensor
    lent: bool = False


@dataclass(frozen=True)
class Count:
    """`steps` additions starting from the seed; the step of index `fails` (from 0) fails; `emits` each sum."""

    semantics: str = "count/v1"
    steps: int = 3
    slot: str = "latents"
    fails: int = -1
    emits: bool = False
    width: int = 4
    state_type = CountState

    def init(self, request: Request, inputs: Tensors, env: Instance) -> CountState:
        total = torch.full((1, self.width), float(request.seed))
        return CountState(env.binding, 0, total, "given" in inputs)

    def next(self, state: CountState) -> Step | Wait | None:
        if state.done == self.steps:
            return None
        op = fail if state.done == self.fails else add_lent if state.lent else add
        handles = {"lent": Ref("given")} if state.lent and op is not fail else {}
        return Step(op, ("transformer",), state.binding, {"total": state.total}, handles, {"amount": 1.0}, Unit.DENOISE,
                    ("seen",) if op is not fail else (), "count" if op is not fail else "")  # fmt: skip

    def advance(self, state: CountState, result: Result) -> tuple[CountState, Tensors]:
        total = result.tensors["total"]
        return CountState(state.binding, state.done + 1, total, state.lent), {self.slot: total} if self.emits else {}

    def feed(self, state: CountState, port: str, item: Tensors | None) -> CountState:
        raise ValueError(f"no port {port!r}")

    def outlook(self, state: CountState) -> Sequence[tuple[Unit, int]]:
        return [(Unit.DENOISE, self.steps - state.done)]

    def finish(self, state: CountState) -> Tensors:
        return {self.slot: state.total}


@dataclass(frozen=True, slots=True)
class ReceiveState:
    """Items that came in, and the sum of those already added."""

    binding: Binding
    total: torch.Tensor
    items: tuple[float, ...] = ()
    closed: bool = False


@dataclass(frozen=True)
class Receive:
    """Adds what is fed to its port "in" until it is closed."""

    semantics: str = "receive/v1"
    state_type = ReceiveState

    def init(self, request: Request, inputs: Tensors, env: Instance) -> ReceiveState:
        return ReceiveState(env.binding, torch.zeros(1, 4))

    def next(self, state: ReceiveState) -> Step | Wait | None:
        if state.items:
            return Step(add, ("transformer",), state.binding, {"total": state.total}, {}, {"amount": state.items[0]},
                        Unit.DENOISE)  # fmt: skip
        return None if state.closed else Wait("in")

    def advance(self, state: ReceiveState, result: Result) -> tuple[ReceiveState, Tensors]:
        return ReceiveState(state.binding, result.tensors["total"], state.items[1:], state.closed), {}

    def feed(self, state: ReceiveState, port: str, item: Tensors | None) -> ReceiveState:
        if port != "in":
            raise ValueError(f"no port {port!r}")
        items = state.items if item is None else (*state.items, float(item["amount"]))
        return ReceiveState(state.binding, state.total, items, state.closed or item is None)

    def outlook(self, state: ReceiveState) -> Sequence[tuple[Unit, int]]:
        return [(Unit.DENOISE, len(state.items))]

    def finish(self, state: ReceiveState) -> Tensors:
        return {"latents": state.total}


@dataclass
class Fake:
    """A model of fake loops, one stage each, in order; every stage writes its slot and reads `reads`."""

    loops: Sequence[object]
    writes: Sequence[tuple[str, ...]] = ()
    reads: Sequence[tuple[str, ...]] = ()
    model: Instance = field(init=False)

    def __post_init__(self) -> None:
        writes = self.writes or [("latents",)] * len(self.loops)
        reads = self.reads or [()] * len(self.loops)
        stages = tuple(
            Stage(f"stage{i}", f"loop{i}", reads[i], writes[i], ("transformer",)) for i in range(len(self.loops))
        )
        table = {f"{loop.semantics}.{i}": loop for i, loop in enumerate(self.loops)}
        card = Card(
            "fake", "fake", {"transformer": Component("fake.Net", dtype="float32")},
            {f"loop{i}": name for i, name in enumerate(table)}, {TASK: Program(stages, (), {"latents": writes[-1][0]})},
            {TASK: DEFAULTS}, {"size_multiple": 16, "frame_stride": 4, "experts": ("transformer",)},
            Recipe(assumes=tuple(table)),
        )  # fmt: skip
        self.model = Instance(card, table, Store(), device="cpu", locate=lambda card, component: None)
        self.model._residents["transformer"] = Resident(("fake",), torch.nn.Identity())

    def request(self, seed: int = 0, **changes: object) -> Request:
        """A request of this model; `seed` is where the counting begins."""
        return resolve(self.model.card, prompt="", seed=seed, output="latents", **changes)
