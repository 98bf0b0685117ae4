"""Masters stay in float32; what is computed with is what diffusers would load, part by part."""

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch.distributed.tensor import DTensor

from loopwright.distributed.group import joined
from loopwright.distributed.shard import local, shard, trained, whole


@pytest.mark.parametrize("kind", ["t2v", "i2v", "ti2v"])
def test_every_weight_is_computed_with_in_the_precision_that_serving_loads_it_in(kind, checkpoint):
    folder = checkpoint(kind) / "transformer"
    lowered = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    served = {name: parameter.dtype for name, parameter in lowered.named_parameters()}
    assert set(served.values()) == {torch.float32, torch.bfloat16}
    network, seen = WanTransformer3DModel.from_pretrained(folder, torch_dtype=torch.float32), {}
    with joined("cpu") as group:
        shard(network, group.mesh, "bfloat16")
        stored = dict(network.named_parameters())
        assert all(isinstance(p, DTensor) and p.dtype == torch.float32 for p in stored.values())
        for path, module in network.named_modules():
            module.register_forward_pre_hook(_noting(path, seen))
        shape = (1, network.config.in_channels, 2, 4, 4)
        image = torch.randn(1, 257, 4).bfloat16() if network.config.image_dim else None
        network(torch.randn(shape), torch.tensor([500.0]), torch.randn(1, 512, 32).bfloat16(), image, return_dict=False)
    assert seen == served


def _noting(path: str, seen: dict[str, torch.dtype]):
    """Notes what a module's own weights are while it runs."""

    def note(module: torch.nn.Module, given: object) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            seen[f"{path}.{name}" if path else name] = parameter.dtype

    return note


def test_names_are_in_one_order_and_parts_add_up():
    network = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    network[0].bias.requires_grad_(False)
    before = {name: parameter.detach().clone() for name, parameter in network.named_parameters()}
    with joined("cpu") as group:
        shard(network, group.mesh, "float32")
        names = list(trained({"net": network}))
        assert names == ["net.0.weight", "net.1.weight", "net.1.bias"]
        for name, parameter in network.named_parameters():
            assert torch.equal(whole(parameter.detach()), before[name])
            assert torch.equal(local(parameter.detach()), before[name]), "one process holds all of it"


def test_a_plain_tensor_is_whole_already():
    tensor = torch.ones(2)
    assert whole(tensor) is tensor and local(tensor) is tensor
