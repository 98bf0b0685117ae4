"""What was generated, and the record that its files carry."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..errors import MediaError, RequestError
from ..files import replacing
from ..request import Request
from .pixels import Pixels
from .trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Result:
    """What was generated, and all that is needed to repeat it.

    `latents` float32 [1, C, T, H, W] on the model's device; `video` uint8 [T, H, W, 3], None if only latents were
    asked for; `request` is fully resolved; `record` is what saved files carry; `trajectory` is there if it
    was recorded.
    """

    request: Request
    latents: torch.Tensor
    video: Pixels | None
    seconds: float
    record: Mapping[str, object]
    trajectory: Trajectory | None = None

    @property
    def image(self) -> Pixels:
        """The first frame, uint8 [H, W, 3]."""
        first: Pixels = self._pixels()[0]
        return first

    def save(self, path: str | Path) -> Path:
        """Write .mp4, .gif or an image with the record embedded, or .safetensors with the latents."""
        from .. import media

        path = Path(path)
        if path.suffix == ".safetensors":
            try:
                with replacing(path) as temporary:
                    record = {"loopwright": json.dumps(self.record)}
                    save_file({"latents": self.latents.cpu()}, temporary, metadata=record)
            except (OSError, SafetensorError) as error:
                raise MediaError(f"cannot write {path} ({error})", remedy="choose another place") from error
        else:
            media.write(path, self._pixels(), fps=self.request.fps, metadata=self.record)
        return path

    def _pixels(self) -> Pixels:
        if self.video is None:
            raise RequestError(
                "only latents were asked for",
                value=self.request.output,
                choices=("video",),
                remedy='generate with output="video"',
            )
        return self.video


def read_record(path: str | Path) -> dict[str, object]:
    """The record a saved result carries. Raises MediaError if the file has none."""
    if Path(path).suffix != ".safetensors":
        from .. import media

        return dict(media.read_metadata(path))
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {})["loopwright"]))
    except (OSError, SafetensorError, KeyError, json.JSONDecodeError) as error:
        raise MediaError(f"{path} carries no record of a generation ({error})") from error
