"""Requests side by side give the bits they give alone; and a planted module-global is caught by the same comparison."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from loopwright.api import Model
from loopwright.engine.instance import Instance
from loopwright.engine.job import Job
from loopwright.engine.runner import Interleaved, Serial
from loopwright.loop import Step
from loopwright.loops.denoise import denoise_step
from loopwright.models.wan import forward
from loopwright.models.wan.program import tokenise
from loopwright.request import Request
from support import run, same, tensors_in, with_loops

Work = Sequence[tuple[Instance, Request]]
Outputs = list[dict[str, torch.Tensor] | None]
TWO_MODELS = [
    ("t2v", "euler", {"num_inference_steps": 2, "seed": 1, "guidance_scale": 1.0}),
    ("i2v", "unipc", {"num_inference_steps": 4, "seed": 2}),
    ("v2v", "euler", {"num_inference_steps": 5, "seed": 3}),
    ("t2v", "euler", {"num_inference_steps": 4, "seed": 4, "num_frames": 5}),
    ("i2v", "unipc", {"num_inference_steps": 2, "seed": 5, "num_frames": 5, "guidance_scale": 1.0}),
    ("t2v", "euler", {"num_inference_steps": 3, "seed": 6, "output": "latents"}),
    ("i2v", "unipc", {"num_inference_steps": 3, "seed": 7, "guidance_scale": 2.0, "max_sequence_length": 64}),
    ("v2v", "euler", {"num_inference_steps": 3, "seed": 8, "height": 16, "width": 48}),
]


def outputs(runner: Serial, work: Work) -> Outputs:
    """What each request gives on that runner; None where it failed."""
    jobs = [runner.submit(Job(model, request)) for model, request in work]
    runner.run()
    assert all(job.ended for job in jobs) and len(runner) == 0
    return [None if job.output is None else dict(job.output) for job in jobs]


def alike(a: Outputs, b: Outputs) -> bool:
    return all(same(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(scope="module")
def work(ask: Callable) -> Work:
    asked = [ask(kind, scheduler, **changes) for kind, scheduler, changes in TWO_MODELS]
    return [(loaded.instance, request) for loaded, request in asked]


@pytest.fixture(scope="module")
def alone(work: Work) -> Outputs:
    return [run(model, request) for model, request in work]


def test_eight_requests_over_two_models_interleaved_are_bit_identical_to_serial(work: Work, alone: Outputs) -> None:
    assert len({id(model) for model, _ in work}) == 2 and len({request.task for _, request in work}) == 3
    assert alike(outputs(Serial(), work), alone)
    assert alike(outputs(Interleaved(), work), alone)
    assert alike(outputs(Interleaved(), work[::-1])[::-1], alone)


def test_the_requests_really_take_turns(work: Work) -> None:
    order: list[str] = []
    runner = Interleaved()
    for model, request in work:
        runner.submit(Job(model, request, listener=lambda event: order.append(event.job)))
    del order[:]
    runner.run()
    turns = [job for job, previous in zip(order, [None, *order], strict=False) if job != previous]
    assert len(turns) > 4 * len(work)


def test_requests_that_join_late_change_nothing(work: Work, alone: Outputs) -> None:
    runner, jobs = Interleaved(), []
    for model, request in work:
        jobs.append(runner.submit(Job(model, request)))
        for _ in range(5):
            runner.step()
    runner.run()
    assert alike([job.output for job in jobs], alone)


MEMORY: dict[str, torch.Tensor] = {}


def decode_chunk_with_a_global(parts, *, x, **carry):
    """The decoder with its memory in a module-global, as if on the module."""
    if not carry:
        MEMORY.clear()
    out = forward.decode_chunk(parts, x=x, **MEMORY)
    MEMORY.clear()
    MEMORY.update({name: item for name, item in out.items() if name.startswith("memory_")})
    return out


def denoise_step_with_a_global(parts, *, latents, row, **more):
    """UniPC with its history in a module-global, as if on the scheduler."""
    names = [name for name, item in more.items() if isinstance(item, torch.Tensor)]
    begins = not any(more[name].any() for name in names)
    if begins:
        MEMORY.clear()
    out = denoise_step(parts, latents=latents, row=row, **{**more, **{n: MEMORY[n] for n in names if not begins}})
    MEMORY.clear()
    MEMORY.update({name: out[name] for name in names})
    return out


class Planted:
    """A loop whose steps of one op run another."""

    def __init__(self, loop: object, old: Callable, new: Callable) -> None:
        self._loop, self._old, self._new = loop, old, new

    def __getattr__(self, name: str) -> object:
        return getattr(self._loop, name)

    def next(self, state: object) -> object:
        step = self._loop.next(state)
        return replace(step, op=self._new) if isinstance(step, Step) and step.op is self._old else step


PLANTS = {
    "decode memory": (forward.decode_chunk, decode_chunk_with_a_global, "frames"),
    "solver history": (denoise_step, denoise_step_with_a_global, "latents"),
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_module_global_breaks_the_comparison(plant: str, ask: Callable) -> None:
    """Negative control: harmless one after another, caught when interleaved."""
    old, new, slot = PLANTS[plant]
    loaded, first = ask("t2v", "unipc", num_inference_steps=4)
    requests = [replace(first, seed=seed) for seed in (1, 2, 3)]
    loops = {name: Planted(loop, old, new) for name, loop in loaded.instance.loops.items()}
    planted = [(with_loops(loaded.instance, loops), request) for request in requests]
    clean = [run(loaded.instance, request) for request in requests]
    assert alike(outputs(Serial(), planted), clean)
    broken = outputs(Interleaved(), planted)
    assert not alike(broken, clean)
    assert any(o is None or not torch.equal(o[slot], c[slot]) for o, c in zip(broken, clean, strict=True))
    assert alike(outputs(Interleaved(), [(loaded.instance, request) for request in requests]), clean)


def in_threads(*calls: Callable[[], object]) -> list[object]:
    """Run calls at the same time, each in a thread of its own; their results, or the first error."""
    results: list[object] = [None] * len(calls)
    barrier = threading.Barrier(len(calls))

    def work(i: int) -> None:
        barrier.wait()
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for result in results:
        if isinstance(result, Exception):
            raise result
    return results


def test_threads_that_generate_at_once_on_one_instance_give_the_serial_results(work: Work, alone: Outputs) -> None:
    chosen = [0, 2, 3, 7]  # one model, two tasks, three shapes
    assert len({id(work[i][0]) for i in chosen}) == 1
    found = in_threads(*[lambda i=i: run(*work[i]) for i in chosen])
    assert alike(found, [alone[i] for i in chosen])


def test_threads_that_load_a_component_at_once_load_it_once(checkpoint: Callable) -> None:
    import loopwright

    loaded = loopwright.load(checkpoint("t2v"), device="cpu")
    parts = in_threads(*[lambda: loaded.instance.part("vae")] * 4)
    assert all(part is parts[0] for part in parts) and len(loaded.instance.store) == 1


class StatefulTokenizer:
    """Keeps its settings on itself during a call, as fast tokenizers do."""

    length = 0

    def __call__(self, texts: list[str], *, max_length: int, **options: object) -> object:
        self.length = max_length
        time.sleep(0.002)
        found = type("Encoding", (), {})()
        found.input_ids = found.attention_mask = torch.zeros(1, self.length, dtype=torch.long)
        return found


def test_threads_that_tokenise_at_once_get_their_own_lengths(ask: Callable) -> None:
    loaded, request = ask("t2v")
    tokenizer = StatefulTokenizer()
    env = type("Env", (), {"binding": loaded.instance.binding, "part": lambda self, name: tokenizer})()

    def lengths(length: int) -> set[int]:
        own = replace(request, max_sequence_length=length)
        return {t.shape[1] for _ in range(10) for t in tensors_in(tokenise(own, {}, env))}

    assert in_threads(lambda: lengths(16), lambda: lengths(64)) == [{16}, {64}]


@pytest.mark.parametrize("kind", ["t2v", "i2v", "ti2v", "v2v"])
def test_the_default_dtype_of_the_process_changes_nothing(kind: str, ask: Callable) -> None:
    """diffusers and transformers set it while they load a component, whoever is generating in another thread."""
    loaded, request = ask(kind, "unipc")
    expected = run(loaded.instance, request)
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = run(loaded.instance, request)
    finally:
        torch.set_default_dtype(torch.float32)
    assert same(found, expected)


def decode_job(loaded: Model, request: Request, latents: torch.Tensor) -> Job:
    job = Job(loaded.instance, request)
    job.stage = len(job.stages) - 1
    job.slots = {"latents": latents}
    return job


def noise(seed: int, frames: int = 3) -> torch.Tensor:
    return torch.randn(1, 16, frames, 4, 4, generator=torch.Generator().manual_seed(seed))


def test_decodes_interleaved_frame_by_frame_give_each_clip_its_own_frames(ask: Callable) -> None:
    loaded, request = ask("t2v")
    clips = [noise(1), noise(2), noise(3, frames=5)]
    runner = Serial()
    alone = []
    for clip in clips:
        job = runner.submit(decode_job(loaded, request, clip))
        runner.run()
        alone.append(job.output)
    runner, order = Interleaved(), []
    jobs = [runner.submit(decode_job(loaded, request, clip)) for clip in clips]
    for i, job in enumerate(jobs):
        job._listener = lambda event, i=i: order.append(i) if type(event).__name__ == "Artifact" else None
    runner.run()
    assert order[:6] == [0, 1, 2, 0, 1, 2]
    assert alike([job.output for job in jobs], alone)
    assert not torch.equal(alone[0]["frames"], alone[1]["frames"])


def module_decode(vae: torch.nn.Module, latents: torch.Tensor) -> Iterator[torch.Tensor]:
    """AutoencoderKLWan.decode, a frame at a time: its memory is on the module."""
    vae.clear_cache()
    x = vae.post_quant_conv(latents)
    for i in range(latents.shape[2]):
        vae._conv_idx = [0]
        yield vae.decoder(x[:, :, i : i + 1], feat_cache=vae._feat_map, feat_idx=vae._conv_idx, first_chunk=i == 0)


def test_memory_on_the_module_would_mix_the_clips(ask: Callable) -> None:
    """The control: the reference's own decode, driven the way ours is, gives the first clip the second one's memory."""
    vae = ask("t2v")[0].instance.part("vae")
    with torch.no_grad():
        first, second = (torch.cat(list(module_decode(vae, noise(seed))), 2) for seed in (1, 2))
        pairs = list(zip(module_decode(vae, noise(1)), module_decode(vae, noise(2)), strict=True))
        vae.clear_cache()
    mixed = [torch.cat(frames, 2) for frames in zip(*pairs, strict=True)]
    assert not torch.equal(mixed[0], first) or not torch.equal(mixed[1], second)
    assert torch.equal(mixed[0][:, :, :1], first[:, :, :1])  # the frame before anything could mix
