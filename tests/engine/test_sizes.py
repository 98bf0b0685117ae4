"""What requests need, known before they run."""

import gc
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loopwright.engine.execute import eager
from loopwright.engine.job import Job
from loopwright.engine.ledger import Need
from loopwright.engine.sizes import Sizes, _bytes
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
    from loopwright.engine import sizes as module

    runs = []
    monkeypatch.setattr(module, "_sized", lambda job, sized=module._sized: runs.append(job) or sized(job))
    model, sizes = loopwright.load(checkpoint("t2v"), device="cpu"), Sizes()
    small = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2}
    first = sizes.need(model.instance, model.request("a fox", seed=1, **small))
    assert sizes.need(model.instance, model.request("a longer prompt", seed=2, **small)) == first
    assert sizes.need(model.instance, model.request("a fox", **{**small, "height": 64})).resident > first.resident
    assert len(runs) == 2 and model.instance.store.loaded.bytes == 0


def test_outlines_are_let_go_with_their_instance(checkpoint):
    import loopwright

    model, sizes = loopwright.load(checkpoint("t2v"), device="cpu"), Sizes()
    sizes.need(model.instance, model.request("a", height=32, width=32, num_frames=1, num_inference_steps=1))
    assert len(sizes._outlines) == 1
    del model
    gc.collect()
    assert len(sizes._outlines) == 0
