"""Names of precisions and what they mean to torch.

    torch_dtype("float8")       # torch.bfloat16: what such a component computes and keeps most of its weights in

"float8" is bfloat16 with the feed-forward layers' weights and inputs in 8 bits, see `fp8`.
"""

import torch

DTYPES = ("float32", "bfloat16", "float16", "float8")
FLOAT8 = "float8"


def compute_dtype(name: str) -> str:
    """The precision a component's activations are in."""
    return "bfloat16" if name == FLOAT8 else name


def torch_dtype(name: str) -> torch.dtype:
    """The dtype a component of that precision is loaded in."""
    dtype: torch.dtype = getattr(torch, compute_dtype(name))
    return dtype
