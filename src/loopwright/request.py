"""What a user asks for: one frozen record that holds everything an answer depends on, apart from the weights.

    request = Request(task="text_to_video", prompt="a red fox", height=64, width=64, num_frames=9, ...)

A `Request` is always *resolved*: defaults come from the card (`program.resolve`), never from here. Pixels travel as
`Frames`, plain bytes with a shape, so that a request can be hashed, stored and sent without pickle. Deliberately
absent: which machine runs it and when.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields

OUTPUTS = ("video", "latents", "score")
MODES = ("exact", "fixed", "throughput")
ATTENTION, KERNELS = "sdpa", "plain"  # where neither the request nor the card's defaults choose


@dataclass(frozen=True, slots=True)
class Frames:
    """RGB pixels, uint8. `shape` is (T, H, W, 3); an image is T = 1. `source` says where they came from."""

    data: bytes
    shape: tuple[int, int, int, int]
    source: str = ""

    def __post_init__(self) -> None:
        t, h, w, c = self.shape
        if len(self.data) != t * h * w * c or c != 3:
            raise ValueError(f"{len(self.data)} bytes are not RGB frames of shape {self.shape}")

    @property
    def digest(self) -> str:
        """Content hash of pixels and shape (not of `source`)."""
        return hashlib.sha256(repr(self.shape).encode() + self.data).hexdigest()


@dataclass(frozen=True, slots=True)
class Request:
    """Every parameter of one generation. Sizes in pixels, `fps` in frames per second.

    `guidance_scale` is in the convention uncond + s (cond - uncond); at 1 or below there is one forward a step.
    `guidance_scale_2` and `flow_shift` are None where the model has no second expert or no static shift.
    `strength` in (0, 1] is how much of the schedule video-to-video runs.
    `mode` is how its steps share calls with other requests': never (`exact`), in calls of always `rows` rows, padded if
    need be, so that the bits do not depend on who shares them (`fixed`), or freely (`throughput`).
    `noise_level` is how much noise a stochastic sampler draws, in `noise_steps` steps from step `noise_start` (from 0)
    on; None with any other sampler.
    `attention` and `kernels` name what computes it, such as "sdpa" and "plain"; `loopwright backends` lists what a
    device offers.
    """

    model: str
    task: str
    prompt: str
    negative_prompt: str
    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float | None
    flow_shift: float | None
    strength: float
    max_sequence_length: int
    fps: int
    seed: int
    output: str
    mode: str
    rows: int
    attention: str
    kernels: str
    noise_level: float | None = None
    noise_start: int | None = None
    noise_steps: int | None = None
    image: Frames | None = None
    video: Frames | None = None

    def record(self) -> dict[str, str | int | float | None]:
        """The request as plain JSON values; pixels appear as their source and digest. Repeats the result."""
        values: dict[str, str | int | float | None] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Frames):
                values[field.name], values[f"{field.name}_digest"] = value.source, value.digest
            else:
                values[field.name] = value
        return values


def to_json(request: Request) -> tuple[dict[str, str | int | float | None], dict[str, Frames]]:
    """Split a request into JSON values and its pixels, for storage."""
    pixels = {name: frames for name in ("image", "video") if (frames := getattr(request, name)) is not None}
    values = {f.name: getattr(request, f.name) for f in fields(request) if f.name not in ("image", "video")}
    return values, pixels


def from_json(values: Mapping[str, str | int | float | None], pixels: Mapping[str, Frames]) -> Request:
    """The inverse of `to_json`. Raises TypeError on unknown or missing names."""
    return Request(**values, **pixels)  # type: ignore[arg-type]
