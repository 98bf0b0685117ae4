"""What serving costs on an H200, against diffusers in the same process: Wan2.1-1.3B with random weights.

    python benchmarks/serve_h200.py --output DIR --workspace DIR [--sections graphs,steps] [--shapes 256,512]
    python benchmarks/serve_h200.py --tiny --device cpu --output DIR --workspace DIR      # that it runs; no timings

Sections, each of which writes DIR/NAME.json and prints its rows as they come:

    ceilings   matrix product, copy, attention of each kind: what this card gives
    graphs     captured and compiled steps against eager ones, bit for bit or by error; what could not be captured
    steps      a request's step, per shape and requests at once, against diffusers eager and compiled
    profile    where the device's time goes in those steps
    endtoend   encode, 20 guided steps, decode
    kernels    each kernel against its plain twin: time and error
    memory     200 mixed requests, some cancelled or failing, leave allocated bytes where they were
    oom        the device runs out of memory in a batch of four; the neighbours' bits are those of running alone
    placement  weights that come and go against weights that stay: same bits, peak bytes

Protocol: one process, same weights and inputs, variants A B B A, at least 3 warm-ups and 7 timed runs, device events,
the relative error to float32 beside each speed. A step's time is that from submitting all requests to the last
result, by requests times steps; one forward a step (no guidance). Each side has the fastest attention that it can run.
About 20 minutes in all on one H200; `--shapes` and `--sections` split that.
"""

import argparse
import gc
import importlib.util
import itertools
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

if importlib.util.find_spec("fa3_fwd_interface"):  # for diffusers as well, which knows it by another name
    import diffusers.utils.import_utils as _packages
    import fa3_fwd_interface

    sys.modules["flash_attn_interface"] = fa3_fwd_interface
    _packages._flash_attn_3_available = True

from diffusers import WanPipeline, WanTransformer3DModel
from diffusers.utils import logging

import checkpoint
import loopwright
import timing
from checkpoint import REAL, TINY, Sizes
from loopwright.api import Model
from loopwright.backends import registry
from loopwright.backends.device import probe
from loopwright.backends.kernels import plain
from loopwright.backends.registry import KERNELS, why_not
from loopwright.engine.execute import eager
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.engine.prices import Prices
from loopwright.engine.scheduler import Scheduler
from loopwright.request import Request
from loopwright.sampling import solvers
from timing import relative

Row = dict[str, object]
PROMPT = "a red fox number {} runs through the snow"


@dataclass(frozen=True)
class Shape:
    """`at_once`: requests submitted together -> the target in ms a step and request, or None. `steps` a request."""

    name: str
    height: int
    width: int
    frames: int
    steps: int
    at_once: dict[int, float | None]

    @property
    def tokens(self) -> int:
        return checkpoint.tokens(self.height, self.width, self.frames)

    def given(self, **more: object) -> dict[str, object]:
        return {"height": self.height, "width": self.width, "num_frames": self.frames} | more


SHAPES = (
    Shape("256", 256, 256, 1, 20, {1: 5.0, 8: None, 32: 2.0}),
    Shape("512", 512, 512, 1, 10, {1: None, 8: 6.5}),
    Shape("1024", 1024, 1024, 1, 6, {1: 29.0}),
    Shape("480p81", 480, 832, 81, 3, {1: 490.0}),
)
SMALL = (Shape("32", 32, 32, 1, 2, {1: None, 3: None}), Shape("32x5", 32, 32, 5, 2, {1: None}))
END_TO_END = {"256": (32, 8, 1), "512": (8, 1)}  # requests at once
DIFFUSERS = {"480p81": 520.0}  # ms of the best peer measured before


