"""Both methods learn from the judge of digits, by the files of runs/digits, and their controls do not.

`benchmarks/digits.py` has whole runs.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from loopwright.training.run import read
from loopwright.training.session import train
from loopwright.training.sinks import table

RUNS = Path(__file__).parents[2] / "runs" / "digits"
EPOCHS, GAIN = 8, {"grpo": 0.1, "nft": 0.25}
slow = pytest.mark.slow


@pytest.fixture
def base():
    """What came of the recipe's generator, on digits of which 65 % have a wrong label."""
    pytest.importorskip("sklearn")
    return RUNS / "generator"


@pytest.fixture
def made(base, tmp_path_factory):
    """The recipe's generator, made anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(RUNS))
        from start import write

    folder = tmp_path_factory.mktemp("digits")
    write(folder / "start")
    named = [f"model={folder / 'start'}", f"output={folder / 'base'}", f"drawn.file={RUNS / 'digits.py'}"]
    assert train(read(RUNS / "base.yaml", [*named, "device=cpu"])).finished
    return folder / "base" / "model"


def rewards(base, output, method, reward, *changes, epochs=EPOCHS, staleness=0):
    """What the epochs' samples were given on average, by the run file with another reward."""
    named = [f"model={base}", f"output={output}", "device=cpu", f"epochs={epochs}", *changes]
    run = read(RUNS / f"{method}.yaml", named)
    rollout = replace(run.rollout, prompts=str(RUNS / "prompts.txt"), staleness=staleness)
    train(replace(run, rollout=rollout, rewards={f"{RUNS / 'digits.py'}:{reward}": 1.0}, evaluation=None))
    return [row["reward_mean"] for row in table(output / "metrics.csv") if "reward_mean" in row]


@pytest.mark.parametrize("kind", ["base", pytest.param("made", marks=slow)])
def test_the_generator_begins_where_others_began(kind, tmp_path, request):
    """At .34: as many of its labels are right, and it draws what they say."""
    generator = request.getfixturevalue(kind)
    assert rewards(generator, tmp_path, "nft", "likely", epochs=1)[0] == pytest.approx(0.34, abs=0.05)


@pytest.mark.parametrize(("method", "epochs", "gain"), [("grpo", 6, 0.08), ("nft", 4, 0.12)])
def test_a_method_begins_to_learn_what_the_judge_wants(base, tmp_path, method, epochs, gain):
    """By more than twice what rewards of other samples ever bring in the first epochs."""
    found = rewards(base, tmp_path, method, "likely", epochs=epochs)
    assert found[-1] > found[0] + gain


@slow
@pytest.mark.parametrize(("method", "staleness"), [("grpo", 0), ("nft", 0), ("grpo", 1)])
def test_a_method_learns_what_the_judge_wants(base, tmp_path, method, staleness):
    """Samples one update old tell of it one epoch later."""
    found = rewards(base, tmp_path, method, "likely", epochs=EPOCHS + staleness, staleness=staleness)
    assert found[-1] > found[0] + GAIN[method]


@slow
@pytest.mark.parametrize("method", ["grpo", "nft"])
def test_from_rewards_of_other_samples_nothing_is_learnt(base, tmp_path, method):
    found = rewards(base, tmp_path, method, "shuffled")
    assert found[-1] < found[0] + GAIN[method] / 2


@slow
def test_what_is_learnt_from_the_good_alone_is_lost_again(base, tmp_path):
    found = rewards(base, tmp_path, "nft", "likely", "nft.positive_only=true", epochs=2 * EPOCHS)
    assert found[-1] < max(found) - 0.15


def test_one_number_for_all_moves_no_weight(base, tmp_path):
    from safetensors.torch import load_file

    assert rewards(base, tmp_path, "grpo", "constant", epochs=1) == [0.5]
    before, after = (
        load_file(next((folder / "transformer").glob("*.safetensors"))) for folder in (base, tmp_path / "model")
    )
    assert all(bool((before[name] == after[name]).all()) for name in before)
