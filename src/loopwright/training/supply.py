"""What a run's steps are made of: encodings of a data set, or batches that its own file draws.

with opened(plan, group, say) as supply:
    supply.feed, supply.held, supply.blank
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass

import torch

from .. import rewards
from ..distributed.group import Group
from ..errors import RequestError
from ..rewards import Composite
from . import drawn
from .feed import Batches, Feed
from .plan import Plan, encoded
from .run import Run


@dataclass(frozen=True)
class Supply:
    """`feed` is None where the networks make it by themselves, scored by `score`, with `judges` where there are some;
    `held` where nothing is held out; `blank` [L, D] where there are no prompts or the engine encodes them."""

    feed: Batches | None
    held: Batches | None = None
    blank: torch.Tensor | None = None
    score: Composite | None = None
    judges: Composite | None = None


def _check_blank(run: Run, source: drawn.Source) -> None:
    dropout = run.sft.caption_dropout
    if run.method == "sft" and dropout and source.blank is None:
        remedy = "set it to 0, or give the drawn source's blank the embeddings of the empty prompt"
        raise RequestError("sft.caption_dropout has nothing to put in a caption's place", value=dropout, remedy=remedy)


@contextmanager
def opened(plan: Plan, group: Group, say: Callable[[str], None]) -> Iterator[Supply]:
    """The supply of a run whose encodings, if it has any, are made.

    Raises RequestError for a drawn source without the empty prompt where captions are to be dropped.
    """
    run = plan.run
    if run.rollout is not None:
        with ExitStack() as stack:
            score = stack.enter_context(closing(rewards.parse(run.rewards)))
            named = run.evaluation.judges if run.evaluation and group.first else {}
            judges = stack.enter_context(closing(rewards.judges(named, run.rewards))) if named else None
            yield Supply(None, score=score, judges=judges)
        return
    if run.drawn is not None:
        source = drawn.opened(run.drawn, group.device)
        _check_blank(run, source)
        feed = drawn.DrawnFeed(source, group, run.rows, run.accumulate, run.seed, drawn.identity(run.drawn))
        yield Supply(feed, drawn.HeldOut(source), source.blank)
        return
    assert run.data is not None and plan.order is not None
    with encoded(run.data, str(group.device), say) as encodings:
        held = None if plan.held is None else Feed(encodings, plan.held_rows, plan.held, group)
        blank = encodings.prompt("").to(group.device)
        yield Supply(Feed(encodings, plan.rows, plan.order, group, run.accumulate), held, blank)