@dataclass
class Context:
    """Where and how to measure, and what has been loaded so far."""

    arguments: argparse.Namespace
    sizes: Sizes
    shapes: tuple[Shape, ...]
    folder: Path
    device: str
    store: Store = field(default_factory=lambda: Store(0))
    models: dict[object, Model] = field(default_factory=dict)
    best: dict[str, str] = field(default_factory=dict)
    gemm: float = 0.0

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.cuda else "float32"

    def dtypes(self, generator: str) -> dict[str, str]:
        return {"transformer": generator, "text_encoder": self.dtype, "vae": self.dtype}

    def model(self, *, compile: bool = False, dtype: str | None = None, **options: object) -> Model:
        """Loaded once. All share a store, so that what is the same is there once."""
        name = (compile, dtype, *sorted(options.items()))
        if name not in self.models:
            given = {"device": self.device, "store": self.store, "memory": "high"} | options
            dtypes = self.dtypes(dtype or self.dtype)
            self.models[name] = loopwright.load(self.folder, dtype=dtypes, compile=compile, **given)
        return self.models[name]

    def forget(self) -> None:
        """Drop all models: a section begins with an empty device."""
        for model in self.models.values():
            if model.graphs is not None:
                model.graphs.relief()
        self.models.clear()
        self.store = Store(0)
        gc.collect()
        if self.cuda:
            torch.cuda.empty_cache()

    def attention(self, shape: Shape, rows: int = 1) -> str:
        """The fastest there is for that shape; decided by measuring."""
        name = f"{shape.name} x {rows}"
        if name not in self.best:
            found = dict(attentions(self, shape, rows))
            self.best[name] = min(found, key=lambda kind: found[kind].median)
        return self.best[name]

    def interleaved(self, runs: dict[str, Callable[[], object]]) -> dict[str, timing.Figure]:
        """By the protocol. A side that cannot run is said and left out."""
        able = {}
        for name, run in runs.items():
            try:
                run()
                able[name] = run
            except Exception as error:
                say(f"    {name} cannot run: {type(error).__name__}: {str(error).splitlines()[0]}")
                if self.arguments.debug:
                    traceback.print_exc()
        return timing.interleaved(able, device=self.device, **self.few() | {"warm": 1 if self.arguments.tiny else 2})

    def small(self, run: Callable[[], object]) -> timing.Figure:
        return timing.small(run, self.device, **self.few())

    def few(self) -> dict[str, int]:
        """How often to run: by the protocol, or only to see that it does."""
        return {"warm": 1, "rounds": 2} if self.arguments.tiny else {"warm": 3, "rounds": 7}


class Full(Prices):
    """Takes everybody who waits, so that a figure is that of the number of rows it names."""

    def rows(self, label: str, waiting: int, limit: int) -> int:
        return min(waiting, limit)


def say(text: str) -> None:
    print(text, flush=True)


# --- ceilings


def attentions(context: Context, shape: Shape, rows: int) -> Iterator[tuple[str, timing.Figure]]:
    """Each attention that runs here, on a shape's tokens; `math` would write out all scores."""
    sizes = context.sizes
    dtype = getattr(torch, context.dtype)
    q, k, v = (
        torch.randn(rows, shape.tokens, sizes.heads, sizes.head, device=context.device, dtype=dtype) for _ in range(3)
    )
    for name in registry.ATTENTIONS:
        if name != "math" and not why_not(KERNELS[name], probe(context.device), context.dtype):
            attend = registry.load(name)
            yield name, timing.recorded(lambda attend=attend: attend(q, k, v), context.device, **context.few())


def ceilings(context: Context) -> Iterator[Row]:
    large = 8192 if context.cuda else 128
    context.gemm = timing.gemm(context.device, large)
    yield {"what": f"gemm bf16 {large}", "tflops": context.gemm / 1e12}
    copied = timing.copied(context.device, 2**32 if context.cuda else 2**20)
    yield {"what": "copy", "tb_per_s": copied / 1e12}
    for shape in context.shapes:
        for name, figure in attentions(context, shape, 1):
            work = 4 * shape.tokens**2 * context.sizes.width
            yield {"what": f"attention {name} {shape.name}", "ms": figure.median * 1e3,
                   "tflops": work / figure.median / 1e12}  # fmt: skip


# --- graphs


def graphs(context: Context) -> Iterator[Row]:
    """The plain twin of a graph is the same model without; of compiled blocks, the plain ones within a bound."""
    shape = context.shapes[0]
    given = shape.given(num_inference_steps=4, output="latents", guidance_scale=5.0)
    kinds = ["plain"] + ([] if why_not_any(context, registry.SETS["fused"]) else ["fused"])
    for compiled in (False, True) if context.arguments.compile else (False,):
        for attention in [name for name in registry.ATTENTIONS if runs_here(context, name)]:
            for kernels in kinds:
                captured = context.model(compile=compiled)
                request = captured.request(PROMPT.format(0), attention=attention, kernels=kernels, seed=1, **given)
                runner, job = Scheduler(), Job(captured.instance, request)
                runner.submit(job)
                runner.run()
                first, again = (captured.run(request).latents for _ in range(2))
                same = torch.equal(captured.result(job).latents, first) and torch.equal(first, again)
                other = context.model().request(PROMPT.format(0), attention="sdpa", seed=1, **given)
                yield {"compiled": compiled, "attention": attention, "kernels": kernels, "captured_equals_eager": same,
                       "error_to_plain": relative(first, plain_run(context.model(), other).latents),
                       **seen(captured)}  # fmt: skip


def plain_run(model: Model, request: Request) -> loopwright.api.Result:
    """The request run without graphs."""
    runner = Scheduler(execute=eager)
    job = runner.submit(Job(model.instance, request))
    runner.run()
    return model.result(job)


