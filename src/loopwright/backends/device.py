"""The devices of this machine.

    device = pick("auto")       # "cuda" if there is one, else "cpu"

Deliberately absent: falling back from a device that was asked for by name.
"""

import torch

from ..errors import RequestError


def available() -> tuple[str, ...]:
    """Devices that can be asked for, the fastest first."""
    cuda = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return (*cuda, *mps, "cpu")


def pick(name: str) -> str:
    """The device of that name; "auto" is the fastest. Raises RequestError for one this machine does not have."""
    choices = available()
    if name == "auto":
        return choices[0]
    if name not in choices:
        raise RequestError("this machine has no such device", value=name, choices=("auto", *choices))
    return name


def preferred_dtype(device: str) -> str:
    """What "auto" precision means there: bfloat16 on CUDA, float32 elsewhere."""
    return "bfloat16" if device.startswith("cuda") else "float32"
