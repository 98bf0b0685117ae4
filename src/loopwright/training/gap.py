"""How far log-probs of an optimised path lie from those of the same steps called one by one, eagerly.

    found = gap(model, samples, rows=24)        # 0.0 where captured steps are what they were captured from

Measured on one step of some samples an epoch, with the weights that sampled. A method compares log-probs of its own
with the rollout's, so what is no policy's doing must stay below what it tells apart.
"""

from collections.abc import Sequence

import torch

from ..api import Model
from ..errors import BackendError
from .methods.policy import Sample

BOUND = 1e-6


@torch.no_grad()
def gap(model: Model, samples: Sequence[Sample], rows: int) -> float:
    """The largest difference of the first step that drew noise, of as many samples as a call has rows."""
    start = samples[0].request.noise_start or 0
    moves = [sample.moves[start] for sample in samples[:rows]]
    filled = [*moves, *[moves[0]] * (rows - len(moves))]
    # of the sample, as training computes it: given its noise, a step is as likely under any weights
    given = [{"latents": move.rows["latents"], "row": move.rows["row"], "sample": move.after} for move in filled]
    tensors = {name: torch.cat([each[name] for each in given]) for name in given[0]}
    lent = {name: (torch.cat([move.lent[name] for move in filled]),) for name in moves[0].lent}
    with model.instance.using((str(moves[0].static["model"]),)) as parts:
        again = moves[0].op(parts, **tensors, **lent, **moves[0].static)["log_prob"]
    sampled = [move.log_prob for move in moves if move.log_prob is not None]
    return float((again[: len(moves)] - torch.cat(sampled)).abs().max())


def require(found: float) -> None:
    """Raise BackendError for a gap that a policy's update could be mistaken for."""
    if not found <= BOUND:
        raise BackendError(
            f"log-probs of captured steps lie further than {BOUND:g} from those of the same steps run eagerly",
            value=found,
            remedy='set rollout.graphs to "never"',
        )
