"""A ledger of what is promised: what is held adds up, of calls the largest counts."""

import pytest

from loopwright.engine.ledger import Ledger, Need
from loopwright.errors import CapacityError


def test_a_ledger_adds_up_what_is_held_and_takes_the_largest_call():
    ledger = Ledger(100)
    assert ledger.reserve("a", Need(30, 20)) and ledger.reserve("b", Need(20, 30))
    assert ledger.reserved == 80
    assert not ledger.reserve("c", Need(25, 1)) and ledger.reserve("d", Need(20, 30))
    assert ledger.reserved == 100
    ledger.refund("b")
    ledger.refund("nobody")
    assert ledger.reserved == 80 and ledger.rows("a") == 2
    for holder in ("a", "d"):
        ledger.refund(holder)
    assert ledger.reserved == 0


def test_what_can_never_be_promised_says_what_it_needs():
    with pytest.raises(CapacityError, match=r"needs 80\.00 MiB, requests have 64\.00 MiB"):
        Ledger(64 * 2**20).require(Need(16 * 2**20, 64 * 2**20))
    Ledger(80 * 2**20).require(Need(16 * 2**20, 64 * 2**20))
