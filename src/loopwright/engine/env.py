"""What the loops of one request see of its model: the card's settings, its parts, and the request's own binding."""

from collections.abc import Mapping
from dataclasses import dataclass

from ..card import Value
from ..loop import Binding
from .instance import Instance


@dataclass(frozen=True, slots=True)
class RequestEnv:
    """An instance under the attention and kernels that a request chose. Available here: `Instance.bind` has looked."""

    model: Instance
    binding: Binding

    @property
    def settings(self) -> Mapping[str, Value]:
        """The card's settings."""
        return self.model.settings

    def part(self, name: str) -> object:
        """The component, loaded on first use."""
        return self.model.part(name)
