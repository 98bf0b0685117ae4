"""Weights on their way to a component.

delivery = Delivery.of("full", module.state_dict())
delivery.verify()                          # on arrival
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

import torch

from ...errors import WeightsError
from .sums import checksum

FORMS = ("full", "merged", "adapter")


@dataclass(frozen=True, slots=True, eq=False)
class Delivery:
    """Tensors for one component.

    Attributes:
        form: "full", every weight of the component by its name in the `state_dict`; "merged", those that an adapter is
            merged into; or "adapter", A and B of each adapted layer, as `lora.Adapter` has them.
        tensors: dtypes are those of the component. float32 or float64 masters are rounded to them.
        checksum: of the tensors, by whoever packed them.
        alphas: of an adapter, by the layer's name.
        config: what the module they were taken from was built by, as far as known, as `plain` has it.
        stored: whether they come of a checkpoint: then they take the component's precision, as when one is loaded.
    """

    form: str
    tensors: Mapping[str, torch.Tensor]
    checksum: str
    alphas: Mapping[str, float] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    stored: bool = False

    @classmethod
    def of(
        cls,
        form: str,
        tensors: Mapping[str, torch.Tensor],
        *,
        alphas: Mapping[str, float] | None = None,
        config: Mapping[str, object] | None = None,
    ) -> Self:
        """With the checksum of these tensors. Raises WeightsError for an unknown form, or where there are none."""
        if form not in FORMS:
            raise WeightsError("unknown form of weights", value=form, choices=FORMS)
        if not tensors:
            raise WeightsError("there are no weights in what is sent", remedy="send at least one tensor")
        return cls(form, tensors, checksum(tensors), alphas or {}, plain(config or {}))

    @classmethod
    def arrived(cls, head: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> Self:
        """Tensors with the head that they were sent with. Raises WeightsError where that is none; verifies nothing."""
        form, checksum, alphas = head.get("form"), head.get("checksum"), head.get("alphas")
        config, stored = head.get("config"), head.get("stored")
        if not (isinstance(form, str) and isinstance(checksum, str) and isinstance(alphas, dict)) or not (
            isinstance(config, dict) and isinstance(stored, bool)
        ):
            raise WeightsError("what arrived does not say what it delivers", value=head, remedy="send it again")
        return cls(form, tensors, checksum, {str(name): float(alpha) for name, alpha in alphas.items()}, config, stored)

    @property
    def head(self) -> dict[str, object]:
        """All but the tensors, for who carries them: JSON can have it."""
        return {
            "form": self.form,
            "checksum": self.checksum,
            "alphas": dict(self.alphas),
            "config": dict(self.config),
            "stored": self.stored,
        }

    @property
    def bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def verify(self) -> None:
        """Raise WeightsError unless the tensors are those that were packed."""
        found = checksum(self.tensors)
        if found != self.checksum:
            raise WeightsError(
                "the weights that arrived are not those that were sent: their checksum is",
                value=found,
                choices=(self.checksum,),
                remedy="send them again",
            )


def plain(config: Mapping[str, object]) -> dict[str, object]:
    """As JSON has it, what JSON does not know by its text: so what has travelled equals what has not."""
    out: dict[str, object] = json.loads(json.dumps(dict(config), default=str))
    return out
