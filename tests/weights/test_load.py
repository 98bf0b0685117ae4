"""Damaged or missing weights are an error that names the file; nothing is ever filled with random numbers."""

import json
import shutil
import struct
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import UMT5EncoderModel

from loopwright.card import Component
from loopwright.errors import CardError, WeightsError
from loopwright.weights.load import _module, check_files, count_parameters, load_component, stored_bytes

TRANSFORMER = Component("diffusers.WanTransformer3DModel", subfolder="transformer", dtype="float32")
TEXT = Component("transformers.UMT5EncoderModel", subfolder="text_encoder", dtype="float32")
VAE = Component("diffusers.AutoencoderKLWan", subfolder="vae", dtype="float32")
FILES = {"transformer": "diffusion_pytorch_model.safetensors", "text_encoder": "model.safetensors"}
BOTH = pytest.mark.parametrize("component", [TRANSFORMER, TEXT], ids=lambda c: c.subfolder)


@pytest.fixture
def folder(checkpoint: Callable, tmp_path: Path) -> Path:
    """A copy of a checkpoint, to be damaged."""
    for part in (*FILES, "vae", "tokenizer"):
        shutil.copytree(checkpoint("t2v") / part, tmp_path / part)
    return tmp_path


def file_of(folder: Path, component: Component) -> Path:
    return folder / component.subfolder / FILES[component.subfolder]


def refused(folder: Path, component: Component, match: str) -> None:
    with pytest.raises(WeightsError, match=match) as caught:
        load_component(component, folder, "cpu")
    assert component.subfolder in str(caught.value) and "\n" not in str(caught.value)


@BOTH
def test_a_component_is_frozen_in_evaluation_mode_and_has_the_files_weights(component: Component, folder: Path) -> None:
    module = load_component(component, folder, "cpu")
    assert not module.training and not any(p.requires_grad for p in module.parameters())
    stored, own = load_file(file_of(folder, component)), module.state_dict()
    assert stored and all(torch.equal(own[name], tensor) for name, tensor in stored.items())


@BOTH
@pytest.mark.parametrize("keep", [0, 5, 8, 200, -1, -5000])
def test_a_truncated_file_is_refused(component: Component, keep: int, folder: Path) -> None:
    file = file_of(folder, component)
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, component, f"{file.name} is (truncated|damaged|not a safetensors file)")


@BOTH
def test_a_file_longer_than_its_header_says_is_refused(component: Component, folder: Path) -> None:
    file = file_of(folder, component)
    size = file.stat().st_size
    file.write_bytes(file.read_bytes() + b"\0" * 8)
    refused(folder, component, f"is damaged: {size + 8} bytes where its header says {size}; download it again")


@BOTH
@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\0" * 100, b"<html>not found</html>" * 9, b"\xff" * 64], ids=str
)
def test_garbage_is_refused(component: Component, content: bytes, folder: Path) -> None:
    file_of(folder, component).write_bytes(content)
    refused(folder, component, r"\.safetensors is ")


VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["data_offsets", "dtype", "shape", "__metadata__", "w"]), inner, max_size=3)
    ),
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    header=st.binary(max_size=40) | VALUE.map(lambda v: json.dumps(v).encode()), length=st.integers(0, 60) | st.none()
)
def test_no_header_raises_anything_but_a_weights_error(header: bytes, length: int | None, tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header)
    try:
        check_files(tmp_path)
    except WeightsError as error:
        assert "x.safetensors" in str(error) and "\n" not in str(error)


