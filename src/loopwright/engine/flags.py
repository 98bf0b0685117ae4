"""Whether what a call computed is finite, row by row: the device is asked at once, and answers when it comes to it.

    flags = Flags(step, tensors)
    ...                             # whatever need not know, such as asking for the next call
    flags.wait()                    # [True, True, False]

Reading a value makes the host wait for the device, and the device then waits for the host's next call. On CUDA the
flags therefore travel to pinned memory by themselves.
"""

from collections.abc import Sequence

import torch

from ..errors import ModelError
from ..loop import Step, Tensors


class Flags:
    """Of one call: a row of the result `finite` for each request, if its step says that it has one."""

    __slots__ = ("_event", "_rows")

    def __init__(self, step: Step, tensors: Tensors) -> None:
        self._rows = tensors["finite"] if step.finite else None
        self._event: torch.cuda.Event | None = None
        if self._rows is not None and self._rows.is_cuda:
            self._rows, self._event = _sent(self._rows)

    @property
    def ready(self) -> bool:
        """Whether `wait` returns at once."""
        return self._event is None or self._event.query()

    def wait(self) -> Sequence[bool] | None:
        """Whether each row is finite; None where the step does not say."""
        if self._event is not None:
            self._event.synchronize()
        return None if self._rows is None else self._rows.tolist()


def _sent(flags: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
    host = torch.empty(flags.shape, dtype=flags.dtype, pin_memory=True)
    host.copy_(flags, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(flags.device))
    return host, event


def not_finite(what: str) -> ModelError:
    """The error of a step whose flag is false."""
    return ModelError(
        f"the model produced NaN or infinity in {what}",
        remedy="check the weights and the precision (dtype=float32 tells which)",
    )