def seen(model: Model) -> Row:
    if model.graphs is None:
        return {"graphs": 0}
    graphs = model.graphs
    return {"graphs": len(graphs), "replays": graphs.replays, "graph_mib": graphs.bytes / 2**20,
            "breaks": dict(graphs.breaks)}  # fmt: skip


def runs_here(context: Context, kernel: str) -> bool:
    return not why_not(KERNELS[kernel], probe(context.device), context.dtype)


def why_not_any(context: Context, names: tuple[str, ...]) -> str:
    return next((reason for name in names if (reason := why_not(KERNELS[name], probe(context.device)))), "")


# --- steps


def steps(context: Context) -> Iterator[Row]:
    if not context.gemm:
        context.gemm = timing.gemm(context.device, 8192 if context.cuda else 128)
        say(f"    gemm {context.gemm / 1e12:.0f} TFLOP/s")
    context.store = Store()  # prompts are encoded once, as those of the other side are before the clock starts
    exact = {shape.name: float32_latents(context, shape) for shape in context.shapes}
    peers = Peers(context)
    for shape in context.shapes:
        for count, target in shape.at_once.items():
            yield from steps_of(context, shape, count, target, peers, exact[shape.name])


def steps_of(
    context: Context, shape: Shape, count: int, target: float | None, peers: "Peers", exact: torch.Tensor
) -> Iterator[Row]:
    ours = {name: Ours(context, shape, count, **options) for name, options in variants(context).items()}
    theirs = peers.sides(shape, count)
    for name, side in ours.items():
        side.settle_for_cudnn(name)
    runs = {name: side.run for name, side in (ours | theirs).items()}
    attention = context.attention(shape, count)
    say(f"  {shape.name} x {count}: {shape.tokens} tokens, attention {attention}, target {target or '-'} ms")
    work, _ = checkpoint.flops(context.sizes, shape.tokens)
    for name, figure in context.interleaved(runs).items():
        side = (ours | theirs)[name]
        share = 1e3 / (count * shape.steps)
        each = figure.median / (count * shape.steps)
        yield {"shape": shape.name, "at_once": count, "side": name, "ms": figure.row(share), "target": target,
               "peer_before": DIFFUSERS.get(shape.name), "tflops": work / each / 1e12,
               "of_gemm": work / each / context.gemm, "error": relative(side.latents(2), exact),
               **side.notes()}  # fmt: skip


def variants(context: Context) -> dict[str, dict[str, object]]:
    """Ours. Under graphs each; compiled blocks fuse their norms themselves."""
    found: dict[str, dict[str, object]] = {"graphs": {}}
    if not why_not_any(context, registry.SETS["fused"]):
        found["graphs, fused kernels"] = {"kernels": "fused"}
    if context.arguments.compile:
        found["graphs, compiled"] = {"compiled": True}
    return found


class Ours:
    """So many requests of a shape, through the public engine; one scheduler, as a server has."""

    def __init__(
        self, context: Context, shape: Shape, count: int, *, compiled: bool = False, kernels: str = "plain"
    ) -> None:
        self.model, self.shape, self.count = context.model(compile=compiled), shape, count
        self.scheduler = self.model.scheduler(rows=count)
        self.scheduler.prices = Full()
        mode = "exact" if count == 1 else "throughput"
        self.choice = {"attention": context.attention(shape, count), "kernels": kernels, "mode": mode}

    def settle_for_cudnn(self, name: str) -> None:
        """What compiles blocks may not know how to trace an attention that comes in a package of its own."""
        try:
            self.run(1)
        except Exception as error:
            if self.choice["attention"] != "fa3":
                return  # said when its turn comes
            say(f"    {name}: cudnn instead of fa3 ({type(error).__name__}: {str(error).splitlines()[0]})")
            self.choice["attention"] = "cudnn"

    def run(self, steps: int | None = None) -> list[Job]:
        requests = [self.request(index, steps or self.shape.steps) for index in range(self.count)]
        jobs = [self.scheduler.submit(Job(self.model.instance, request)) for request in requests]
        self.scheduler.run()
        for job in jobs:
            self.model.result(job)
        return jobs

    def request(self, index: int, steps: int) -> Request:
        given = self.shape.given(num_inference_steps=steps, guidance_scale=1.0, output="latents", seed=index)
        return self.model.request(PROMPT.format(index), **given, **self.choice)

    def latents(self, steps: int) -> torch.Tensor:
        return self.model.result(self.run(steps)[0]).latents

    def notes(self) -> Row:
        merger = self.scheduler.merger
        return {**self.choice, "rows_a_call": merger.rows / merger.calls if merger.calls else 1.0, **seen(self.model)}


