"""Paged attention against attention, rows of different lengths in one call."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from loopwright.caches.kv import KV, kv_page
from loopwright.caches.lease import Lease
from loopwright.caches.pool import Pool
from loopwright.caches.residual import LATEST, Residual, residual_page
from loopwright.loop import Append, PoolRef


def dirty(page, count):
    """A pool whose pages lay with somebody who left NaN behind."""
    pool = Pool(page, count, "cpu")
    for tensor in pool.storage.values():
        tensor.fill_(float("nan"))
    return pool


@pytest.mark.parametrize("queries", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
def test_rows_of_any_length_attend_to_their_own_past_and_to_nothing_else(causal, queries):
    torch.manual_seed(0)
    page = kv_page(layers=2, tokens=4, heads=2, dims=8)
    pool, new = dirty(page, 40), 3
    pasts = [torch.randn(2, 2, 1, 2, past, 8) for past in (0, 3, 4, 13)]  # layer, k or v, 1, H, N, D
    refs = [PoolRef("past", page, Append(16), past.shape[4], new) for past in pasts]
    leases = [Lease(pool) for _ in pasts]
    for lease, ref, past in zip(leases, refs, pasts, strict=True):
        pages, length = lease.rows(ref)
        writer = KV(pool.storage, pages, torch.zeros_like(length))
        for layer in (0, 1):
            writer._write("k", layer, past[layer, 0])
            writer._write("v", layer, past[layer, 1])
    rows = [lease.rows(ref) for lease, ref in zip(leases, refs, strict=True)]
    q, k, v = torch.randn(4, queries, new, 8), torch.randn(4, 2, new, 8), torch.randn(4, 2, new, 8)
    cache = KV(pool.storage, *(torch.cat(parts) for parts in zip(*rows, strict=True)))
    for layer in (0, 1):
        out = cache.attend(layer, q, k, v, causal=causal)
        for i, past in enumerate(pasts):
            keys, values = torch.cat([past[layer, 0], k[i : i + 1]], 2), torch.cat([past[layer, 1], v[i : i + 1]], 2)
            mask = torch.ones(new, keys.shape[2], dtype=torch.bool).tril(past.shape[4]) if causal else None
            plain = scaled_dot_product_attention(q[i : i + 1], keys, values, attn_mask=mask, enable_gqa=True)
            assert torch.allclose(out[i : i + 1], plain, atol=1e-6)


def test_what_is_written_is_kept_in_the_pages_precision():
    page = kv_page(layers=1, tokens=2, heads=1, dims=4, dtype="bfloat16")
    lease = Lease(dirty(page, 4))
    cache = KV(lease.pool.storage, *lease.rows(PoolRef("past", page, Append(4), 0, 2)))
    q = torch.randn(1, 1, 2, 4).bfloat16()
    assert cache.attend(0, q, q, q, causal=True).dtype == torch.bfloat16


def test_a_residual_is_recalled_once_committed_and_until_then_is_nothing_or_the_one_before():
    page = residual_page({"block": (2, 3), "norm": (1,)})
    lease = Lease(dirty(page, 4))

    def memory(committed):
        return Residual(lease.pool.storage, *lease.rows(PoolRef("cond", page, LATEST, committed)))

    assert not memory(0).known and torch.equal(memory(0).recall("block"), torch.zeros(1, 2, 3))
    memory(0).remember("block", torch.ones(1, 2, 3))
    assert torch.equal(memory(0).recall("block"), torch.zeros(1, 2, 3))
    for value in range(1, 5):
        assert memory(value).known and torch.equal(memory(value).recall("block"), torch.full((1, 2, 3), float(value)))
        memory(value).remember("block", torch.full((1, 2, 3), float("nan")))  # a step that failed
        memory(value).remember("block", torch.full((1, 2, 3), value + 1.0))
        assert torch.equal(memory(value).recall("block"), torch.full((1, 2, 3), float(value)))
    assert lease.pool.free == 2
