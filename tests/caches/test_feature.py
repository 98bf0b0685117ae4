"""The cache of embeddings: once per content, bounded, and void when the weights that made them change."""

import threading

import pytest
import torch

import loopwright
from loopwright.caches.feature import FeatureCache, content
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.engine.scheduler import Scheduler
from support import run, same


def value(size: int = 4, fill: float = 1.0) -> dict[str, torch.Tensor]:
    return {"out": torch.full((size,), fill)}


def test_what_is_known_is_not_made_again():
    cache = FeatureCache(1000)
    first = cache.compute("a", 1, value)
    assert cache.compute("a", 1, lambda: pytest.fail("made again")) is first
    assert (cache.hits, cache.misses, len(cache), cache.bytes) == (1, 1, 1, 16)


def test_the_least_recently_used_leave_when_the_bytes_are_full():
    cache = FeatureCache(40)
    for key in (1, 2):
        cache.compute("a", key, value)
    cache.compute("a", 1, value)
    cache.compute("a", 3, value)
    assert cache.bytes == 32 and cache.misses == 3
    cache.compute("a", 1, lambda: pytest.fail("1 was used last"))
    cache.compute("a", 2, value)
    assert cache.misses == 4


def test_nothing_is_kept_without_room():
    cache = FeatureCache(0)
    assert torch.equal(cache.compute("a", 1, value)["out"], value()["out"])
    assert len(cache) == 0 and cache.bytes == 0


def test_an_owners_entries_go_alone():
    cache = FeatureCache(1000)
    for owner in ("a", "b"):
        cache.compute(owner, 1, value)
    cache.drop("a")
    assert len(cache) == 1 and cache.bytes == 16
    cache.compute("b", 1, lambda: pytest.fail("b was dropped"))


def test_threads_that_ask_for_one_key_at_once_make_it_once():
    cache, made, start = FeatureCache(1000), [], threading.Barrier(6)
    out = []

    def make():
        made.append(1)
        threading.Event().wait(0.05)
        return value()

    def ask():
        start.wait()
        out.append(cache.compute("a", 1, make))

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 1 and all(item is out[0] for item in out)
    assert cache._computing == {}


def test_a_failure_is_not_kept():
    cache = FeatureCache(1000)
    with pytest.raises(RuntimeError):
        cache.compute("a", 1, lambda: (_ for _ in ()).throw(RuntimeError("no")))
    assert torch.equal(cache.compute("a", 1, value)["out"], value()["out"])


@pytest.mark.parametrize(
    "other",
    [
        {"ids": torch.tensor([[1, 3]])},
        {"ids": torch.tensor([[1], [2]])},
        {"ids": torch.tensor([[1, 2]], dtype=torch.int32)},
        {"mask": torch.tensor([[1, 2]])},
    ],
)
def test_content_tells_values_shapes_dtypes_and_names_apart(other):
    assert content({"ids": torch.tensor([[1, 2]])}) == content({"ids": torch.tensor([[1, 2]])})
    assert content({"ids": torch.tensor([[1, 2]])}) != content(other)


def encodes(model) -> list[int]:
    """Counts calls of the text encoder from now on."""
    calls = []
    model.instance.part("text_encoder").register_forward_hook(lambda *_: calls.append(1))
    return calls


def small(seed: int = 1) -> dict[str, object]:
    return {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "seed": seed, "output": "latents"}


def test_one_prompt_of_many_requests_is_encoded_once_with_equal_bits(checkpoint):
    folder = checkpoint("t2v", "euler")
    model, plain = loopwright.load(folder, device="cpu"), loopwright.load(folder, device="cpu", store=Store(0))
    calls, runner = encodes(model), Scheduler()
    jobs = [runner.submit(Job(model.instance, model.request("a fox", **small(seed)))) for seed in range(5)]
    runner.run()
    assert len(calls) == 2  # the prompt and the empty negative prompt
    for seed, job in enumerate(jobs):
        assert same(job.output, run(plain.instance, plain.request("a fox", **small(seed))))
    assert len(plain.instance.store.features) == 0
    assert model.instance.store.features.bytes > 0


def test_new_weights_of_a_component_void_its_entries_and_no_others(checkpoint):
    model = loopwright.load(checkpoint("t2v", "euler"), device="cpu")
    calls = encodes(model)
    model.generate("a fox", **small())
    model.instance.changed("transformer")
    model.generate("a fox", **small())
    assert len(calls) == 2
    model.instance.changed("text_encoder")
    assert len(model.instance.store.features) == 0
    model.generate("a fox", **small())
    assert len(calls) == 4


def test_a_student_uses_what_its_teacher_encoded(checkpoint):
    store = Store()
    teacher = loopwright.load(checkpoint("t2v", "euler"), device="cpu", store=store)
    student = loopwright.load(checkpoint("t2v", "euler"), device="cpu", store=store, sampler="unipc")
    calls = encodes(teacher)
    teacher.generate("a fox", **small())
    student.generate("a fox", **small())
    assert len(calls) == 2
