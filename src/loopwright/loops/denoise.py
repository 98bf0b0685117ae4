"""The denoising loop of flow-matching models: forward, guidance and solver update are one op.

    Denoise(solver="unipc", velocity=wan.velocity, settings=card.settings)

A family gives its `velocity` adapter; everything else is shared. A request's schedule, guidance and solver become one
table of numbers on the host in float64, and a step reads its row: [timestep, guidance scale, solver coefficients].
A stochastic sampler's noise is an input of the step. Conditioning stays in the request's slots and is lent to the op.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from ..backends.registry import KERNELS as ALL_KERNELS
from ..backends.registry import load
from ..card import Value, whole
from ..errors import RequestError
from ..loop import Binding, Env, Ref, Result, Step, Tensors, Unit
from ..request import ATTENTION, KERNELS, Request
from ..sampling import solvers, stochastic
from ..sampling.guidance import Guidance, guided
from ..sampling.schedules import Schedule, euler_flow, first_step, unipc_flow
from .common import Handle, finite, rows
from .noise import draw, levels, with_noise

TEXT, NEGATIVE, SOURCE = "prompt_embeds", "negative_embeds", "source"
NOISE = "noise"
Velocity = Callable[..., torch.Tensor]
Update = Callable[[torch.Tensor, torch.Tensor, solvers.History, torch.Tensor], tuple[torch.Tensor, solvers.History]]


@dataclass(frozen=True)
class Solver:
    """A schedule, a coefficient table for it, and the update that reads a row of the table.

    `stepper` names a stochastic one's of `sampling.stochastic`.
    """

    semantics: str
    schedule: Callable[..., Schedule]
    update: Update
    remembers: bool
    stepper: str = ""

    def table(self, sigmas: NDArray[np.float32], order: int, start: int) -> NDArray[np.float64]:
        return solvers.unipc_table(sigmas, order=order, start=start) if self.remembers else solvers.euler_table(sigmas)

    def history(self, x: torch.Tensor, order: int) -> solvers.History:
        return solvers.unipc_history(x, order) if self.remembers else solvers.euler_history(x)


SOLVERS = {
    "euler": Solver("flow_euler.cfg/v1", euler_flow, solvers.euler_update, remembers=False),
    "unipc": Solver("flow_unipc.cfg/v1", unipc_flow, solvers.unipc_update, remembers=True),
} | {
    stepper: Solver(f"{stepper}.cfg/v1", euler_flow, stochastic.stochastic_update, remembers=False, stepper=stepper)
    for stepper in stochastic.STEPPERS
}


def update_of(solver: str, kernels: str) -> Update:
    """The solver's update; as one kernel where kernels are fused, which those of stochastic samplers never are."""
    name = f"{solver}_update"
    fused = kernels != KERNELS and name in ALL_KERNELS
    return cast(Update, load(name)) if fused else SOLVERS[solver].update


def denoise_step(
    parts: Mapping[str, torch.nn.Module],
    *,
    latents: torch.Tensor,
    row: torch.Tensor,
    text: Handle,
    negative: Handle = (),
    model: str,
    velocity: Velocity,
    solver: str,
    guidance: Guidance,
    attention: str = ATTENTION,
    kernels: str = KERNELS,
    **more: torch.Tensor | Handle,
) -> dict[str, torch.Tensor]:
    """One step of one expert: latents float32 [B, C, T, H, W] at a row's sigma -> at the next.

    `more` holds the solver's history or a stochastic one's noise (tensors) and the family's conditioning (handles),
    passed on to `velocity`. Training gives the recorded `sample` in place of the noise, and differentiates `log_prob`.
    """
    history = {name: item for name, item in more.items() if isinstance(item, torch.Tensor)}
    conditioning = {name: item for name, item in more.items() if isinstance(item, tuple)}
    forward = Forward(parts[model], velocity, attention, kernels, conditioning)
    v = forward.guided(latents, row, text, negative, guidance)
    after, remembered = update_of(solver, kernels)(latents, v, history, row[:, 2:])
    return {"latents": after, "finite": finite(after), **remembered}


