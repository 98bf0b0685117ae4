"""A loop over chunks of time with a carry: causal video autoencoders, a latent frame a step.

    Chunked("wan_vae.decode/v1", "vae", prepare, count, open_latents, decode_chunk, 1, "frames", Unit.DECODE)

The carry (what diffusers keeps on the module) is in the state, so decodes of many requests interleave frame by frame.
Steps: one `opening` on the whole input, one `chunk` for the first frame, one for each `length` frames after it, and,
if there is one, a `closing` on all outputs. Without a closing the outputs are emitted as they come. In throughput mode,
where rounding is free, a first frame that nothing follows may have an op of its own, `alone`, which needs no memory.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..loop import Binding, Env, Op, Result, Step, Tensors, Unit
from ..request import Request

Opening = tuple[dict[str, torch.Tensor], dict[str, Hashable]]


@dataclass(frozen=True, slots=True)
class ChunkedState:
    """`opened` [B, C, T, H, W] is None until the opening ran; `carry` is the causal layers' memory.

    `single` says that `alone` computes the only chunk.
    """

    binding: Binding
    start: dict[str, torch.Tensor]
    static: dict[str, Hashable]
    opened: torch.Tensor | None
    carry: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    closed: torch.Tensor | None
    frames: int
    single: bool


@dataclass(frozen=True)
class Chunked:
    """`prepare` gives the opening's tensors, its static arguments; `frames` counts the opened input's time axis."""

    semantics: str
    part: str
    prepare: Callable[[Request, Tensors, Env], Opening]
    frames: Callable[[Mapping[str, torch.Tensor], Mapping[str, Hashable]], int]
    opening: Op
    chunk: Op
    length: int
    slot: str
    unit: Unit
    closing: Op | None = None
    alone: Op | None = None
    state_type = ChunkedState

    def init(self, request: Request, inputs: Tensors, env: Env) -> ChunkedState:
        start, static = self.prepare(request, inputs, env)
        frames = self.frames(start, static)
        single = self.alone is not None and frames == 1 and request.mode == "throughput"
        return ChunkedState(env.binding, start, static, None, {}, {}, None, frames, single)

    def next(self, state: ChunkedState) -> Step | None:
        if state.opened is None:
            return self._step(self.opening, state, state.start, state.static, "")
        done, chunks = len(state.outputs), self._chunks(state)
        if done < chunks:
            told = f"{self.slot}, step {done + 1} of {chunks}"
            first = max(0, 1 + (done - 1) * self.length)
            last = 1 + done * self.length
            op = self.alone if self.alone is not None and state.single else self.chunk
            return self._step(op, state, {"x": state.opened[:, :, first:last], **state.carry}, {}, told)
        if self.closing is not None and state.closed is None:
            return self._step(self.closing, state, state.outputs, {}, self.slot)
        return None

    def _step(self, op: Op, state: ChunkedState, tensors: Tensors, static: Mapping[str, Hashable], finite: str) -> Step:
        return Step(op, (self.part,), state.binding, tensors, {}, static, self.unit, finite=finite)

    def advance(self, state: ChunkedState, result: Result) -> tuple[ChunkedState, Tensors]:
        tensors = result.tensors
        if state.opened is None:
            return self._after(state, opened=tensors["out"], start={}), {}
        done, chunks = len(state.outputs), self._chunks(state)
        if done < chunks:
            carry = {name: item for name, item in tensors.items() if name not in ("out", "finite")}
            outputs = {**state.outputs, f"chunk_{done:04}": tensors["out"]}
            emitted = {self.slot: tensors["out"]} if self.closing is None else {}
            last = done + 1 == chunks
            return self._after(state, carry={} if last else carry, outputs=outputs), emitted
        return self._after(state, closed=tensors["out"], outputs=state.outputs), {}

    def _after(
        self,
        state: ChunkedState,
        *,
        start: dict[str, torch.Tensor] | None = None,
        opened: torch.Tensor | None = None,
        carry: dict[str, torch.Tensor] | None = None,
        outputs: dict[str, torch.Tensor] | None = None,
        closed: torch.Tensor | None = None,
    ) -> ChunkedState:
        return ChunkedState(
            state.binding,
            state.start if start is None else start,
            state.static,
            state.opened if opened is None else opened,
            state.carry if carry is None else carry,
            state.outputs if outputs is None else outputs,
            state.closed if closed is None else closed,
            state.frames,
            state.single,
        )

    def feed(self, state: ChunkedState, port: str, item: Tensors | None) -> ChunkedState:
        raise ValueError(f"{self.semantics} has no port {port!r}")

    def outlook(self, state: ChunkedState) -> Sequence[tuple[Unit, int]]:
        opening = int(state.opened is None)
        closing = int(self.closing is not None and state.closed is None)
        return [(self.unit, opening + self._chunks(state) - len(state.outputs) + closing)]

    def finish(self, state: ChunkedState) -> Tensors:
        if state.closed is not None:
            return {self.slot: state.closed}
        return {self.slot: torch.cat(list(state.outputs.values()), dim=1)}

    def _chunks(self, state: ChunkedState) -> int:
        return 1 + (state.frames - 1) // self.length
