"""What every kernel's launch needs: its device, the block that holds a row, its warps, the refusal of gradients."""

import torch
import triton

from ...errors import BackendError

device_of = torch.cuda.device_of  # Triton launches on the current device, whichever the tensors are on


def block_of(width: int) -> int:
    """The power of two that holds a row."""
    return int(triton.next_power_of_2(width))


def warps_of(width: int) -> int:
    """Warps for a row of that width: about 16 values a thread, as loads of 16 bytes want it."""
    return min(16, max(1, block_of(width) // 512))


def forward_only(name: str, *tensors: torch.Tensor) -> None:
    """Raise BackendError where a gradient is wanted of a kernel that has none."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise BackendError(
            f"{name} has no backward pass", value="fused", choices=("plain",), remedy='use kernels="plain"'
        )
