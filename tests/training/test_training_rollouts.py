"""Epochs of samples: who is asked, what is recorded, what is dropped, what is shared."""

from types import SimpleNamespace

import pytest
import torch

from loopwright import rewards
from loopwright.catalog import velocity
from loopwright.distributed.group import Group
from loopwright.distributed.shard import trained
from loopwright.errors import StateError
from loopwright.training import networks
from loopwright.training.live import Live
from loopwright.training.methods import METHODS, Material
from loopwright.training.plan import make
from loopwright.training.rollout_feed import RolloutFeed
from loopwright.training.rollouts import Rollouts


class Parts:
    """A run's parts up to its feed."""

    def __init__(self, run, group: Group):
        self.plan, self.said = make(run), []
        self.run = self.plan.run
        self.networks = networks.load(self.plan.card, self.plan.roles, self.run, group)
        self.live = Live(self.plan, group, self.networks)
        forward, given = velocity(self.plan.card), trained(self.networks)
        card, roles, asked = self.plan.card, self.plan.roles, self.plan.asked
        material = Material(card, forward, roles, torch.float32, "sdpa", None, given, asked)
        self.method = METHODS[self.run.method](self.run, material)
        score = rewards.parse(self.run.rewards)
        self.rollouts = Rollouts(self.plan, group, self.live, self.method, score, say=self.said.append)
        self.feed = RolloutFeed(self.rollouts, self.method, self.plan, group)

    def step(self):
        return next(iter(self.feed.steps(self.feed.start(), epochs=1)))


@pytest.fixture
def parts(alone):
    return lambda run: Parts(run, alone)


def test_an_epochs_samples_are_of_its_prompts_and_the_same_whenever_it_is_sampled(parts, rollout_of):
    ours = parts(rollout_of())
    first, again, next_one = (ours.rollouts.epoch(epoch) for epoch in (0, 0, 1))
    assert [scored.number for scored in first.samples] == list(range(8))
    prompts = [scored.sample.request.prompt for scored in first.samples]
    assert sorted(set(prompts)) == ["dark", "light"] and prompts[:4] == [prompts[0]] * 4
    pairs = zip(first.samples, again.samples, strict=True)
    assert all(torch.equal(a.sample.latents, b.sample.latents) and a.advantage == b.advantage for a, b in pairs)
    seeds = {scored.sample.request.seed for drawn in (first, next_one) for scored in drawn.samples}
    assert len(seeds) == 16


def test_a_group_of_one_prompt_is_encoded_once_and_shares_its_conditioning(parts, rollout_of, checkpoint):
    small = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2, "max_sequence_length": 32}
    run = rollout_of(model=str(checkpoint("t2v")), rollout={"rows": 2, "parameters": {**small, "guidance_scale": 1.0}})
    ours = parts(run)
    drawn = ours.rollouts.epoch(0)
    features = ours.live.store.features
    assert (features.misses, features.hits) == (2, 6)
    texts = {id(move.lent["text"]) for scored in drawn.samples for move in scored.sample.moves}
    assert len(texts) == 2
    ours.rollouts.epoch(1)  # of other weights of the transformer
    assert (features.misses, features.hits) == (2, 14), "a frozen encoder's work survives new weights"
    assert {move.versions["transformer"] for scored in drawn.samples for move in scored.sample.moves} == {2}


def test_one_window_draws_noise_for_all_of_an_epoch_and_never_the_last_step(parts, rollout_of):
    ours = parts(rollout_of(rollout={"window": 2, "parameters": {"num_inference_steps": 6}}))
    starts = set()
    for epoch in range(8):
        asked = {(a.request.noise_start, a.request.noise_steps) for a in ours.rollouts._requests(epoch)}
        ((start, steps),) = asked
        assert steps == 2 and start + steps <= 5
        starts.add(start)
    assert len(starts) > 2
    moves = ours.rollouts.epoch(0).samples[0].sample.moves
    assert sum(bool(move.log_prob) for move in moves) == 2
    assert sum(move.after.numel() > 0 for move in moves) == 2, "of the others no latents are kept"


def test_what_could_not_be_scored_is_dropped_and_counted(parts, rollout_of):
    run = rollout_of(reward="halting", batch_size=12, rollout={"groups": 4, "group_size": 6})
    drawn = parts(run).rollouts.epoch(0)
    lost = drawn.metrics["not_scored"]
    assert 0 < lost < 24 and len(drawn.samples) == 24 - lost
    assert all(abs(scored.advantage) < 3 for scored in drawn.samples)


