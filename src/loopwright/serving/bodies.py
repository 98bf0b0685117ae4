"""The bodies of requests, field by field, as OpenAI names them and beside them the engine's own parameters.

    body = ImageBody.model_validate_json(b'{"prompt": "a fox", "size": "64x64", "seed": 7}')
    body.parameters()                           # {"width": 64, "height": 64, "seed": 7}

Fields that nobody reads are refused. What a value may be for a model is the model's to say (`Model.request`); here it
only has a type.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..api.model import Parameter
from ..card import Card, Value
from .refusal import Refusal

_SIZE = "^([1-9][0-9]{0,5}x[1-9][0-9]{0,5}|auto)$"
Whole = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Text = Annotated[str, Field(max_length=2**20)]
Name = Annotated[str, Field(max_length=512)]
Size = Annotated[
    str, Field(max_length=32, description="WIDTHxHEIGHT in pixels, or auto", json_schema_extra={"pattern": _SIZE})
]
Deadline = Annotated[float, Field(gt=0, le=10 * 86400, description="seconds from now; later, the result is unwanted")]
FORMATS = {"png": ".png", "webp": ".webp", "jpeg": ".jpg"}
_APART = ("model", "task", "prompt", "size", "priority", "deadline", "dry_run")


class Body(BaseModel):
    """What every kind of generation takes."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    model: Name | None = None
    prompt: Text
    negative_prompt: Text | None = None
    size: Size | None = None
    height: Whole | None = None
    width: Whole | None = None
    num_inference_steps: Whole | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    flow_shift: float | None = None
    strength: float | None = None
    max_sequence_length: Whole | None = None
    seed: Whole | None = None
    mode: Literal["exact", "fixed", "throughput"] | None = None
    rows: Whole | None = None
    noise_level: float | None = None
    noise_start: Whole | None = None
    noise_steps: Whole | None = None
    attention: Name | None = None
    kernels: Name | None = None
    priority: Literal["high", "normal", "low"] = "normal"
    deadline: Deadline | None = None
    dry_run: Annotated[bool, Field(description="check and resolve the request, and run nothing")] = False

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.size not in (None, "auto") and (self.height is not None or self.width is not None):
            raise ValueError("give size, or height and width, not both")
        return self

    def parameters(self) -> dict[str, Parameter]:
        """The request's parameters as far as they are given."""
        given = self.model_dump(exclude_none=True, include=set(Body.model_fields) - set(_APART))
        if self.size not in (None, "auto"):
            given["width"], given["height"] = size_of(self.size)
        return given


class ImageBody(Body):
    """POST /v1/images/generations."""

    n: Whole = 1
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "webp", "jpeg"] = "png"
    stream: bool = False
    partial_images: Annotated[int, Field(ge=0, le=3)] = 0

    @model_validator(mode="after")
    def _streamed(self) -> Self:
        if self.partial_images and not self.stream:
            raise ValueError("partial_images come with stream: true alone")
        if self.stream and self.response_format == "url":
            raise ValueError("a stream carries b64_json alone")
        return self

    def parameters(self) -> dict[str, Parameter]:
        """An image is a video of one frame."""
        return {**super().parameters(), "num_frames": 1}


class VideoBody(Body):
    """POST /v1/videos, and what a rollout shares with it."""

    task: Name | None = None
    seconds: Annotated[str | float, Field(description="of the video; the nearest length the model can make")] | None = (
        None
    )
    num_frames: Whole | None = None
    fps: Whole | None = None
    webhook: Annotated[str, Field(max_length=2048, description="address that is told of the video's end")] | None = None

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if self.seconds is not None and self.num_frames is not None:
            raise ValueError("give seconds or num_frames, not both")
        return self

    def frames(self, card: Card, task: str) -> dict[str, Parameter]:
        """The parameters, the length told in frames."""
        given = self.parameters()
        given |= self.model_dump(exclude_none=True, include={"num_frames", "fps"})
        if self.seconds is not None:
            given["num_frames"] = frames_of(self.seconds, card, given.get("fps") or card.defaults[task]["fps"])
        return given


class RolloutBody(VideoBody):
    """POST /rollout/generate."""

    output: Literal["latents", "video"] = "latents"
    trajectory: Annotated[bool, Field(description="latents before the first step and after each")] = True
    follow_weights: Annotated[bool, Field(description="go on with weights that are swapped in the middle")] = False

    @model_validator(mode="after")
    def _waited_for(self) -> Self:
        if self.webhook is not None:
            raise ValueError("webhook is of videos alone: a rollout is waited for")
        return self


class WeightsBody(BaseModel):
    """POST /update_weights_from_disk."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False, frozen=True)

    model: Name | None = None
    component: Annotated[Name, Field(description="the generator, if it is the only one")] | None = None
    path: Annotated[str, Field(max_length=4096, description="in one of the server's model roots")]
    policy: Literal["drain", "freeze", "finish"] = "drain"
    version: Whole | None = None
    drain_seconds: Annotated[float, Field(ge=0, le=86400, description="how long requests under way may take")] = 600.0


class ModelBody(BaseModel):
    """POST /v1/models."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Name


def size_of(size: str | None) -> tuple[int, int]:
    """Width and height."""
    found = re.fullmatch(r"([1-9]\d{0,5})x([1-9]\d{0,5})", size or "", re.ASCII)
    if found is None:
        raise Refusal(f"size must be WIDTHxHEIGHT in pixels: {size!r}; such as 64x64, or auto", param="size")
    return int(found[1]), int(found[2])


def frames_of(seconds: str | float, card: Card, fps: Value) -> int:
    """The number of frames, of those the card can make, that is nearest to so many seconds."""
    stride = card.settings["frame_stride"]
    try:
        count = float(seconds) * float(fps)  # type: ignore[arg-type]
        if not 0 < count < 2**31:
            raise ValueError(seconds)
    except (ValueError, OverflowError) as error:
        raise Refusal(f"seconds must be a number above 0: {seconds!r}"[:200], param="seconds") from error
    assert isinstance(stride, int)
    return round(max(0.0, count - 1) / stride) * stride + 1
