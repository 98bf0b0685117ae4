"""Pages of a pool, and what a request gets of them."""

import gc

import pytest
import torch

from loopwright.caches.lease import Lease, capacity
from loopwright.caches.pool import Pool, Pools, page_bytes
from loopwright.errors import CapacityError, StaleError
from loopwright.loop import Append, Page, PoolRef, Window

PAGE = Page((("k", (2, 4), "float32"), ("v", (3,), "bfloat16")), tokens=4)


def appended(committed, new=1, limit=40):
    return PoolRef("past", PAGE, Append(limit), committed, new)


def shown(window, chunk):
    return PoolRef("past", PAGE, window, 4 * chunk, 4)


def test_a_pool_has_the_pages_that_fit_and_its_storage_stays_where_it_is():
    pools = Pools(100)
    pool = pools.get("cpu", PAGE)
    assert page_bytes(PAGE) == 2 * 4 * 4 + 3 * 2 and pool.count == 100 // 38 == 2
    assert pools.get("cpu", Page(PAGE.tensors, 4)) is pool and pools.get("meta", PAGE) is not pool
    assert pool.storage["k"].shape == (2, 2, 4) and pool.storage["v"].dtype == torch.bfloat16
    assert pools.idle_bytes("cpu") == 76
    where = pool.storage["k"].data_ptr()
    taken = pool.take(2)
    assert sorted(taken) == [0, 1] and pools.idle_bytes("cpu") == 0
    pool.give(taken)
    assert pool.free == 2 and pool.storage["k"].data_ptr() == where


def test_a_pool_that_is_exhausted_says_what_is_needed_and_what_is_free_and_gives_nothing():
    pool = Pool(PAGE, 3, "cpu")
    pool.take(1)
    with pytest.raises(CapacityError, match=r"3 pages on cpu .*'3 needed, 2 free'; run fewer or shorter requests"):
        pool.take(3)
    assert pool.free == 2
    with pytest.raises(CapacityError, match="a page needs 38 bytes, a pool has 20"):
        Pools(20).get("cpu", PAGE)


def test_a_sequence_takes_pages_as_it_grows_and_its_row_always_has_the_same_width():
    pool = Pool(PAGE, 20, "cpu")
    pool.take(5)
    lease = Lease(pool)
    seen = []
    for committed in (0, 3, 4, 11):
        pages, length = lease.rows(appended(committed))
        assert pages.shape == (1, 16) and pages.dtype == length.dtype == torch.int32 and length.tolist() == [committed]
        seen.append(pool.count - pool.free - 5)
    assert seen == [1, 1, 2, 3] and lease.bytes == 3 * page_bytes(PAGE)
    first = lease.rows(appended(8))[0]
    assert first.tolist()[0][:3] == [5, 6, 7] and lease.rows(appended(9))[0] is first


def test_several_tokens_at_once_take_the_pages_they_reach():
    lease = Lease(Pool(PAGE, 20, "cpu"))
    lease.rows(appended(3, new=6))
    assert lease.pool.free == 17


def test_a_sequence_beyond_its_limit_is_refused():
    lease = Lease(Pool(PAGE, 20, "cpu"))
    with pytest.raises(CapacityError, match="lease past is for at most 40 tokens: 41"):
        lease.rows(appended(40))
    assert lease.pool.free == 20


def test_limits_share_few_widths():
    assert [capacity(Append(limit), PAGE) for limit in (1, 4, 5, 16, 17, 33, 64)] == [1, 1, 2, 4, 8, 16, 16]
    assert capacity(Window(3, 2), PAGE) == 6


@pytest.mark.parametrize("window", [Window(1), Window(3), Window(2, 1), Window(1, 3), Window(0, 2)])
def test_a_window_shows_sinks_and_the_last_chunks_in_order_and_writes_to_none_of_them(window):
    lease = Lease(Pool(PAGE, 20, "cpu"))
    holds = {}
    for chunk in range(12):
        pages, length = lease.rows(shown(window, chunk))
        count = int(length) // 4
        assert pages.shape == (1, window.sinks + window.last + 1)
        seen = [holds[page] for page in pages[0].tolist()[:count]]
        assert seen == [i for i in range(chunk) if i < window.sinks or i >= chunk - window.last]
        holds[pages[0].tolist()[count]] = chunk
    assert lease.pool.free == 20 - (window.sinks + window.last + 1)


def test_asking_again_changes_nothing():
    lease = Lease(Pool(PAGE, 20, "cpu"))
    first, again = lease.rows(shown(Window(2), 5)), lease.rows(shown(Window(2), 5))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True)) and lease.pool.free == 17


def test_released_and_forgotten_leases_give_everything_back_once():
    pool = Pool(PAGE, 4, "cpu")
    lease, other = Lease(pool), Lease(pool)
    lease.rows(appended(0, new=8))
    other.rows(appended(0, new=8))
    lease.release()
    lease.release()
    assert pool.free == 2
    del other, lease
    gc.collect()
    assert pool.free == 4 and sorted(pool.take(4)) == [0, 1, 2, 3]


def test_a_lease_exported_and_filled_elsewhere_holds_the_same():
    lease, pool = Lease(Pool(PAGE, 8, "cpu")), Pool(PAGE, 8, "cpu")
    pages = lease.rows(appended(0, new=12))[0][0, :3].long()
    lease.pool.storage["k"][pages] = torch.randn(3, 2, 4)
    lease.pool.storage["v"][pages] = torch.randn(3, 3).bfloat16()
    pool.take(4)
    again = Lease(pool)
    again.fill(lease.export())
    found = again.rows(appended(8))[0][0, :3].long()
    assert found.tolist() != pages.tolist()
    assert all(torch.equal(pool.storage[name][found], lease.pool.storage[name][pages]) for name in ("k", "v"))


def test_a_lease_whose_weights_changed_is_stale_and_says_of_which_component():
    lease, versions = Lease(Pool(PAGE, 8, "cpu")), {"lm": 1, "vae": 1}
    lease.require_current(("lm",), versions.__getitem__)
    versions["vae"] = 2
    lease.require_current(("lm",), versions.__getitem__)
    versions["lm"] = 3
    with pytest.raises(StaleError, match=r"weights of lm have changed .*'version 1, now 3'; start the request anew"):
        lease.require_current((), versions.__getitem__)
