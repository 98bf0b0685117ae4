"""What it takes to replace the weights of a model that is being served, and that what it gives afterwards is right.

    python benchmarks/weight_sync.py --device cuda [--output result.json]      # the transformer of Wan2.1-1.3B
    python benchmarks/weight_sync.py                                            # a small one, on the CPU
    torchrun --nproc-per-node 2 benchmarks/weight_sync.py --device cuda --broadcast         # from one GPU to the other

Random weights in the published configuration. Each way to bring new weights is timed, medians of several; after each,
the model's output (by captured graphs on CUDA, which must have outlived the sync) is compared bit for bit with the same
request run eagerly, and with the output of the version before, which it must not be. A request that is under way while
weights are replaced beside it must end as if nothing had happened. Exits with 1 if anything of this does not hold.
"""

import argparse
import copy
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel
from transformers import ByT5Tokenizer, UMT5Config, UMT5EncoderModel

import loopwright
from loopwright.api import Model
from loopwright.distributed.group import joined
from loopwright.engine.execute import Executor, eager
from loopwright.engine.job import Job
from loopwright.engine.store import Store
from loopwright.request import Request
from loopwright.weights import lora, sync

NAME = "transformer"
REAL = {"num_attention_heads": 12, "attention_head_dim": 128, "text_dim": 4096, "ffn_dim": 8960, "num_layers": 30}
SMALL = {"num_attention_heads": 4, "attention_head_dim": 32, "text_dim": 64, "ffn_dim": 512, "num_layers": 4}
TARGETS = (r"attn\d\.to_[qkv]", r"to_out\.0")
ROUNDS = 7


def transformer(settings: dict[str, int], device: str | torch.device, seed: int) -> WanTransformer3DModel:
    """Of these settings, random, float32."""
    torch.manual_seed(seed)
    with torch.device(device):
        return WanTransformer3DModel(
            patch_size=(1, 2, 2), in_channels=16, out_channels=16, freq_dim=256, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", **settings,
        )  # fmt: skip


