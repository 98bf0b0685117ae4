"""Flow-GRPO: steps that led to better samples than others of their prompt become likelier, within a trust region.

    ratio = exp(log_prob - log_prob of the rollout)
    loss = max(-A ratio, -A clip(ratio, 1 - clip, 1 + clip)) + kl KL(to the network before training)

A row is one step of one sample, by the very op that the rollout ran, with the sample in place of the noise. Log-probs
and divergences are means over the latents' elements, so `clip` is for models whose latents are large: with few
elements ratios move more, and it must be larger.

Options: `guard` takes from the logarithm of the ratio its bias, brings all steps to one scale and divides by their
length; `divergence` masks rows, instead of clipping, that have gone too far and would go further.
Deliberately absent: a value network, entropy. Sources: Flow-GRPO, Liu et al. 2025 (arXiv 2505.05470); GRPO-Guard, Wang
et al. 2025 (arXiv 2510.22319); divergence proximal policy optimisation, 2026 (arXiv 2602.04879).
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from ...card import whole
from ...errors import RequestError
from ...loops.denoise import denoise_step
from ...request import KERNELS
from ...sampling.stochastic import divergence
from .batch import Batch, Losses, Material, Moment
from .policy import Example, Reference, Sample, conditioning, taught

CLIP, GUARDED = 1e-4, 3e-6
FIRST = 2  # of a row's numbers, where those of the sampler begin: weights of latents and velocity, deviation


@dataclass(frozen=True, slots=True)
class Settings:
    """How far a policy may go in an epoch, and from where training began.

    Attributes:
        clip: of the ratio, to both sides; None is 1e-4, and 3e-6 with `guard`.
        advantage_clip: the largest advantage that counts.
        kl: what the divergence from the network before training weighs; 0 computes none.
        timesteps: the share of the steps that drew noise to learn from, drawn for each sample.
        divergence: the largest from the rollout's policy, instead of a clipped ratio; None: clips.
    """

    clip: float | None = None
    advantage_clip: float = 5.0
    kl: float = 0.04
    timesteps: float = 1.0
    guard: bool = False
    divergence: float | None = None

    def __post_init__(self) -> None:
        if self.clip is None:
            object.__setattr__(self, "clip", GUARDED if self.guard else CLIP)
        for name, fits, what in (
            ("clip", self.most > 0, "above 0"),
            ("advantage_clip", self.advantage_clip > 0, "above 0"),
            ("kl", self.kl >= 0, "at least 0"),
            ("timesteps", 0 < self.timesteps <= 1, "above 0, at most 1"),
            ("divergence", self.divergence is None or self.divergence > 0, "above 0"),
        ):
            if not fits:
                raise RequestError(f"grpo.{name} must be {what}", value=getattr(self, name))

    @property
    def most(self) -> float:
        """How far a ratio may lie from 1."""
        assert self.clip is not None, "settled when it was made"
        return self.clip


class Grpo:
    """The method of `METHODS["grpo"]`."""

    sampler, noisy = "flow_sde", True
    usual: Mapping[str, str | int | float] = MappingProxyType({"num_inference_steps": 10})

    def __init__(self, settings: Settings, material: Material, *, adapters: bool) -> None:
        self._settings, self._attention, self._roles = settings, material.attention, material.roles
        assert material.asked is not None, "a plan has resolved it"
        self._steps, self._train_steps = (
            material.asked.num_inference_steps,
            whole(material.card.settings, "train_steps"),
        )
        self._reference = Reference(material.parameters, adapters=adapters) if settings.kl else None

    def sampling(self) -> AbstractContextManager[None]:
        """The weights as they are."""
        return nullcontext()

    def renew(self, steps: int) -> None:
        """Nothing: who samples is who is trained."""

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """Nothing: what the network was comes from its own files."""
        return {}

    def examples(self, sample: Sample, source: torch.Generator) -> Sequence[Example]:
        """The steps that drew noise, or a share of them."""
        asked = sample.request
        assert asked.noise_start is not None and asked.noise_steps is not None
        drew = range(asked.noise_start, asked.noise_start + asked.noise_steps)
        steps = [index for index in taught(sample.moves, self._roles) if index in drew]
        order = torch.randperm(len(steps), generator=source)
        count = math.ceil(len(steps) * self._settings.timesteps)
        return [self._example(sample, steps[place]) for place in sorted(order[:count].tolist())]

    def losses(self, networks: Mapping[str, nn.Module], batch: Batch, moment: Moment) -> Losses:
        """The losses of steps [B], with what trust regions are watched by."""
        network, row = networks[str(batch.static["model"])], batch.tensors["row"][:, FIRST:]
        kept = 0.0 if self._reference is None else self._towards(network, batch)
        log_prob, mean = self._recomputed(network, batch)
        drift = divergence(mean, _old_mean(batch), row)
        change = log_prob - batch.tensors["log_prob"]
        policy, ratio, masked = self._policy(batch, change, drift)
        anchor = divergence(mean, kept, row) if isinstance(kept, torch.Tensor) else torch.zeros_like(policy)
        rows = policy + self._settings.kl * anchor
        logs = self._logs(batch, change.detach(), ratio.detach(), drift.detach(), anchor.detach())
        return Losses(rows, logs if masked is None else logs | {"masked": masked.float()})

    def held_out(self, networks: Mapping[str, nn.Module], batch: Batch, draw: int, draws: int) -> Losses:
        """Never asked: a policy is judged by its rewards."""
        raise AssertionError("rollouts hold no batches out")

    def _example(self, sample: Sample, index: int) -> Example:
        move = sample.moves[index]
        assert move.log_prob is not None
        here = move.rows["row"][:, 0]
        ahead = sample.moves[index + 1].rows["row"][:, 0] if index + 1 < len(sample.moves) else torch.zeros_like(here)
        rows = {**move.rows, **move.lent, "sample": move.after, "log_prob": move.log_prob}
        step = torch.full_like(here, index)
        return Example({**rows, "span": (here - ahead) / self._train_steps, "step": step}, move.static)

    def _recomputed(self, network: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-probs [B] of the samples and the steps' means, by the rollout's op."""
        known = {name: batch.tensors[name] for name in ("latents", "row", "sample")}
        lent = {name: (tensor,) for name, tensor in conditioning(batch).items()}
        static = {**batch.static, "attention": self._attention, "kernels": KERNELS}  # which have a backward pass
        made = denoise_step({str(static["model"]): network}, **known, **lent, **static)  # type: ignore[arg-type]
        return made["log_prob"], made["mean"]

    def _towards(self, network: nn.Module, batch: Batch) -> torch.Tensor:
        assert self._reference is not None
        with self._reference.standing_in(network):
            return self._recomputed(network, batch)[1]

    def _policy(
        self, batch: Batch, change: torch.Tensor, drift: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The losses [B] without the anchor, the ratios, and which rows are masked, where any may be."""
        most = self._settings.advantage_clip
        advantage = batch.tensors["advantage"].clamp(-most, most)
        scale = torch.ones_like(change)
        if self._settings.guard:
            change, scale = (change + drift) * batch.tensors["row"][:, FIRST + 2], 1 / batch.tensors["span"]
        ratio = change.exp()
        plain = -advantage * ratio
        if self._settings.divergence is not None:
            masked = ((advantage > 0) == (ratio > 1)) & (drift.detach() > self._settings.divergence)
            return torch.where(masked, 0, plain) * scale, ratio, masked
        clipped = -advantage * ratio.clamp(1 - self._settings.most, 1 + self._settings.most)
        return torch.maximum(plain, clipped) * scale, ratio, None

    def _logs(
        self, batch: Batch, change: torch.Tensor, ratio: torch.Tensor, drift: torch.Tensor, anchor: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        clip = self._settings.most
        spread = ratio[: batch.real].std(correction=0) if batch.real else ratio.new_zeros(())
        logs = {
            "ratio": ratio,
            "ratio_std": spread.expand_as(ratio),
            "clip_high": (ratio > 1 + clip).float(),
            "clip_low": (ratio < 1 - clip).float(),
            "approx_kl": change.square() / 2,
            "old_divergence": drift,
            "kl": anchor,
        }
        nothing = torch.full_like(ratio, math.nan)
        for index in range(self._steps):
            at = batch.tensors["step"] == index
            logs[f"logp_abs_diff/step_{index}"] = torch.where(at, change.abs(), nothing)
        return logs


def _old_mean(batch: Batch) -> torch.Tensor:
    """Where the rollout's policy would have gone on average: the sample without its noise."""
    std = batch.tensors["row"][:, FIRST + 2].view(-1, *[1] * (batch.tensors["sample"].ndim - 1))
    return batch.tensors["sample"] - std * batch.tensors["noise"]
