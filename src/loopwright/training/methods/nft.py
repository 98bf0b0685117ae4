"""DiffusionNFT: the forward process tells good samples from bad ones, with no log-probs and by any solver.

    good = beta v + (1 - beta) v_old;  bad = (1 + beta) v_old - beta v;  r = (1 + clip(A, -c, c) / c) / 2
    loss = c (r E(good) + (1 - r) E(bad)) / beta + kl |v - v_ref|^2

E is the square error of the clean sample that a velocity implies, over its mean absolute error, which takes no
gradient. A row is one sample with new noise at one level of the schedule it was made by. The old policy, which samples,
follows the network after each epoch. Deliberately absent: guidance; the rollout's is used for sampling alone, and what
is trained is the conditional velocity. Source: DiffusionNFT, Zheng et al. 2025 (arXiv 2509.16117).
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn

from ...card import whole
from ...errors import RequestError
from .. import noise
from ..copies import Copy
from .batch import Batch, Losses, Material, Moment
from .policy import Example, Reference, Sample, conditioning, taught

_LEAST = 1e-5  # of the mean absolute error that errors are divided by
RAMP, HELD = 1e-3, 0.5  # how much of itself the old policy keeps: so much a step, at most


@dataclass(frozen=True, slots=True)
class Settings:
    """What the good and the bad are made of.

    Attributes:
        beta: how far they lie from the old policy, of the way to the network.
        advantage_clip: the advantage from which on a sample is all good, or all bad.
        kl: what the distance from the network before training weighs; 0 computes none.
        positive_only: learn from the good alone: a control, which collapses.
    """

    beta: float = 1.0
    advantage_clip: float = 5.0
    kl: float = 1e-4
    positive_only: bool = False

    def __post_init__(self) -> None:
        for name, fits, what in (
            ("beta", self.beta > 0, "above 0"),
            ("advantage_clip", self.advantage_clip > 0, "above 0"),
            ("kl", self.kl >= 0, "at least 0"),
        ):
            if not fits:
                raise RequestError(f"nft.{name} must be {what}", value=getattr(self, name))


class Nft:
    """The method of `METHODS["nft"]`."""

    sampler, noisy = None, False
    usual: Mapping[str, str | int | float] = MappingProxyType({"num_inference_steps": 10, "guidance_scale": 1.0})

    def __init__(self, settings: Settings, material: Material, *, adapters: bool) -> None:
        self._settings, self._material = settings, material
        self._train_steps = whole(material.card.settings, "train_steps")
        self._old = Copy(material.parameters)
        self._reference = Reference(material.parameters, adapters=adapters) if settings.kl else None

    def sampling(self) -> AbstractContextManager[None]:
        """The old policy's weights."""
        return self._old.standing_in()

    def renew(self, steps: int) -> None:
        """The old policy follows the network, the more slowly the more steps are done."""
        self._old.follow(1 - min(RAMP * steps, HELD))

    def tensors(self) -> Mapping[str, torch.Tensor]:
        """The old policy's weights."""
        return {f"old.{name}": tensor for name, tensor in self._old.tensors.items()}

    def examples(self, sample: Sample, source: torch.Generator) -> Sequence[Example]:
        """The sample at each level of its schedule."""
        moves = [sample.moves[index] for index in taught(sample.moves, self._material.roles)]
        return [
            Example({"latents": sample.latents, "row": move.rows["row"], **move.lent}, {"model": move.static["model"]})
            for move in moves
        ]

    def losses(self, networks: Mapping[str, nn.Module], batch: Batch, moment: Moment) -> Losses:
        """The losses of samples at levels [B]."""
        network, x0 = networks[str(batch.static["model"])], batch.tensors["latents"].float()
        sigma = (batch.tensors["row"][:, 0] / self._train_steps).view(-1, *[1] * (x0.ndim - 1))
        x = (1 - sigma) * x0 + sigma * self._noise(batch, moment)
        with torch.no_grad(), self._old.standing_in():
            old = self._velocity(network, x, batch)
        anchor = self._before(network, x, batch)
        new = self._velocity(network, x, batch)
        way = self._settings.beta * (new - old)
        policy = self._policy(batch, x - sigma * (old + way), x - sigma * (old - way))
        apart = torch.zeros_like(policy) if anchor is None else (new - anchor).square().flatten(1).mean(1)
        change = (new.detach() - old).square().flatten(1).mean(1)
        return Losses(policy + self._settings.kl * apart, {"kl": apart.detach(), "old_distance": change})

    def held_out(self, networks: Mapping[str, nn.Module], batch: Batch, draw: int, draws: int) -> Losses:
        """Never asked: a policy is judged by its rewards."""
        raise AssertionError("rollouts hold no batches out")

    def _policy(self, batch: Batch, good: torch.Tensor, bad: torch.Tensor) -> torch.Tensor:
        """The losses of clean samples [B, ...] as the good and the bad velocity imply them."""
        most = self._settings.advantage_clip
        share = (1 + batch.tensors["advantage"].double().clamp(-most, most) / most) / 2
        weighed = share * _error(batch, good)
        if not self._settings.positive_only:
            weighed = weighed + (1 - share) * _error(batch, bad)
        return (weighed * most / self._settings.beta).float()

    def _noise(self, batch: Batch, moment: Moment) -> torch.Tensor:
        """Each row's own, whoever computes it."""
        like = batch.tensors["latents"]
        sources = [noise.generator("nft", moment.seed, moment.step, place) for place in batch.places]
        return torch.stack([torch.randn(like.shape[1:], generator=source) for source in sources]).to(like.device)

    def _before(self, network: nn.Module, x: torch.Tensor, batch: Batch) -> torch.Tensor | None:
        if self._reference is None:
            return None
        with self._reference.standing_in(network):
            return self._velocity(network, x, batch)

    def _velocity(self, network: nn.Module, x: torch.Tensor, batch: Batch) -> torch.Tensor:
        lent = {name: tensor for name, tensor in conditioning(batch).items() if name not in ("text", "negative")}
        timestep, text = batch.tensors["row"][:, 0], batch.tensors["text"]
        v = self._material.velocity(network, x, timestep, text, attention=self._material.attention, **lent)
        return v.float()


def _error(batch: Batch, implied: torch.Tensor) -> torch.Tensor:
    """Square errors over their row's mean absolute error, float64 [B]."""
    apart = (implied - batch.tensors["latents"]).double()
    size = apart.detach().abs().flatten(1).mean(1).clamp(min=_LEAST)
    return apart.square().flatten(1).mean(1) / size
