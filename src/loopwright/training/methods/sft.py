"""Supervised fine-tuning by flow matching: the velocity from data to noise, at a random level of noise.

    x_t = (1 - sigma) x0 + sigma eps;  target eps - x0;  loss: the mean square over a row

Levels are drawn on the model's own grid of timesteps, shifted by a shift of training's own. Of two experts, one is
trained by a part of a step: the one to which a level drawn for the whole part belongs, so every process picks the same;
then each row draws its level within that expert's range. Noise, level and caption dropout of a row depend on seed,
step and the row's place in the step, not on the process: so the number of processes changes nothing.
Source: flow matching, Lipman et al. 2022 (arXiv 2210.02747); Wan2.2's experts by noise level.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import torch
from torch import nn

from ...card import Card, experts, whole
from ...errors import RequestError
from .. import noise
from .batch import Batch, Losses, Material, Moment

OWN, PINNED = ("latent", "cond"), "first_frame"
LOGIT = "logit_normal"
BUCKETS = 10  # of the noise level, for the logs
Drawn = tuple[int, bool, torch.Tensor]
Draws = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Settings:
    """How noise levels are drawn, and what else supervised fine-tuning can be told.

    Attributes:
        sampling: of the levels; logit_normal has `logit_mean` and `logit_std`, mode has `mode_scale`.
        shift: of the grid of levels in training, whatever samples are drawn with.
        caption_dropout: the share of rows trained on the empty prompt, which guidance needs.
        min_snr: weights as if the error of the clean sample counted min(SNR, this); None: all levels count the same.
        draws: of noise and levels. "row": each row's own, on the host, whatever the number of processes; "batch": at
            once on the device, which large batches need.
    """

    sampling: Literal["uniform", "logit_normal", "mode"] = "logit_normal"
    logit_mean: float = 0.0
    logit_std: float = 1.0
    mode_scale: float = 1.29
    shift: float = 1.0
    caption_dropout: float = 0.1
    min_snr: float | None = None
    draws: Literal["row", "batch"] = "row"

    def __post_init__(self) -> None:
        for name, fits, what in (
            ("shift", self.shift > 0, "above 0"),
            ("logit_std", self.logit_std > 0, "above 0"),
            ("mode_scale", -1 <= self.mode_scale <= 1.75, "between -1 and 1.75"),
            ("caption_dropout", 0 <= self.caption_dropout <= 1, "between 0 and 1"),
            ("min_snr", self.min_snr is None or self.min_snr > 0, "above 0"),
        ):
            if not fits:
                raise RequestError(f"sft.{name} must be {what}", value=getattr(self, name))
        self._check_sampling()

    def _check_sampling(self) -> None:
        """Raise for a setting that the sampling does not read."""
        usual = {each.name: each.default for each in fields(self)}
        for name, reader in (("logit_mean", LOGIT), ("logit_std", LOGIT), ("mode_scale", "mode")):
            if self.sampling != reader and (value := getattr(self, name)) != usual[name]:
                remedy = f"leave it out, or set sft.sampling to {reader}"
                raise RequestError(
                    f"sft.{name} has no meaning under sampling {self.sampling}", value=value, remedy=remedy
                )


class Sft:
    """The method of `METHODS["sft"]`."""

    def __init__(self, settings: Settings, material: Material) -> None:
        self._settings, self._material = settings, material
        self._steps = whole(material.card.settings, "train_steps")
        self._levels, self._edges, self._ranges = reached(material.card, material.roles, settings)
        self._placed: tuple[torch.Tensor, torch.Tensor] | None = None
        self._span = min(low for low, _ in self._ranges.values()), max(high for _, high in self._ranges.values())

    def losses(self, networks: Mapping[str, nn.Module], batch: Batch, moment: Moment) -> Losses:
        """Mean square errors of the velocity [B], and the same by the bucket of the noise level."""
        role = self.role(moment)
        if self._settings.draws == "batch":
            return self._losses(networks[role], batch, self._draw_together(batch, role, moment))
        drawn = [self._draw(batch, role, moment, place) for place in batch.places]
        return self._losses(networks[role], batch, self._stacked(batch, drawn))

    def held_out(self, networks: Mapping[str, nn.Module], batch: Batch, draw: int, draws: int) -> Losses:
        """The same at one quantile of the levels, with noise of the row's own, and no caption dropped."""
        level = noise.pick(self._edges, *self._span, (draw + 0.5) / draws)
        role = self._owner(level)
        shape = batch.tensors["latent"].shape[1:]
        drawn = [
            (level, False, torch.randn(shape, generator=noise.generator("held out", name, draw)))
            for name in batch.names
        ]
        return self._losses(networks[role], batch, self._stacked(batch, drawn))

    def role(self, moment: Moment) -> str:
        """The network that this part of the step trains."""
        if len(self._ranges) == 1:
            return next(iter(self._ranges))
        anchor = noise.uniform(noise.generator("expert", moment.seed, moment.step, moment.part))
        return self._owner(noise.pick(self._edges, *self._span, anchor))

    def _owner(self, level: int) -> str:
        return next(role for role, (low, high) in self._ranges.items() if low <= level < high)

    def _draw(self, batch: Batch, role: str, moment: Moment, place: int) -> Drawn:
        """A row's level, whether it loses its caption, and its noise [C, T, H, W]."""
        source = noise.generator("row", moment.seed, moment.step, place)
        level = noise.pick(self._edges, *self._ranges[role], noise.uniform(source))
        dropped = noise.uniform(source) < self._settings.caption_dropout
        return level, dropped, torch.randn(batch.tensors["latent"].shape[1:], generator=source)

    def _draw_together(self, batch: Batch, role: str, moment: Moment) -> Draws:
        """The same of all rows at once, by a generator of the device: levels, which captions go, noise."""
        latent = batch.tensors["latent"]
        source = noise.seeded(latent.device, noise.generator("batch", moment.seed, moment.step, batch.places[:1]))
        edges, levels = self._tables(latent.device)
        low, high = self._ranges[role]
        chance = torch.rand(2, len(latent), generator=source, device=latent.device, dtype=torch.float64)
        target = edges[low] + chance[0] * (edges[high] - edges[low])
        level = (torch.searchsorted(edges, target, right=True) - 1).clamp(low, high - 1)
        eps = torch.randn(latent.shape, generator=source, device=latent.device)
        return levels[level].float(), chance[1] < self._settings.caption_dropout, eps

    def _tables(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The edges of the levels' shares and the levels, on the device."""
        if self._placed is None:
            self._placed = (torch.from_numpy(self._edges).to(device), torch.from_numpy(self._levels).to(device))
        return self._placed

    def _stacked(self, batch: Batch, drawn: list[Drawn]) -> Draws:
        device = batch.tensors["latent"].device
        sigma = torch.tensor([self._levels[level] for level, _, _ in drawn], dtype=torch.float32, device=device)
        dropped = torch.tensor([dropped for _, dropped, _ in drawn], device=device)
        return sigma, dropped, torch.stack([values for _, _, values in drawn]).to(device)

    def _losses(self, network: nn.Module, batch: Batch, draws: Draws) -> Losses:
        x0, given, material = batch.tensors["latent"].float(), batch.tensors["cond"], self._material
        sigma, dropped, eps = draws
        text = self._captions(given, dropped).to(material.compute)
        s = sigma.view(-1, 1, 1, 1, 1)
        noisy, more = (1 - s) * x0 + s * eps, self._conditions(batch)
        v = material.velocity(network, noisy, sigma * self._steps, text, attention=material.attention, **more)
        error = (v.float() - (eps - x0)).square()
        if PINNED in more:  # what stands in the place of the first frame is given, and nothing is made there
            error = error[:, :, 1:]
        rows = error.flatten(1).mean(1) * self._weights(sigma)
        return Losses(rows, buckets(rows.detach(), sigma), len(rows) * _tokens(network, x0))

    def _captions(self, given: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
        blank = self._material.blank
        if blank is None:
            assert not self._settings.caption_dropout, "who drops captions brings the empty one"
            return given
        return torch.where(dropped[:, None, None], blank.to(given.dtype), given)

    def _conditions(self, batch: Batch) -> dict[str, torch.Tensor]:
        """What the forward takes of a first frame: latents in float32 and embeddings as computed with, as served."""
        return {
            name: tensor.float() if tensor.ndim == 5 else tensor.to(self._material.compute)
            for name, tensor in batch.tensors.items()
            if name not in OWN
        }

    def _weights(self, sigma: torch.Tensor) -> torch.Tensor:
        """The error of x0 is sigma times that of the velocity, and the signal (1 - sigma)^2 / sigma^2 of the noise."""
        if self._settings.min_snr is None:
            return torch.ones_like(sigma)
        return torch.minimum((1 - sigma).square(), self._settings.min_snr * sigma.square())


def reached(
    card: Card, roles: Sequence[str], settings: Settings
) -> tuple[noise.Levels, noise.Levels, dict[str, tuple[int, int]]]:
    """The levels of training, the edges of their shares, and which of them belong to each network that is trained.

    Raises RequestError for a network for which none is ever drawn.
    """
    steps = whole(card.settings, "train_steps")
    levels = noise.grid(steps, settings.shift)
    edges = noise.shares(
        settings.sampling, steps, mean=settings.logit_mean, std=settings.logit_std, scale=settings.mode_scale
    )
    found = {role: span for role, span in ranges(card, levels).items() if role in roles}
    for role, (low, high) in found.items():
        if not edges[high] > edges[low]:
            remedy = "choose another sft.shift or sft.sampling"
            raise RequestError("no noise level is ever drawn for an expert", value=role, remedy=remedy)
    return levels, edges, found


def ranges(card: Card, levels: noise.Levels) -> dict[str, tuple[int, int]]:
    """Which of the levels belong to which expert, as serving divides them: the first has those from the boundary up."""
    names, boundary = experts(card), card.settings.get("boundary")
    if boundary is None:
        return {names[0]: (0, len(levels))}
    assert isinstance(boundary, float)
    steps = whole(card.settings, "train_steps")
    high = int(np.sum((levels * steps).astype(np.float32) >= np.float32(boundary * steps)))
    return {names[0]: (0, high), names[1]: (high, len(levels))}


def buckets(rows: torch.Tensor, sigma: torch.Tensor) -> dict[str, torch.Tensor]:
    """The losses by tenths of the noise level; NaN for rows of another."""
    bucket = (sigma * BUCKETS).long().clamp(max=BUCKETS - 1)
    nothing = torch.full_like(rows, math.nan)
    return {f"loss/sigma_{i / BUCKETS:.1f}": torch.where(bucket == i, rows, nothing) for i in range(BUCKETS)}


def _tokens(network: nn.Module, x0: torch.Tensor) -> int:
    """What the network makes of a row's latents; as many tokens as latent pixels if it has no patches."""
    patch = getattr(getattr(network, "config", None), "patch_size", (1, 1, 1))
    return math.prod(x0.shape[2:]) // math.prod(patch)