def sharded(folder: Path, component: Component) -> list[Path]:
    """Split a component's weights in two shards with an index, as large checkpoints are."""
    file = file_of(folder, component)
    tensors = load_file(file)
    file.unlink()
    names, stem = sorted(tensors), file.name.removesuffix(".safetensors")
    shards = [file.with_name(f"{stem}-0000{i}-of-00002.safetensors") for i in (1, 2)]
    halves = (names[: len(names) // 2], names[len(names) // 2 :])
    for shard, half in zip(shards, halves, strict=True):
        save_file({name: tensors[name] for name in half}, shard, metadata={"format": "pt"})
    where = {name: shard.name for shard, half in zip(shards, halves, strict=True) for name in half}
    index = {"metadata": {"total_size": 1}, "weight_map": where}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps(index))
    return shards


@BOTH
def test_shards_are_loaded_as_one(component: Component, folder: Path, checkpoint: Callable) -> None:
    whole = load_component(component, folder, "cpu").state_dict()
    assert count_parameters(folder / component.subfolder) > 0
    sharded(folder, component)
    parts = load_component(component, folder, "cpu").state_dict()
    assert list(parts) == list(whole) and all(torch.equal(parts[name], whole[name]) for name in whole)


@BOTH
@pytest.mark.parametrize("which", [0, 1])
def test_a_shard_the_index_names_may_not_be_missing(component: Component, which: int, folder: Path) -> None:
    shard = sharded(folder, component)[which]
    shard.unlink()
    refused(folder, component, f"{shard.name} is missing; download the checkpoint again")


@BOTH
def test_a_truncated_shard_is_refused_by_name(component: Component, folder: Path) -> None:
    shard = sharded(folder, component)[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    refused(folder, component, f"{shard.name} is damaged")


@BOTH
@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\0"])
def test_a_damaged_index_is_refused(component: Component, index: str, folder: Path) -> None:
    sharded(folder, component)
    file = file_of(folder, component)
    file.with_name(f"{file.name}.index.json").write_text(index)
    refused(folder, component, r"index\.json is damaged")


@BOTH
def test_missing_weights_are_named_and_never_random(component: Component, folder: Path) -> None:
    file = file_of(folder, component)
    tensors = load_file(file)
    gone = sorted(tensors)[3]
    del tensors[gone]
    save_file(tensors, file, metadata={"format": "pt"})
    refused(folder, component, f"lacks 1 weights of .*'{gone}'; download")


@BOTH
def test_weights_of_another_shape_are_refused(component: Component, folder: Path) -> None:
    file = file_of(folder, component)
    tensors = load_file(file)
    name = next(n for n in sorted(tensors) if tensors[n].ndim == 2)
    tensors[name] = torch.zeros(tensors[name].shape[0] + 1, tensors[name].shape[1])
    save_file(tensors, file, metadata={"format": "pt"})
    refused(folder, component, "cannot be loaded")


@BOTH
def test_without_safetensors_there_are_no_weights(component: Component, folder: Path) -> None:
    """A pickle is never read."""
    file = file_of(folder, component)
    torch.save(load_file(file), file.with_name("diffusion_pytorch_model.bin"))
    torch.save(load_file(file), file.with_name("pytorch_model.bin"))
    file.unlink()
    refused(folder, component, "holds no safetensors weights; convert or download them as safetensors")


@pytest.mark.parametrize(
    ("component", "damage"), [(TRANSFORMER, "missing"), (TEXT, "missing"), (TRANSFORMER, "garbage"), (TEXT, "garbage")]
)
def test_a_configuration_that_cannot_be_read_is_a_weights_error(
    component: Component, damage: str, folder: Path
) -> None:
    config = folder / component.subfolder / "config.json"
    config.unlink()
    if damage == "garbage":
        config.write_text("{")
    refused(folder, component, "config.json is missing" if damage == "missing" else "cannot be loaded")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    refused(tmp_path, TRANSFORMER, "transformer is missing; download")


@pytest.mark.parametrize("damage", ["missing", "garbage"])
def test_a_tokenizer_that_cannot_be_read_is_a_weights_error(damage: str, folder: Path) -> None:
    tokenizer = Component("transformers.AutoTokenizer", subfolder="tokenizer")
    assert load_component(tokenizer, folder, "cpu")("a").input_ids
    for file in (folder / "tokenizer").iterdir():
        file.unlink() if damage == "missing" else file.write_text("{")
    refused(folder, tokenizer, "cannot be loaded")


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("os.system", r"unknown library: 'os\.system'; choices: diffusers, transformers"),
        ("WanTransformer3DModel", "unknown library"),
        ("diffusers.models.WanTransformer3DModel", "unknown library"),
        ("diffusers.configuration_utils", "diffusers loads no class of that name"),
        ("diffusers.NoSuchModel", "diffusers loads no class of that name: 'NoSuchModel'; correct the card"),
    ],
)
def test_a_class_from_elsewhere_is_never_loaded(kind: str, match: str, folder: Path) -> None:
    with pytest.raises(CardError, match=match):
        load_component(Component(kind, subfolder="transformer", dtype="float32"), folder, "cpu")


