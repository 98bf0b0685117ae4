"""What a run came to, for people: a page in Markdown and plots, from its metrics.

write(plan)         # summary.md and plots/*.png in the run's folder
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from ..files import replacing
from .plan import Plan
from .run import text
from .sinks import METRICS, table

SUMMARY, PLOTS = "summary.md", "plots"
Rows = Sequence[Mapping[str, float]]
_SHOWN: Mapping[str, Callable[[str], bool]] = {
    "reward": lambda name: (
        name in ("reward_mean", "reward_std", "held_out/reward", "held_out/ema_reward", "zero_std_ratio")
    ),
    "reward-and-judge": lambda name: name in ("reward_mean", "held_out/reward", "held_out/judge"),
    "diversity": lambda name: name == "held_out/diversity_ratio",
    "trust-region": lambda name: name in ("clip_high", "clip_low", "approx_kl", "kl"),
    "loss": lambda name: name in ("loss", "held_out/loss", "held_out/ema_loss"),
    "loss-by-noise": lambda name: name.startswith("loss/"),
    "learning-rate": lambda name: name == "lr",
    "gradient-norm": lambda name: name == "grad_norm",
    "throughput": lambda name: name == "tokens_per_second",
}
_NEEDS = {"reward-and-judge": "held_out/judge"}  # without which there is nothing to compare
_RIGHT = ("held_out/judge",)  # on an axis of its own: its scale is another
_WINDOW = 50  # of a curve's points its running mean is over, at most a tenth of them


def write(plan: Plan) -> None:
    """Write the page and its plots, from whatever has been measured so far."""
    rows = table(plan.output / METRICS)
    names = list(dict.fromkeys(name for row in rows for name in row))
    plots = [name for name, of in _SHOWN.items() if any(map(of, names)) and _NEEDS.get(name, names[0]) in names]
    for plot in plots:
        _draw(plan.output / PLOTS / f"{plot}.png", rows, list(filter(_SHOWN[plot], names)), title=plot)
    with replacing(plan.output / SUMMARY) as temporary:
        temporary.write_text(_page(plan, rows, plots), encoding="utf-8")


def _page(plan: Plan, rows: Rows, plots: Sequence[str]) -> str:
    figures = [f"| {name} | {value} |" for name, value in _figures(plan, rows).items()]
    pictures = [f"![{plot}]({PLOTS}/{plot}.png)" for plot in plots]
    head = f"# {plan.output.name}: {plan.card.name} by {plan.run.method}"
    parts = [head, "\n".join(["| | |", "| --- | --- |", *figures]), *pictures]
    return "\n\n".join([*parts, "## All settings", f"```yaml\n{text(plan.run)}```"]) + "\n"


def _figures(plan: Plan, rows: Rows) -> dict[str, str]:
    found = {
        "networks trained": ", ".join(plan.roles),
        "rows": _rows(plan),
        "steps": f"{int(rows[-1]['step']) if rows else 0} of {plan.steps}",
    }
    # a policy's loss is a slope and no measure of anything
    losses = ("loss", "held_out/loss", "held_out/ema_loss") if plan.run.rollout is None else ()
    rewards = ("reward_mean", "held_out/reward", "held_out/ema_reward", "held_out/judge", "held_out/diversity_ratio")
    for name in (*losses, *rewards):
        if values := [row[name] for row in rows if name in row]:
            found[name] = _course(values)
    for name in ("samples_per_second", "tokens_per_second"):
        if values := [row[name] for row in rows if name in row]:
            found[f"{name.replace('_', ' ')} (median)"] = f"{median(values):.4g}"
    found["entries encoded"] = f"{sum(row.get('cache_misses', 0) for row in rows):.0f}"
    return found


def _rows(plan: Plan) -> str:
    if plan.run.rollout is not None:
        return f"{plan.run.rollout.samples} sampled an epoch, {plan.run.rows} a step"
    if plan.run.drawn is not None:
        return f"drawn by {plan.run.drawn.source} of {plan.run.drawn.file}, {plan.run.rows} a step"
    return f"{len(plan.rows)}, and {len(plan.held_rows)} held out" if plan.held_rows else str(len(plan.rows))


def _course(values: Sequence[float]) -> str:
    """Beginning and end, each the mean of a tenth."""
    count = max(len(values) // 10, 1)
    begun, ended = (sum(part) / len(part) for part in (values[:count], values[-count:]))
    return f"{begun:.4f} → {ended:.4f}" + (f" ({ended / begun - 1:+.1%})" if begun else "")


def _draw(path: Path, rows: Rows, names: Sequence[str], *, title: str) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    right = axes.twinx() if set(names) & set(_RIGHT) else None
    for index, name in enumerate(names):
        side = right if right is not None and name in _RIGHT else axes
        points = [(row["step"], row[name]) for row in rows if name in row]
        steps, values = [step for step, _ in points], [value for _, value in points]
        window = min(max(len(values) // 10, 1), _WINDOW)
        side.plot(steps, values, color=f"C{index}", linewidth=0.5, alpha=0.4 if window > 1 else 1.0)
        side.plot(steps, _smooth(values, window), color=f"C{index}", label=name)
    axes.set_xlabel("step")
    axes.set_title(title)
    figure.legend(fontsize="small", loc="outside lower center", ncols=4)
    if right is not None:
        right.set_ylabel(" and ".join(name for name in names if name in _RIGHT))
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120)


def _smooth(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value and those before it in the window."""
    return [sum(part) / len(part) for end in range(1, len(values) + 1) if (part := values[max(end - window, 0) : end])]
