"""How far log-probs of rollouts lie from training's: where it is looked for, and what is too far."""

from dataclasses import replace

import pytest

import loopwright
from loopwright.errors import BackendError
from loopwright.training.gap import gap, require
from loopwright.training.methods.policy import Sample


def test_the_gap_is_that_of_the_last_step_that_drew_noise(rollout_of, labels):
    model = loopwright.load(labels, device="cpu", sampler="flow_sde")
    asked = {"num_inference_steps": 4, "mode": "fixed", "rows": 2, "noise_start": 1, "noise_steps": 2}
    results = list(model.run_all([model.request("light", seed=seed, **asked) for seed in range(3)], recorded=True))
    samples = [Sample(each.request, each.trajectory.moves, each.latents) for each in results]
    run = rollout_of()
    assert gap(model, samples, run, rows=2) == 0

    def off(index):
        """The samples with log-probs of one step that are off by a half."""
        changed = [list(sample.moves) for sample in samples]
        for moves in changed:
            moves[index] = replace(moves[index], log_prob=moves[index].log_prob + 0.5)
        return [replace(sample, moves=moves) for sample, moves in zip(samples, changed, strict=True)]

    found = [gap(model, off(index), run, rows=2) for index in range(4)]
    assert found == [0, 0, pytest.approx(0.5), 0], "the other steps are not looked at"
    require(found[0], 1e-6)
    with pytest.raises(BackendError, match="lie further than 1e-06"):
        require(found[2], 1e-6)
