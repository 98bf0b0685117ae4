"""What every loop needs: rows of lent storage, flags of finiteness."""

import torch

Handle = tuple[torch.Tensor, ...]


def rows(handle: Handle) -> torch.Tensor:
    """A handle as rows: alone in its call it is used where it lies."""
    return handle[0] if len(handle) == 1 else torch.cat(handle)


def finite(x: torch.Tensor) -> torch.Tensor:
    """bool [B]: whether a row holds no NaN or infinity."""
    return torch.isfinite(x).flatten(1).all(1)
