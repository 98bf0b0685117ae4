"""Weights on their way: what is sent arrives or is refused, whole; nothing is half written."""

import json
import os
import stat
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import sync_members
import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from transformers import UMT5Config, UMT5EncoderModel

from loopwright.card import Component
from loopwright.distributed.group import joined
from loopwright.distributed.launch import launch
from loopwright.distributed.shard import shard
from loopwright.errors import WeightsError
from loopwright.weights import lora, sync
from loopwright.weights.load import load_component

SETTINGS = {
    "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 16, "out_channels": 16, "text_dim": 32,
    "freq_dim": 32, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True,
}  # fmt: skip
COMPONENT = Component("diffusers.WanTransformer3DModel", subfolder="transformer", dtype="float32")
TARGETS = ("attn1.to_[qkv]", r"ffn\.net\.2")


def net(seed: int, **changes: object) -> WanTransformer3DModel:
    torch.manual_seed(seed)
    return WanTransformer3DModel(**SETTINGS | changes).eval()


def adapted(seed: int, alpha: float = 8, **changes: object) -> WanTransformer3DModel:
    """Adapters that count for something."""
    module = net(0, **changes)
    lora.inject(module, rank=4, alpha=alpha, targets=TARGETS)
    torch.manual_seed(seed)
    for name, parameter in module.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter.data, std=0.2)
    return module


def running(folder: Path) -> WanTransformer3DModel:
    """Serves adapters of other values."""
    file = lora.save(folder / "first.safetensors", lora.tensors(adapted(2)), alpha=8)
    module = net(0)
    lora.attach(module, [(lora.read(file), 1.0)])
    return module


def state(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)


def into(module: torch.nn.Module, delivery: sync.Delivery) -> None:
    sync.write(sync.bind(module, delivery))


def refused(module: torch.nn.Module, delivery: sync.Delivery, told: str) -> None:
    """It is, with these words, and nothing has changed."""
    before = state(module)
    with pytest.raises(WeightsError, match=told):
        into(module, delivery)
    assert equal(before, module.state_dict())


# --- the checksum


def test_a_checksum_is_of_the_content_alone() -> None:
    tensors = sync_members.weights()
    same = {name: tensor.clone() for name, tensor in reversed(tensors.items())}
    same["a"] = torch.cat([torch.zeros(5), same["a"].flatten()])[5:].view(3, 5)  # elsewhere in its memory
    assert sync.checksum(same) == sync.checksum(tensors) and len(sync.checksum(tensors)) == 32


CHANGES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "a bit": lambda t: t["d"].view(torch.int32)[0, 0].bitwise_xor_(1),
    "two signs": lambda t: t["d"][0, 1::2].mul_(-1),  # of the highest bits of words, which sums could cancel
    "two rows": lambda t: t["d"].copy_(t["d"][[1, 0, *range(2, 64)]]),
    "transposed": lambda t: t.update(d=t["d"].t()),
    "exchanged": lambda t: t.update(d=t["view"], view=t["d"]),
    "a name": lambda t: t.update(z=t.pop("a")),
    "a shape": lambda t: t.update(a=t["a"].view(5, 3)),
    "a type": lambda t: t.update(count=t["count"].double()),
    "an empty one": lambda t: t.pop("e"),
    "cut off": lambda t: t.update(b=t["b"][:6]),
    "zeroed": lambda t: t["d"][32:].zero_(),
    "far apart": lambda t: t.update(long=torch.arange(2**19).roll(2**16)),
}


def test_a_checksum_sees_every_kind_of_change() -> None:
    base = {name: tensor.clone() for name, tensor in sync_members.weights().items()} | {"long": torch.arange(2**19)}
    seen = {sync.checksum(base)}
    for change in CHANGES.values():
        tensors = {name: tensor.clone() for name, tensor in base.items()}
        change(tensors)
        seen.add(sync.checksum(tensors))
    assert len(seen) == 1 + len(CHANGES)


def test_a_random_bit_anywhere_changes_the_checksum() -> None:
    weights = torch.randn(3000)
    known, generator = sync.checksum({"w": weights}), torch.Generator().manual_seed(0)
    for place in torch.randint(3000, (60,), generator=generator).tolist():
        bit = int(torch.randint(31, (), generator=generator))
        weights.view(torch.int32)[place].bitwise_xor_(1 << bit)
        assert sync.checksum({"w": weights}) != known
        weights.view(torch.int32)[place].bitwise_xor_(1 << bit)
    assert sync.checksum({"w": weights}) == known


