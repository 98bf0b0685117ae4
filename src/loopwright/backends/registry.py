"""What computes what on which hardware: a list of kernels, each with the reason where it cannot run.

    probe = device.probe("cuda")
    why_not(KERNELS["fa3"], probe, "bfloat16")        # "", or "needs sm_90, this is sm_80"
    require(probe, "bfloat16", attention="flash", kernels="fused")     # BackendError unless all of it runs there
    attend = load("flash")

Decided from a `Probe`, plain data, before anything is computed. Nothing here chooses for the user: an unavailable
choice is an error that names the others. Each kernel but attention has a plain twin, and a test that compares them.
"""

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from ..errors import BackendError
from ..request import ATTENTION
from ..request import KERNELS as PLAIN
from .device import Probe
from .precision import FLOAT8, compute_dtype

KINDS = ("attention", "linear", "norm", "rotary", "solver")
_HALF = ("bfloat16", "float16")
_ANY = ("float32", *_HALF)


@dataclass(frozen=True, slots=True)
class Kernel:
    """A way to compute something.

    Attributes:
        kind: what it computes, one of `KINDS`.
        source: "module:function" below this package, imported when first used.
        devices: kinds of devices it runs on.
        least: CUDA capability it needs at least; `only`: the sole generation it runs on, such as 9.
        dtypes: precisions it computes in on CUDA; elsewhere a kernel takes any.
        package: what must be installed for it on CUDA; "" for nothing beside torch.
        backward: whether gradients flow through it.
        summary: for listings.
    """

    name: str
    kind: str
    source: str
    summary: str
    devices: tuple[str, ...] = ("cuda",)
    least: tuple[int, int] = (0, 0)
    only: int = 0
    dtypes: tuple[str, ...] = _ANY
    package: str = ""
    backward: bool = False


_ALL = (
    Kernel(
        "sdpa",
        "attention",
        "attention:sdpa",
        "what torch picks; bit-identical to diffusers",
        devices=("cpu", "cuda", "mps"),
        backward=True,
    ),
    Kernel(
        "math",
        "attention",
        "attention:plain",
        "all scores written out: slow, the reference",
        devices=("cpu", "cuda", "mps"),
        backward=True,
    ),
    Kernel(
        "flash",
        "attention",
        "attention:flash",
        "FlashAttention 2, as torch ships it",
        devices=("cpu", "cuda"),
        least=(8, 0),
        dtypes=_HALF,
        backward=True,
    ),
    Kernel(
        "cudnn",
        "attention",
        "attention:cudnn",
        "cuDNN's fused attention",
        least=(8, 0),
        dtypes=_HALF,
        package="cudnn",
        backward=True,
    ),
    Kernel(
        "fa3",
        "attention",
        "attention:fa3",
        "FlashAttention 3 forward (pip install fa3-fwd)",
        least=(9, 0),
        only=9,
        dtypes=("bfloat16",),
        package="fa3_fwd_interface",
    ),
    Kernel(
        "adaptive_norm",
        "norm",
        "kernels.norm:adaptive_norm",
        "layer norm, scale and shift in one pass",
        least=(8, 0),
        package="triton",
    ),
    Kernel(
        "norm_rotary",
        "rotary",
        "kernels.rotary:norm_rotary",
        "RMS norm and rotary embedding in one pass",
        least=(8, 0),
        package="triton",
    ),
    Kernel(
        "euler_update",
        "solver",
        "kernels.solver:euler_update",
        "Euler's step in one pass",
        least=(8, 0),
        package="triton",
    ),
    Kernel(
        "unipc_update",
        "solver",
        "kernels.solver:unipc_update",
        "UniPC's correction and step in one pass",
        least=(8, 0),
        package="triton",
    ),
    Kernel(
        "fp8_linear",
        "linear",
        "kernels.fp8:linear",
        "products of 8-bit floats (precision float8)",
        least=(8, 9),
        dtypes=(FLOAT8,),
        package="triton",
    ),
)
KERNELS = {kernel.name: kernel for kernel in _ALL}
ATTENTIONS = tuple(kernel.name for kernel in _ALL if kernel.kind == "attention")
# What a request's `kernels` may say, and which kernels that takes. Plain is torch's own operations.
SETS: dict[str, tuple[str, ...]] = {
    PLAIN: (),
    "fused": ("adaptive_norm", "norm_rotary", "euler_update", "unipc_update"),
}