def test_missing_scores_are_told_by_reward_and_by_reason(parts, rollout_of, rewards_file):
    both = {f"{rewards_file}:{name}": 1.0 for name in ("bright", "broken")}
    ours = parts(rollout_of(rewards=both, batch_size=12, rollout={"groups": 4, "group_size": 6}))
    found = ours.rollouts.epoch(0).metrics
    fine, broken = both
    assert found[f"not_scored/{fine}"] == 0 and found[f"reward/{fine}"] > 0
    assert 0 < found[f"not_scored/{broken}"] == found["not_scored"] < 24
    count = int(found["not_scored"])
    assert ours.said == [
        f"epoch 0: {count} of 24 samples were not scored; {broken}: not a finite number ({count})"
    ]  # fmt: skip
    ours.rollouts.epoch(0)
    assert ours.said[1] == ours.said[0], "reasons of an epoch, not of all so far"


def test_a_group_of_which_nothing_was_scored_is_lost_and_no_other_is_touched(parts, rollout_of):
    run = rollout_of(reward="only_light")
    drawn = parts(run).rollouts.epoch(0)
    assert drawn.metrics["groups_lost"] == 1 and drawn.metrics["not_scored"] == 4
    assert drawn.metrics["zero_std_ratio"] == 0, "of the groups that are left"
    assert [scored.sample.request.prompt for scored in drawn.samples] == ["light"] * 4
    assert sum(scored.advantage for scored in drawn.samples) == pytest.approx(0)


def test_an_epoch_of_which_nothing_was_scored_ends_the_run(parts, rollout_of):
    ours = parts(rollout_of(reward="nothing"))
    with pytest.raises(StateError, match="not one sample of epoch 0 was scored"):
        ours.rollouts.epoch(0)


def test_groups_without_spread_are_left_out_and_their_share_is_told(parts, rollout_of):
    ours = parts(rollout_of(reward="same"))
    drawn = ours.rollouts.epoch(0)
    assert not drawn.samples and drawn.metrics["zero_std_ratio"] == 1 and drawn.metrics["reward_mean"] == 0.5
    step = ours.step()
    assert step.parts == () and step.rows == 0


@pytest.mark.parametrize(("method", "steps"), [("grpo", 2), ("nft", 3)])
def test_batches_have_the_rollouts_rows_and_every_example_once(parts, rollout_of, method, steps):
    ours = parts(rollout_of(method, rollout={"rows": 5}))
    epoch = list(ours.feed.steps(ours.feed.start(), epochs=1))
    batches = [batch for step in epoch for batch in step.parts]
    assert {len(tensor) for batch in batches for tensor in batch.tensors.values()} == {5}
    places = [place for batch in batches for place in batch.places[: batch.real]]
    assert len(places) == len(set(places)) == 8 * steps == sum(step.rows for step in epoch)
    assert [step.after.offset for step in epoch] == [1, 0] and epoch[-1].after.epoch == 1
    assert "reward_mean" in epoch[0].metrics and not epoch[1].metrics


def test_a_share_of_the_steps_is_another_for_each_sample(parts, rollout_of):
    run = rollout_of(grpo={"timesteps": 0.5, "kl": 0.0}, rollout={"parameters": {"num_inference_steps": 5}})
    step = parts(run).step()
    chosen = {}
    for batch in step.parts:
        for place in batch.places[: batch.real]:
            chosen.setdefault(place // 5, set()).add(int(batch.tensors["step"][batch.places.index(place)]))
    assert {len(steps) for steps in chosen.values()} == {2} and len({tuple(sorted(s)) for s in chosen.values()}) > 1


def test_processes_share_groups_and_fill_up_to_as_many_batches(rollout_of, alone):
    ours = Parts(rollout_of(reward="halting", batch_size=12, rollout={"groups": 4, "group_size": 6, "rows": 4}), alone)
    ranks = [SimpleNamespace(rank=rank, ranks=2, device=alone.device) for rank in range(2)]
    asked = []
    for group in ranks:
        ours.rollouts._group = group
        asked.append([each.number for each in ours.rollouts._requests(0)])
    assert sorted(asked[0] + asked[1]) == list(range(24)) and len(asked[0]) == len(asked[1])
    ours.rollouts._group = alone
    drawn = ours.rollouts.epoch(0)
    mine, theirs = drawn.samples[:2], drawn.samples[2:9]
    counted = {}

    def total(tensor):
        counted[len(counted)] = tensor
        return sum(counted.values())

    for samples in (theirs, mine):  # the process with fewer samples hears how many the other has
        rank = len(counted)
        ours.feed._group = SimpleNamespace(rank=rank, ranks=2, total=total)
        step = ours.feed._step(0, samples, drawn.spare)
    assert len(step.parts) == 4 and [batch.real for batch in step.parts] == [4, 0, 0, 0] and step.rows == 18