# --- modules of this process


def test_all_weights_arrive_at_the_addresses_that_were_there() -> None:
    target, source = net(0), net(1)
    addresses = {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}
    into(target, sync.full(source))
    assert equal(target.state_dict(), source.state_dict())
    assert addresses == {name: tensor.data_ptr() for name, tensor in target.state_dict().items()}


def test_masters_are_rounded_to_the_precision_of_each_weight_as_loading_rounds_them(tmp_path: Path) -> None:
    source = net(1)
    source.save_pretrained(tmp_path / "transformer")
    component = Component(COMPONENT.kind, subfolder="transformer", dtype="bfloat16")
    loaded = load_component(component, tmp_path, "cpu")
    target = load_component(component, tmp_path, "cpu")
    for parameter in target.parameters():
        torch.nn.init.zeros_(parameter)
    into(target, sync.full(source))
    assert equal(target.state_dict(), loaded.state_dict())
    assert {tensor.dtype for tensor in target.state_dict().values()} == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_weights_are_what_peft_merges(dtype: torch.dtype) -> None:
    trained, target = adapted(1).to(dtype), net(0).to(dtype)
    into(target, sync.merged(trained))
    trained.fuse_lora()
    trained.unload_lora()
    assert equal(target.state_dict(), trained.state_dict())
    assert not equal(target.state_dict(), net(0).to(dtype).state_dict())


def test_masters_of_adapters_are_merged_in_the_precision_of_the_forward() -> None:
    trained, rounded = adapted(1), adapted(1).to(torch.bfloat16)
    for name, parameter in trained.named_parameters():
        if "lora_" not in name:
            parameter.data = parameter.data.bfloat16()
    assert equal(sync.merged(trained).tensors, sync.merged(rounded).tensors)


def test_adapters_alone_arrive_in_a_module_that_runs_some(tmp_path: Path) -> None:
    trained, target = adapted(1), net(0)
    lora.attach(
        target, [(lora.read(lora.save(tmp_path / "first.safetensors", lora.tensors(adapted(2)), alpha=8)), 1.0)]
    )
    into(target, sync.adapter(trained))
    x = {"hidden_states": torch.randn(1, 16, 1, 4, 4), "timestep": torch.ones(1),
         "encoder_hidden_states": torch.randn(1, 8, 32), "return_dict": False}  # fmt: skip
    with torch.no_grad():
        assert torch.equal(target(**x)[0], trained(**x)[0])


def test_what_is_packed_depends_on_who_has_adapters(tmp_path: Path) -> None:
    with_some = running(tmp_path)
    forms = [sync.pack(module, to).form for module in (net(1), adapted(1)) for to in (net(0), with_some)]
    assert forms == ["full", "full", "merged", "adapter"]


def test_sharded_weights_are_gathered() -> None:
    source, target = net(1), net(0)
    expected = state(source)
    with joined("cpu") as group:
        shard(source, group.mesh, "float32")
        into(target, sync.full(source))
    assert equal(target.state_dict(), expected)


# --- what is refused, whole


def changed(**changes: object) -> dict[str, torch.Tensor]:
    """Weights that fit, but for some; those that come first in the module fit."""
    tensors = state(net(1))
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not None}


LAST = "proj_out.weight"


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        (changed(**{LAST: None}), "are missing: 'proj_out.weight'"),
        (changed(surplus=torch.ones(1)), "no such weights: 'surplus'"),
        (changed(**{LAST: torch.ones(3, 4)}), r"proj_out.weight is \[3, 4\] and must be \[64, 24\]"),
        (
            changed(**{LAST: torch.ones(64, 24).bfloat16()}),
            r"proj_out.weight is torch.bfloat16 and must be torch.float32",
        ),
        (changed(**{LAST: torch.ones(64, 24).long()}), "torch.int64"),
        ({"module." + name: tensor for name, tensor in changed().items()}, "are missing: .*, and 66 more"),
    ],
)
def test_what_does_not_fit_is_refused_whole(tensors: dict[str, torch.Tensor], told: str) -> None:
    refused(net(0), sync.Delivery.of("full", tensors), told)


