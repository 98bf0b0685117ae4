"""Advantages are standard scores of a group, and a group without spread teaches nothing."""

import numpy as np
import pytest
import torch

from loopwright.training.advantages import grouped


def test_advantages_are_a_groups_standard_scores():
    scores = torch.rand(3, 8, generator=torch.Generator().manual_seed(0)) * torch.tensor([[1.0], [5.0], [1e3]])
    values = scores.double().numpy()
    expected = (values - values.mean(1, keepdims=True)) / values.std(1, keepdims=True)
    found = grouped(scores)
    np.testing.assert_allclose(found.values.numpy(), expected, rtol=2e-3)
    assert not found.flat.any()


def test_another_groups_spread_changes_nothing():
    """With the deviation of all together the first group's would all but vanish."""
    calm, wild = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([-100.0, 0.0, 100.0])
    alone, together = grouped(calm[None]).values[0], grouped(torch.stack([calm, wild])).values[0]
    assert torch.equal(alone, together) and alone.abs().max() > 1


def test_what_was_not_scored_counts_for_nobody():
    with_gap = grouped(torch.tensor([[1.0, torch.nan, 3.0, 2.0]]))
    without = grouped(torch.tensor([[1.0, 3.0, 2.0]]))
    assert with_gap.values[0, 1].isnan()
    assert torch.equal(with_gap.values[0, [0, 2, 3]], without.values[0])


@pytest.mark.parametrize("row", [[0.7, 0.7, 0.7], [0.1 + 0.2, 0.3, 0.3], [torch.nan, 2.0, torch.nan], [torch.nan] * 3])
def test_a_group_without_spread_is_flat_and_no_advantage_is_infinite(row):
    found = grouped(torch.tensor([row, [1.0, 2.0, 3.0]], dtype=torch.float64))
    assert found.flat.tolist() == [True, False]
    assert found.lost.tolist() == [sum(score == score for score in row) < 2, False]
    assert not found.values.isinf().any() and found.values[0].nan_to_num().abs().max() < 1e-6
