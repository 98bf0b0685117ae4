"""Weights that every process has whole: after the backward pass the processes' gradients become one.

    average_gradients(network.parameters())           # in place; then each process takes the same optimiser step

For networks that fit a device with all their optimiser holds: one sum a step instead of gathering each layer, and
blocks that are compiled stay in one piece.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.distributed.tensor import DTensor


def average_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """The mean over all processes, in place of each gradient that is not sharded. A collective where there are any."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None and not isinstance(parameter, DTensor):
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    for gradients in by_dtype.values():
        together = _flatten_dense_tensors(gradients)
        dist.all_reduce(together)
        together /= dist.get_world_size()
        for gradient, mean in zip(gradients, _unflatten_dense_tensors(together, gradients), strict=True):
            gradient.copy_(mean)
