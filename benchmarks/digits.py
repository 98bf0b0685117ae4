"""Do the methods learn, and their controls not? Runs of runs/digits over several seeds, through `loopwright train`.

    python benchmarks/digits.py --seeds 0 1 2 --jobs 2 --folder out/digits         # one curve a run, and a verdict

What is compared is the judge's mean probability of the digit asked for, of held-out samples without noise, at epochs 0
to 40. A run found in the folder is continued or taken as it is. Leaves a JSON file and a plot in benchmarks/results.
Deliberately absent: speed.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
RUNS = HERE.parent / "runs" / "digits"
SHUFFLED, CONSTANT = (f"rewards={{runs/digits/digits.py:{name}: 1.0}}" for name in ("shuffled", "constant"))
FLAT = (0.34, 0.33, 0.33, 0.33, 0.33)
KINDS = {  # the run file, its changes, and what is known at epochs 0, 10, 20, 30, 40
    "grpo": ("grpo", [], (0.34, 0.68, 0.90, 0.98, 0.996)),
    "nft": ("nft", [], (0.34, 0.70, 0.92, 0.995, 0.999)),
    "nft-positive": ("nft", ["nft.positive_only=true"], (0.34, 0.45, 0.43, 0.31, 0.18)),
    "grpo-shuffled": ("grpo", [SHUFFLED], FLAT),
    "nft-shuffled": ("nft", [SHUFFLED], FLAT),
    "grpo-constant": ("grpo", [CONSTANT], ()),
}
EPOCHS, NEAR = (0, 10, 20, 30, 40), 0.07


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--jobs", type=int, default=1, help="runs at once, a thread each")
    parser.add_argument("--folder", type=Path, default=Path("out/digits"))
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--only-report", action="store_true", help="what is there, without running anything")
    given = parser.parse_args()
    folder = given.folder.resolve()
    names = [(kind, seed) for kind in given.kinds for seed in given.seeds]
    if not given.only_report:
        base(folder)
        with ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(lambda name: run(folder, *name), names))
    found = {f"{kind}-{seed}": curve(folder / f"{kind}-{seed}") for kind, seed in names}
    found = {name: points for name, points in found.items() if points}
    report(found, given.results)


def base(folder: Path) -> None:
    """The generator that all begin with."""
    if not (folder / "start").exists():
        subprocess.run([sys.executable, RUNS / "start.py", folder / "start"], check=True)
    train("base", folder / "base", [f"model={folder / 'start'}"])


def run(folder: Path, kind: str, seed: int) -> None:
    file, changes, _ = KINDS[kind]
    train(file, folder / f"{kind}-{seed}", [f"model={folder / 'base' / 'model'}", f"seed={seed}", *changes])


def train(file: str, output: Path, changes: list[str]) -> None:
    """By the command, in a process of its own."""
    sets = [part for change in (*changes, f"output={output}") for part in ("--set", change)]
    command = [sys.executable, "-m", "loopwright", "train", str(RUNS / f"{file}.yaml"), *sets]
    quiet = {**os.environ, "OMP_NUM_THREADS": "1"}
    output.parent.mkdir(parents=True, exist_ok=True)
    with (output.parent / f"{output.name}.log").open("w") as log:
        subprocess.run(command, check=True, cwd=HERE.parent, env=quiet, stdout=log, stderr=subprocess.STDOUT)


def curve(output: Path) -> dict[int, float]:
    """The judge's probability by epoch."""
    import yaml

    from loopwright.training.sinks import table

    if not (output / "metrics.csv").exists():
        return {}
    settings = yaml.safe_load((output / "run.yaml").read_text())
    rollout = settings["rollout"]
    each = rollout["groups"] * rollout["group_size"] // settings["batch_size"]
    rows = table(output / "metrics.csv")
    judged = {round(row["step"] / each): row["held_out/reward"] for row in rows if "held_out/reward" in row}
    return {epoch: judged[epoch] for epoch in EPOCHS if epoch in judged}


def report(found: dict[str, dict[int, float]], folder: Path) -> None:
    print(f"{'':18}" + "".join(f"{epoch:>8}" for epoch in EPOCHS))
    for name, points in found.items():
        cells = "".join(f"{points[epoch]:8.3f}" if epoch in points else " " * 8 for epoch in EPOCHS)
        print(f"{name:18}{cells}  {verdict(name, points)}")
    folder.mkdir(exist_ok=True)
    values = {"epochs": EPOCHS, "known": {kind: known for kind, (_, _, known) in KINDS.items()}, "runs": found}
    (folder / "digits.json").write_text(json.dumps(values, indent=2) + "\n")
    plot(found, folder / "digits.png")


def verdict(name: str, points: dict[int, float]) -> str:
    """Of a whole run: near what is known at epochs 20 and 40; controls against where they began."""
    kind = name.rpartition("-")[0]
    if 40 not in points:
        return "not at its end"
    apart = [points[epoch] - points[0] for epoch in points]
    if kind == "grpo-constant":
        return "unmoved" if not any(apart) else "MOVED BY NOTHING"
    if kind.endswith("shuffled"):
        fell = "flat" if min(apart) > -NEAR else "no gain, FELL"
        return fell if max(apart) < NEAR else "LEARNT FROM NOTHING"
    if kind == "nft-positive":
        return "collapsed" if points[40] < points[0] else "DID NOT COLLAPSE"
    known = dict(zip(EPOCHS, KINDS[kind][2], strict=True))
    return "as known" if all(points[epoch] > known[epoch] - NEAR for epoch in (20, 40)) else "BELOW WHAT IS KNOWN"


def plot(found: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    colours = {kind: f"C{place}" for place, kind in enumerate(KINDS)}
    for kind, (_, _, known) in KINDS.items():
        if kind.endswith(("shuffled", "constant")):
            continue
        axes.plot(EPOCHS, known, "--", color=colours[kind], alpha=0.4, label=f"{kind}, known")
    for name, points in found.items():
        kind, seed = name.rpartition("-")[::2]
        axes.plot(
            list(points), list(points.values()), "o-", color=colours[kind], markersize=3, label=f"{kind}, seed {seed}"
        )
    axes.set(xlabel="epoch", ylabel="the judge's probability of the digit asked for", ylim=(0, 1.02))
    axes.legend(fontsize="x-small", ncols=2)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
