"""What requests need, known before they run; and a ledger of what is promised."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loopwright.engine.execute import eager
from loopwright.engine.job import Job
from loopwright.engine.memory import Ledger, Need, Sizes, _bytes
from loopwright.errors import CapacityError
from support import KINDS


class Watch(TorchDispatchMode):
    """Bytes of the storages that operations make, as they come and go: on real tensors."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(item, torch.Tensor) and item.untyped_storage()._cdata not in self.known:
                storage = item.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.gone, storage._cdata, storage.nbytes())
        return out

    def gone(self, name, count):
        self.known.discard(name)
        self.now -= count


def measured(instance, request):
    """What the request really holds and what its largest call really takes."""
    job, held, peak = Job(instance, request), 0, 0
    while (call := job.pending()) is not None:
        with Watch() as watch:
            tensors = eager(instance, call)
        held, peak = max(held, _bytes([job.slots, job.state])), max(peak, watch.peak)
        del tensors
        job.run(call)
    assert job.status == "done"
    return Need(held, peak)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_needs_is_known_before_it_runs(kind, ask):
    model, request = ask(kind, "unipc")
    said, real = Sizes().need(model.instance, request), measured(model.instance, request)
    assert said.resident == pytest.approx(real.resident, rel=0.03)
    assert real.peak <= said.peak <= 1.5 * real.peak


def test_finding_out_reads_no_weights_and_is_done_once_a_shape(checkpoint, monkeypatch):
    import loopwright
    from loopwright.engine import memory

    runs = []
    monkeypatch.setattr(memory, "_sized", lambda job, sized=memory._sized: runs.append(job) or sized(job))
    model, sizes = loopwright.load(checkpoint("t2v"), device="cpu"), Sizes()
    small = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    first = sizes.need(model.instance, model.request("a fox", seed=1, **small))
    assert sizes.need(model.instance, model.request("a longer prompt", seed=2, **small)) == first
    assert sizes.need(model.instance, model.request("a fox", **{**small, "height": 64})).resident > first.resident
    assert len(runs) == 2 and model.instance.store.loaded.bytes == 0


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


def test_outlines_are_let_go_with_their_instance(checkpoint):
    import loopwright

    model, sizes = loopwright.load(checkpoint("t2v"), device="cpu"), Sizes()
    sizes.need(model.instance, model.request("a", height=32, width=32, num_frames=1, num_inference_steps=1))
    assert len(sizes._outlines) == 1
    del model
    gc.collect()
    assert len(sizes._outlines) == 0