@dataclass(frozen=True, slots=True)
class Forward:
    """A network's velocity under guidance, with what stays the same from branch to branch."""

    part: torch.nn.Module
    velocity: Velocity
    attention: str
    kernels: str
    conditioning: Mapping[str, Handle]

    def guided(
        self, latents: torch.Tensor, row: torch.Tensor, text: Handle, negative: Handle, guidance: Guidance
    ) -> torch.Tensor:
        """The velocity [B, C, T, H, W] at a row's timestep and guidance scale."""
        conditioning = {name: rows(item) for name, item in self.conditioning.items()}

        def branch(embeds: torch.Tensor, copies: int, scale: torch.Tensor | None) -> torch.Tensor:
            x, t, extra = (
                (latents, row[:, 0], conditioning)
                if copies == 1
                else (
                    torch.cat([latents] * copies),
                    row[:, 0].repeat(copies),
                    {name: torch.cat([item] * copies) for name, item in conditioning.items()},
                )
            )
            if scale is not None:
                extra = {**extra, "guidance": scale}
            return self.velocity(self.part, x, t, embeds, attention=self.attention, kernels=self.kernels, **extra)

        return guided(guidance, branch, rows(text), rows(negative) if negative else None, row[:, 1])


@dataclass(frozen=True, slots=True)
class DenoiseState:
    """`table` float32 [N, K] on the model's device; `experts` and `guidance` per step; `slots` are lent to the op.

    `history` of a stochastic sampler is the noise of the step at `index`, drawn from `seed`.
    """

    binding: Binding
    index: int
    latents: torch.Tensor
    history: dict[str, torch.Tensor]
    table: torch.Tensor
    experts: tuple[str, ...]
    guidance: tuple[str, ...]
    slots: dict[str, str]
    seed: int


