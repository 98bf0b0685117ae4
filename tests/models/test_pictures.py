"""Single pictures: what decodes them in each mode."""

from dataclasses import replace

import pytest

from fakes import Generous
from loopwright.engine.execute import eager
from loopwright.engine.job import Job
from loopwright.engine.scheduler import Scheduler
from loopwright.loop import Unit
from loopwright.models.wan import forward


def decoded(instance, request):
    """The frames, and the ops that made them of latents."""
    ops = []

    def noting(model, call):
        if call.step.unit is Unit.DECODE:
            ops.append(call.step.op)
        return eager(model, call)

    scheduler = Scheduler(prices=Generous(), execute=noting)
    job = scheduler.submit(Job(instance, request))
    scheduler.run()
    assert job.error is None
    return job.output["frames"], ops


@pytest.mark.parametrize("kind", ["t2v", "ti2v_text"])
def test_a_picture_is_decoded_without_a_third_dimension_where_rounding_is_free(ask, kind):
    model, request = ask(kind, num_frames=1, num_inference_steps=2)
    exact, ops = decoded(model.instance, replace(request, mode="exact", rows=1))
    assert forward.decode_chunk in ops and forward.decode_picture not in ops
    free, ops = decoded(model.instance, replace(request, mode="throughput", rows=1))
    assert forward.decode_picture in ops and forward.decode_chunk not in ops
    assert free.shape == exact.shape and exact.float().std() > 1
    assert (free.int() - exact.int()).abs().max() <= 1


def test_a_clip_is_decoded_by_its_chunks_in_every_mode(ask):
    model, request = ask("t2v", num_frames=5, num_inference_steps=2)
    for mode in ("exact", "throughput"):
        _, ops = decoded(model.instance, replace(request, mode=mode, rows=1))
        assert forward.decode_chunk in ops and forward.decode_picture not in ops
