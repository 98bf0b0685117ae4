"""One adapter in three layouts of files: nothing is lost between them, and nothing doubtful is read."""

import json
from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import tiny
from loopwright.errors import WeightsError
from loopwright.weights import lora
from loopwright.weights.lora.keys import LAYOUTS, name_of, parse
from lora_files import EVERY, in_blocks, matrices

OTHERS = (
    "patch_embedding",
    "condition_embedder.time_embedder.linear_1",
    "condition_embedder.time_embedder.linear_2",
    "condition_embedder.time_proj",
    "condition_embedder.text_embedder.linear_1",
    "condition_embedder.text_embedder.linear_2",
    "condition_embedder.image_embedder.ff.net.0.proj",
    "condition_embedder.image_embedder.ff.net.2",
    "proj_out",
)
NAMES = (*in_blocks((*EVERY, "attn2.add_k_proj", "attn2.add_v_proj")), *OTHERS)


@pytest.fixture(scope="module")
def model() -> WanTransformer3DModel:
    return tiny._transformer(16, True, clip=True)


def test_every_linear_layer_of_wan_has_a_name_of_its_own_in_every_layout(model: WanTransformer3DModel) -> None:
    linear = [name for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)]
    for layout in LAYOUTS:
        named = [name_of(name, layout) for name in linear]
        assert None not in named and len(set(named)) == len(linear) > 20
        assert [parse(f"{name}.alpha") for name in named] == [(layout, name, "alpha") for name in linear]


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_any_adapter_goes_through_all_layouts_unchanged(
    data: st.DataObject, model: WanTransformer3DModel, tmp_path: Path
) -> None:
    names = data.draw(st.lists(st.sampled_from([n for n in NAMES if n != "patch_embedding"]), min_size=1, unique=True))
    ranks = {name: data.draw(st.integers(1, 4)) for name in names}
    alphas = {name: data.draw(st.floats(1e-3, 1e3)) for name in names}
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    made = {key: tensor.to(dtype) for key, tensor in matrices(model, names, rank=ranks).items()}
    path, alpha = tmp_path / "a.safetensors", alphas
    tensors = made
    for layout in data.draw(st.permutations(LAYOUTS)):
        read = lora.read(lora.save(path, tensors, alpha=alpha, layout=layout))
        tensors, alpha = read.tensors, read.alphas
        assert dict(alpha) == alphas and set(tensors) == set(made)
        assert all(tensors[key].dtype == dtype and torch.equal(tensors[key], made[key]) for key in made)


def test_the_digest_is_of_the_content_and_not_of_the_layout(model: WanTransformer3DModel, tmp_path: Path) -> None:
    made = matrices(model, in_blocks(EVERY))
    files = {layout: lora.save(tmp_path / f"{layout}.safetensors", made, alpha=3, layout=layout) for layout in LAYOUTS}
    digests = {lora.read(file).digest for file in files.values()}
    other = {key: tensor.clone() for key, tensor in made.items()}
    next(iter(other.values()))[0, 0] += 1
    digests_of_others = {
        lora.read(lora.save(tmp_path / "b.safetensors", made, alpha=4)).digest,
        lora.read(lora.save(tmp_path / "b.safetensors", other, alpha=3)).digest,
        lora.read(lora.save(tmp_path / "b.safetensors", {k: t.half() for k, t in made.items()}, alpha=3)).digest,
    }
    assert len(digests) == 1 and len(digests_of_others | digests) == 4


def test_a_convolution_goes_through_all_layouts(tmp_path: Path) -> None:
    key = "transformer.patch_embedding.lora_{}.weight"
    made = {key.format("A"): torch.randn(2, 16, 1, 2, 2), key.format("B"): torch.randn(24, 2, 1, 1, 1)}
    for layout in LAYOUTS:
        read = lora.read(lora.save(tmp_path / "c.safetensors", made, alpha=2, layout=layout))
        assert all(torch.equal(read.tensors[k], made[k]) for k in made)


def test_files_carry_the_names_that_others_use(model: WanTransformer3DModel, tmp_path: Path) -> None:
    made = matrices(model, ["blocks.1.attn2.to_out.0"])
    saved = {layout: lora.save(tmp_path / f"{layout}.safetensors", made, alpha=2, layout=layout) for layout in LAYOUTS}
    keys = {layout: set(load_file(file)) for layout, file in saved.items()}
    assert keys == {
        "diffusers": {f"transformer.blocks.1.attn2.to_out.0.lora_{x}.weight" for x in "AB"},
        "comfyui": {f"diffusion_model.blocks.1.cross_attn.o.{x}" for x in ("lora_A.weight", "lora_B.weight", "alpha")},
        "kohya": {f"lora_unet_blocks_1_cross_attn_o.{x}" for x in ("lora_down.weight", "lora_up.weight", "alpha")},
    }


def test_alphas_that_are_the_rank_need_no_saying_but_in_kohyas_layout(
    model: WanTransformer3DModel, tmp_path: Path
) -> None:
    made = matrices(model, ["proj_out"], rank=4)
    comfy = lora.save(tmp_path / "a.safetensors", made, alpha=4, layout="comfyui")
    kohya = lora.save(tmp_path / "b.safetensors", made, alpha=4, layout="kohya")
    assert not any("alpha" in key for key in load_file(comfy))
    assert load_file(kohya)["lora_unet_head_head.alpha"].item() == 4
    assert lora.read(comfy).alphas == lora.read(kohya).alphas == {"proj_out": 4}


