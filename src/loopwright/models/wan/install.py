"""Readies a Wan transformer that was just loaded, and binds a request's choice of kernels to one call of it.

prepare(component, module)
with bound(module, "flash", "fused"):
    module(hidden_states=...)
"""

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from diffusers import WanTransformer3DModel

from ...backends.precision import FLOAT8
from ...card import Component
from ...errors import BackendError
from ...request import ATTENTION, KERNELS
from .attention import Processor
from .blocks import forward
from .choice import Holder, choice_of

_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def install(component: Component, part: object) -> None:
    """Give a transformer its holder, processors and blocks, and 8-bit layers if its precision says so."""
    if not isinstance(part, WanTransformer3DModel):
        return
    holder = Holder()
    part.set_attn_processor(Processor(holder))
    for block in part.blocks:
        block.forward = functools.partial(forward, block, holder=holder)
    if component.dtype == FLOAT8:
        _quantise(part)


def bound(transformer: WanTransformer3DModel, attention: str, kernels: str) -> AbstractContextManager[None]:
    """For a `with` block in which calls of the transformer use this attention and these kernels.

    Raises BackendError where that cannot be had because `install` has not seen the module.
    """
    processor = transformer.blocks[0].attn1.processor
    if isinstance(processor, Processor):
        return processor.holder.bound(choice_of(attention, kernels))
    if (attention, kernels) != (ATTENTION, KERNELS):
        raise BackendError(
            "this transformer was not prepared for a choice of kernels",
            value=f"attention {attention}, kernels {kernels}",
            choices=(f"attention {ATTENTION}, kernels {KERNELS}",),
            remedy="load it through an Instance that knows its family's prepare",
        )
    return _AS_IT_IS


def _quantise(transformer: WanTransformer3DModel) -> None:
    """The blocks' feed-forward layers, the part that bears it best; attention and embeddings stay as they are."""
    from ...backends.kernels.fp8 import FeedForward

    for block in transformer.blocks:
        up, down = block.ffn.net[0].proj, block.ffn.net[2]
        assert isinstance(up, torch.nn.Linear) and isinstance(down, torch.nn.Linear)
        block.ffn = FeedForward(up, down)
