"""Keys and values of attention in leased pages, for the requests of a call at once.

    page = kv_page(layers=24, tokens=16, heads=8, dims=64, dtype="bfloat16")
    PoolRef("kv", page, Append(limit=4096), committed, new)                 # a sequence that grows by tokens
    PoolRef("kv", page_of_a_chunk, Window(last=4, sinks=1), committed, new) # a video that remembers its last chunks

    def op(parts, *, token, kv, kv_pages, kv_length):                        # in the step's op, and in its modules
        cache = KV(kv, kv_pages, kv_length)
        out = cache.attend(layer, q, k, v, causal=True)

The plain twin of paged attention kernels: it gathers a row's pages and masks what is not the row's. A page that lay
with another request may hold anything, NaN included, so what is masked is also cleared. Positions (rotary embeddings)
are the model's business; keys are kept as they come.
"""

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..loop import Page
from .pool import Storage


def kv_page(*, layers: int, tokens: int, heads: int, dims: int, dtype: str = "float32") -> Page:
    """A page of `tokens` keys and values of all layers: [L, T, H, D] each."""
    shape = (layers, tokens, heads, dims)
    return Page((("k", shape, dtype), ("v", shape, dtype)), tokens)


class KV:
    """The cache of a call: storage [P, L, T, H, D], a row's pages int32 [R, C], tokens to read int32 [R]."""

    def __init__(self, storage: Storage, pages: torch.Tensor, length: torch.Tensor) -> None:
        self._storage, self._pages, self._length = storage, pages.long(), length.long()
        self._tokens = storage["k"].shape[2]

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        """Attention of N new tokens to the row's past and to each other (`causal`: to those before and themselves).

        q [R, Hq, N, D], k and v [R, H, N, D], Hq a multiple of H -> [R, Hq, N, D]. Writes k and v past the length.
        """
        new = q.shape[2]
        self._write("k", layer, k)
        self._write("v", layer, v)
        end = self._length[:, None] + new  # [R, 1]
        last = self._length[:, None] + torch.arange(1, new + 1, device=q.device) if causal else end
        places = torch.arange(self._pages.shape[1] * self._tokens, device=q.device)
        keys, values = (self._read(name, layer, places < end) for name in ("k", "v"))
        mask = places < last[..., None]  # [R, N or 1, places]
        return scaled_dot_product_attention(
            q, keys, values, attn_mask=mask[:, None], enable_gqa=q.shape[1] != k.shape[1]
        )

    def _write(self, name: str, layer: int, new: torch.Tensor) -> None:
        """[R, H, N, D] to the places after the row's length."""
        places = self._length[:, None] + torch.arange(new.shape[2], device=new.device)  # [R, N]
        pages = self._pages.gather(1, places // self._tokens)
        stored = self._storage[name]
        stored[pages, layer, places % self._tokens] = new.transpose(1, 2).to(stored.dtype)

    def _read(self, name: str, layer: int, valid: torch.Tensor) -> torch.Tensor:
        """[R, H, C * T, D], zero where not valid [R, C * T]."""
        gathered = self._storage[name][self._pages, layer].flatten(1, 2)  # [R, C * T, H, D]
        return torch.where(valid[..., None, None], gathered, 0).transpose(1, 2)