def build(folder: Path, settings: dict[str, int], device: str, dtype: torch.dtype) -> None:
    """A checkpoint with the transformer of these settings beside small other parts."""
    made = torch.nn.Module.to(transformer(settings, device, 0), dtype)
    text = UMT5Config(vocab_size=384, d_model=settings["text_dim"], d_kv=64, d_ff=64, num_layers=1, num_heads=2,
                      feed_forward_proj="gated-gelu")  # fmt: skip
    vae = AutoencoderKLWan(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                           temperal_downsample=[False, True, True])  # fmt: skip
    WanPipeline(
        tokenizer=ByT5Tokenizer(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        transformer=made,
        vae=vae,
        text_encoder=UMT5EncoderModel(text),
    ).save_pretrained(folder)


def masters(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """As it may be in training: float32, with other weights."""
    other = torch.nn.Module.to(copy.deepcopy(module), torch.float32)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * parameter.std().nan_to_num(0.0) * torch.randn_like(parameter))
    return other


def adapted(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """The module as served, with float32 adapters in training."""
    other = copy.deepcopy(module)
    torch.manual_seed(seed)
    lora.inject(other, rank=16, alpha=16, targets=TARGETS)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.02)
    return other


def generated(model: Model, request: Request, execute: Executor | None = None) -> torch.Tensor:
    runner = model.scheduler(execute=execute)
    job = runner.submit(Job(model.instance, request))
    runner.run()
    return model.result(job).latents


class Checks:
    """What was found, by what was to be."""

    def __init__(self) -> None:
        self.held: dict[str, bool] = {}

    def __call__(self, what: str, held: bool) -> None:
        self.held[what] = held
        print(f"{'holds' if held else 'FAILS'}: {what}", flush=True)


def timed(work: Callable[[], object], device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    begun = time.perf_counter()
    work()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def row(what: str, times: list[float], bytes_: int) -> dict[str, object]:
    median = statistics.median(times)
    print(f"{what:44} {median * 1e3:9.1f} ms   {min(times) * 1e3:9.1f} to {max(times) * 1e3:.1f}   "
          f"{bytes_ / 2**20:8.1f} MiB", flush=True)  # fmt: skip
    return {"what": what, "ms": median * 1e3, "least": min(times) * 1e3, "most": max(times) * 1e3, "bytes": bytes_}


def syncs(model: Model, request: Request, ways: dict[str, list[object]], checks: Checks, device: str) -> list[object]:
    """Time each way to bring weights, alternating between two sets of them; see that each took effect."""
    rows: list[object] = []
    size = model.instance.resident(NAME).bytes
    for what, sources in ways.items():
        model.update_weights(NAME, sources[-1])
        before = generated(model, request)
        replays = 0 if model.graphs is None else model.graphs.replays
        turns = [sources[i % 2] for i in range(ROUNDS)]
        times = [timed(lambda source=source: model.update_weights(NAME, source), device) for source in turns]
        after = generated(model, request)
        checks(f"{what}: gives what the new weights give eagerly", torch.equal(after, generated(model, request, eager)))
        checks(f"{what}: gives something else than before", not torch.equal(after, before))
        if model.graphs is not None:
            checks(f"{what}: captured graphs outlive it", model.graphs.replays > replays and len(model.graphs) > 0)
        rows.append(row(what, times, size))
    return rows


def beside(model: Model, request: Request, source: torch.nn.Module, checks: Checks, device: str) -> object:
    """Replace weights while a request is under way, which keeps its own."""
    expected = generated(model, request)
    runner = model.scheduler()
    job = runner.submit(Job(model.instance, request))
    with torch.no_grad():
        for _ in range(3):
            runner.step()
    took = timed(lambda: model.update_weights(NAME, source, policy="finish"), device)
    runner.run()
    checks("finish: a request under way ends with its weights", torch.equal(model.result(job).latents, expected))
    checks("finish: others have the new ones", not torch.equal(generated(model, request), expected))
    return row("full, beside the old ones (finish)", [took], model.instance.resident(NAME).bytes)


def measure(folder: Path, device: str) -> tuple[list[object], Checks]:
    checks = Checks()
    model = loopwright.load(folder, device=device, store=Store())
    served = model.instance.resident(NAME).part
    request = model.request("a fox", height=256, width=256, num_frames=1, num_inference_steps=4, seed=1,
                            output="latents", max_sequence_length=64)  # fmt: skip
    generated(model, request)
    trained, low_rank = [masters(served, seed) for seed in (1, 2)], [adapted(served, seed) for seed in (1, 2)]
    rounded = [torch.nn.Module.to(copy.deepcopy(one), next(served.parameters()).dtype) for one in trained]
    state = served.state_dict()
    checks("the checksum on the device is that on the host",
           sync.checksum(state) == sync.checksum({name: tensor.cpu() for name, tensor in state.items()}))  # fmt: skip
    size = model.instance.resident(NAME).bytes
    rows: list[object] = [
        row("checksum alone", [timed(lambda: sync.checksum(state), device) for _ in range(ROUNDS)], size)
    ]
    ways: dict[str, list[object]] = {"full, from float32 masters": [*trained], "adapters, merged": [*low_rank]}
    rows += syncs(model, request, ways, checks, device)
    packed = [sync.full(_as_served(one, served)) for one in rounded]
    place = sync.SHARED if shutil.disk_usage(sync.SHARED).free > 3 * size else folder
    with sync.shared(packed[0], place) as one, sync.shared(packed[1], place) as two:
        rows += syncs(model, request, {f"full, from a file in {place.name}": [one, two]}, checks, device)
    file = lora.save(folder / "adapter.safetensors", lora.tensors(low_rank[0]), alpha=16)
    running = loopwright.load(folder, device=device, store=Store(), lora=file)
    generated(running, running.request("a fox", **_sizes(request)))
    rows += syncs(running, running.request("a fox", **_sizes(request)), {"adapters alone": [*low_rank]}, checks, device)
    rows.append(beside(model, request, trained[1], checks, device))
    return rows, checks


def across(kind: str, settings: dict[str, int]) -> int:
    """From the first process of a group to the others: packed, sent, checked and written in each."""
    with joined(kind) as group:
        module = torch.nn.Module.to(transformer(settings, group.device, group.rank), torch.bfloat16)

        def send() -> None:
            packed = sync.full(module) if group.first else None
            delivery = sync.broadcast(packed, source=0, device=group.device)
            if not group.first:
                sync.write(sync.bind(module, delivery))

        times = [timed(send, str(group.device)) for _ in range(ROUNDS)]
        mine = torch.tensor([int(sync.checksum(module.state_dict())[:15], 16)], device=group.device)
        alike = bool(group.total(mine) == group.ranks * mine)
        if group.first:
            row(f"full, broadcast to {group.ranks - 1}", times, sum(t.nbytes for t in module.state_dict().values()))
        print(f"process {group.rank}: {'holds' if alike else 'FAILS'}: all have the same weights", flush=True)
        return 0 if alike else 1


def _sizes(request: Request) -> dict[str, object]:
    names = ("height", "width", "num_frames", "num_inference_steps", "seed", "output", "max_sequence_length")
    return {name: getattr(request, name) for name in names}


def _as_served(module: torch.nn.Module, served: torch.nn.Module) -> torch.nn.Module:
    """Each weight in the precision that the served one has, some of which stay float32."""
    own = served.state_dict()
    for name, parameter in module.named_parameters():
        parameter.data = parameter.data.to(own[name].dtype)
    return module


def main() -> int:
    """Build, measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("real", "small"), help="real on CUDA, small elsewhere")
    parser.add_argument("--broadcast", action="store_true", help="between the processes of torchrun")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    cuda = arguments.device.startswith("cuda")
    settings = REAL if (arguments.size or ("real" if cuda else "small")) == "real" else SMALL
    if arguments.broadcast:
        return across(arguments.device, settings)
    folder, begun = Path(tempfile.mkdtemp(prefix="weight-sync-")), time.perf_counter()
    try:
        build(folder, settings, arguments.device, torch.bfloat16 if cuda else torch.float32)
        print(f"built in {time.perf_counter() - begun:.0f} s", flush=True)
        rows, checks = measure(folder, arguments.device)
    finally:
        shutil.rmtree(folder)
    name = torch.cuda.get_device_name() if cuda else "CPU"
    found = {"device": name, "torch": torch.__version__, "settings": settings, "rows": rows, "checks": checks.held}
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{time.perf_counter() - begun:.0f} s in all on {name}", flush=True)
    return 0 if all(checks.held.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
