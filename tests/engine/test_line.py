"""Lines of those that wait: the policy's order, and nobody who has left."""

import random
from types import SimpleNamespace

from loopwright.engine.line import Line


def entry(order: int, score: float = 0.0):
    return SimpleNamespace(order=order, score=score, ticket=0)


def test_the_first_is_who_has_the_least_score_and_came_first():
    line = Line()
    for each in (late := entry(2), first := entry(0), best := entry(1, score=-1.0)):
        line.push(each)
    assert line.first() is best and line.first() is best, "looking takes nobody away"
    assert [line.pop() for _ in range(4)] == [best, first, late, None]


def test_who_has_left_or_was_pushed_again_is_passed_over():
    line, waiting, rng = Line(), {}, random.Random(0)
    for order in range(200):
        each = entry(order, score=rng.random())
        line.push(each)
        waiting[order] = each
        if rng.random() < 0.5:
            other = waiting[rng.choice(list(waiting))]
            other.ticket += 1
            if rng.random() < 0.5:
                other.score = rng.random()
                line.push(other)
            else:
                del waiting[other.order]
        line.tidy(len(waiting))
        assert len(line) <= max(2 * len(waiting), 1)
        assert line.first() is min(waiting.values(), key=lambda each: (each.score, each.order), default=None)
    found = [line.pop() for _ in range(len(waiting))]
    assert found == sorted(waiting.values(), key=lambda each: (each.score, each.order)) and line.pop() is None
    line.push(entry(0))
    line.tidy(0)
    assert len(line) == 1, "it still waits"
