"""What rollouts and their updates cost on an H200: images a second, share of the matrix peak, log-probs' gaps, memory.

    python benchmarks/rollout_h200.py --output DIR --workspace DIR [--phases engine,training] [--kinds lora,full]
    python benchmarks/rollout_h200.py --tiny --device cpu --output DIR --workspace DIR     # that it runs; no figures

Wan2.1-1.3B at random in bfloat16, its autoencoder too, one frame of 256x256, 10 steps by `flow_sde` without guidance,
groups of 24. First the engine alone, by `Model.run_all` as rollouts call it: latents, then pictures. Then
`training.session.train` with Flow-GRPO (a reference for its KL among it) and JPEG's size as the reward, one optimiser
step an epoch, everything kept on the device. Its first epoch captures and is left out.

MFU counts what `checkpoint.flops` does, against 989 TFLOP/s dense: a forward a step; of an update a forward and a
backward of twice its work, under adapters without the gradients of the layers' own weights, and the reference's
forward. Gaps are the largest differences between log-probs as sampled and as computed again from the recorded steps: by
the plain step in bfloat16 at 24 rows a call, which is training's, and in float32; `logp_gap/trainer` by the trainer's
own forward. Nothing of the runs is written but metrics.
"""

import argparse
import contextlib
import json
import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter

import torch

import checkpoint
import loopwright
from checkpoint import REAL, TINY
from loopwright.api import Model, Result
from loopwright.backends.usage import settle
from loopwright.engine.store import Store
from loopwright.request import KERNELS, Request
from loopwright.training import session
from loopwright.training.methods.grpo import Settings as Grpo
from loopwright.training.rollout import Rollout
from loopwright.training.run import Checkpoints, Lora, Run
from train_h200 import PEAK, Enough, work_of

GROUP, STEPS, SAMPLER, WARM = 24, 10, "flow_sde", 2
Row = dict[str, object]


@dataclass(frozen=True)
class Way:
    """A way to sample: the engine's mode, graphs, kernels, whether blocks are compiled."""

    mode: str
    graphs: str
    kernels: str
    compile: bool = False

    @property
    def name(self) -> str:
        how = "captured" if self.graphs == "always" else "eager"
        return f"{self.mode}, {how}, {self.kernels} kernels{', compiled' if self.compile else ''}"

    def sharing(self) -> dict[str, str | int]:
        return {"mode": self.mode, "kernels": self.kernels} | ({"rows": GROUP} if self.mode == "fixed" else {})


WAYS = (
    Way("throughput", "always", "fused"),
    Way("throughput", "always", KERNELS, compile=True),
    Way("throughput", "always", KERNELS),
    Way("fixed", "always", KERNELS),
    Way("fixed", "always", KERNELS, compile=True),
    Way("throughput", "never", KERNELS),
    Way("fixed", "never", KERNELS),
)


@dataclass(frozen=True)
class Setting:
    """What all measurements share: the checkpoint, the size of a picture, its work."""

    folder: Path
    device: str
    size: int
    steps: int
    groups: int
    forward: float
    attention: float
    dtype: str

    @property
    def samples(self) -> int:
        return self.groups * GROUP

    @property
    def shape(self) -> dict[str, int | float]:
        return {"height": self.size, "width": self.size, "num_frames": 1, "num_inference_steps": self.steps,
                "guidance_scale": 1.0}  # fmt: skip

    def mfu(self, rate: float) -> float:
        """Of so many images a second."""
        return rate * self.steps * self.forward / PEAK


def synchronised(device: str) -> float:
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return perf_counter()


def peak(device: str) -> int:
    """The most bytes in use since this was last asked."""
    if not device.startswith("cuda"):
        return 0
    found = torch.cuda.max_memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    return found


def sampled(model: Model, requests: Sequence[Request]) -> list[Result]:
    return list(model.run_all(requests, recorded=True))


def speed(model: Model, requests: Sequence[Request], device: str, rounds: int) -> Row:
    """Images a second, median and spread, after passes that are left out: prices are learnt, steps captured."""
    rates = []
    for index in range(WARM + rounds):
        begun = synchronised(device)
        sampled(model, requests)
        if index >= WARM:
            rates.append(len(requests) / (synchronised(device) - begun))
    return {"images_per_second": statistics.median(rates), "least": min(rates), "most": max(rates)}


def loaded(setting: Setting, dtype: str, store: Store, way: Way | None = None) -> Model:
    precisions = {"transformer": dtype, "vae": setting.dtype}
    given = {"graphs": "never"} if way is None else {"graphs": way.graphs, "compile": way.compile}
    return loopwright.load(
        setting.folder, device=setting.device, dtype=precisions, sampler=SAMPLER, store=store, **given
    )


