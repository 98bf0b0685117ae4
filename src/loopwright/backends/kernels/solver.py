"""The solvers' updates in one pass over the latents: the twins of those in `sampling.solvers`, bit for bit.

Products and sums are rounded one by one, as separate operations of torch are: contraction into fused multiply-adds is
switched off at launch.
"""

from collections.abc import Mapping

import torch
import triton
import triton.language as tl

from ...errors import BackendError
from .launch import device_of, forward_only

History = Mapping[str, torch.Tensor]
_BLOCK = 1024
_HIGHEST = 3  # order of UniPC


@triton.jit
def _euler(x, velocity, row, out, count, row_step, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = at < count, batch * count + at
    value = tl.load(x + place, mask=inside)
    speed = tl.load(velocity + place, mask=inside).to(tl.float32)
    tl.store(out + place, value + tl.load(row + batch * row_step) * speed, mask=inside)


def euler_update(
    x: torch.Tensor, velocity: torch.Tensor, history: History, row: torch.Tensor
) -> tuple[torch.Tensor, History]:
    """x + (s' - s) v. `x`, `velocity` float32 [B, ...], `row` float32 [B, 1]; the history is empty and stays so."""
    forward_only("euler_update", x, velocity)
    x, velocity, out = x.contiguous(), velocity.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    count = x[0].numel()
    grid = (triton.cdiv(count, _BLOCK), x.shape[0])
    with device_of(x):
        _euler[grid](x, velocity, row, out, count, row.stride(0), BLOCK=_BLOCK, enable_fp_fusion=False)
    return out, history


@triton.jit
def _unipc(  # type: ignore[no-untyped-def]
    x, velocity, last, past_0, past_1, past_2, row, corrected_out, data_out, out, count, row_step,
    ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside, place = at < count, batch * count + at
    row += batch * row_step
    value = tl.load(x + place, mask=inside)
    data = value - tl.load(row) * tl.load(velocity + place, mask=inside).to(tl.float32)
    corrected = tl.load(row + 1) * value
    corrected += tl.load(row + 2) * tl.load(last + place, mask=inside)
    corrected += tl.load(row + 3) * data
    older = tl.load(past_0 + place, mask=inside)
    corrected += tl.load(row + 4) * older
    if ORDER > 1:
        oldest = tl.load(past_1 + place, mask=inside)
        corrected += tl.load(row + 5) * oldest
    if ORDER > 2:
        corrected += tl.load(row + 6) * tl.load(past_2 + place, mask=inside)
    following = tl.load(row + ORDER + 4) * corrected
    following += tl.load(row + ORDER + 5) * data
    if ORDER > 1:
        following += tl.load(row + ORDER + 6) * older
    if ORDER > 2:
        following += tl.load(row + ORDER + 7) * oldest
    tl.store(corrected_out + place, corrected, mask=inside)
    tl.store(data_out + place, data, mask=inside)
    tl.store(out + place, following, mask=inside)


def unipc_update(
    x: torch.Tensor, velocity: torch.Tensor, history: History, row: torch.Tensor
) -> tuple[torch.Tensor, History]:
    """Correct `x` with this step's data prediction, then predict the next x. Arguments as the twin's.

    Raises BackendError for an order above 3.
    """
    forward_only("unipc_update", x, velocity)
    order = len(history) - 1
    if order > _HIGHEST:
        raise BackendError(
            f"the fused UniPC update has orders up to {_HIGHEST}", value=order, remedy='use kernels="plain"'
        )
    past = [history[f"data_{k}"].contiguous() for k in range(order)]
    x, velocity, last = x.contiguous(), velocity.contiguous(), history["last"].contiguous()
    corrected, data, out = (torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(3))
    absent = [x] * (_HIGHEST - order)
    count = x[0].numel()
    with device_of(x):
        _unipc[(triton.cdiv(count, _BLOCK), x.shape[0])](
            x, velocity, last, *past, *absent, row, corrected, data, out, count, row.stride(0),
            ORDER=order, BLOCK=_BLOCK, enable_fp_fusion=False,
        )  # fmt: skip
    recent = [data, *past[: order - 1]]
    return out, {"last": corrected, **{f"data_{k}": item for k, item in enumerate(recent)}}
