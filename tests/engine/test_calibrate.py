"""The rows of fixed mode: measured once for a shape, proved, kept."""

from dataclasses import replace

import pytest
import torch

from loopwright.engine.calibrate import choose_rows
from loopwright.engine.execute import eager
from loopwright.engine.prices import Prices
from loopwright.errors import BackendError
from loopwright.loops import denoise


def on_a_device(monkeypatch, cost):
    """An executor on whose device a call of n rows takes cost(n) seconds; and the rows of its calls."""
    from loopwright.engine import calibrate

    now, rows = [0.0], []

    def execute(model, call):
        now[0] += cost(call.rows)
        rows.append(call.rows)
        return eager(model, call)

    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: now[0])
    return execute, rows


def small(ask):
    model, request = ask("t2v", "unipc", num_inference_steps=2)
    return model.instance, request


def test_rows_are_as_many_as_make_a_row_cheaper_and_are_kept(ask, monkeypatch, tmp_path):
    execute, rows = on_a_device(monkeypatch, lambda n: max(4, n) * 0.01)
    instance, request = small(ask)
    path = tmp_path / "prices.json"
    assert choose_rows(instance, request, Prices(path), 32, execute) == 4
    assert sorted(set(rows)) == [1, 2, 4, 8]
    del rows[:]
    assert (
        choose_rows(instance, replace(request, seed=99, prompt="another"), Prices(path), 32, execute) == 4 and not rows
    )
    assert choose_rows(instance, request, Prices(path), 2, execute) == 2


def test_one_row_where_one_request_fills_the_device(ask, monkeypatch):
    execute, rows = on_a_device(monkeypatch, lambda n: n * 0.5)
    instance, request = small(ask)
    assert choose_rows(instance, request, Prices(), 32, execute) == 1 and max(rows) == 2


def test_rows_do_not_pass_the_limit(ask, monkeypatch):
    execute, rows = on_a_device(monkeypatch, lambda n: 1.0)
    instance, request = small(ask)
    assert choose_rows(instance, request, Prices(), 8, execute) == 8 and max(rows) == 8


def test_rows_whose_bits_depend_on_their_neighbours_are_refused(ask, monkeypatch):
    def meddling(parts, *, latents, **arguments):
        out = step(parts, latents=latents, **arguments)
        return {**out, "latents": out["latents"] + latents.mean()}

    step = denoise.denoise_step
    monkeypatch.setattr(denoise, "denoise_step", meddling)
    instance, request = small(ask)
    execute, _ = on_a_device(monkeypatch, lambda n: 1.0)
    with pytest.raises(BackendError, match="bits depend on its neighbours"):
        choose_rows(instance, request, Prices(), 4, execute)


def test_the_model_says_its_rows_and_requests_of_that_many_repeat(ask):
    model, request = ask("t2v", "unipc", num_inference_steps=2, output="latents")
    rows = model.rows(request, limit=2)
    assert rows in (1, 2) and model.rows(request, limit=2) == rows
    served = replace(request, mode="fixed", rows=rows)
    assert torch.equal(model.run(served).latents, model.run(served).latents)
