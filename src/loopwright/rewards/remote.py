"""Scores from a service of your own, over HTTP.

    score = Remote("http://scorer:8000/score", format="msgpack", batch=16)

It gets a POST with `samples`: for each its `prompt`, its `facts` and its `frames`, and answers `{"scores": [...]}`, a
number or null for each, in their order. In JSON the frames are PNGs in base64; in msgpack their bytes, uint8, with
`shape` [T, H, W, 3]. Deliberately absent: pickle, and any other way to run what a service sends.
"""

import json
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence

import msgpack

from ..errors import RequestError
from .pictures import png
from .reward import Sample
from .wire import Calls, Question, Unreadable, parsed

FORMATS = {"json": "application/json", "msgpack": "application/msgpack"}


class Remote:
    """A reward. `batch` samples a request, `concurrency` requests at a time, each tried `retries` times again.

    `key` is the name of an environment variable whose value is sent as a bearer token.
    """

    def __init__(
        self,
        url: str,
        *,
        format: str = "json",
        batch: int = 8,
        timeout: float = 60.0,
        retries: int = 3,
        concurrency: int = 8,
        key: str = "",
    ) -> None:
        if format not in FORMATS:
            raise RequestError("unknown format", value=format, choices=FORMATS)
        if batch < 1:
            raise RequestError("a request has at least one sample", value=batch, remedy="give 1 or more")
        self._format, self._batch = format, batch
        self._calls = Calls(url, timeout=timeout, retries=retries, concurrency=concurrency, headers=bearer(key))

    @property
    def failures(self) -> Counter[str]:
        """Samples without a score, by reason."""
        return self._calls.failures

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """A score a sample; None for those that the service has none for, or whose request came to nothing."""
        parts = [samples[start : start + self._batch] for start in range(0, len(samples), self._batch)]
        answers = self._calls.each(parts, self._question, len)
        scores: list[float | None] = []
        for part, answer in zip(parts, answers, strict=True):
            scores += [None] * len(part) if answer is None else answer
        return scores

    def close(self) -> None:
        """Drop the connections."""
        self._calls.close()

    def _question(self, samples: Sequence[Sample]) -> Question[list[float | None]]:
        pack = _packed if self._format == "msgpack" else _written
        body = {"samples": [pack(sample) for sample in samples]}
        data = msgpack.packb(body) if self._format == "msgpack" else json.dumps(body).encode()
        return Question(data, FORMATS[self._format], lambda answer: self._read(answer, len(samples)))

    def _read(self, answer: bytes, count: int) -> list[float | None]:
        said = _unpacked(answer) if self._format == "msgpack" else parsed(answer)
        scores = said.get("scores") if isinstance(said, Mapping) else None
        if not isinstance(scores, list) or len(scores) != count:
            raise Unreadable("not one score a sample")
        missing = sum(score is None for score in scores)
        read = [None if score is None else _number(score) for score in scores]
        if missing:
            self._calls.count("no score from the service", missing)
        return read


def _number(value: object) -> float:
    """A finite number. Raises Unreadable."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise Unreadable("a score that is no number")
    try:
        number = float(value)
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise Unreadable("a score that is no number")
    return number


def _unpacked(answer: bytes) -> object:
    """What msgpack says. Raises Unreadable."""
    try:
        said: object = msgpack.unpackb(answer)
    except (ValueError, msgpack.UnpackException) as error:
        raise Unreadable("not msgpack") from error
    return said


def bearer(key: str) -> dict[str, str]:
    """The header with the token that the environment variable of that name holds; none for "". Raises RequestError."""
    if not key:
        return {}
    if not os.environ.get(key):
        raise RequestError("the environment variable with the scorer's key is not set", value=key)
    return {"authorization": f"Bearer {os.environ[key]}"}


def _written(sample: Sample) -> dict[str, object]:
    frames = [png(frame) for frame in sample.frames.numpy()]
    return {"prompt": sample.prompt, "facts": dict(sample.facts), "frames": frames}


def _packed(sample: Sample) -> dict[str, object]:
    pixels = sample.frames.numpy()
    shown = {"shape": list(pixels.shape), "frames": pixels.tobytes()}
    return {"prompt": sample.prompt, "facts": dict(sample.facts), **shown}
