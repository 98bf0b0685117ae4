"""The devices of this machine, and what each is: a probe is plain data, so that whoever decides by it can be tested.

    device = pick("auto")       # "cuda" if there is one, else "cpu"
    probe("cuda:0")             # Probe("cuda:0", "cuda", (9, 0), "NVIDIA H200", ("sm_80", "sm_90", ...), {"triton"})

Deliberately absent: falling back from a device that was asked for by name, or from one this build of torch cannot use.
"""

import importlib.util
import os
from dataclasses import dataclass

import torch

from ..errors import BackendError, RequestError

# Packages that kernels need and an installation may lack, by the name they are imported under.
OPTIONAL = ("triton", "fa3_fwd_interface")


@dataclass(frozen=True, slots=True)
class Probe:
    """What a device can run.

    Attributes:
        kind: "cpu", "cuda" or "mps".
        capability: of a CUDA device, such as (9, 0); None elsewhere.
        archs: what the installed torch holds CUDA code for, such as "sm_90" or "compute_90".
        packages: those of `OPTIONAL` that are installed, and "cudnn" where torch has it.
    """

    device: str
    kind: str
    capability: tuple[int, int] | None = None
    name: str = ""
    archs: tuple[str, ...] = ()
    packages: frozenset[str] = frozenset()

    @property
    def arch(self) -> str:
        """As people name it: sm_90, or the kind of a device without CUDA."""
        return self.kind if self.capability is None else "sm_{}{}".format(*self.capability)

    @property
    def unusable(self) -> str:
        """Why the installed torch cannot compute here at all; "" if it can."""
        if self.capability is None or any(_runs(arch, self.capability) for arch in self.archs):
            return ""
        return f"this build of torch has no code for {self.arch} (it has {', '.join(self.archs) or 'none'})"


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Binary code runs on its own generation from its minor version up; portable code on everything after it.

    Code marked "a" is for one architecture alone, "f" for its generation.
    """
    form, _, number = arch.partition("_")
    digits = number.rstrip("af")
    if form not in ("sm", "compute") or not digits.isdigit():
        return False
    built = (int(digits[:-1]), int(digits[-1]))
    if number.endswith("a"):
        return built == capability
    if form == "sm" or number.endswith("f"):
        return built[0] == capability[0] and built[1] <= capability[1]
    return built <= capability


def available() -> tuple[str, ...]:
    """Devices that can be asked for, the fastest first."""
    cuda = ["cuda", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))] if torch.cuda.is_available() else []
    mps = ["mps"] if torch.backends.mps.is_available() else []
    return (*cuda, *mps, "cpu")


def probe(device: str) -> Probe:
    """What the device of that name is. It must be one of `available`."""
    packages = {name for name in OPTIONAL if importlib.util.find_spec(name) is not None}
    kind = device.partition(":")[0]
    if kind != "cuda":
        return Probe(
            device, kind, name=f"{os.cpu_count()} cores" if kind == "cpu" else "", packages=frozenset(packages)
        )
    if torch.backends.cudnn.is_available():
        packages.add("cudnn")
    return Probe(
        device,
        kind,
        torch.cuda.get_device_capability(device),
        torch.cuda.get_device_name(device),
        tuple(torch.cuda.get_arch_list()),
        frozenset(packages),
    )


def pick(name: str) -> str:
    """The device of that name; "auto" is the fastest.

    Raises RequestError for one this machine does not have, BackendError for one the installed torch has no code for.
    """
    choices = available()
    if name not in ("auto", *choices):
        raise RequestError("this machine has no such device", value=name, choices=("auto", *choices))
    device = choices[0] if name == "auto" else name
    if reason := probe(device).unusable:
        raise BackendError(reason, value=device, choices=choices[1:], remedy="install a torch built for it")
    return device


def preferred_dtype(device: str) -> str:
    """What "auto" precision means there: bfloat16 on CUDA, float32 elsewhere."""
    return "bfloat16" if device.startswith("cuda") else "float32"
