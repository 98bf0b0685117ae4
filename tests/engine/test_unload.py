"""A model that lets go: what nobody else has leaves memory, with all that was made of it, and comes again as it was."""

import gc
import weakref

import loopwright
from loopwright.engine.graphs import Graphs
from loopwright.engine.job import Job
from loopwright.engine.ledger import Ledger
from loopwright.engine.scheduler import Scheduler
from loopwright.engine.store import Store
from standin_capture import StandIns
from support import media_for, run, same


def loaded(checkpoint, *kinds: str) -> tuple[Store, list[loopwright.api.Model]]:
    store = Store()
    return store, [loopwright.load(checkpoint(kind), device="cpu", store=store) for kind in kinds]


def parts(model) -> list[weakref.ref]:
    return [weakref.ref(model.instance.part(name)) for name in ("text_encoder", "transformer", "vae")]


def test_what_was_let_go_is_gone_and_comes_again_with_the_same_bits(checkpoint):
    store, (model,) = loaded(checkpoint, "t2v")
    request = model.request("a fox", **media_for("t2v"))
    before, known = run(model.instance, request), parts(model)
    assert len(store.features) and set(model.instance.loaded) >= {"text_encoder", "transformer", "vae"}
    model.instance.unload()
    gc.collect()
    assert [part() for part in known] == [None] * 3
    assert (len(store), store.loaded.bytes, len(store.features), model.instance.loaded) == (0, 0, 0, {})
    assert same(run(model.instance, request), before)


def test_what_another_model_has_stays_until_that_lets_go_too(checkpoint):
    _, (one, two) = loaded(checkpoint, "t2v", "t2v")
    known = parts(one)
    assert [part() for part in parts(two)] == [part() for part in known]
    one.instance.unload()
    gc.collect()
    assert all(part() is not None for part in known)
    assert same(run(two.instance, two.request("a fox", **media_for("t2v"))),
                run(one.instance, one.request("a fox", **media_for("t2v"))))  # fmt: skip
    one.instance.unload()
    two.instance.unload()
    gc.collect()
    assert [part() for part in known] == [None] * 3


def test_graphs_of_it_are_gone_and_the_others_stay(checkpoint):
    _, models = loaded(checkpoint, "t2v", "ti2v")
    graphs, known = Graphs(StandIns()), parts(models[0])
    for model, kind in zip(models, ("t2v", "ti2v"), strict=True):
        scheduler = Scheduler(execute=graphs)
        scheduler.submit(Job(model.instance, model.request("a fox", **media_for(kind))))
        scheduler.run()
    both = len(graphs)
    models[0].instance.unload()
    gc.collect()
    assert 0 < len(graphs) < both and [part() for part in known] == [None] * 3


def test_what_was_set_aside_for_it_is_for_requests_again(checkpoint):
    store, (model,) = loaded(checkpoint, "t2v")
    ledger = store._ledgers["cpu"] = Ledger(10**9)
    model.instance.set_aside(ledger)
    parts(model)
    assert 0.9 * store.loaded.bytes < 10**9 - ledger.room <= store.loaded.bytes
    model.instance.unload()
    assert ledger.room == 10**9
