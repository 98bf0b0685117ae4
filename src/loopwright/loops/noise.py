"""The noise of stochastic samplers: which steps draw it, how much, and from which seed.

    request = with_noise(request, "flow_sde")       # resolved: noise_level 0.7, from step 0, all steps but the last
    levels(request, steps)                          # float64 [N], 0 where a step draws none
    draw(request.seed, step, like)                  # float32, like the latents of one row

A step's noise depends on seed and step alone, so it is the same whoever shares the call, and after a restart.
"""

import hashlib
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import RequestError
from ..request import Request
from ..sampling.stochastic import LEVELS

_MOST = {"cps": 1.0}  # all of the noise is new


def with_noise(request: Request, stepper: str) -> Request:
    """The request with what it leaves open of its noise. `stepper` is "" for a sampler that draws none.

    Raises RequestError for noise where there is none, or steps that there are not.
    """
    given = {name: getattr(request, name) for name in ("noise_level", "noise_start", "noise_steps")}
    if not stepper:
        for name, value in given.items():
            if value is not None:
                remedy = f"leave it out, or load the model with sampler={next(iter(LEVELS))!r}"
                raise RequestError(f"{name}: the model's sampler draws no noise", value=value, remedy=remedy)
        return request
    level = LEVELS[stepper] if request.noise_level is None else request.noise_level
    start = 0 if request.noise_start is None else request.noise_start
    last = request.num_inference_steps - 1  # which draws none unless told to
    steps = max(last - start, 0) if request.noise_steps is None else request.noise_steps
    most = _MOST.get(stepper, np.inf)
    if isinstance(level, bool) or not isinstance(level, (int, float)) or not 0 <= level <= most:
        raise RequestError("noise_level is out of range", value=level, remedy=f"0 to {most}")
    for name, value, end in (("noise_start", start, last), ("noise_steps", steps, last + 1 - start)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= end:
            raise RequestError(f"{name} is out of range", value=value, remedy=f"0 to {end}")
    return replace(request, noise_level=float(level), noise_start=start, noise_steps=steps)


def levels(request: Request, steps: int) -> NDArray[np.float64]:
    """The noise level of each step."""
    assert request.noise_level is not None and request.noise_start is not None and request.noise_steps is not None
    found = np.zeros(steps)
    found[request.noise_start : request.noise_start + request.noise_steps] = request.noise_level
    return found


def draw(seed: int, step: int, like: torch.Tensor) -> torch.Tensor:
    """Standard normal, as large as `like`, on its device; drawn on the host, so that it is the same on every device."""
    digest = hashlib.blake2b(f"{seed}/{step}".encode(), digest_size=7).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "big"))
    return torch.randn(like.shape, generator=generator, dtype=torch.float32).to(like.device)
