"""A rollout's latents, step by step, and its answer as bytes of safetensors.

trajectory = Trajectory()
job = Job(instance, request, observers=[trajectory])
rollout_bytes(model.result(job), trajectory, echo)
"""

import json
from collections.abc import Mapping

import torch
from safetensors.torch import save

from ..api.result import Result
from ..engine.job import Job
from ..loop import Key, Step, Unit
from ..loop import Result as StepResult


class Trajectory:
    """Latents float32 [1, C, T, H, W] before the first denoising step and after each; timesteps, one a step."""

    def __init__(self) -> None:
        self.latents: list[torch.Tensor] = []
        self.timesteps: list[torch.Tensor] = []

    def on_step(self, job: Job, step: Step, key: Key, result: StepResult) -> None:
        """Keep what a denoising step began with and gave."""
        if step.unit is Unit.DENOISE:
            if not self.latents:
                self.latents.append(step.tensors["latents"])
            self.latents.append(result.tensors["latents"])
            self.timesteps.append(step.tensors["row"][:, 0])


def rollout_bytes(result: Result, trajectory: Trajectory | None, echo: Mapping[str, object]) -> bytes:
    """`latents`, `video` if it was asked for, `trajectory` [N + 1, C, T, H, W] and `timesteps` [N] if kept.

    The file's metadata has the result's record and what other answers say of it.
    """
    tensors = {"latents": result.latents.cpu()}
    if result.video is not None:
        tensors["video"] = torch.from_numpy(result.video)
    if trajectory is not None:
        tensors["trajectory"] = torch.cat(trajectory.latents).cpu()
        tensors["timesteps"] = torch.cat(trajectory.timesteps).cpu()
    owned = {name: tensor.contiguous() for name, tensor in tensors.items()}
    contents: bytes = save(owned, metadata={"loopwright": json.dumps(result.record), "answer": json.dumps(echo)})
    return contents
