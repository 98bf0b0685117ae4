"""A loop of independent calls, usually one: text encoders, image encoders, small tensor work between stages.

    Once("text.encode/v1", op=encode_text, part="text_encoder", prepare=tokenise)

`prepare(request, inputs, env)` returns, for each slot to write, the tensors of the call that computes it.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from ..loop import Binding, Env, Op, Result, Step, Tensors, Unit
from ..request import Request

Calls = dict[str, dict[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class OnceState:
    """`calls`: slot -> the tensors of its call; `done`: slots computed so far."""

    binding: Binding
    calls: Calls
    done: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Once:
    """One call of `op` per slot; the op returns {"out": ..., "finite": ...}. `part` is "" for an op without weights."""

    semantics: str
    op: Op
    part: str
    prepare: Callable[[Request, Tensors, Env], Calls]
    static: Mapping[str, Hashable] = field(default_factory=dict)
    unit: Unit = Unit.EMBED
    state_type = OnceState

    def init(self, request: Request, inputs: Tensors, env: Env) -> OnceState:
        return OnceState(env.binding, self.prepare(request, inputs, env), {})

    def next(self, state: OnceState) -> Step | None:
        for slot, tensors in state.calls.items():
            if slot not in state.done:
                uses = (self.part,) if self.part else ()
                return Step(self.op, uses, state.binding, tensors, {}, self.static, self.unit, finite=slot)
        return None

    def advance(self, state: OnceState, result: Result) -> tuple[OnceState, Tensors]:
        slot = next(name for name in state.calls if name not in state.done)
        return OnceState(state.binding, state.calls, {**state.done, slot: result.tensors["out"]}), {}

    def feed(self, state: OnceState, port: str, item: Tensors | None) -> OnceState:
        raise ValueError(f"{self.semantics} has no port {port!r}")

    def outlook(self, state: OnceState) -> Sequence[tuple[Unit, int]]:
        return [(self.unit, len(state.calls) - len(state.done))]

    def finish(self, state: OnceState) -> Tensors:
        return state.done
