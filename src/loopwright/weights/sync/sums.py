"""What tells one set of weights from another: the same on every device, and there nearly as fast as reading them.

    checksum(module.state_dict())          # "3f9c..."; 32 hexadecimal digits

Each tensor's bytes are mixed and summed where they lie, as 64-bit words, each times a number of its place; what is left
of a tensor, its name, shape and dtype are hashed on the host. It finds what goes wrong, such as tensors exchanged, cut
off, transposed, half written; against who forges weights on purpose it is no protection.
"""

import functools
import hashlib
from collections.abc import Mapping

import torch

_WORDS = 2**16  # in one sum
_SUMS = {"cuda": 256}  # at once; on a host one a thread, which its cache holds
_GOLDEN, _MIX = -7046029254386353131, -4658895280553007687  # of splitmix64, as signed numbers


def checksum(tensors: Mapping[str, torch.Tensor]) -> str:
    """Of names, shapes, dtypes and bytes; their order does not matter."""
    names = sorted(tensors)
    sums = [_sums(tensors[name].detach()) for name in names]  # all is asked of a device before any of it is waited for
    total = hashlib.sha256()
    for name, found in zip(names, sums, strict=True):
        total.update(f"{name} {tensors[name].dtype} {list(tensors[name].shape)}\n".encode())
        total.update(found.cpu().numpy().tobytes())
    return total.hexdigest()[:32]


def _sums(tensor: torch.Tensor) -> torch.Tensor:
    """int64, one for every `_WORDS` words."""
    words = _words(tensor)
    table, whole = _table(str(words.device)), len(words) // _WORDS * _WORDS
    at_once = _SUMS.get(words.device.type, torch.get_num_threads()) * _WORDS
    sums = [_mixed(words[i : min(i + at_once, whole)].view(-1, _WORDS), table) for i in range(0, whole, at_once)]
    if len(words) > whole:
        sums.append(_mixed(words[whole:][None], table[: len(words) - whole]))
    return torch.cat(sums) if sums else words


def _mixed(words: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """int64 [sums, words] -> [sums]. The first shift lets a word's highest bits count for more than themselves."""
    mixed = (words ^ (words >> 31)).mul_(table)
    mixed ^= mixed >> 29
    return mixed.sum(1)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes as int64, zeros after them."""
    flat = tensor.contiguous().flatten().view(torch.uint8)
    if rest := -len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    return (flat.clone() if flat.storage_offset() % 8 else flat).view(torch.int64)


@functools.cache
def _table(device: str) -> torch.Tensor:
    """Odd numbers without a pattern, int64 [_WORDS]."""
    mixed = torch.arange(1, _WORDS + 1, dtype=torch.int64) * _GOLDEN
    mixed = (mixed ^ (mixed >> 30)) * _MIX
    return ((mixed ^ (mixed >> 27)) | 1).to(device)
