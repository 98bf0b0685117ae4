"""What every loop needs: rows of lent storage, the host's look at finiteness."""

import torch

from ..errors import ModelError
from ..loop import Result

Handle = tuple[torch.Tensor, ...]


def rows(handle: Handle) -> torch.Tensor:
    """A handle as rows: alone in its call it is used where it lies."""
    return handle[0] if len(handle) == 1 else torch.cat(handle)


def finite(x: torch.Tensor) -> torch.Tensor:
    """bool [B]: whether a row holds no NaN or infinity."""
    return torch.isfinite(x).flatten(1).all(1)


def require_finite(result: Result, what: str) -> None:
    """Raise ModelError naming `what` if the op's `finite` flag, read by the host, is false."""
    if not all(result.host["finite"]):
        raise ModelError(
            f"the model produced NaN or infinity in {what}",
            remedy="check the weights and the precision (dtype=float32 tells which)",
        )
