"""Rows held out of training, told by their content and nothing else.

    training, held = split(rows, fraction=0.05, seed=0)

A row stays on its side however many are added or taken away, and all rows of one media file are on one side, so that
a second caption of a clip that is trained on is no test.
"""

import hashlib
from collections.abc import Sequence

from ..errors import RequestError
from .row import Row


def split(rows: Sequence[Row], fraction: float, seed: int) -> tuple[list[Row], list[Row]]:
    """The rows to train on and those held out, about `fraction` of all, in their order.

    Reads every media file once for its hash. Raises RequestError for a fraction outside [0, 1), and where one of the
    sides would be empty although a fraction is to be held out.
    """
    if not 0 <= fraction < 1:
        raise RequestError("the held-out fraction must be at least 0 and below 1", value=fraction)
    held = [is_held_out(row.content, fraction, seed) for row in rows] if fraction else [False] * len(rows)
    sides = ([row for row, out in zip(rows, held, strict=True) if out is side] for side in (False, True))
    training, kept = sides
    if fraction and not (training and kept):
        side = "training" if kept else "the held-out part"
        remedy = "take another fraction or seed, or add rows"
        raise RequestError(f"no row of {len(rows)} falls to {side} at fraction", value=fraction, remedy=remedy)
    return training, kept


def is_held_out(content: str, fraction: float, seed: int) -> bool:
    """Whether media with this hash is held out: its draw from [0, 1) is below the fraction, so a larger one adds."""
    draw = hashlib.sha256(f"{seed}/{content}".encode()).digest()[:8]
    return int.from_bytes(draw) < fraction * 2**64
