"""What a prompt asks for, as rewards read it: a fact of its row, or what the prompt itself says in quotes."""

import re

from ..errors import RequestError
from .reward import Sample

_QUOTED = re.compile(r'"([^"]+)"')


def fact(sample: Sample, name: str) -> str:
    """The fact of that name. Raises RequestError where the sample has none: a prompt set is all of one kind."""
    value = sample.facts.get(name)
    if not value:
        raise RequestError(
            f"the prompt {sample.prompt!r} does not say its {name}",
            choices=sample.facts,
            remedy=f"add {name} to its row",
        )
    return value


def text(sample: Sample) -> str:
    """The text a picture should show: the fact "text", else what the prompt has in double quotes."""
    quoted = _QUOTED.search(sample.prompt)
    return fact(sample, "text") if "text" in sample.facts or quoted is None else quoted[1]
