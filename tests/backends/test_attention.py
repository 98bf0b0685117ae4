"""Every attention against the written-out one, forward and backward, on this machine's fastest device."""

import pytest
import torch

from loopwright.backends import attention
from loopwright.backends.device import pick, probe
from loopwright.backends.registry import ATTENTIONS, KERNELS, load, why_not
from loopwright.errors import BackendError

DEVICE = pick("auto")
HERE = probe(DEVICE)
DTYPES = {"float32": 2e-6, "bfloat16": 1e-2}
CASES = [(name, dtype) for name in ATTENTIONS for dtype in DTYPES]


def inputs(width: int, dtype: torch.dtype, *, gradients: bool = False) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 70, 3, width), (2, 33, 3, width), (2, 33, 3, width))
    made = [torch.randn(shape, generator=generator).to(DEVICE, dtype) for shape in shapes]
    return [x.requires_grad_(gradients) for x in made]


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.einsum("blhd,bmhd->bhlm", q.double(), k.double()) / q.shape[-1] ** 0.5
    return torch.einsum("bhlm,bmhd->blhd", scores.softmax(-1), v.double())


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def runnable(name: str, dtype: str) -> None:
    if reason := why_not(KERNELS[name], HERE, dtype):
        pytest.skip(f"{name} on {DEVICE}: {reason}")


@pytest.mark.parametrize("width", [12, 64, 128])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_attention_is_what_it_is_by_definition(name: str, dtype: str, width: int) -> None:
    runnable(name, dtype)
    q, k, v = inputs(width, getattr(torch, dtype))
    out = load(name)(q, k, v)
    assert out.shape == q.shape and out.dtype == q.dtype
    assert error(out, exact(q, k, v)) < DTYPES[dtype]


@pytest.mark.parametrize("width", [12, 64])
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_gradients_are_those_of_the_definition_or_refused(name: str, dtype: str, width: int) -> None:
    runnable(name, dtype)
    given = inputs(width, getattr(torch, dtype), gradients=True)
    if not KERNELS[name].backward:
        with pytest.raises(BackendError, match="no backward pass"):
            load(name)(*given)
        return
    weights = torch.linspace(-1, 1, width, device=DEVICE)
    ours = torch.autograd.grad((load(name)(*given).float() * weights).sum(), given)
    true = torch.autograd.grad((exact(*given) * weights.double()).sum(), given)
    for mine, theirs in zip(ours, true, strict=True):
        assert error(mine, theirs) < 3 * DTYPES[dtype]


def test_nothing_of_the_process_is_touched() -> None:
    """Torch's switches, which the whole process shares, stay as they are, and rule nothing here but `sdpa`."""
    flags = (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.math_sdp_enabled,
             torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.cudnn_sdp_enabled)  # fmt: skip
    before = [flag() for flag in flags]
    dtype = "bfloat16"
    for name in ATTENTIONS:
        if not why_not(KERNELS[name], HERE, dtype):
            load(name)(*inputs(64, torch.bfloat16))
    assert [flag() for flag in flags] == before


def test_heads_too_wide_for_a_fused_kernel_are_refused_by_name() -> None:
    q, k, v = (x.to("meta") for x in inputs(264, torch.bfloat16))
    for name in ("cudnn", "fa3"):
        with pytest.raises(BackendError, match=f"{name} attention takes heads of at most 256 values: 264"):
            load(name)(q, k, v)


def test_padding_heads_to_eights_changes_nothing() -> None:
    def run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        assert q.shape[-1] == k.shape[-1] == v.shape[-1] == 16
        return exact(q * scale * 16**0.5, k, v)

    q, k, v = inputs(12, torch.float32)
    assert error(attention._in_eights("any", run, q, k, v), exact(q, k, v)) < 1e-6