def test_nothing_to_bind_is_an_error() -> None:
    with pytest.raises(WeightsError, match="no weights in what is sent"):
        sync.Delivery.of("full", {})
    with pytest.raises(WeightsError, match="no weights in what is sent"):
        sync.adapter(net(0))
    refused(net(0), sync.Delivery.of("merged", {"elsewhere.weight": torch.ones(1)}), "no such weights")
    refused(net(0), sync.adapter(adapted(1)), "runs without adapters")


def test_a_and_b_travel_together(tmp_path: Path) -> None:
    trained = sync.adapter(adapted(1))
    target = running(tmp_path)
    halved = {name: tensor for name, tensor in trained.tensors.items() if "ffn.net.2.lora_B" not in name}
    refused(target, sync.Delivery.of("adapter", halved, alphas=trained.alphas), "missing: '.*ffn.net.2.lora_B.weight")
    refused(target, sync.adapter(adapted(1, alpha=4)), "another alpha: 4.0; choices: 8")


def test_weights_of_a_model_that_computes_otherwise_are_refused(tmp_path: Path) -> None:
    refused(net(0), sync.full(net(1, eps=1e-5)), "another eps: 1e-05; choices: 1e-06")
    refused(net(0), sync.full(net(1, num_attention_heads=4, attention_head_dim=6)), "another num_attention_heads: 4")
    refused(net(0), sync.merged(adapted(1, eps=1e-5)), "another eps: 1e-05")
    refused(running(tmp_path), sync.adapter(adapted(1, eps=1e-5)), "another eps: 1e-05")


def test_an_interrupted_copy_is_completed_before_it_is_told() -> None:
    class Interrupting(torch.Tensor):
        left = 1

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            if func is torch.Tensor.copy_ and cls.left:
                cls.left -= 1
                raise KeyboardInterrupt
            return super().__torch_function__(func, types, args, kwargs)

    target, source = net(0), net(1)
    pairs = list(sync.bind(target, sync.full(source)))
    pairs[5] = (pairs[5][0], pairs[5][1].as_subclass(Interrupting))
    with pytest.raises(KeyboardInterrupt):
        sync.write(pairs)
    assert equal(target.state_dict(), source.state_dict())


# --- files


def saved(folder: Path, module: torch.nn.Module, shards: str = "10GB") -> Path:
    module.save_pretrained(folder / "transformer", max_shard_size=shards)
    return folder


def test_a_folder_its_parent_and_its_shards_are_read_as_loading_reads_them(tmp_path: Path) -> None:
    source = net(1)
    whole, parts = saved(tmp_path / "whole", source), saved(tmp_path / "parts", source, "20KB")
    assert len(list((parts / "transformer").glob("*.safetensors"))) > 2
    file = next((whole / "transformer").glob("*.safetensors"))
    for place in (whole, whole / "transformer", parts, parts / "transformer", file):
        target = net(0)
        into(target, sync.read(place, COMPONENT))
        assert equal(target.state_dict(), source.state_dict())


def test_stored_weights_take_the_components_precision_either_way(tmp_path: Path) -> None:
    source = torch.nn.Module.to(net(1), torch.bfloat16)
    save_file(state(source), tmp_path / "half.safetensors")
    target = net(0)
    into(target, sync.read(tmp_path / "half.safetensors", COMPONENT))
    assert equal(target.state_dict(), {name: tensor.float() for name, tensor in source.state_dict().items()})


def test_an_adapters_file_is_read_as_one(tmp_path: Path) -> None:
    file = lora.save(tmp_path / "a.safetensors", lora.tensors(adapted(1)), alpha=8, layout="comfyui")
    delivery, packed = sync.read(file, COMPONENT), sync.adapter(adapted(1))
    assert (delivery.form, delivery.alphas) == ("adapter", packed.alphas) and equal(delivery.tensors, packed.tensors)


def test_what_transformers_saves_is_read_under_the_modules_own_names(tmp_path: Path) -> None:
    config = UMT5Config(vocab_size=384, d_model=32, d_kv=8, d_ff=37, num_layers=2, num_heads=4)
    torch.manual_seed(0)
    source, target = UMT5EncoderModel(config).eval(), UMT5EncoderModel(config).eval()
    source.save_pretrained(tmp_path / "text_encoder")
    component = Component("transformers.UMT5EncoderModel", subfolder="text_encoder", dtype="float32")
    into(target, sync.read(tmp_path, component))
    assert equal(target.state_dict(), source.state_dict())


