"""Orders of requests, and that nobody waits for ever."""

from dataclasses import dataclass

import pytest

from loopwright.engine.policy import AGEING, HEAD_START, POLICIES, SLACK


@dataclass
class Waiting:
    """A request as policies see it."""

    arrived: float = 0.0
    work: float = 1.0
    left: float = 1.0
    deadline: float | None = None
    priority: str = "normal"


def order(policy, *waiting):
    return [waiting.index(one) for one in sorted(waiting, key=POLICIES[policy])]


def test_first_come_first_served():
    assert order("fifo", Waiting(2.0), Waiting(1.0, left=99.0), Waiting(3.0)) == [1, 0, 2]


def test_the_shortest_goes_first():
    assert order("shortest", Waiting(0.0, left=9.0), Waiting(0.1, left=1.0)) == [1, 0]


def test_the_earliest_deadline_goes_first_and_long_work_is_due_later_by_itself():
    assert order("deadline", Waiting(deadline=9.0), Waiting(deadline=4.0), Waiting(work=0.1)) == [2, 1, 0]
    assert order("deadline", Waiting(work=10.0), Waiting(1.0, work=0.5)) == [1, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_priority_class_is_a_head_start(policy):
    assert order(policy, Waiting(priority="low"), Waiting(), Waiting(priority="high")) == [2, 1, 0]
    late = HEAD_START["high"] + 1.0
    assert order(policy, Waiting(0.0), Waiting(late, priority="high")) == [0, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_nobody_starves(policy):
    """However many short, urgent requests keep coming, a long one of low priority is next within a bounded time."""
    long = Waiting(0.0, work=100.0, left=100.0, priority="low")
    bound = 2 * HEAD_START["high"] + max(100.0 / AGEING, SLACK * 100.0)
    for time in (bound + 1.0, 2 * bound, 1e6):
        newcomer = Waiting(time, work=0.01, left=0.01, priority="high")
        assert order(policy, newcomer, long) == [1, 0]