def test_what_diffusers_and_peft_write_is_read(model: WanTransformer3DModel, tmp_path: Path) -> None:
    from diffusers import WanPipeline
    from diffusers.training_utils import _collate_lora_metadata
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    trained = tiny._transformer(16, False, clip=False)
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=["to_q", "ffn.net.0.proj"],
        rank_pattern={"attn2.to_q": 2},
        alpha_pattern={"blocks.1.attn1.to_q": 3},
        lora_dropout=0.1,
    )
    trained.add_adapter(config)
    layers = get_peft_model_state_dict(trained)
    metadata = _collate_lora_metadata({"transformer": trained})
    WanPipeline.save_lora_weights(tmp_path, layers, **metadata)
    read = lora.read(tmp_path / "pytorch_lora_weights.safetensors")
    assert read.alphas["blocks.0.attn1.to_q"] == 6 and read.alphas["blocks.1.attn1.to_q"] == 3
    assert read.pairs["blocks.1.attn2.to_q"][0].shape[0] == 2 and len(read.pairs) == 6


def test_the_name_that_peft_gave_the_adapter_is_passed_over(model: WanTransformer3DModel, tmp_path: Path) -> None:
    made = matrices(model, ["blocks.0.attn1.to_q"])
    file = tmp_path / "a.safetensors"
    save_file({key.replace(".weight", ".default.weight"): tensor for key, tensor in made.items()}, file)
    read = lora.read(file)
    assert set(read.tensors) == set(made) and read.alphas == {"blocks.0.attn1.to_q": 4}


Q = "transformer.blocks.0.attn1.to_q"
A, B = torch.ones(4, 24), torch.ones(24, 4)
BAD = {
    "a key of no layout": ({"unet.q.lora_A.weight": A}, "not the key of an adapter.*'unet.q.lora_A.weight'"),
    "a weight that is no adapter's": ({f"{Q}.weight": A}, "not the key of an adapter"),
    "a bias": ({f"{Q}.lora_A.weight": A, f"{Q}.lora_B.bias": B[0]}, "not the key of an adapter.*lora_B.bias"),
    "an unknown module": ({"diffusion_model.blocks.0.q.lora_A.weight": A}, "not the key of an adapter"),
    "a second expert's": ({"transformer_2.proj_out.lora_A.weight": A}, "not the key of an adapter"),
    "half a pair": ({f"{Q}.lora_A.weight": A}, "blocks.0.attn1.to_q lacks its lora_B"),
    "the other half": ({f"{Q}.lora_B.weight": B}, "blocks.0.attn1.to_q lacks its lora_A"),
    "ranks": (
        {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B[:, :2].clone()},
        "blocks.0.attn1.to_q are of no common rank",
    ),
    "whole numbers": ({f"{Q}.lora_A.weight": A.int(), f"{Q}.lora_B.weight": B.int()}, "are no floats"),
    "two layouts": (
        {f"{Q}.lora_A.weight": A, "diffusion_model.blocks.0.self_attn.q.lora_B.weight": B},
        "not the key of an adapter: 'transformer.*|diffusion_model.*'",
    ),
    "a matrix twice": (
        {f"{Q}.lora_A.weight": A, f"{Q}.lora_A.default.weight": A.clone(), f"{Q}.lora_B.weight": B},
        "the same matrix twice",
    ),
    "alpha": (
        {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B, f"{Q}.alpha": torch.ones(2)},
        "the alpha of blocks.0.attn1.to_q is no number",
    ),
    "nothing": ({}, "holds no adapter"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_doubtful_is_refused_with_key_and_file(case: str, tmp_path: Path) -> None:
    tensors, match = BAD[case]
    file = tmp_path / "doubtful.safetensors"
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=match) as caught:
        lora.read(file)
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("field, value", [("use_dora", True), ("use_rslora", True), ("lora_bias", True),
                                          ("init_lora_weights", "pissa"), ("r", 3), ("lora_alpha", "x")])  # fmt: skip
def test_a_configuration_that_changes_what_the_matrices_mean_is_refused(
    field: str, value: object, tmp_path: Path
) -> None:
    file, pair = tmp_path / "a.safetensors", {f"{Q}.lora_A.weight": A, f"{Q}.lora_B.weight": B}
    config = {"transformer.r": 4, "transformer.lora_alpha": 4, f"transformer.{field}": value}
    save_file(pair, file, metadata={"lora_adapter_metadata": json.dumps(config)})
    with pytest.raises(WeightsError, match=r"only plain LoRA|has rank 4|is no number"):
        lora.read(file)
    save_file(pair, file, metadata={"lora_adapter_metadata": "not JSON"})
    with pytest.raises(WeightsError, match="is no JSON"):
        lora.read(file)


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    torch.save({f"{Q}.lora_A.weight": A}, tmp_path / "pickle.safetensors")
    with pytest.raises(WeightsError, match="is not a safetensors file"):
        lora.read(tmp_path / "pickle.safetensors")
    with pytest.raises(WeightsError, match="no such adapter"):
        lora.read(tmp_path / "missing.safetensors")


def test_nothing_is_written_that_would_not_be_read(model: WanTransformer3DModel, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    made = matrices(model, ["blocks.0.attn1.to_q"])
    half = dict(list(made.items())[:1])
    unnamed = {key.replace("blocks.0.attn1.to_q", "blocks.0.attn3.to_q"): tensor for key, tensor in made.items()}
    for tensors, layout, match in ((half, "diffusers", "lacks its lora_B"), (unnamed, "kohya", "has no name"),
                                   (made, "a1111", "unknown layout"), ({}, "comfyui", "no adapter")):  # fmt: skip
        with pytest.raises(WeightsError, match=match):
            lora.save(file, tensors, alpha=4, layout=layout)
    assert list(tmp_path.iterdir()) == []
    lora.save(file, made, alpha=4)
    with safe_open(file, framework="pt") as opened:
        assert "lora_adapter_metadata" in opened.metadata()
    assert list(tmp_path.iterdir()) == [file]
