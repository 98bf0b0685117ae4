"""Both methods learn from the judge of digits, by the files of runs/digits; `benchmarks/digits.py` has whole runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.training.run import read
from loopwright.training.session import train
from loopwright.training.sinks import table

RUNS = Path(__file__).parents[2] / "runs" / "digits"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The recipe's generator, on digits of which 65 % have a wrong label."""
    pytest.importorskip("sklearn")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RUNS))
        from start import write

    folder = tmp_path_factory.mktemp("digits")
    write(folder / "start")
    named = [f"model={folder / 'start'}", f"output={folder / 'base'}", f"drawn.file={RUNS / 'digits.py'}"]
    assert train(read(RUNS / "base.yaml", [*named, "device=cpu"])).finished
    return folder / "base" / "model"


@pytest.mark.slow
@pytest.mark.parametrize(("method", "staleness", "gain"), [("grpo", 0, 0.08), ("nft", 0, 0.15), ("grpo", 1, 0.08)])
def test_a_method_learns_in_five_epochs_what_the_judge_wants(base, tmp_path, method, staleness, gain):
    """Samples one update old tell of it one epoch later."""
    named = [f"model={base}", f"output={tmp_path}", "device=cpu", f"epochs={6 + staleness}"]
    run = read(RUNS / f"{method}.yaml", named)
    rollout = replace(run.rollout, prompts=str(RUNS / "prompts.txt"), staleness=staleness)
    train(replace(run, rollout=rollout, rewards={f"{RUNS / 'digits.py'}:likely": 1.0}, evaluation=None))
    rewards = [row["reward_mean"] for row in table(tmp_path / "metrics.csv") if "reward_mean" in row]
    assert rewards[-1] > rewards[0] + gain
