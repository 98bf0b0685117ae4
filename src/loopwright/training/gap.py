"""How far the log-probs of a rollout lie from those of the same steps as training computes them, one call at a time.

    found = gap(model, samples, run, rows=24)       # 0.0 where rollouts are exact: captured in fixed mode, same kernels
    require(found, bound(run))

Measured on one step of some samples an epoch, by the weights that sampled, whatever lies between: captured graphs,
other partners in a call, compiled blocks, kernels for sampling alone. Deliberately absent: the trainer's own forward of
a sharded network, whose share the first `logp_abs_diff` of an epoch has.
"""

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from ..api import Model
from ..errors import BackendError
from ..request import KERNELS
from .methods.policy import Sample
from .run import Run

EXACT = 1e-6  # what exact rollouts may differ by


@torch.no_grad()
def gap(model: Model, samples: Sequence[Sample], run: Run, *, rows: int) -> float:
    """The largest difference of the last step that drew noise, of as many samples as a forward of training has.

    Noise is least there, so that the same rounding of a velocity moves a log-prob most.
    """
    asked = samples[0].request
    last = (asked.noise_start or 0) + (asked.noise_steps or 1) - 1
    moves = [sample.moves[last] for sample in samples[:rows]]
    filled = [*moves, *[moves[0]] * (rows - len(moves))]
    # of the sample, as training computes it: given its noise, a step is as likely under any weights
    given = [{"latents": move.rows["latents"], "row": move.rows["row"], "sample": move.after} for move in filled]
    tensors = {name: torch.cat([each[name] for each in given]) for name in given[0]}
    lent = {name: (torch.cat([move.lent[name] for move in filled]),) for name in moves[0].lent}
    static = {**moves[0].static, "attention": run.attention, "kernels": KERNELS}
    plainly = torch.compiler.set_stance("force_eager") if model.instance.binding.compile else nullcontext()
    with plainly, model.instance.using((str(static["model"]),)) as parts:
        again = moves[0].op(parts, **tensors, **lent, **static)["log_prob"]
    sampled = [move.log_prob for move in moves if move.log_prob is not None]
    return float((again[: len(moves)] - torch.cat(sampled)).abs().max())


def bound(run: Run, asked: tuple[str, str]) -> float:
    """The largest gap to learn with, of what was asked with this attention and these kernels: next to nothing where
    rollouts are exact, else what ratios are clipped at, for an untouched policy must not be."""
    assert run.rollout is not None
    exact = run.rollout.mode == "fixed" and not run.rollout.compile and asked == (run.attention, KERNELS)
    return EXACT if exact else run.grpo.most


def require(found: float, most: float) -> None:
    """Raise BackendError for a gap that an update could be mistaken for."""
    if not found <= most:
        remedy = 'set rollout.graphs to "never" or mode to "fixed", leave compile, attention and kernels to training\'s'
        raise BackendError(
            f"log-probs of rollouts lie further than {most:g} from training's", value=found, remedy=remedy
        )
