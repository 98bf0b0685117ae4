"""Samples on their way from another process: results with their trajectories as bytes, and back.

    data = packed(results)                          # where they were made
    results = unpacked(data, velocity, device)      # the same, on this process's device

Tensors travel as safetensors, each once however often it is named: latents that one step gave are those that the next
began with, and samples of one prompt share its conditioning. All else is JSON. What cannot be written is told by name:
the forward, which the receiver has, and the op, which is the denoising step.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from safetensors.torch import load, save

from ..api import Result
from ..api.trajectory import Move, Trajectory
from ..loops.denoise import denoise_step
from ..request import from_json, to_json

_ABOUT = "about"
Velocity = Callable[..., torch.Tensor]
Plain = Mapping[str, object]


def packed(results: Sequence[Result]) -> bytes:
    """Results whose requests bring no pixels."""
    tensors = _Tensors()
    about = [_result(result, tensors) for result in results]
    text = json.dumps(about).encode()
    contents: bytes = save({**tensors.owned(), _ABOUT: torch.frombuffer(bytearray(text), dtype=torch.uint8)})
    return contents


def unpacked(data: bytes, velocity: Velocity, device: torch.device) -> list[Result]:
    """Those results, their latents on the device, computed by that forward."""
    # copies, because tensors read from bytes lie at odd addresses, and the last bits of products depend on that
    tensors = load(data)
    about = json.loads(bytes(tensors.pop(_ABOUT).tolist()))
    frames = {each["video"] for each in about}
    moved = {name: tensor.to("cpu" if name in frames else device, copy=True) for name, tensor in tensors.items()}
    return [_restored(each, moved, velocity) for each in about]


class _Tensors:
    """Names for tensors, one each."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[str, torch.Tensor]] = {}

    def name(self, tensor: torch.Tensor) -> str:
        return self._found.setdefault(id(tensor), (str(len(self._found)), tensor))[0]

    def names(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
        return {name: self.name(tensor) for name, tensor in tensors.items()}

    def owned(self) -> dict[str, torch.Tensor]:
        return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in self._found.values()}


def _result(result: Result, tensors: _Tensors) -> Plain:
    request, pixels = to_json(result.request)
    assert not pixels, "what a rollout asks is text"
    moves = [] if result.trajectory is None else result.trajectory.moves
    return {
        "request": request,
        "latents": tensors.name(result.latents),
        "video": None if result.video is None else tensors.name(torch.from_numpy(result.video)),
        "seconds": result.seconds,
        "record": result.record,
        "moves": [_move(move, tensors) for move in moves],
    }


def _move(move: Move, tensors: _Tensors) -> Plain:
    assert move.op is denoise_step
    return {
        "rows": tensors.names(move.rows),
        "lent": tensors.names(move.lent),
        "after": tensors.name(move.after),
        "log_prob": None if move.log_prob is None else tensors.name(move.log_prob),
        "static": {name: value for name, value in move.static.items() if name != "velocity"},
        "versions": dict(move.versions),
    }


def _restored(about: dict[str, Any], tensors: Mapping[str, torch.Tensor], velocity: Velocity) -> Result:
    video = about["video"]
    return Result(
        request=from_json(about["request"], {}),
        latents=tensors[about["latents"]],
        video=None if video is None else tensors[video].numpy(),
        seconds=about["seconds"],
        record=about["record"],
        trajectory=Trajectory([_moved(move, tensors, velocity) for move in about["moves"]]),
    )


def _moved(about: dict[str, Any], tensors: Mapping[str, torch.Tensor], velocity: Velocity) -> Move:
    log_prob = about["log_prob"]
    return Move(
        op=denoise_step,
        rows={name: tensors[key] for name, key in about["rows"].items()},
        lent={name: tensors[key] for name, key in about["lent"].items()},
        after=tensors[about["after"]],
        log_prob=None if log_prob is None else tensors[log_prob],
        static={**about["static"], "velocity": velocity},
        versions=about["versions"],
    )