def float32_latents(context: Context, shape: Shape) -> torch.Tensor:
    """Two steps in float32, eagerly: what every side's error is told against."""
    model = loopwright.load(
        context.folder, device=context.device, dtype=context.dtypes("float32"), store=context.store, memory="high",
        graphs="never",
    )  # fmt: skip
    given = shape.given(num_inference_steps=2, guidance_scale=1.0, output="latents", seed=0)
    return model.run(model.request(PROMPT.format(0), **given)).latents


class Peers:
    """diffusers' pipeline, its batch being all requests at once; eager and with compiled blocks."""

    def __init__(self, context: Context) -> None:
        self.context = context
        dtype = getattr(torch, context.dtype)
        self.pipes = {"diffusers eager": pipeline(context, dtype)}
        if context.arguments.compile:
            shared = dict(self.pipes["diffusers eager"].components)
            transformer = WanTransformer3DModel.from_pretrained(context.folder / "transformer", torch_dtype=dtype)
            transformer.to(context.device).compile_repeated_blocks(dynamic=False)
            compiled = WanPipeline(**shared | {"transformer": transformer})
            compiled.set_progress_bar_config(disable=True)
            self.pipes["diffusers compiled"] = compiled
            torch._dynamo.config.recompile_limit = 64

    def sides(self, shape: Shape, count: int) -> dict[str, "Theirs"]:
        backend = self.backend(shape, count)
        return {name: Theirs(self.context, pipe, shape, count, backend) for name, pipe in self.pipes.items()}

    def backend(self, shape: Shape, count: int) -> str:
        """The fastest of its attentions that runs."""
        taken = {}
        for name in ("_flash_3", "_native_cudnn", "native") if self.context.cuda else ("native",):
            side = Theirs(self.context, self.pipes["diffusers eager"], shape, count, name)
            try:
                side.run(1)
                taken[name] = timing.seconds(lambda side=side: side.run(2), self.context.device)
            except Exception as error:
                say(f"    diffusers has no {name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return min(taken, key=taken.__getitem__)


class Theirs:
    """A pipeline's denoising on prepared embeddings: what encodes them is left out, to its advantage."""

    def __init__(self, context: Context, pipe: WanPipeline, shape: Shape, count: int, backend: str) -> None:
        self.pipe, self.shape, self.count, self.backend = pipe, shape, count, backend
        with torch.no_grad():
            prompts = [PROMPT.format(index) for index in range(count)]
            options = {"do_classifier_free_guidance": False, "max_sequence_length": 512}
            self.embeds, _ = pipe.encode_prompt(prompts, device=context.device, **options)

    def run(self, steps: int | None = None) -> torch.Tensor:
        self.pipe.transformer.set_attention_backend(self.backend)
        generators = [torch.Generator("cpu").manual_seed(index) for index in range(self.count)]
        return self.pipe(
            prompt_embeds=self.embeds,
            num_inference_steps=steps or self.shape.steps,
            guidance_scale=1.0,
            generator=generators,
            output_type="latent",
            **self.shape.given(),
        ).frames

    def latents(self, steps: int) -> torch.Tensor:
        return self.run(steps)[:1]

    def notes(self) -> Row:
        return {"attention": self.backend, "rows_a_call": self.count}


def pipeline(context: Context, dtype: torch.dtype) -> WanPipeline:
    pipe = WanPipeline.from_pretrained(context.folder, torch_dtype=dtype).to(context.device)
    pipe.set_progress_bar_config(disable=True)
    return pipe


# --- where the time goes


def profile(context: Context) -> Iterator[Row]:
    """Device time by kind of kernel, and how long the device waits, in the steps that have a target."""
    peers = Peers(context)
    for shape in context.shapes:
        for count, target in shape.at_once.items():
            if target is None:
                continue
            ours = {name: Ours(context, shape, count, **options) for name, options in variants(context).items()}
            for name, side in ours.items():
                side.settle_for_cudnn(name)
            sides = ours | peers.sides(shape, count)
            for name, side in [
                (name, side) for name, side in sides.items() if "eager" not in name and name != "graphs"
            ]:
                for _ in range(2):
                    side.run()
                yield {"shape": shape.name, "at_once": count, "side": name, **spent(side.run, shape.steps * count)}


def spent(run: Callable[[], object], each: int) -> Row:
    """Milliseconds an item: of wall time, of kernels in all and of each kind; `waits` is the share without a kernel."""
    from torch.profiler import ProfilerActivity

    if not torch.cuda.is_available():
        run()
        return {}
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as seen:
        begun = time.perf_counter()
        run()
        torch.cuda.synchronize()
        wall = time.perf_counter() - begun
    kinds: dict[str, float] = {}
    for event in seen.key_averages():
        kind = kind_of(event.key)
        kinds[kind] = kinds.get(kind, 0.0) + event.self_device_time_total / 1e3 / each
    busy = sum(kinds.values())
    return {"wall": wall * 1e3 / each, "busy": busy, "waits": max(0.0, 1 - busy / (wall * 1e3 / each)),
            "kinds": {name: round(kinds[name], 4) for name in sorted(kinds, key=kinds.__getitem__)[::-1]}}  # fmt: skip


def kind_of(kernel: str) -> str:
    words = {
        "compiled": ("triton_",),  # first, for their names tell what they were made from
        "attention": ("flash", "fmha", "sdpa", "attention"),
        "matrix products": ("gemm", "cutlass", "nvjet", "xmma"),
        "copies": ("memcpy", "Memcpy", "memset", "Memset", "copy", "Cat"),
    }
    return next((kind for kind, parts in words.items() if any(part in kernel for part in parts)), "others")


# --- end to end


def endtoend(context: Context) -> Iterator[Row]:
    """Prompts are others in every run; guidance takes two forwards a step. The negative prompt, which is empty, is
    remembered, as it is by default.
    """
    context.store, drawn = Store(), itertools.count()
    base = context.folder
    if context.arguments.encoder == "xxl":
        say("  writing the published text encoder")
        context.folder = checkpoint.with_encoder(base.with_name("xxl"), base, context.sizes, context.device)
    number = 20 if context.cuda else 2
    pipe = pipeline(context, getattr(torch, context.dtype))
    if context.arguments.compile:
        pipe.transformer.compile_repeated_blocks(dynamic=False)
    for shape in (shape for shape in context.shapes if not context.cuda or shape.name in END_TO_END):
        for count in END_TO_END[shape.name] if context.cuda else (1, 2):
            model = context.model(compile=context.arguments.compile)
            scheduler = model.scheduler(rows=count)
            scheduler.prices = Full()
            attention = context.attention(shape, 2 * count)
            backend = "_native_cudnn" if context.cuda else "native"

            def ours(
                model: Model = model, scheduler: Scheduler = scheduler, shape: Shape = shape, count: int = count,
                attention: str = attention,
            ) -> None:  # fmt: skip
                mode = "exact" if count == 1 else "throughput"
                given = shape.given(num_inference_steps=number, guidance_scale=5.0, mode=mode, attention=attention)
                requests = [model.request(PROMPT.format(next(drawn)), seed=index, **given) for index in range(count)]
                jobs = [scheduler.submit(Job(model.instance, request)) for request in requests]
                scheduler.run()
                for job in jobs:
                    model.result(job)

            def theirs(shape: Shape = shape, count: int = count, backend: str = backend) -> None:
                pipe.transformer.set_attention_backend(backend)
                generators = [torch.Generator("cpu").manual_seed(index) for index in range(count)]
                prompts = [PROMPT.format(next(drawn)) for _ in range(count)]
                pipe(prompts, num_inference_steps=number, guidance_scale=5.0, generator=generators, **shape.given())

            compiled = ", compiled" if context.arguments.compile else ""
            runs = {f"graphs{compiled}": ours, f"diffusers{compiled}": theirs}
            for name, figure in context.interleaved(runs).items():
                yield {"shape": shape.name, "at_once": count, "side": name, "ms_a_request": figure.row(1e3 / count),
                       "steps": number, "encoder": context.arguments.encoder}  # fmt: skip
    context.folder = base


# --- kernels


def kernels(context: Context) -> Iterator[Row]:
    if not context.cuda:
        say("  kernels need CUDA; their plain twins alone run here")
    for shape in context.shapes:
        yield from kernels_of(context, shape)


def kernels_of(context: Context, shape: Shape) -> Iterator[Row]:
    sizes, device, dtype = context.sizes, context.device, getattr(torch, context.dtype)
    count, width = shape.tokens, sizes.width

    def normal(*dims: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*dims, device=device, dtype=kind)

    x = normal(1, count, width)
    scale, shift = (0.1 * normal(1, 1, width, kind=torch.float32) for _ in range(2))
    angle = torch.rand(1, count, 1, sizes.head // 2, device=device).repeat_interleave(2, -1) * 6.28
    rotary, weight = (angle.cos(), angle.sin()), 1 + 0.1 * normal(width)
    q, k, v = (normal(1, count, sizes.heads, sizes.head) for _ in range(3))
    latents, speed = (normal(1, 16, shape.frames // 4 + 1, shape.height // 8, shape.width // 8, kind=torch.float32)
                      for _ in range(2))  # fmt: skip
    row = torch.rand(1, 1, device=device)
    cases: list[tuple[str, Callable[..., object], tuple[object, ...]]] = [
        ("adaptive_norm", plain.adaptive_norm, (x, scale, shift, 1e-6)),
        ("norm_rotary", plain.norm_rotary, (x, weight, 1e-6, rotary, sizes.heads)),
        ("euler_update", solvers.euler_update, (latents, speed, {}, row)),
    ]
    unipc = unipc_case(latents, speed, device)
    cases.append(("unipc_update", solvers.unipc_update, unipc))
    for name, twin, given in cases:
        yield from pair(context, shape, name, twin, given)
    for name in registry.ATTENTIONS:
        if name not in ("sdpa", "math") and runs_here(context, name):
            yield from pair(context, shape, name, registry.load("sdpa"), (q, k, v), twin_name="sdpa")
    if runs_here_in(context, "fp8_linear", "float8_e4m3fn"):
        yield from fp8(context, shape, x[0])


def unipc_case(latents: torch.Tensor, speed: torch.Tensor, device: str) -> tuple[object, ...]:
    history = {name: torch.randn_like(item) for name, item in solvers.unipc_history(latents, 2).items()}
    sigmas = torch.linspace(0.95, 0, 6).numpy()
    table = torch.from_numpy(solvers.unipc_table(sigmas, order=2, start=0)).float().to(device)
    return latents, speed, history, table[2:3]


def pair(
    context: Context, shape: Shape, name: str, twin: Callable[..., object], given: tuple[object, ...],
    twin_name: str = "plain",
) -> Iterator[Row]:  # fmt: skip
    """A kernel and its twin, timed, and both held against the twin on wider numbers."""
    whole = twin_name == "sdpa" and shape.tokens > 4096  # where all scores in float64 would be too much
    exact = first((registry.load("math") if twin_name == "sdpa" and not whole else twin)(*wider(given, whole)))
    ways = {twin_name: twin} | ({name: registry.load(name)} if runs_here(context, name) else {})
    for way, run in ways.items():
        figure = context.small(lambda run=run: run(*given))
        yield {"shape": shape.name, "kernel": name, "way": way, "us": figure.row(1e6),
               "error": relative(first(run(*given)), exact)}  # fmt: skip


def wider(value: object, single: bool) -> object:
    """In float64, or in float32 alone."""
    if isinstance(value, torch.Tensor):
        return value.float() if single else value.double()
    if isinstance(value, tuple):
        return tuple(wider(item, single) for item in value)
    return {name: wider(item, single) for name, item in value.items()} if isinstance(value, dict) else value


def first(value: object) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else value[0]


def runs_here_in(context: Context, name: str, dtype: str) -> bool:
    kernel = KERNELS[name]
    return any(not why_not(kernel, probe(context.device), each) for each in (dtype, *kernel.dtypes))


def fp8(context: Context, shape: Shape, x: torch.Tensor) -> Iterator[Row]:
    """The feed-forward network in 8 bits, quantising included, against that of bfloat16 layers."""
    from loopwright.backends.kernels.fp8 import FeedForward

    width, inner = context.sizes.width, context.sizes.ffn
    up, down = (
        torch.nn.Linear(*dims, device=context.device, dtype=x.dtype) for dims in ((width, inner), (inner, width))
    )
    for layer in (up, down):
        checkpoint.randomise(layer)
    eight = FeedForward(up, down)

    def sixteen(x: torch.Tensor, up: torch.nn.Module = up, down: torch.nn.Module = down) -> torch.Tensor:
        return down(torch.nn.functional.gelu(up(x), approximate="tanh"))

    with torch.no_grad():
        exact = sixteen(x.double(), *(torch.nn.Linear.double(copy_of(layer)) for layer in (up, down)))
        for way, run in {"bfloat16": sixteen, "float8": eight}.items():
            given = x[None] if way == "float8" else x
            figure = context.small(lambda run=run, given=given: run(given))
            yield {"shape": shape.name, "kernel": "feed-forward", "way": way, "us": figure.row(1e6),
                   "error": relative(run(given).reshape(exact.shape), exact)}  # fmt: skip


def copy_of(layer: torch.nn.Linear) -> torch.nn.Linear:
    copied = torch.nn.Linear(
        layer.in_features, layer.out_features, device=layer.weight.device, dtype=layer.weight.dtype
    )
    copied.load_state_dict(layer.state_dict())
    return copied


# --- memory


def memory(context: Context) -> Iterator[Row]:
    """Allocated bytes before and after; every kind of request once before, so that graphs are there."""
    model = context.model()
    scheduler = model.scheduler(rows=4)
    number = 200 if context.cuda else 24
    mixed_requests(context, model, scheduler, range(24))
    before = allocated(context, model)
    ended = mixed_requests(context, model, scheduler, range(number))
    kept = seen(model)
    after = allocated(context, model)
    yield {"requests": number, **ended, "before": before, "after": after, "grown": after - before, **kept}


def mixed_requests(context: Context, model: Model, scheduler: Scheduler, seeds: range) -> dict[str, int]:
    """Shapes, modes, guidance, outputs; some are cancelled half way, some have a listener that raises."""
    ended: dict[str, int] = {}
    for start in range(0, len(seeds), 4):
        jobs = [scheduler.submit(mixed_job(context, model, seed)) for seed in seeds[start : start + 4]]
        for _ in range(2):
            scheduler.step()
        if start % 16 == 0:
            jobs[0].cancel()
        scheduler.run()
        for job in jobs:
            ended[job.status] = ended.get(job.status, 0) + 1
    return ended


def mixed_job(context: Context, model: Model, seed: int) -> Job:
    shape = context.shapes[(seed // 4) % min(2, len(context.shapes))]
    given = shape.given(
        num_inference_steps=3,
        guidance_scale=1.0 if seed % 3 else 5.0,
        output="latents" if seed % 5 else "video",
        mode=("exact", "throughput")[seed // 8 % 2],
    )

    def listen(event: object) -> None:
        if seed % 11 == 10 and type(event).__name__ == "Stepped":
            raise RuntimeError("a listener that raises")

    return Job(model.instance, model.request(PROMPT.format(seed), seed=seed, **given), listener=listen)


def allocated(context: Context, model: Model) -> int:
    """Graphs left out, for how many there are depends on what shared its calls."""
    gc.collect()
    if model.graphs is not None:
        model.graphs.relief()
    if not context.cuda:
        return sum(item.nbytes for item in gc.get_objects() if type(item) is torch.Tensor)
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


# --- running out of memory


def oom(context: Context) -> Iterator[Row]:
    """Too little for two rows: a call of four is narrowed down to calls of one. There is no admission."""
    model = context.model(graphs="never") if context.cuda else context.model()
    shape = replace(context.shapes[-1], name="oom", frames=33) if context.cuda else context.shapes[-1]
    given = shape.given(num_inference_steps=2, guidance_scale=1.0, output="latents")
    alone = []
    for seed in range(4):
        exact = model.request(PROMPT.format(seed), seed=seed, **given)
        begin_peak(context)
        alone.append(model.run(exact).latents.cpu())
    took = peak(context)
    requests = [model.request(PROMPT.format(seed), seed=seed, mode="throughput", **given) for seed in range(4)]
    refused: list[int] = []
    runner = Scheduler(prices=Full(), rows=4, execute=counted(refused, fake=not context.cuda))
    jobs = [Job(model.instance, request) for request in requests]
    limited(context, took)
    try:
        for job in jobs:
            runner.submit(job)
        runner.run()
    finally:
        limited(context, None)
    same = [job.status == "done" and torch.equal(model.result(job).latents.cpu(), one)
            for job, one in zip(jobs, alone, strict=True)]  # fmt: skip
    yield {"rows_refused": refused, "statuses": [job.status for job in jobs], "same_as_alone": same,
           "peak_of_one": took, "errors": [str(job.error) for job in jobs if job.error]}  # fmt: skip
    yield from one_too_large(context, model, given, alone)


def one_too_large(context: Context, model: Model, given: dict[str, object], alone: list[torch.Tensor]) -> Iterator[Row]:
    """A batch of four of which one needs more than there is: it alone fails."""
    if not context.cuda:
        return
    large = given | {"num_frames": 161, "height": 720, "width": 1280}
    requests = [model.request(PROMPT.format(seed), seed=seed, **(large if seed == 1 else given)) for seed in range(4)]
    begin_peak(context)
    runner, jobs = Scheduler(), [Job(model.instance, request) for request in requests]
    limited(context, int(torch.cuda.memory_allocated() + 3 * 2**30))
    try:
        for job in jobs:
            runner.submit(job)
        runner.run()
    finally:
        limited(context, None)
    same = [
        job.status == "done" and torch.equal(model.result(job).latents.cpu(), one)
        for job, one in zip(jobs, alone, strict=True)
        if job is not jobs[1]
    ]
    yield {"statuses": [job.status for job in jobs], "same_as_alone": same, "error": str(jobs[1].error)}


def counted(refused: list[int], *, fake: bool) -> Callable[..., object]:
    """Eager, noting the rows of calls that ran out of memory; on the host, which has enough, several rows do."""

    def execute(model: object, call: object) -> object:
        try:
            if fake and call.rows > 1:
                raise torch.OutOfMemoryError("planned")
            return eager(model, call)
        except torch.OutOfMemoryError:
            refused.append(call.rows)
            raise

    return execute


def limited(context: Context, count: int | None) -> None:
    """Let the process have half a row more than that; None lifts the limit."""
    if not context.cuda:
        return
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    device = torch.cuda.current_device()
    total = torch.cuda.get_device_properties(device).total_memory
    if count is None:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    row = count - torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (count + row // 2) / total), device)


def begin_peak(context: Context) -> None:
    if context.cuda:
        torch.cuda.synchronize()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak(context: Context) -> int:
    """Reserved, which is what a limit is about."""
    return torch.cuda.max_memory_reserved() if context.cuda else 0


# --- placement


def placement(context: Context) -> Iterator[Row]:
    shape, results = context.shapes[min(1, len(context.shapes) - 1)], {}
    for kind in ("high", "low"):
        results[kind], most, seconds = placed(context, shape, kind)
        yield {"memory": kind, "peak_bytes": most, "seconds_second_request": seconds,
               "same_as_high": torch.equal(results[kind].latents, results["high"].latents)
               and (results[kind].video == results["high"].video).all().item()}  # fmt: skip


def placed(context: Context, shape: Shape, memory: str) -> tuple[loopwright.api.Result, int, float]:
    """The result, on the host; the most bytes there were; the seconds of a second request. Leaves nothing behind."""
    context.forget()
    begin_peak(context)
    model = context.model(memory=memory, graphs="never", store=Store(0))
    given = shape.given(num_inference_steps=4, guidance_scale=5.0, seed=3)
    result = model.run(model.request(PROMPT.format(3), **given))
    begun = time.perf_counter()
    model.run(model.request(PROMPT.format(4), **given))
    most = torch.cuda.max_memory_allocated() if context.cuda else 0
    return replace(result, latents=result.latents.cpu()), most, time.perf_counter() - begun


SECTIONS: dict[str, Callable[[Context], Iterator[Row]]] = {
    "ceilings": ceilings,
    "graphs": graphs,
    "steps": steps,
    "profile": profile,
    "endtoend": endtoend,
    "kernels": kernels,
    "memory": memory,
    "oom": oom,
    "placement": placement,
}


def told(row: Row) -> str:
    """A row for people."""
    return "  " + "; ".join(f"{name} {cell(value)}" for name, value in row.items())


def cell(value: object) -> str:
    if isinstance(value, dict) and "median" in value:
        return f"{value['median']:.3f} ({value['least']:.3f} to {value['most']:.3f})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_section(name: str, context: Context) -> None:
    """Rows are written as they come, so that a run that is stopped leaves what it has."""
    begun, rows = time.perf_counter(), []
    say(f"== {name}")
    try:
        for row in SECTIONS[name](context):
            rows.append(row)
            say(told(row))
            file = context.arguments.output / f"{name}.json"
            file.write_text(json.dumps({"machine": machine(context), "rows": rows}, indent=1, default=str))
    except Exception:
        traceback.print_exc()
        say(f"== {name} FAILED")
    say(f"== {name}: {time.perf_counter() - begun:.0f} s")
    context.forget()


def machine(context: Context) -> Row:
    found = probe(context.device)
    return {"device": found.name, "arch": found.arch, "torch": torch.__version__, "dtype": context.dtype,
            "packages": sorted(found.packages), "shapes": [shape.name for shape in context.shapes]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for the figures")
    parser.add_argument("--workspace", type=Path, required=True, help="folder for the checkpoints")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="names, separated by commas")
    parser.add_argument("--shapes", default="", help="names, separated by commas; all if left out")
    parser.add_argument("--at-once", type=int, help="only so many requests at once")
    parser.add_argument("--encoder", default="xxl", choices=("xxl", "one"), help="the text encoder of endtoend")
    parser.add_argument(
        "--no-compile", dest="compile", action="store_false", help="nothing is compiled, on either side"
    )
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, a few runs: no figures")
    parser.add_argument("--debug", action="store_true", help="tracebacks of sides that cannot run")
    arguments = parser.parse_args()
    unknown = set(arguments.sections.split(",")) - set(SECTIONS)
    if unknown:
        parser.error(f"no such section: {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    if arguments.tiny:
        arguments.compile, arguments.encoder = False, "one"
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    arguments.output.mkdir(parents=True, exist_ok=True)
    shapes = SMALL if arguments.tiny else SHAPES
    wanted = set(filter(None, arguments.shapes.split(",")))
    shapes = tuple(shape for shape in shapes if not wanted or shape.name in wanted)
    if arguments.at_once:
        shapes = tuple(
            replace(shape, at_once={arguments.at_once: shape.at_once.get(arguments.at_once)}) for shape in shapes
        )
    sizes = TINY if arguments.tiny else REAL
    begun = time.perf_counter()
    folder = checkpoint.build(arguments.workspace / ("tiny" if arguments.tiny else "real"), sizes, arguments.device)
    say(f"checkpoint ready in {time.perf_counter() - begun:.0f} s; {len(shapes)} shapes")
    context = Context(arguments, sizes, shapes, folder, arguments.device)
    say(json.dumps(machine(context)))
    for name in arguments.sections.split(","):
        run_section(name, context)


if __name__ == "__main__":
    main()
