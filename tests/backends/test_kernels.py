"""Every fused kernel against its plain twin. Needs a CUDA device, or Triton's interpreter on the CPU:

TRITON_INTERPRET=1 python -m pytest --noconftest tests/backends/test_kernels.py   # beside torch: triton, diffusers
"""

import importlib.util
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from loopwright.backends.device import probe
from loopwright.backends.kernels import plain
from loopwright.backends.registry import KERNELS, load, why_not
from loopwright.errors import BackendError
from loopwright.sampling import solvers

CUDA = torch.cuda.is_available()
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if CUDA else "cpu"
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2e-3 if CUDA else 1e-2}  # the interpreter rounds towards zero
DTYPES = pytest.mark.parametrize("dtype", list(ROUNDING), ids=str)


def kernel(name: str) -> Callable:
    reason = why_not(KERNELS[name], probe(DEVICE))
    if reason and not INTERPRETED:
        pytest.skip(f"{name} on {DEVICE}: {reason}")
    return load(name)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def error(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape and a.dtype == b.dtype
    return float((a.double() - b.double()).norm() / b.double().norm())


@DTYPES
@pytest.mark.parametrize("width", [24, 256, 1536])
@pytest.mark.parametrize("per_token", [False, True])
def test_adaptive_norm_is_its_twin(dtype: torch.dtype, width: int, per_token: bool) -> None:
    fused = kernel("adaptive_norm")
    x = random(2, 7, width, dtype=dtype) * 3 + 1
    table = random(2, 7, 6, width, seed=1) if per_token else random(2, 6, width, seed=1)
    shift, scale = [part.squeeze(2) for part in table.chunk(6, dim=2)][:2] if per_token else table.chunk(6, dim=1)[:2]
    assert error(fused(x, scale, shift, 1e-6), plain.adaptive_norm(x, scale, shift, 1e-6)) < ROUNDING[dtype]


def angles(tokens: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    angle = random(1, tokens, 1, width // 2, seed=2).repeat_interleave(2, dim=-1)
    return angle.cos(), angle.sin()


@DTYPES
@pytest.mark.parametrize(("heads", "width"), [(2, 12), (3, 64), (12, 128)])
def test_norm_and_rotary_is_its_twin(dtype: torch.dtype, heads: int, width: int) -> None:
    fused = kernel("norm_rotary")
    x, weight = random(2, 5, heads * width, dtype=dtype), random(heads * width, seed=1, dtype=dtype)
    rotary = angles(5, width)
    ours = fused(x, weight, 1e-6, rotary, heads)
    assert error(ours, plain.norm_rotary(x, weight, 1e-6, rotary, heads)) < ROUNDING[dtype]


def rows(make: Callable[..., np.ndarray], **options: int) -> torch.Tensor:
    """Samples at different places of different schedules, in a table with two columns before the solver's."""
    sigmas = np.linspace(0.99, 0, 9).astype(np.float32)
    table = make(sigmas, **options)
    picked = np.column_stack([np.zeros((3, 2)), table[[0, 3, 7]]])
    return torch.from_numpy(picked).float().to(DEVICE)[:, 2:]


def same(ours: tuple[torch.Tensor, solvers.History], twin: tuple[torch.Tensor, solvers.History]) -> bool:
    assert list(ours[1]) == list(twin[1])
    return torch.equal(ours[0], twin[0]) and all(torch.equal(ours[1][name], twin[1][name]) for name in twin[1])


def test_eulers_update_is_its_twin_bit_for_bit() -> None:
    fused = kernel("euler_update")
    x, velocity = random(3, 4, 3, 9, 13), random(3, 4, 3, 9, 13, seed=1)
    row = rows(solvers.euler_table)
    assert same(fused(x, velocity, {}, row), solvers.euler_update(x, velocity, {}, row))


@pytest.mark.parametrize("order", [1, 2, 3])
def test_unipcs_update_is_its_twin_bit_for_bit(order: int) -> None:
    fused = kernel("unipc_update")
    x, velocity = random(3, 4, 3, 9, 13), random(3, 4, 3, 9, 13, seed=1)
    history = {name: random(*x.shape, seed=i) for i, name in enumerate(solvers.unipc_history(x, order), start=2)}
    row = rows(solvers.unipc_table, order=order)
    assert same(fused(x, velocity, history, row), solvers.unipc_update(x, velocity, history, row))


def test_unipc_of_a_higher_order_is_refused() -> None:
    fused = kernel("unipc_update")
    x = random(1, 2, 2)
    with pytest.raises(BackendError, match="orders up to 3: 4"):
        fused(x, x, solvers.unipc_history(x, 4), x.new_zeros(1, 13))


@pytest.mark.parametrize("name", ["adaptive_norm", "norm_rotary", "euler_update"])
def test_gradients_are_refused_rather_than_lost(name: str) -> None:
    fused = kernel(name)
    x = random(1, 4, 24).requires_grad_()
    arguments = {
        "adaptive_norm": (x, random(1, 1, 24), random(1, 1, 24), 1e-6),
        "norm_rotary": (x, random(24), 1e-6, angles(4, 12), 2),
        "euler_update": (x, x, {}, random(1, 1)),
    }[name]
    with pytest.raises(BackendError, match=f"{name} has no backward pass"):
        fused(*arguments)
    with torch.no_grad():
        fused(*arguments)


@DTYPES
@pytest.mark.parametrize("gelu", [False, True])
def test_quantised_rows_are_their_twins_nearly_everywhere(dtype: torch.dtype, gelu: bool) -> None:
    """A value on the edge between two 8-bit numbers may fall on either side; scales agree to rounding."""
    kernel("fp8_linear")
    from loopwright.backends.kernels.quantise import quantise_rows

    x = random(9, 160, dtype=dtype) * 3
    x[4] = 0
    ours, scale = quantise_rows(x, gelu=gelu)
    twin, expected = (plain.quantise_gelu if gelu else plain.quantise_rows)(x)
    assert ours.dtype == twin.dtype == torch.float8_e4m3fn and (ours[4].float() == 0).all()
    assert torch.allclose(scale, expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5)
    found, wanted = ours.float(), twin.float()
    if not CUDA:  # the interpreter loses the carry where rounding ends at a power of two
        found = torch.where(wanted == 2 * found, wanted, found)
    assert error(found * scale, wanted * expected) < (0.02 if dtype == torch.bfloat16 else 0.002)


def test_eight_bit_products_are_their_twins() -> None:
    product = kernel("fp8_linear")
    if not CUDA:
        pytest.skip("8-bit products need CUDA; the interpreter has none")
    x, x_scale = plain.quantise_rows(random(37, 64, dtype=torch.bfloat16))
    weight, weight_scale = plain.quantise_rows(random(48, 64, seed=1, dtype=torch.bfloat16))
    bias = random(48, seed=2, dtype=torch.bfloat16)
    for given in (bias, None):
        arguments = (x, x_scale, weight, weight_scale.t().contiguous(), given)
        assert error(product(*arguments), plain.fp8_linear(*arguments)) < 4e-3


def test_an_eight_bit_feed_forward_network_is_the_full_one_to_a_few_percent() -> None:
    kernel("fp8_linear")
    if not CUDA:
        pytest.skip("8-bit products need CUDA; the interpreter has none")
    from loopwright.backends.kernels.fp8 import FeedForward

    torch.manual_seed(0)
    up, down = (torch.nn.Linear(a, b, device=DEVICE, dtype=torch.bfloat16) for a, b in ((256, 1024), (1024, 256)))
    x = random(2, 33, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        full = down(torch.nn.functional.gelu(up(x), approximate="tanh"))
        assert error(FeedForward(up, down)(x), full) < 0.08


def test_sizes_that_eight_bit_products_do_not_have_are_refused() -> None:
    from loopwright.backends.kernels.fp8 import Linear

    with pytest.raises(BackendError, match="multiples of 16: '24 to 32'"):
        Linear(torch.nn.Linear(24, 32))


def test_quantised_weights_keep_their_values_to_a_few_percent() -> None:
    from loopwright.backends.kernels.fp8 import Linear

    layer = torch.nn.Linear(64, 32, dtype=torch.bfloat16).requires_grad_(False)
    eight = Linear(layer)
    assert eight.weight.dtype == torch.float8_e4m3fn and eight.scale.shape == (1, 32)
    assert error(eight.weight.float() * eight.scale.t(), layer.weight.float()) < 0.03
    x, scale = plain.quantise_rows(torch.randn(5, 64, generator=torch.Generator().manual_seed(0)))
    out = plain.fp8_linear(x, scale, eight.weight, eight.scale, eight.bias)
    assert error(out.float(), layer.float()(x.float() * scale)) < 0.03


@DTYPES
@pytest.mark.parametrize("per_token", [False, True])
def test_a_wan_transformer_under_fused_kernels_is_itself_within_rounding(dtype: torch.dtype, per_token: bool) -> None:
    for name in ("adaptive_norm", "norm_rotary"):
        kernel(name)
    from diffusers import WanTransformer3DModel

    from loopwright.card import Component
    from loopwright.models.wan.install import bound, install

    torch.manual_seed(0)
    module = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=24, in_channels=16, out_channels=16, text_dim=32, freq_dim=32,
        ffn_dim=64, num_layers=2, rope_max_seq_len=32,
    ).eval()  # fmt: skip
    for name, parameter in module.named_parameters():
        if not any(kept in name for kept in module._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    module = module.to(DEVICE)
    install(Component("diffusers.WanTransformer3DModel"), module)
    times = torch.tensor([900.0, 200.0], device=DEVICE)
    given = {
        "hidden_states": random(2, 16, 3, 4, 6, dtype=dtype),
        "timestep": times[:, None] * torch.ones(18, device=DEVICE) if per_token else times,
        "encoder_hidden_states": random(2, 20, 32, seed=1, dtype=dtype),
    }
    out = {}
    with torch.no_grad():
        for kernels in ("plain", "fused"):
            with bound(module, "sdpa", kernels):
                out[kernels] = module(**given, return_dict=False)[0]
    if dtype is torch.float32:  # bfloat16 may round both alike; that kernels are called is counted elsewhere
        assert not torch.equal(out["fused"], out["plain"])
    assert error(out["fused"], out["plain"]) < 5 * ROUNDING[dtype]


@pytest.mark.parametrize("solver", ["euler", "unipc"])
def test_a_denoising_step_hands_its_choice_on_and_uses_the_fused_update(solver: str) -> None:
    kernel(f"{solver}_update")
    from loopwright.loops.denoise import SOLVERS, denoise_step

    chosen: list[tuple[str, str]] = []

    def velocity(part: object, x: torch.Tensor, t: torch.Tensor, text: torch.Tensor, *, attention: str, kernels: str):
        chosen.append((attention, kernels))
        return x * 0.5 + text.mean()

    x, text = random(3, 4, 2, 4, 6), random(3, 5, 8, seed=1)
    made = SOLVERS[solver]
    coefficients = rows(lambda sigmas: made.table(sigmas, 2, 0))
    row = torch.cat([torch.tensor([[900.0, 5.0]] * 3, device=DEVICE), coefficients], dim=1)
    history = {name: random(*x.shape, seed=i) for i, name in enumerate(made.history(x, 2), start=2)}
    results = [
        denoise_step(
            {"net": torch.nn.Identity()}, latents=x, row=row, text=(text,), negative=(text * 0.5,), model="net",
            velocity=velocity, solver=solver, guidance="batched", attention="math", kernels=kernels, **history,
        )
        for kernels in ("plain", "fused")
    ]  # fmt: skip
    assert chosen == [("math", "plain"), ("math", "fused")]
    assert results[0].keys() == results[1].keys()
    assert all(torch.equal(results[1][name], results[0][name]) for name in results[0])
