"""Adapters in modules: what is trained, what is attached, and that diffusers computes the same of the same files."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tiny
from loopwright.errors import RequestError, WeightsError
from loopwright.weights import lora
from loopwright.weights.lora.keys import LAYOUTS
from lora_files import ATTENTION, EVERY, in_blocks, matrices, written


@pytest.fixture
def model() -> WanTransformer3DModel:
    torch.manual_seed(5)
    return tiny._transformer(16, False, clip=False).eval()


def output(model: WanTransformer3DModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 16, 2, 4, 4, generator=generator).to(model.dtype)
    text = torch.randn(1, 512, 32, generator=generator).to(model.dtype)
    with torch.no_grad():
        return model(x, torch.tensor([500]), text, return_dict=False)[0]


def adapted(model: WanTransformer3DModel) -> set[str]:
    return {name.split(".lora_A.")[0] for name, _ in model.named_parameters() if ".lora_A." in name}


@pytest.mark.parametrize("targets, expected", [
    (("to_q",), in_blocks(("attn1.to_q", "attn2.to_q"))),
    (("attn1.to_[qkv]", "ffn.net.2"), in_blocks(("attn1.to_q", "attn1.to_k", "attn1.to_v", "ffn.net.2"))),
    ((r"blocks\.1\..*",), [name for name in in_blocks(EVERY) if name.startswith("blocks.1.")]),
    (("linear_1", "linear_1"), ["condition_embedder.time_embedder.linear_1",
                                "condition_embedder.text_embedder.linear_1"]),
])  # fmt: skip
def test_targets_fit_the_ends_of_names(model: WanTransformer3DModel, targets: tuple, expected: list[str]) -> None:
    names = lora.inject(model, rank=2, alpha=2, targets=targets)
    assert set(names) == set(expected) == adapted(model) and len(names) == len(expected)


@pytest.mark.parametrize("targets", [("to_q", "to_x"), ("o_q",), ("norm2",), ("attn1",), ("to_(q",), ()])
def test_a_target_that_fits_nothing_is_refused_and_nothing_is_adapted(
    model: WanTransformer3DModel, targets: tuple
) -> None:
    with pytest.raises(WeightsError, match=r"blocks\.\*\.attn1\.to_q|no regular expression") as caught:
        lora.inject(model, rank=2, alpha=2, targets=targets)
    assert not targets or repr(targets[-1]) in str(caught.value)
    assert not adapted(model)


def test_only_the_adapters_require_gradients_in_float32_and_change_nothing_yet(model: WanTransformer3DModel) -> None:
    model = model.to(torch.bfloat16)
    before = output(model)
    names = lora.inject(model, rank=3, alpha=6, targets=("to_q", "net.2"))
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in trained.values()} == {torch.float32} and model.dtype == torch.bfloat16
    assert set(trained) == {f"{name}.lora_{half}.default.weight" for name in names for half in "AB"}
    assert torch.equal(output(model), before)


def test_a_module_takes_adapters_once(model: WanTransformer3DModel) -> None:
    lora.inject(model, rank=2, alpha=2, targets=("to_q",))
    with pytest.raises(WeightsError, match="has adapters already"):
        lora.inject(model, rank=2, alpha=2, targets=("to_k",))
    with pytest.raises(WeightsError, match="rank of an adapter must be at least 1"):
        lora.inject(tiny._transformer(16, False, clip=False), rank=0, alpha=2, targets=("to_k",))


def test_dropout_is_of_training_alone(model: WanTransformer3DModel) -> None:
    lora.inject(model, rank=2, alpha=2, targets=("to_q",), dropout=0.5)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.ones_(parameter)
    assert torch.equal(output(model), output(model))
    model.train()
    assert not torch.equal(output(model), output(model))


def test_what_was_trained_computes_the_same_when_it_is_read(model: WanTransformer3DModel, tmp_path: Path) -> None:
    other = copy.deepcopy(model)
    lora.inject(model, rank=3, alpha=2, targets=EVERY)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.3)
    base = output(other)
    for layout in LAYOUTS:
        file = lora.save(tmp_path / f"{layout}.safetensors", lora.tensors(model), alpha=2, layout=layout)
        fresh = copy.deepcopy(other)
        lora.attach(fresh, [(lora.read(file), 1.0)])
        assert torch.equal(output(fresh), output(model)) and not torch.equal(output(fresh), base)


def test_the_tensors_are_copies(model: WanTransformer3DModel) -> None:
    lora.inject(model, rank=2, alpha=2, targets=("attn1.to_q",))
    taken = lora.tensors(model)
    assert set(taken) == set(matrices(model, in_blocks(["attn1.to_q"], 0))) | {
        f"transformer.blocks.{n}.attn1.to_q.lora_{half}.weight" for n in (0, 1) for half in "AB"
    }
    for parameter in model.parameters():
        parameter.data.zero_()
    assert taken["transformer.blocks.0.attn1.to_q.lora_A.weight"].abs().sum() > 0


def test_sharded_adapters_are_gathered(model: WanTransformer3DModel) -> None:
    lora.inject(model, rank=2, alpha=2, targets=("to_q",))
    plain = lora.tensors(model)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        for block in model.blocks:
            fully_shard(block, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
        assert all(isinstance(p, DTensor) for p in model.blocks.parameters())
        gathered = lora.tensors(model)
        assert not any(isinstance(tensor, DTensor) for tensor in gathered.values())
        assert set(gathered) == set(plain) and all(torch.equal(gathered[key], plain[key]) for key in plain)
    finally:
        torch.distributed.destroy_process_group()


def diffusers_of(checkpoint: Callable, files: list[Path], scales: list[float], dtype: torch.dtype) -> torch.nn.Module:
    pipeline = tiny.reference(checkpoint("t2v"), "t2v").to(dtype)
    for index, file in enumerate(files):
        pipeline.load_lora_weights(file, adapter_name=f"a{index}")
    pipeline.set_adapters([f"a{index}" for index in range(len(files))], scales)
    return pipeline.transformer


def ours_of(checkpoint: Callable, files: list[Path], scales: list[float], dtype: torch.dtype) -> torch.nn.Module:
    transformer = tiny.reference(checkpoint("t2v"), "t2v").to(dtype).transformer
    lora.attach(transformer, [(lora.read(file), scale) for file, scale in zip(files, scales, strict=True)])
    return transformer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout, alpha", [("diffusers", 4), ("diffusers", 3), ("comfyui", 4), ("comfyui", 1),
                                           ("kohya", 4), ("kohya", 2)])  # fmt: skip
def test_diffusers_computes_the_same_of_what_is_written(
    layout: str, alpha: float, dtype: torch.dtype, checkpoint: Callable, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.safetensors", model, alpha=alpha, layout=layout)
    theirs, ours = (load(checkpoint, [file], [1.0], dtype) for load in (diffusers_of, ours_of))
    assert torch.equal(output(theirs), output(ours)) and adapted(theirs) == adapted(ours) == set(in_blocks(EVERY))
    assert {p.dtype for n, p in theirs.named_parameters() if "lora" in n} == {dtype}
    assert {p.dtype for n, p in ours.named_parameters() if "lora" in n} == {dtype}
    assert not torch.equal(output(ours), output(tiny.reference(checkpoint("t2v"), "t2v").to(dtype).transformer))


@pytest.mark.parametrize("layout", ["comfyui", "kohya"])
def test_where_diffusers_folds_alpha_into_the_matrices_it_rounds_otherwise_and_no_more(
    layout: str, checkpoint: Callable, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    file = written(tmp_path / "a.safetensors", model, alpha=3, layout=layout)
    theirs, ours = (load(checkpoint, [file], [1.0], torch.float32) for load in (diffusers_of, ours_of))
    torch.testing.assert_close(output(theirs), output(ours), rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
def test_several_with_ranks_alphas_and_scales_of_their_own_are_what_diffusers_computes(
    checkpoint: Callable, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    names = [*in_blocks(ATTENTION), "proj_out", "condition_embedder.time_proj"]
    ranks = {name: 1 + index % 4 for index, name in enumerate(names)}
    alphas = {name: 0.5 + index % 3 for index, name in enumerate(names)}
    first = lora.save(tmp_path / "a.safetensors", matrices(model, names, rank=ranks), alpha=alphas)
    files = [first, written(tmp_path / "b.safetensors", model, alpha=5, seed=1)]
    theirs, ours = (load(checkpoint, files, [0.7, -0.3], torch.float32) for load in (diffusers_of, ours_of))
    assert torch.equal(output(theirs), output(ours))


def test_attaching_draws_no_random_numbers_and_leaves_the_adapter_alone(
    model: WanTransformer3DModel, tmp_path: Path
) -> None:
    adapter, state = lora.read(written(tmp_path / "a.safetensors", model)), torch.random.get_rng_state()
    lora.attach(model, [(adapter, 1.0)])
    assert torch.equal(torch.random.get_rng_state(), state)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    digest = adapter.digest
    for parameter in model.parameters():
        parameter.data.zero_()
    assert lora.Adapter(adapter.file, adapter.tensors, adapter.alphas).digest == digest


def test_a_module_without_weights_takes_an_adapters_shapes(model: WanTransformer3DModel, tmp_path: Path) -> None:
    with torch.device("meta"):
        outline = tiny._transformer(16, False, clip=False)
    lora.attach(outline, [(lora.read(written(tmp_path / "a.safetensors", model)), 0.5)])
    assert {parameter.device.type for parameter in outline.parameters()} == {"meta"} and adapted(outline)


def test_an_adapter_of_another_model_is_refused(model: WanTransformer3DModel, tmp_path: Path) -> None:
    larger = WanTransformer3DModel(num_attention_heads=2, attention_head_dim=24, in_channels=16, out_channels=16,
                                   text_dim=32, freq_dim=32, ffn_dim=32, num_layers=3)  # fmt: skip
    shapes = lora.read(lora.save(tmp_path / "a.safetensors", matrices(larger, ["blocks.0.attn1.to_q"]), alpha=4))
    deeper = lora.read(lora.save(tmp_path / "b.safetensors", matrices(larger, ["blocks.2.attn1.to_q"]), alpha=4))
    with pytest.raises(WeightsError, match=r"a.safetensors: the matrices of blocks.0.attn1.to_q do not fit"):
        lora.attach(model, [(shapes, 1.0)])
    with pytest.raises(WeightsError, match=r"b.safetensors: .* has no such layer: 'blocks.2.attn1.to_q'; choices: "):
        lora.attach(model, [(deeper, 1.0)])
    with pytest.raises(WeightsError, match="no such layer"):
        lora.check(AutoencoderKLWan(base_dim=3, z_dim=4, dim_mult=[1, 1], temperal_downsample=[True]), deeper)
    assert not adapted(model)


def test_uses_say_whose_an_adapter_is_and_how_much_it_counts(
    model: WanTransformer3DModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = written(tmp_path / "a=b:c.safetensors", model)
    monkeypatch.chdir(tmp_path)
    one, two = ("transformer",), ("transformer", "transformer_2")
    found = lora.uses([odd, f"{odd}:0.5", "./a=b:c.safetensors:-1e-1"], one)
    assert [(use.component, use.scale) for use in found] == [("transformer", 1), ("transformer", 0.5),
                                                             ("transformer", -0.1)]  # fmt: skip
    (named,) = lora.uses(["transformer_2=./a=b:c.safetensors:2"], two)
    assert (named.component, named.scale, named.adapter.file) == ("transformer_2", 2, str(odd))
    assert named.record() == {
        "component": "transformer_2", "file": str(odd), "digest": lora.read(odd).digest, "scale": 2
    }  # fmt: skip


@pytest.mark.parametrize("text, error, match", [
    ("{}", RequestError, "several experts.*choices: transformer={}, transformer_2={}"),
    ("vae={}", RequestError, "components that generate: 'vae'; choices: transformer, transformer_2"),
    ("transformer={}:nan", RequestError, "finite number"),
    ("transformer={}:inf", RequestError, "finite number"),
    ("transformer={}:much", WeightsError, "no such adapter"),
    ("transformer=", WeightsError, "no such adapter"),
])  # fmt: skip
def test_uses_that_cannot_be_are_refused(
    text: str, error: type, match: str, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    file = str(written(tmp_path / "a.safetensors", model))
    with pytest.raises(error, match=match.replace("{}", file)):
        lora.uses([text.replace("{}", file)], ("transformer", "transformer_2"))