def engine(setting: Setting, way: Way, store: Store, rounds: int) -> Iterator[Row]:
    """Of one way to sample: latents alone, then pictures; with the gaps of its log-probs."""
    model = loaded(setting, setting.dtype, store, way)
    asked = {**setting.shape, **way.sharing()}
    peak(setting.device)
    for output in ("latents", "video"):
        requests = [
            model.request(f"prompt {seed // GROUP}", seed=seed, output=output, **asked)
            for seed in range(setting.samples)
        ]
        found = speed(model, requests, setting.device, rounds)
        rate = float(str(found["images_per_second"]))
        yield {"phase": "engine", "way": way.name, "output": output, **found, "mfu": setting.mfu(rate),
               "peak_bytes": peak(setting.device)}  # fmt: skip
    first = [replace(request, output="latents") for request in requests[:GROUP]]
    results = {result.request: result for result in sampled(model, first)}
    yield {"phase": "gap", "way": way.name, **gaps(setting, store, [results[request] for request in first])}
    if model.graphs is not None:
        yield {"phase": "graphs", "way": way.name, "bytes": model.graphs.bytes, "breaks": dict(model.graphs.breaks)}
        model.graphs.relief()


def gaps(setting: Setting, store: Store, results: Sequence[Result]) -> Row:
    """Of the first and of a middle step, which both drew noise."""
    found: Row = {}
    for name, dtype in (("training", setting.dtype), ("float32", "float32")):
        model = loaded(setting, dtype, store)
        found[f"logp_gap/{name}"] = max(apart(model, results, index, dtype) for index in (0, setting.steps // 2))
    return found


@torch.no_grad()
def apart(model: Model, results: Sequence[Result], index: int, dtype: str) -> float:
    """Between log-probs as sampled and as the model computes them of the recorded step, plainly, in one call."""
    assert all(result.trajectory is not None for result in results)
    moves = [result.trajectory.moves[index] for result in results if result.trajectory is not None]
    given = [{"latents": move.rows["latents"], "row": move.rows["row"], "sample": move.after} for move in moves]
    tensors = {name: torch.cat([each[name] for each in given]) for name in given[0]}
    exactly = {"float32": torch.float32}.get(dtype, moves[0].lent["text"].dtype)
    lent = {name: (torch.cat([move.lent[name] for move in moves]).to(exactly),) for name in moves[0].lent}
    static = {**moves[0].static, "kernels": KERNELS}
    with model.instance.using((str(static["model"]),)) as parts:
        again = moves[0].op(parts, **tensors, **lent, **static)["log_prob"]
    before = torch.cat([move.log_prob for move in moves if move.log_prob is not None])
    return float((again - before).abs().max())


class Epochs(session.Silent):
    """Keeps what each epoch is measured at, and ends the run after so many: nothing of it is worth writing."""

    def __init__(self, setting: Setting, kind: str, updates: float) -> None:
        self.rows: list[dict[str, float]] = []
        self._setting, self._kind, self._updates = setting, kind, updates

    def say(self, line: str) -> None:
        print(f"  {line}", flush=True)

    def step(self, step: int, steps: int, metrics: Mapping[str, float]) -> None:
        self.rows.append(dict(metrics))
        shown = {name: metrics.get(name) for name in ("seconds/rollout", "seconds/score", "seconds/update", "logp_gap")}
        print(f"  {self._kind}, epoch {step} of {steps}: {shown}", flush=True)
        if step == steps:
            raise Enough

    def measured(self) -> Row:
        """Of the epochs after the first."""
        setting = self._setting
        made = [row["seconds/rollout"] + row["seconds/score"] for row in self.rows[1:]]
        learnt = [row["seconds/update"] for row in self.rows[2:]]  # which is told of the epoch before
        rollout, update = statistics.median(made), statistics.median(learnt)
        rate = setting.samples / rollout
        gap = max((value for row in self.rows for name, value in row.items() if "logp_abs_diff" in name), default=0.0)
        return {
            "rollout_images_per_second": rate,
            "rollout_mfu": setting.mfu(rate),
            "waited_for_scores": statistics.median(row["seconds/score"] for row in self.rows[1:]),
            "update_images_per_second": setting.samples / update,
            "update_rows_per_second": setting.samples * (setting.steps - 1) / update,
            "update_mfu": self._updates / update / PEAK,
            "images_per_second": setting.samples / (rollout + update),
            "logp_gap": max(row.get("logp_gap", 0.0) for row in self.rows),
            "logp_gap/trainer": gap,
            "peak_bytes": max(row["peak_bytes"] for row in self.rows),
            "reward_mean": self.rows[-1]["reward_mean"],
        }


def training(setting: Setting, kind: str, way: Way, workspace: Path, epochs: int) -> Row:
    """Rollout and update of a whole run."""
    prompts = workspace / "prompts.txt"
    prompts.write_text("".join(f"prompt {index}\n" for index in range(setting.groups)))
    run = Run(
        model=str(setting.folder),
        output=str(workspace / f"out-{kind}-{torch.randint(2**31, ()).item()}"),
        method="grpo",
        grpo=Grpo(clip=1e-2),  # wide enough for kernels that round otherwise
        rollout=Rollout(
            prompts=str(prompts),
            groups=setting.groups,
            group_size=GROUP,
            rows=GROUP,
            mode="throughput" if way.mode == "throughput" else "fixed",
            graphs="never" if way.graphs == "never" else "always",
            compile=way.compile,
            dtype={"vae": setting.dtype},
            parameters={**setting.shape, "kernels": way.kernels},
        ),
        rewards={"jpeg": -1.0},
        epochs=epochs,
        batch_size=setting.samples,
        lora=Lora(rank=32) if kind == "lora" else None,
        precision="bfloat16" if setting.dtype == "bfloat16" else "float32",
        device=setting.device,
        checkpoints=Checkpoints(every=10**6),
        sinks=(),
        sleep="nobody",
    )
    row = work_of(kind, setting.forward, setting.attention) + setting.forward  # the reference's
    seen = Epochs(setting, kind, row * setting.samples * (setting.steps - 1))
    with contextlib.suppress(Enough):
        session.train(run, seen)
    return {"phase": "training", "kind": kind, "way": way.name, **seen.measured()}


def ways_of(device: str) -> list[Way]:
    """Those that the device has."""
    return [way for way in WAYS if device.startswith("cuda") or (way.graphs, way.kernels) == ("never", KERNELS)]


def ways_of_training(ways: Sequence[Way]) -> list[Way]:
    """The first, and the exact one."""
    return [ways[0], next(way for way in ways if (way.mode, way.kernels) == ("fixed", KERNELS) and not way.compile)]


def setting_of(arguments: argparse.Namespace) -> Setting:
    sizes, size, steps = (TINY, 32, 3) if arguments.tiny else (REAL, 256, STEPS)
    forward, attention = checkpoint.flops(sizes, checkpoint.tokens(size, size, 1))
    folder = checkpoint.build(arguments.workspace / ("tiny" if arguments.tiny else "real"), sizes, arguments.device)
    groups, dtype = (1, "float32") if arguments.tiny else (arguments.groups, "bfloat16")
    return Setting(folder, arguments.device, size, steps, groups, forward, attention, dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workspace", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--phases", default="engine,training")
    parser.add_argument("--kinds", default="lora,full")
    parser.add_argument("--epochs", type=int, default=4, help="of training, at least 3")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4, help="of 24 samples")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    for folder in (arguments.output, arguments.workspace):
        folder.mkdir(parents=True, exist_ok=True)
    setting, rows, failed = setting_of(arguments), list[Row](), list[str]()
    cuda = arguments.device.startswith("cuda")
    machine = {"device": torch.cuda.get_device_name() if cuda else arguments.device, "torch": torch.__version__,
               "samples": setting.samples, "steps": setting.steps,
               "tflop_a_forward": setting.forward / 1e12}  # fmt: skip

    def keep(row: Row) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)
        told = {"machine": machine, "rows": rows, "failed": failed}
        (arguments.output / "rollout.json").write_text(json.dumps(told, indent=1))

    def attempt(what: str, measured: Callable[[], Iterable[Row]]) -> None:
        """One that fails is told, and keeps no other from being measured."""
        try:
            for row in measured():
                keep(row)
        except Exception as error:
            failed.append(f"{what}: {type(error).__name__}: {error}")
            traceback.print_exc()
            print(f"FAILED {failed[-1]}", flush=True)
        settle(arguments.device)

    ways = ways_of(arguments.device)
    if "engine" in arguments.phases:
        store = Store()
        for way in ways:
            attempt(way.name, partial(engine, setting, way, store, arguments.rounds))
        del store
    if "training" in arguments.phases:
        for way, kind in product(ways_of_training(ways), arguments.kinds.split(",")):
            run = partial(training, setting, kind, way, arguments.workspace, arguments.epochs)
            attempt(f"{kind}, {way.name}", lambda run=run: [run()])
    print(json.dumps({"machine": machine, "rows": rows, "failed": failed}), flush=True)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