def test_files_of_another_configuration_are_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path, net(1)) / "transformer"
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eps": 0.5}))
    refused(net(0), sync.read(folder, COMPONENT), "another eps: 0.5")


@pytest.mark.parametrize("cut", [20, -8])
def test_a_damaged_file_is_refused(tmp_path: Path, cut: int) -> None:
    file = tmp_path / "w.safetensors"
    save_file(state(net(1)), file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(WeightsError, match="is not a safetensors file"):
        sync.read(file, COMPONENT)
    with pytest.raises(WeightsError, match="no such weights"):
        sync.read(tmp_path / "nothing", COMPONENT)


# --- other processes


def test_shared_weights_arrive_and_leave_no_trace(tmp_path: Path) -> None:
    source, target = net(1), net(0)
    for delivery in (sync.full(source), sync.merged(adapted(1)), sync.adapter(adapted(1))):
        with sync.shared(delivery, tmp_path) as path:
            assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
            got = sync.read(path, COMPONENT)
        assert (got.form, got.checksum, got.alphas) == (delivery.form, delivery.checksum, delivery.alphas)
        assert equal(got.tensors, delivery.tensors)
    assert list(tmp_path.iterdir()) == []
    with sync.shared(sync.full(source)) as path:
        assert path.parent == Path("/dev/shm")
        into(target, sync.read(path, COMPONENT))
    assert equal(target.state_dict(), source.state_dict()) and not path.exists()
    with pytest.raises(WeightsError, match="no such folder"), sync.shared(sync.full(source), tmp_path / "none"):
        pass


def test_shared_weights_are_held_against_the_module_as_those_of_this_process_are(tmp_path: Path) -> None:
    with sync.shared(sync.full(net(1, eps=1e-5)), tmp_path) as path:
        refused(net(0), sync.read(path, COMPONENT), "another eps: 1e-05; choices: 1e-06")
    half = torch.nn.Module.to(net(1), torch.bfloat16)
    save_file(state(half), tmp_path / "half.safetensors")
    target = net(0)
    with sync.shared(sync.read(tmp_path / "half.safetensors", COMPONENT), tmp_path) as path:
        into(target, sync.read(path, COMPONENT))
    assert equal(target.state_dict(), {name: tensor.float() for name, tensor in half.state_dict().items()})


def test_a_delivery_without_its_head_is_refused(tmp_path: Path) -> None:
    save_file(state(net(1)), tmp_path / "w.safetensors", {"loopwright_delivery": '{"form": "full"}'})
    with pytest.raises(WeightsError, match="does not say what it delivers"):
        sync.read(tmp_path / "w.safetensors", COMPONENT)


def test_what_changes_on_the_way_is_refused(tmp_path: Path) -> None:
    target = net(0)
    before = state(target)
    with sync.shared(sync.full(net(1)), tmp_path) as path:
        contents = bytearray(path.read_bytes())
        contents[-3] ^= 4
        path.write_bytes(contents)
        with pytest.raises(WeightsError, match="not those that were sent"):
            into(target, sync.read(path, COMPONENT))
    assert equal(target.state_dict(), before)


def test_tied_weights_are_shared_under_each_of_their_names(tmp_path: Path) -> None:
    tensor = torch.randn(4, 4)
    with sync.shared(sync.Delivery.of("full", {"a": tensor, "b": tensor}), tmp_path) as path:
        assert equal(sync.read(path, COMPONENT).tensors, {"a": tensor, "b": tensor})


def test_a_broadcast_arrives_everywhere_or_nowhere(tmp_path: Path) -> None:
    assert launch(2, sync_members.exchange, (str(tmp_path),)) == 0
    receiver, sender = ((tmp_path / rank).read_text().splitlines() for rank in "01")
    assert receiver[0] == sender[0] == "full 8 True True {'x': 2.0}"
    assert receiver[1] == sender[1] == "{'eps': 1e-05, 'kernel': [3, [1, 2]]} True"
    assert "not those that were sent" in receiver[2] and "damaged in other processes: 1" in sender[2]
