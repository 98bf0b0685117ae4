"""How latents came to be: every denoising step of a request as it was computed, for whoever learns from it.

    (result,) = model.run_all([request], recorded=True)
    for move in result.trajectory.moves:
        rows = {name: tensor for name, tensor in move.rows.items() if name != "noise"}
        lent = {name: (tensor,) for name, tensor in move.lent.items()}
        move.op(parts, **rows, sample=move.after, **lent, **move.static)["log_prob"]        # move.log_prob again

Nothing is copied: latents are those that the loop passed on, conditioning is what the request's steps were lent.
Which of the moves drew noise stands in the request (`noise_start`, `noise_steps`), as do `mode` and `rows` of their
calls. Deliberately absent: steps of encoders and decoders.
"""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ..loop import Key, Op, Result, Step, Tensors, Unit

if TYPE_CHECKING:
    from ..engine.job import Job


@dataclass(frozen=True, slots=True)
class Move:
    """One denoising step.

    Attributes:
        op: what computed it.
        rows: its row tensors: `latents` float32 [1, C, T, H, W], `row` [1, K] (timestep, guidance scale, coefficients)
            and, of a stochastic sampler, `noise`.
        lent: its conditioning by the op's names, [1, ...] each; equal prompts share one tensor.
        after: the latents it gave, float32.
        log_prob: of these, [1]; 0 where nothing was drawn, None of a sampler that never draws.
        static: the expert, its forward, guidance and kernels.
        versions: of the weights it ran with, by component.
    """

    op: Op
    rows: Tensors
    lent: Tensors
    after: torch.Tensor
    log_prob: torch.Tensor | None
    static: Mapping[str, Hashable]
    versions: Mapping[str, int]


@dataclass(slots=True)
class Trajectory:
    """The moves of one request, in order. Observes its job."""

    moves: list[Move] = field(default_factory=list)

    def on_step(self, job: "Job", step: Step, key: Key, result: Result) -> None:
        """Keep a denoising step."""
        if step.unit is Unit.DENOISE:
            made, lent = result.tensors, {name: job.slots[ref.slot] for name, ref in step.handles.items()}
            versions = {name: job.model.version(name) for name in step.uses}
            after, found = made["latents"], made.get("log_prob")
            self.moves.append(Move(step.op, step.tensors, lent, after, found, step.static, versions))
