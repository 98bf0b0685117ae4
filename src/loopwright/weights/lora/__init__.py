"""Low-rank adapters: injected for training, read and written as files, attached for serving.

    from loopwright.weights import lora

    adapted = lora.inject(transformer, rank=16, alpha=16, targets=("attn1.to_[qkv]",))
    lora.save("style.safetensors", lora.tensors(transformer), alpha=16)
    lora.attach(other, [(lora.read("style.safetensors"), 0.8)])

An adapter belongs to one module: a model with two experts has two files, as everywhere (`uses` says which is whose).
peft computes; what is here are names, checks and files. Deliberately absent: merging into the weights (`sync`
sends them so), since merged weights round otherwise than what was trained, and other kinds of adapters.
"""

from .adapter import Adapter, key, read, save
from .layers import adapted, attach, check, inject, switched_off, tensors
from .use import Use, uses

__all__ = [
    "Adapter",
    "Use",
    "adapted",
    "attach",
    "check",
    "inject",
    "key",
    "read",
    "save",
    "switched_off",
    "tensors",
    "uses",
]