@dataclass(frozen=True)
class Denoise:
    """`settings`: channels, spatial_stride, frame_stride, train_steps, solver_order, experts, boundary, guidance."""

    solver: str
    velocity: Velocity
    settings: Mapping[str, Value]
    state_type = DenoiseState

    @property
    def semantics(self) -> str:
        """What weights may assume of this loop."""
        return SOLVERS[self.solver].semantics

    def init(self, request: Request, inputs: Tensors, env: Env) -> DenoiseState:
        request = with_noise(request, SOLVERS[self.solver].stepper)
        schedule, start = self._schedule(request, SOURCE in inputs)
        generator = torch.Generator("cpu").manual_seed(request.seed)
        noise = torch.randn(self._shape(request), generator=generator, dtype=torch.float32)
        x = noise.to(env.binding.device)
        if SOURCE in inputs:
            x = solvers.mixed(inputs[SOURCE], x, float(schedule.sigmas[start]))
        experts, scales = self._experts(request, schedule)
        order = whole(self.settings, "solver_order")
        solver = SOLVERS[self.solver]
        table = np.column_stack([schedule.timesteps, scales, self._coefficients(request, schedule, order, start)])
        named = {TEXT: "text", NEGATIVE: "negative"}
        return DenoiseState(
            env.binding,
            start,
            x,
            {NOISE: draw(request.seed, start, x)} if solver.stepper else dict(solver.history(x, order)),
            torch.from_numpy(table).float().to(env.binding.device),
            experts,
            tuple(self._kind(request, scale) for scale in scales),
            {named.get(slot, slot): slot for slot in inputs if slot != SOURCE},
            request.seed,
        )

    def _schedule(self, request: Request, from_source: bool) -> tuple[Schedule, int]:
        with np.errstate(all="ignore"):
            schedule = SOLVERS[self.solver].schedule(
                request.num_inference_steps, shift=request.flow_shift, train_steps=whole(self.settings, "train_steps")
            )
        if not np.isfinite(schedule.sigmas).all():
            raise RequestError("no steps come of that flow_shift", value=request.flow_shift, remedy="nearer to 1")
        return schedule, first_step(schedule, request.strength) if from_source else 0

    def _coefficients(self, request: Request, schedule: Schedule, order: int, start: int) -> NDArray[np.float64]:
        solver = SOLVERS[self.solver]
        if solver.stepper:
            levels_of = levels(request, len(schedule.timesteps))
            return stochastic.stochastic_table(solver.stepper, schedule.sigmas, levels_of)
        try:
            return solver.table(schedule.sigmas, order, start)
        except ValueError as error:
            raise RequestError(
                f"the {self.solver} solver has no steps for flow_shift {request.flow_shift} and that many steps",
                value=request.num_inference_steps,
                remedy="give a flow_shift nearer to 1, or fewer num_inference_steps",
            ) from error

    def _shape(self, request: Request) -> tuple[int, int, int, int, int]:
        stride = whole(self.settings, "spatial_stride")
        frames = (request.num_frames - 1) // whole(self.settings, "frame_stride") + 1
        return 1, whole(self.settings, "channels"), frames, request.height // stride, request.width // stride

    def _experts(self, request: Request, schedule: Schedule) -> tuple[tuple[str, ...], NDArray[np.float64]]:
        """The expert and the guidance scale of each step: the first above the boundary, the second below it."""
        names = self.settings["experts"]
        assert isinstance(names, tuple)
        boundary = self.settings.get("boundary")
        if boundary is None:
            return (str(names[0]),) * len(schedule.timesteps), np.full(len(schedule.timesteps), request.guidance_scale)
        assert isinstance(boundary, float) and request.guidance_scale_2 is not None
        high = schedule.timesteps >= np.float32(boundary * whole(self.settings, "train_steps"))
        scales = np.where(high, request.guidance_scale, request.guidance_scale_2)
        return tuple(str(names[0 if above else 1]) for above in high), scales

    def _kind(self, request: Request, scale: float) -> str:
        """A scale of exactly 1 is the conditional forward alone, whichever expert it belongs to.

        Branches one after the other are the reference's way, and exact mode's; else they are rows of one forward.
        """
        if request.guidance_scale <= 1 or scale == 1:
            return "none"
        merged = self.settings["guidance"] == "serial" and request.mode != "exact"
        return "batched" if merged else str(self.settings["guidance"])

    def next(self, state: DenoiseState) -> Step | None:
        i = state.index
        if i == len(state.experts):
            return None
        kind, expert = state.guidance[i], state.experts[i]
        return Step(
            denoise_step,
            (expert,),
            state.binding,
            {"latents": state.latents, "row": state.table[i : i + 1], **state.history},
            {name: Ref(slot) for name, slot in state.slots.items() if name != "negative" or kind != "none"},
            {
                "model": expert,
                "velocity": self.velocity,
                "solver": self.solver,
                "guidance": kind,
                "attention": state.binding.attention,
                "kernels": state.binding.kernels,
            },
            Unit.DENOISE,
            finite=f"denoising step {i + 1} of {len(state.experts)}",
        )

    def advance(self, state: DenoiseState, result: Result) -> tuple[DenoiseState, Tensors]:
        tensors = result.tensors
        return DenoiseState(
            state.binding,
            state.index + 1,
            tensors["latents"],
            self._remembered(state, tensors),
            state.table,
            state.experts,
            state.guidance,
            state.slots,
            state.seed,
        ), {}

    def _remembered(self, state: DenoiseState, tensors: Tensors) -> dict[str, torch.Tensor]:
        if NOISE not in state.history:
            return {name: tensors[name] for name in state.history}
        index = state.index + 1
        return {NOISE: draw(state.seed, index, tensors["latents"])} if index < len(state.experts) else state.history

    def feed(self, state: DenoiseState, port: str, item: Tensors | None) -> DenoiseState:
        raise ValueError(f"{self.semantics} has no port {port!r}")

    def outlook(self, state: DenoiseState) -> Sequence[tuple[Unit, int]]:
        return [(Unit.DENOISE, len(state.experts) - state.index)]

    def finish(self, state: DenoiseState) -> Tensors:
        return {"latents": state.latents}