def why_not(kernel: Kernel, probe: Probe, dtype: str | None = None) -> str:
    """Why the kernel does not run there, in that precision if one is given; "" if it does."""
    if probe.kind not in kernel.devices:
        return f"needs {' or '.join(kernel.devices)}"
    return probe.unusable or ("" if probe.capability is None else _why_not_cuda(kernel, probe, probe.capability, dtype))


def _why_not_cuda(kernel: Kernel, probe: Probe, capability: tuple[int, int], dtype: str | None) -> str:
    if kernel.only and capability[0] != kernel.only:
        return f"needs sm_{kernel.only}x, this is {probe.arch}"
    if capability < kernel.least:
        return "needs sm_{}{}, this is {}".format(*kernel.least, probe.arch)
    if kernel.package and kernel.package not in probe.packages:
        return f"needs {kernel.package}, which is not installed"
    if dtype is not None and dtype not in kernel.dtypes:
        return f"needs {' or '.join(kernel.dtypes)}, not {dtype}"
    return ""


def precisions(kernel: Kernel, probe: Probe) -> tuple[str, ...]:
    """What the kernel computes in there; none where it does not run."""
    if why_not(kernel, probe):
        return ()
    return kernel.dtypes if probe.kind == "cuda" else _ANY


def manifest(probe: Probe) -> Iterator[tuple[Kernel, str]]:
    """Each kernel, with why it does not run there or ""."""
    for kernel in KERNELS.values():
        yield kernel, why_not(kernel, probe)


def require(probe: Probe, precision: str, *, attention: str = ATTENTION, kernels: str = PLAIN) -> None:
    """Raise BackendError unless the device runs the attention and the set of kernels in that precision."""
    dtype = compute_dtype(precision)
    reasons = {name: why_not(KERNELS[name], probe, dtype) for name in ATTENTIONS}
    _require("attention", attention, reasons, probe)
    _require("kernels", kernels, {name: _why_not_all(names, probe, dtype) for name, names in SETS.items()}, probe)


def require_precision(probe: Probe, precision: str) -> None:
    """Raise BackendError if the device has no arithmetic of that precision."""
    reason = why_not(KERNELS["fp8_linear"], probe) if precision == FLOAT8 else ""
    if reason:
        raise BackendError(
            f"precision not available on {probe.device} ({reason})",
            value=precision,
            choices=_ANY,
            remedy="choose one of these",
        )


@cache
def load(name: str) -> Callable[..., object]:
    """The function of that kernel. Imports what it needs."""
    module, _, function = KERNELS[name].source.partition(":")
    found: Callable[..., object] = getattr(importlib.import_module(f".{module}", __package__), function)
    return found


def _why_not_all(names: tuple[str, ...], probe: Probe, dtype: str) -> str:
    reasons = ((name, why_not(KERNELS[name], probe, dtype)) for name in names)
    return next((f"{name} {reason}" for name, reason in reasons if reason), "")


def _require(what: str, choice: str, reasons: dict[str, str], probe: Probe) -> None:
    """`reasons`: choice -> why it is not available, or ""."""
    if reasons.get(choice) == "":
        return
    known = choice in reasons
    listed = [f"{name} ({reason})" if reason else name for name, reason in reasons.items() if name != choice]
    raise BackendError(
        f"{what} not available on {probe.device} ({reasons[choice]})" if known else f"unknown {what}",
        value=choice,
        choices=listed,
        remedy="choose one that is available; loopwright backends lists them",
    )
