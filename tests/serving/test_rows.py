"""How many rows a call has in fixed mode is measured once a shape, by the engine's thread, and then known."""

import asyncio
import threading
from dataclasses import replace
from types import SimpleNamespace

from loopwright.engine.scheduler import Scheduler
from loopwright.serving.driver import Driver
from loopwright.serving.lifecycle import Lifecycle
from loopwright.serving.models import Models
from loopwright.serving.safety import Guard
from loopwright.serving.settings import Limits


def test_rows_are_measured_once_a_shape_between_two_steps(model):
    request = model("t2v").request("a fox", height=32, width=32, num_frames=1, mode="fixed", rows=1)
    measured = []

    def rows(asked, *, limit):
        measured.append((asked.height, limit, threading.current_thread().name))
        return 8

    card = SimpleNamespace(name="m", digest="d")
    stub = SimpleNamespace(
        card=card, rows=rows, instance=SimpleNamespace(binding=SimpleNamespace(device="cuda"), digest="d"), request=None
    )
    driver = Driver(Scheduler(), between=lambda: None)
    models = Models(Lifecycle([stub], driver), driver, Limits(rows=16), Guard(None))

    async def ask(*requests) -> list[int]:
        return [await models.rows(stub, one) for one in requests]

    others = [
        replace(request, seed=5, prompt="a", guidance_scale=4.5, num_inference_steps=7),
        replace(request, height=64),
    ]
    try:
        assert asyncio.run(ask(request, *others)) == [8, 8, 8]
    finally:
        driver.close(lambda: None)
    assert measured == [(32, 16, "engine"), (64, 16, "engine")]
