"""Guidance costs the forwards it needs and means the same however they are laid out."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopwright.sampling.guidance import combine, guided
from support import relative

X = torch.randn(3, 4, 2, 5, generator=torch.Generator().manual_seed(0))
COND, UNCOND = torch.randn(2, 3, 6, 8, generator=torch.Generator().manual_seed(1))
SCALE = torch.tensor([1.5, 5.0, 7.5])
WEIGHT = torch.randn(8, 4, generator=torch.Generator().manual_seed(2))


class Network:
    """A conditional forward that counts its calls and the rows they had; each row's output depends on its text."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.rows: list[int] = []
        self.scales: list[torch.Tensor | None] = []
        self.dtype = dtype

    def __call__(self, text: torch.Tensor, copies: int, scale: torch.Tensor | None) -> torch.Tensor:
        x = torch.cat([X] * copies)
        assert len(x) == len(text)
        self.rows.append(len(x))
        self.scales.append(scale)
        push = (text.mean(1) @ WEIGHT).view(len(x), 4, 1, 1)
        if scale is not None:
            push = push * scale.view(-1, 1, 1, 1)
        return torch.tanh(x * push + push).to(self.dtype)


def test_without_guidance_there_is_one_forward_of_the_conditional_branch() -> None:
    network = Network()
    out = guided("none", network, COND, None, SCALE)
    assert network.rows == [3] and network.scales == [None]
    assert torch.equal(out, Network()(COND, 1, None))


def test_serial_guidance_is_a_forward_a_branch() -> None:
    network = Network()
    out = guided("serial", network, COND, UNCOND, SCALE)
    assert network.rows == [3, 3] and network.scales == [None, None]
    cond, uncond = Network()(COND, 1, None), Network()(UNCOND, 1, None)
    assert torch.equal(out, uncond + SCALE.view(3, 1, 1, 1) * (cond - uncond))


def test_batched_guidance_is_one_forward_and_means_the_same() -> None:
    network = Network()
    out = guided("batched", network, COND, UNCOND, SCALE)
    assert network.rows == [6]
    assert relative(out, guided("serial", Network(), COND, UNCOND, SCALE)) < 1e-6


def test_embedded_guidance_is_one_forward_that_is_told_the_scale() -> None:
    network = Network()
    out = guided("embedded", network, COND, None, SCALE)
    assert network.rows == [3] and network.scales[0] is SCALE
    assert torch.equal(out, Network()(COND, 1, SCALE))


@pytest.mark.parametrize("kind", ["serial", "batched"])
def test_each_row_has_its_own_scale(kind: str) -> None:
    together = guided(kind, Network(), COND, UNCOND, SCALE)
    for b in range(3):
        same_for_all = guided(kind, Network(), COND, UNCOND, SCALE[b].expand(3))
        assert torch.equal(together[b], same_for_all[b])
    assert not torch.equal(together, guided(kind, Network(), COND, UNCOND, SCALE.flip(0)))


@pytest.mark.parametrize("kind", ["none", "serial", "batched", "embedded"])
def test_the_velocity_is_float32_whatever_the_network_runs_in(kind: str) -> None:
    out = guided(kind, Network(torch.bfloat16), COND, UNCOND, SCALE)
    assert out.dtype == torch.float32 and out.shape == X.shape


def test_branches_are_combined_in_float32_and_not_in_the_networks_precision() -> None:
    out = guided("serial", Network(torch.bfloat16), COND, UNCOND, SCALE)
    cond, uncond = (Network(torch.bfloat16)(text, 1, None) for text in (COND, UNCOND))
    assert torch.equal(out, combine(cond.float(), uncond.float(), SCALE))
    assert not torch.equal(out, combine(cond, uncond, SCALE.bfloat16()).float())


@given(st.floats(0, 20, width=32))
def test_a_scale_of_zero_and_one_are_the_two_branches(scale: float) -> None:
    cond, uncond = X, X.flip(0)
    scales = torch.tensor([0.0, 1.0, scale])
    out = combine(cond, uncond, scales)
    assert torch.equal(out[0], uncond[0])
    torch.testing.assert_close(out[1], cond[1])
    torch.testing.assert_close(out[2] - uncond[2], scale * (cond - uncond)[2], rtol=1e-5, atol=1e-5)
