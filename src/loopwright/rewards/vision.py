"""A vision-language model as a judge, through any server with OpenAI's chat completions.

    score = Vision("http://127.0.0.1:8000/v1", model="Qwen/Qwen2.5-VL-7B-Instruct")

It is shown some frames and asked for one number from `low` to `high`, which becomes 0 to 1. An answer that is anything
but such a number is no score: it is asked for again, and then counted as a failure.
"""

import json
import re
from collections import Counter
from collections.abc import Sequence

from ..errors import RequestError
from .pictures import png, spread
from .remote import bearer
from .reward import Sample
from .wire import Calls, Question, Unreadable, parsed

QUESTION = (
    "How well does the picture, or the frames of a video in their order, show this: {prompt}\n"
    "Answer with one number from {low:g} (not at all) to {high:g} (perfectly) and nothing else."
)
_NUMBER = re.compile(r"\s*(-?\d+(?:\.\d+)?)\s*")


class Vision:
    """A reward. `question` may say {prompt}, {low} and {high}; `frames` of a video are shown.

    `url` is what comes before "/chat/completions"; `key` names the environment variable with the server's key.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        question: str = QUESTION,
        low: float = 0.0,
        high: float = 10.0,
        frames: int = 4,
        timeout: float = 60.0,
        retries: int = 3,
        concurrency: int = 8,
        key: str = "",
    ) -> None:
        if not low < high:
            raise RequestError("a judge's numbers must have a low below a high", value=f"{low:g} to {high:g}")
        if frames < 1:
            raise RequestError("a judge must be shown a frame", value=frames, remedy="give 1 or more")
        try:
            question.format(prompt="", low=low, high=high)
        except (KeyError, IndexError, ValueError) as error:
            raise RequestError(
                f"the question cannot be put ({error})", choices=("{prompt}", "{low}", "{high}")
            ) from error
        self._model, self._asked, self._low, self._high, self._frames = model, question, low, high, frames
        address = url.rstrip("/") + "/chat/completions"
        self._calls = Calls(address, timeout=timeout, retries=retries, concurrency=concurrency, headers=bearer(key))

    @property
    def failures(self) -> Counter[str]:
        """Samples without a score, by reason."""
        return self._calls.failures

    def __call__(self, samples: Sequence[Sample]) -> list[float | None]:
        """A score a sample from 0 to 1, None where the judge gave none."""
        return self._calls.each(samples, self._question, lambda _: 1)

    def close(self) -> None:
        """Drop the connections."""
        self._calls.close()

    def _question(self, sample: Sample) -> Question[float]:
        words = self._asked.format(prompt=sample.prompt, low=self._low, high=self._high)
        pictures = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{png(frame)}"}}
            for frame in spread(sample, self._frames)
        ]
        content = [*pictures, {"type": "text", "text": words}]
        body: dict[str, object] = {"model": self._model, "messages": [{"role": "user", "content": content}]}
        body |= {"temperature": 0, "max_tokens": 16}
        return Question(json.dumps(body).encode(), "application/json", self._read)

    def _read(self, answer: bytes) -> float:
        try:
            said = parsed(answer)["choices"][0]["message"]["content"]  # type: ignore[index]
        except (KeyError, IndexError, TypeError) as error:
            raise Unreadable("not a chat completion") from error
        found = _NUMBER.fullmatch(said) if isinstance(said, str) else None
        if found is None:
            raise Unreadable("not one number")
        value = float(found[1])
        if not self._low <= value <= self._high:
            raise Unreadable("a number out of range")
        return (value - self._low) / (self._high - self._low)
