"""What a run of reinforcement learning samples, as settings.

    rollout:
      prompts: prompts.jsonl                # lines such as {"prompt": "the word CAT", "text": "CAT"}
      groups: 48                            # prompts an epoch
      group_size: 24                        # samples of each
      rows: 24                              # of a call, in sampling and in training
      parameters: {num_inference_steps: 10, guidance_scale: 1.0}

Deliberately absent: what scores samples (`rewards`) and what is learnt from them (`methods`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import RequestError
from .settings import refuse

_WORDS = "leave it out: samples are made from words alone"
_WINDOW = "leave it out, or rollout.window"
SETTLED: dict[str, str] = {
    "prompt": "set rollout.prompts",
    "mode": "set rollout.mode",
    "rows": "set rollout.rows",
    "seed": "set seed, of the run",
    "output": "leave it out: rewards see the clips, and training their latents",
    "image": _WORDS,
    "video": _WORDS,
}
_WINDOWED = {"noise_start": _WINDOW, "noise_steps": _WINDOW}


@dataclass(frozen=True, slots=True)
class Rollout:
    """What is sampled anew each epoch, through the engine.

    Attributes:
        prompts: a file of them, with facts that rewards read.
        held_out: prompts to evaluate with, each `evaluation.draws` times, without noise in the steps; None: `prompts`.
        rows: of every forward in training, and in fixed mode of every call of the engine, so that both give the same
            bits.
        mode: the engine's. "throughput" calls as many rows as pay, and decodes together: faster, and log-probs are
            those of training but for rounding (`logp_gap`).
        sampler: of `load`; None is the method's own.
        window: so many steps draw noise, one after the other from a step that is drawn once an epoch, the same for all
            samples; the others are the flow's own, and so is always the last. None: all but the last, or those that
            `parameters` name by noise_start and noise_steps.
        staleness: how many updates old the weights may be that sample. With 1 the next epoch is sampled while this one
            is learnt from, by a copy of the networks; 0 is on policy.
        graphs: "always" captures denoising steps as CUDA graphs, with the same bits; "auto" is "always" on CUDA where
            nothing is sampled meanwhile and no other process has a part of the weights, else "never".
        compile: the blocks of what samples, which rounds otherwise than training does.
        dtype: of encoders and autoencoder by their names on the card, as `load` takes it; else the card's.
        engines: so many sample instead of this process, each in one of its own, by Ray, on a GPU of its own behind this
            one's. Weights are sent to them, and samples are the same. 0: this process samples.
        parameters: those of a request; samples are made from words alone, so no image or video. Kernels and attention
            without a backward pass are for sampling alone.
    """

    prompts: str
    groups: int = 48
    group_size: int = 24
    rows: int = 24
    mode: Literal["fixed", "throughput"] = "fixed"
    held_out: str | None = None
    sampler: Literal["flow_sde", "dance_sde", "cps", "euler", "unipc"] | None = None
    window: int | None = None
    staleness: Literal[0, 1] = 0
    graphs: Literal["auto", "always", "never"] = "auto"
    engines: int = 0
    compile: bool = False
    dtype: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("groups", 1), ("group_size", 2), ("rows", 1), ("window", 1), ("engines", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise RequestError(f"rollout.{name} must be at least {least}", value=value)
        if self.staleness and self.graphs == "always":
            remedy = "leave rollout.graphs to auto"
            raise RequestError(
                "what is sampled while another thread trains is not captured", value="always", remedy=remedy
            )
        if self.engines and (self.graphs == "always" or self.mode != "fixed"):
            remedy = "leave rollout.graphs and rollout.mode out"
            raise RequestError("engines capture nothing, and call in fixed mode", value=self.mode, remedy=remedy)
        if self.compile and (self.staleness or self.engines):
            remedy = "leave rollout.compile out"
            raise RequestError("only what samples in turn with training is compiled", value=True, remedy=remedy)
        refuse("rollout.parameters", self.parameters, SETTLED)
        if self.window is not None:
            refuse("rollout.parameters", self.parameters, _WINDOWED)

    @property
    def sharing(self) -> Mapping[str, str | int]:
        """How requests share calls, as their parameters."""
        return {"mode": self.mode, **({"rows": self.rows} if self.mode == "fixed" else {})}

    @property
    def samples(self) -> int:
        """Of an epoch."""
        return self.groups * self.group_size
