"""What memory a device has left, and the most that was in use.

free_bytes("cuda")      # None for a device that shares the host's memory
peak_bytes("cpu")       # (1_234_567_890, "the process")
"""

import resource
import sys

import torch


def free_bytes(device: str) -> int | None:
    """Bytes this process can still have there, its own unused reserve included; None where weights lie on the host."""
    if not device.startswith("cuda"):
        return None
    reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + reserve


def total_bytes(device: str) -> int | None:
    """Bytes the device has in all; None where nobody knows what else the host's memory is for."""
    return torch.cuda.get_device_properties(device).total_memory if device.startswith("cuda") else None


def peak_bytes(device: str) -> tuple[int, str]:
    """The most bytes in use so far, and of what: tensors on a CUDA device, else all that the process has in memory."""
    if device.startswith("cuda"):
        index = torch.device(device).index
        name = f"cuda:{torch.cuda.current_device() if index is None else index}"
        return torch.cuda.max_memory_allocated(device), name
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts in bytes there, in KiB elsewhere
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit, "the process"


def trim(device: str) -> None:
    """Give a CUDA device back what this process holds of it for later."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def settle(device: str) -> None:
    """Wait for the copies and kernels under way on a CUDA device."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
