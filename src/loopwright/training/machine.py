"""Whether a run can be computed on this machine: its device and processes, kernels, packages, who encodes where.

    check(run, card, device, here=2)        # of two processes that are started on this machine
    check_workers(run.data, device, processes=2)

Nothing is loaded. Deliberately absent: what rollouts need besides, which is `plan`'s.
"""

import importlib.util

import torch

from ..backends.compile import require_compiler
from ..backends.device import probe
from ..backends.registry import ATTENTIONS, KERNELS, require
from ..card import Card
from ..data.pool import slots
from ..distributed.group import KINDS
from ..errors import BackendError, RequestError
from .run import Data, Run
from .settings import naming

_PLOTS = "matplotlib"


def check(run: Run, card: Card, device: str, *, here: int) -> None:
    """Raise BackendError or RequestError for what this machine cannot do; `here` processes are started on it."""
    _check_device(device, here)
    if run.precision not in card.recipe.precision:
        raise RequestError(
            f"precision: {card.name} does not run in it", value=run.precision, choices=card.recipe.precision
        )
    require(probe(device), run.precision, attention=run.attention)
    if run.compile:
        require_compiler(device)
    if not KERNELS[run.attention].backward:
        choices = [name for name in ATTENTIONS if KERNELS[name].backward]
        raise BackendError("attention has no backward pass", value=run.attention, choices=choices)
    for package in (_PLOTS, *run.sinks):
        if importlib.util.find_spec(package) is None:
            what = "the summary's plots" if package == _PLOTS else f"sinks: {package}"
            extra = "train" if package in (_PLOTS, "tensorboard") else package
            raise BackendError(f"{what} cannot be had", value=package, remedy=f"pip install 'loopwright[{extra}]'")


def check_workers(data: Data, device: str, *, processes: int) -> None:
    """Raise RequestError where encoders cannot have the GPUs that are asked for them."""
    if not data.dedicated:
        return
    with naming("data.dedicated"):
        first, *_ = slots(device.partition(":")[0], data.workers, dedicated=True)
    if processes > 1:
        remedy = "encode ahead by loopwright encode --dedicated, or train in one process"
        raise RequestError("data.dedicated is for one training process", value=f"{processes} processes", remedy=remedy)
    ours, theirs = (int(name.partition(":")[2] or 0) for name in (device, first.device))
    if ours >= theirs:
        what = f"cuda:{ours}, and encoders on cuda:{theirs} and up"
        raise RequestError("data.dedicated takes training's own GPU", value=what, remedy="lower data.workers")


def _check_device(device: str, here: int) -> None:
    kind, _, index = device.partition(":")
    if kind not in KINDS:
        raise BackendError("device: training does not run there", value=device, choices=KINDS, remedy="name one")
    if index and here > 1:
        raise RequestError("device names one of several", value=device, remedy="write cuda: each process takes its own")
    if kind == "cuda" and here > (gpus := torch.cuda.device_count()):
        remedy = f"start {gpus} at most, or set device to cpu"
        raise RequestError("processes need a GPU each", value=here, remedy=remedy)