@pytest.mark.parametrize(
    ("component", "cls", "keyword"),
    [(TRANSFORMER, WanTransformer3DModel, "torch_dtype"), (VAE, AutoencoderKLWan, "torch_dtype"),
     (TEXT, UMT5EncoderModel, "dtype")],
    ids=["transformer", "vae", "text_encoder"],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_precision_is_what_the_library_itself_gives(
    component: Component, cls: type, keyword: str, dtype: str, folder: Path
) -> None:
    """Some modules stay in float32 whatever is asked for."""
    asked = Component(component.kind, subfolder=component.subfolder, dtype=dtype)
    ours = load_component(asked, folder, "cpu").state_dict()
    theirs = cls.from_pretrained(folder / component.subfolder, **{keyword: getattr(torch, dtype)}).state_dict()
    assert {n: t.dtype for n, t in ours.items()} == {n: t.dtype for n, t in theirs.items()}
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("component", "cls"), [(TRANSFORMER, WanTransformer3DModel), (VAE, AutoencoderKLWan), (TEXT, UMT5EncoderModel)],
    ids=["transformer", "vae", "text_encoder"],
)  # fmt: skip
def test_weights_on_another_device_are_the_same_tensors_there(
    component: Component, cls: type, dtype: str, folder: Path
) -> None:
    """The device without storage stands for any; ties, buffers and what stays in float32 included."""
    library, path = component.kind.split(".")[0], folder / component.subfolder
    here, there = (_module(cls, library, path, dtype, device) for device in ("cpu", "meta"))
    for named in ("named_parameters", "named_buffers"):
        mine, other = dict(getattr(here, named)()), dict(getattr(there, named)())
        assert {n: (t.shape, t.dtype) for n, t in mine.items()} == {n: (t.shape, t.dtype) for n, t in other.items()}
        assert all(tensor.device.type == "meta" for tensor in other.values())


class HostBytes(TorchDispatchMode):
    """The most bytes of host memory that operations have taken at once; mapped files take none."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        mapped = func.is_view or func.overloadpacket is torch.ops.aten.set_
        if isinstance(out, torch.Tensor) and out.device.type == "cpu" and not mapped:
            storage = out.untyped_storage()
            if storage._cdata not in self.known:
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def gone(self, name: int, count: int) -> None:
        self.known.discard(name)
        self.now -= count


def test_no_copy_of_the_weights_is_made_on_the_host_on_their_way_to_a_device(folder: Path) -> None:
    """Each tensor is converted by itself; transformers does the same in threads of its own, which are not counted."""
    path = folder / "transformer"
    with HostBytes() as host:
        module = _module(WanTransformer3DModel, "diffusers", path, "bfloat16", "meta")
    largest = max(tensor.numel() * 4 for tensor in module.state_dict().values())
    buffers = sum(tensor.numel() * tensor.element_size() for tensor in module.buffers())
    assert host.most <= 2 * largest + 4 * buffers < stored_bytes(TRANSFORMER, folder) / 2


def test_what_weights_will_take_is_known_from_the_headers(folder: Path) -> None:
    for component in (TRANSFORMER, TEXT, VAE):
        module = load_component(component, folder, "cpu")
        taken = sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())
        assert stored_bytes(component, folder) == taken
        half = Component(component.kind, subfolder=component.subfolder, dtype="bfloat16")
        assert stored_bytes(half, folder) * 2 == taken


def test_bfloat16_keeps_in_float32_what_the_reference_keeps(folder: Path) -> None:
    module = load_component(Component(TRANSFORMER.kind, subfolder="transformer", dtype="bfloat16"), folder, "cpu")
    kept = {name for name, p in module.named_parameters() if p.dtype == torch.float32}
    assert any("time_embedder" in name for name in kept) and any("scale_shift_table" in name for name in kept)
    assert module.blocks[0].attn1.to_q.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_parameters_are_counted_from_the_headers(folder: Path) -> None:
    module = load_component(TRANSFORMER, folder, "cpu")
    assert count_parameters(folder / "transformer") == sum(t.numel() for t in module.state_dict().values())
    assert count_parameters(folder / "tokenizer") == 0
