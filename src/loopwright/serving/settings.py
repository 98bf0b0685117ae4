"""How a server runs: where it listens, what it keeps, and how much anybody may ask of it.

Settings(folder=Path("serving"), queue=64)
"""

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from ..engine.policy import POLICIES
from ..errors import RequestError
from ..files import cache_folder
from ..request import Request
from .logs import FORMATS
from .refusal import Refusal

SMALLEST_FRAME = 16  # pixels; below it encoders of files fail


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for. `pixels` are height x width x frames; `uploads` those of a file; sizes in bytes.

    `bodies` bounds all bodies that are being read, `queue` all requests under way and `concurrent` those of one key.
    """

    body: int = 64 * 2**20
    bodies: int = 2**30
    prompt: int = 8192
    pixels: int = 2**27
    uploads: int = 2**25
    images: int = 8
    steps: int = 200
    rows: int = 32
    sequence: int = 4096
    fps: int = 240
    scale: float = 1000.0
    queue: int = 256
    concurrent: int = 64
    upload_seconds: float = 60.0

    def check(self, request: Request) -> None:
        """Raise Refusal for a resolved request that asks for too much, naming the limit."""
        pixels = request.height * request.width * request.num_frames
        for name, value, most in (
            ("prompt", len(request.prompt), self.prompt),
            ("negative_prompt", len(request.negative_prompt), self.prompt),
            ("size", pixels, self.pixels),
            ("num_inference_steps", request.num_inference_steps, self.steps),
            ("rows", request.rows, self.rows),
            ("max_sequence_length", request.max_sequence_length, self.sequence),
            ("fps", request.fps, self.fps),
            ("guidance_scale", request.guidance_scale, self.scale),
            ("guidance_scale_2", request.guidance_scale_2 or 0.0, self.scale),
            ("flow_shift", request.flow_shift or 0.0, self.scale),
            ("noise_level", request.noise_level or 0.0, self.scale),
        ):
            if value > most:
                what = {"prompt": " characters", "negative_prompt": " characters", "size": " pixels in all frames"}
                raise Refusal(f"{name} is too large here: {value}{what.get(name, '')}; at most {most}", param=name)


@dataclass(frozen=True, slots=True)
class Settings:
    """A server's. Times in seconds.

    Attributes:
        folder: jobs and results; a server has it to itself.
        keys: the file of API keys' hashes; None asks for no key.
        anonymous: whether to listen beyond this machine without keys.
        tls_cert, tls_key: files in PEM format; with both, HTTPS alone is spoken.
        retain_seconds, retain_bytes: how long results are kept, and how much of them.
        save_seconds: how often a job under way is saved, 0 for every step; the end of a stage saves as well.
        health_seconds: how long the outcome of a health check is good for.
        log_format: "text", or "json" for an object a line.
        managers: names of the keys that may load and unload models and replace weights; nobody may without.
        model_roots: folders with models that may be loaded, besides those named at the start, and with weights.
        idle_seconds: a model that nobody has asked for in so long lets its weights go, until somebody does.
        safety: the filter of prompts and pixels, "opennsfw" or "module:function"; None for no filter.
        webhook_hosts: who may be told of a video's end, "HOST" or "HOST:PORT"; nobody if empty.
        webhook_secret: file with the key that signs what they are told; made if there is none.
        webhook_private: whether they may lie in private networks, and be spoken to without TLS.
        drain_seconds: how long requests that wait for their answer may take to finish when the server stops.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    folder: Path = field(default_factory=lambda: cache_folder() / "serving")
    keys: Path | None = None
    anonymous: bool = False
    tls_cert: Path | None = None
    tls_key: Path | None = None
    policy: str = "fifo"
    limits: Limits = field(default_factory=Limits)
    retain_seconds: float = 7 * 86400.0
    retain_bytes: int = 10 * 2**30
    save_seconds: float = 0.0
    health_seconds: float = 5.0
    managers: tuple[str, ...] = ()
    model_roots: tuple[Path, ...] = ()
    idle_seconds: float | None = None
    safety: str | None = None
    webhook_hosts: tuple[str, ...] = ()
    webhook_secret: Path | None = None
    webhook_private: bool = False
    drain_seconds: float = 20.0
    log_format: str = "text"

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise RequestError("unknown policy", value=self.policy, choices=POLICIES)
        if self.webhook_hosts and self.webhook_secret is None:
            raise RequestError("webhooks are signed, and there is no key", remedy="give --webhook-secret FILE")
        if self.managers and self.keys is None:
            raise RequestError("whoever loads models needs a key", value=self.managers[0], remedy="give --keys FILE")
        if self.model_roots and not self.managers:
            raise RequestError(
                "nobody may load models of", value=str(self.model_roots[0]), remedy="give --manager NAME"
            )
        for root in self.model_roots:
            if not root.is_dir():
                raise RequestError("no such folder", value=str(root), remedy="--model-root names one with models")
        if self.idle_seconds is not None and self.idle_seconds <= 0:
            raise RequestError("a model is idle after a time above 0", value=self.idle_seconds)
        if self.log_format not in FORMATS:
            raise RequestError("unknown format of the log", value=self.log_format, choices=FORMATS)
        if not 0 < self.port < 65536:
            raise RequestError("a port lies between 1 and 65535", value=self.port)
        if (self.tls_cert is None) != (self.tls_key is None):
            given, lacking = ("--tls-cert", "--tls-key") if self.tls_cert else ("--tls-key", "--tls-cert")
            raise RequestError(f"{given} needs its other half", remedy=f"give {lacking} too, or neither")
        if not self.local and self.keys is None and not self.anonymous:
            raise RequestError(
                "others could use this server without a key, if it listens on",
                value=self.host,
                remedy="give --keys FILE, or --anonymous if that is meant",
            )

    @property
    def local(self) -> bool:
        """Whether only this machine reaches the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
