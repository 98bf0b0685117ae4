"""What a training step costs on an H200: tokens a second, share of the matrix peak, memory. Wan2.1-1.3B at random.

    python benchmarks/train_h200.py --output DIR --workspace DIR [--kinds full,lora] [--steps 6]
    python benchmarks/train_h200.py --tiny --device cpu --output DIR --workspace DIR     # that it runs; no figures

Runs `training.session.train`, as `loopwright train` does, on latents of 480x832x81 that are drawn at random, one clip a
step, bfloat16 over float32 masters, cuDNN attention. MFU counts a forward and a backward of twice its work, under
adapters without the gradients of the layers' own weights, whatever is computed again, against 989 TFLOP/s dense; the
first two steps are left out.
"""

import argparse
import contextlib
import json
import statistics
from dataclasses import replace
from pathlib import Path

import torch

import checkpoint
import timing
from checkpoint import REAL, TINY
from loopwright.training import session
from loopwright.training.drawn import Drawn
from loopwright.training.run import Checkpoints, Lora, Run

PEAK = 989e12  # of bfloat16 products, dense, as the maker says
FRAMES, HEIGHT, WIDTH = 81, 480, 832


class Latents:
    """Clips of one shape, normal at random, with embeddings of all 512 tokens."""

    def __init__(self, device: torch.device, frames: int, height: int, width: int, text: int) -> None:
        self._device, self._shape, self._text = device, (16, frames, height, width), text
        self.blank = torch.zeros(512, text, device=device)

    def batch(self, step: int, rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
        shapes = {"latent": self._shape, "cond": (512, self._text)}
        return {
            name: torch.randn(rows, *shape, device=self._device, generator=generator) for name, shape in shapes.items()
        }

    def held_out(self) -> list[dict[str, torch.Tensor]]:
        return []


class Enough(Exception):
    """All steps are measured: nothing of such a run is worth writing."""


class Measured(session.Silent):
    """Keeps what each step is measured at."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def step(self, step: int, steps: int, metrics: dict[str, float]) -> None:
        self.metrics.append(dict(metrics))
        print(f"  step {step} of {steps}: {metrics.get('tokens_per_second', 0):.0f} tokens/s", flush=True)
        if step == steps:
            raise Enough


def work_of(kind: str, forward: float, attention: float) -> float:
    """FLOP of a step, of those of a forward and of attention among them."""
    return 3 * forward if kind == "full" else 2 * (forward - attention) + 3 * attention


def measure(run: Run, kind: str, work: float, tokens: int) -> dict[str, object]:
    seen = Measured()
    with contextlib.suppress(Enough):
        session.train(run, seen)
    speeds = [metrics["tokens_per_second"] for metrics in seen.metrics[2:] if "tokens_per_second" in metrics]
    speed = statistics.median(speeds)
    achieved = work * speed / tokens
    return {"kind": kind, "tokens_per_second": speed, "least": min(speeds), "most": max(speeds),
            "seconds_a_step": tokens / speed, "tflops": achieved / 1e12, "mfu": achieved / PEAK,
            "peak_bytes": max(metrics.get("peak_bytes", 0) for metrics in seen.metrics),
            "compile": run.compile, "attention": run.attention,
            "gradient_checkpointing": run.gradient_checkpointing, "loss": seen.metrics[-1]["loss"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", default="full,lora")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--attention", default="cudnn")
    parser.add_argument("--checkpointing", action="store_true", help="activations are computed again")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    sizes = TINY if arguments.tiny else REAL
    frames, height, width = (5, 32, 32) if arguments.tiny else (FRAMES, HEIGHT, WIDTH)
    tokens = checkpoint.tokens(height, width, frames)
    forward, attention = checkpoint.flops(sizes, tokens)
    folder = checkpoint.build(arguments.workspace / ("tiny" if arguments.tiny else "real"), sizes, arguments.device)
    shape = {"frames": (frames - 1) // 4 + 1, "height": height // 8, "width": width // 8, "text": sizes.text}
    run = Run(
        model=str(folder),
        output="",
        drawn=Drawn(__file__, "Latents", shape),
        steps=arguments.steps,
        attention="sdpa" if arguments.tiny else arguments.attention,
        compile=arguments.compile and not arguments.tiny,
        precision="float32" if arguments.tiny else "bfloat16",
        gradient_checkpointing=arguments.checkpointing,
        device=arguments.device,
        checkpoints=Checkpoints(every=10**6),
        sinks=(),
        train_only=True,
    )
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = []
    for kind in arguments.kinds.split(","):
        lora = Lora(rank=32) if kind == "lora" else None
        output = str(arguments.workspace / f"out-{kind}-{torch.randint(2**31, ()).item()}")
        rows.append(measure(replace(run, lora=lora, output=output), kind, work_of(kind, forward, attention), tokens))
        print(json.dumps(rows[-1]), flush=True)
        gemm = timing.gemm(arguments.device, 8192 if not arguments.tiny else 128)
        told = {"device": torch.cuda.get_device_name() if arguments.device == "cuda" else arguments.device,
                "torch": torch.__version__, "gemm_tflops": gemm / 1e12, "tokens": tokens}  # fmt: skip
        (arguments.output / "train.json").write_text(json.dumps({"machine": told, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
