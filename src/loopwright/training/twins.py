"""Networks in training as a server would hold them: whole, frozen, in the precision that is computed in.

    twins = Twins(plan, group, networks)
    twins.modules["transformer"]        # the forward of the sharded network, bit for bit, without gathering anything
    twins.follow()                      # takes the weights as they are now, in place
    twins.tensors["transformer.blocks.0.ffn..."]        # those that are trained

Written where they lie, so graphs that read them there stay good. Weights that are not trained and lie whole in this
process are shared with the network; all else takes the memory of the model as it is served.
"""

from collections.abc import Mapping

import torch
from torch import nn

from ..backends.compile import compile_blocks
from ..distributed.group import Group
from ..distributed.shard import local, trained, whole
from ..engine.residence import align
from . import networks as loading
from .plan import Plan


class Twins:
    """Copies of networks, by their names on the card."""

    def __init__(self, plan: Plan, group: Group, networks: Mapping[str, nn.Module]) -> None:
        self.modules = {role: loading.copied(plan.card, role, plan.run, str(group.device)) for role in networks}
        for role, module in self.modules.items():
            _share(module, networks[role])
            align(module)
            if plan.run.rollout is not None and plan.run.rollout.compile:
                compile_blocks(module)
        self._trained = trained(networks)
        self.tensors = {name: self.modules[role].get_parameter(rest).detach() for name in self._trained
                        for role, _, rest in [name.partition(".")]}  # fmt: skip

    @torch.no_grad()
    def follow(self) -> None:
        """Take the weights as they are now. A collective where they are sharded."""
        for name, ours in self.tensors.items():
            ours.copy_(whole(self._trained[name].detach()))


def _share(twin: nn.Module, network: nn.Module) -> None:
    """Have the twin read the network's frozen weights where they lie."""
    for name, parameter in network.named_parameters():
        ours, theirs = twin.get_parameter(name), local(parameter.detach())
        if not parameter.requires_grad and (theirs.shape, theirs.dtype) == (ours.shape, ours.dtype):
            ours.data = theirs
