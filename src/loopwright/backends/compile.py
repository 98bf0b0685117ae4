"""Regional compilation: the repeated blocks of a transformer, in place, by torch.compile.

    require_compiler("cuda")         # BackendError now rather than in the first step
    compile_blocks(transformer)

One region serves every block of a model, so that compiling takes as long as for one. A shape, a number of rows or a
choice of kernels that a region has not seen compiles it anew at its first call: shapes are exact, never dynamic.
Results are close to those of the plain module, not equal to them.
"""

import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch

from ..errors import BackendError
from .device import probe

_LIMIT = 1024  # forms of a region; past torch's own limit of 8 it would run eagerly without a word
_COMPILERS = {"cpu": ("CXX", ("g++", "clang++", "c++")), "cuda": ("CC", ("gcc", "clang", "cc"))}


def compile_blocks(module: torch.nn.Module) -> None:
    """Compile the blocks that the module's class says it repeats, at their first call. Raises BackendError for none."""
    blocks = list(repeated_blocks(module))
    if not blocks:
        raise BackendError(
            "this model does not say which of its blocks can be compiled",
            value=type(module).__name__,
            remedy="load it with compile=False",
        )
    for block in blocks:
        block.compile(dynamic=False)
    module.register_forward_pre_hook(lambda module, inputs: raise_limit())


def repeated_blocks(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The blocks of the classes that diffusers' models name."""
    names = getattr(module, "_repeated_blocks", None) or ()
    return (child for child in module.modules() if type(child).__name__ in names)


def require_compiler(device: str) -> None:
    """Raise BackendError where blocks cannot be compiled: another kind of device, no compiler, no headers of Python."""
    reason = why_not_compile(device)
    if reason:
        raise BackendError(f"blocks cannot be compiled on {device} ({reason})", remedy="load with compile=False")


def why_not_compile(device: str) -> str:
    """What inductor lacks there; "" if it should work."""
    kind = device.partition(":")[0]
    if kind not in _COMPILERS:
        return f"that takes {' or '.join(_COMPILERS)}"
    if kind == "cuda" and "triton" not in probe(device).packages:
        return "it needs triton, which is not installed"
    variable, names = _COMPILERS[kind]
    named = os.environ.get(variable)
    if not any(shutil.which(name) for name in ([named] if named else names)):
        return f"it needs a compiler: install {names[0]}, or name one in {variable}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "it needs the headers of Python: install them, such as python3-dev"
    return ""


def raise_limit() -> None:
    """Let a region have many forms. torch keeps its settings by thread: whichever runs what is compiled does this."""
    settings = torch._dynamo.config
    if settings.recompile_limit < _LIMIT:
        settings.recompile_limit = settings.accumulated_recompile_limit = _LIMIT
