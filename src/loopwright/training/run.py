"""The settings of a training run, typed and frozen; a YAML file or a few lines of Python.

    model: loopwright/tiny-wan
    output: out/fox
    epochs: 10
    data: {dataset: clips/rows.jsonl, encoder_checkpoint: loopwright/tiny-wan, cache: encoded}
    lora: {rank: 16}

    run = read("fox.yaml", ["optimiser.lr=3e-4"])
    text(run)                                       # all of it, defaults included, as YAML that `read` takes

What can be told from the settings alone is checked here; what needs the model's card, in `plan`. Deliberately absent:
inheritance between files, and settings that nothing reads.
"""

import runpy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, get_args

import yaml  # type: ignore[import-untyped]

from ..errors import RequestError
from .drawn import Drawn
from .methods.autoencoder import Settings as Autoencoder
from .methods.grpo import Settings as Grpo
from .methods.nft import Settings as Nft
from .methods.sft import Settings as Sft
from .rollout import SETTLED, Rollout
from .settings import Plain, build, change, plain, refuse

Method = Literal["sft", "autoencoder", "grpo", "nft"]  # each has settings of that name


@dataclass(frozen=True, slots=True)
class Data:
    """What is trained on, and the encoders that make it, which are always named and never guessed from the model.

    Attributes:
        cache: the folder of encodings, as `loopwright encode` fills it.
        geometry: shapes such as "480x832x81"; none means the encoders' own.
        first_frame: each clip is given its own first frame, as training image-to-video does.
        held_out: the share of clips that is never trained on.
        workers: so many encode what the cache lacks, for each training process: one is that process itself, more are
            processes by Ray on its device.
        dedicated: workers have the last GPUs of the machine to themselves, one each.
        park: encoders that had to be loaded while training go to host memory after each use.
    """

    dataset: str
    encoder_checkpoint: str
    cache: str
    encoder_revision: str | None = None
    geometry: tuple[str, ...] = ()
    frame_stride: int = 1
    crop: Literal["center", "none"] = "center"
    first_frame: bool = False
    held_out: float = 0.0
    workers: int = 1
    dedicated: bool = False
    park: bool = False

    def __post_init__(self) -> None:
        _require("data.workers", self.workers, self.workers >= 1, "at least 1")
        _require("data.frame_stride", self.frame_stride, self.frame_stride >= 1, "at least 1")
        _require("data.held_out", self.held_out, 0 <= self.held_out < 1, "at least 0 and below 1")


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank adapters instead of the weights themselves. `targets` are regular expressions for the ends of
    layers' names; `alpha` None is the rank. `layout` is by whose names the file calls layers."""

    rank: int = 16
    alpha: float | None = None
    targets: tuple[str, ...] = ("to_[qkv]", r"to_out\.0")
    dropout: float = 0.0
    layout: Literal["diffusers", "comfyui", "kohya"] = "diffusers"

    def __post_init__(self) -> None:
        _require("lora.rank", self.rank, self.rank >= 1, "at least 1")
        _require("lora.alpha", self.alpha, self.alpha is None or self.alpha > 0, "above 0")
        _require("lora.dropout", self.dropout, 0 <= self.dropout < 1, "at least 0 and below 1")
        _require("lora.targets", list(self.targets), bool(self.targets), "one pattern at least")


@dataclass(frozen=True, slots=True)
class Optimiser:
    """AdamW. `lr` None is 1e-5 for whole networks, 1e-4 for adapters, and 3e-4 for those that learn from rollouts.
    `clip` is the largest norm of all gradients together; None leaves them as they are, and logs the norm all the
    same."""

    lr: float | None = None
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    clip: float | None = 1.0

    def __post_init__(self) -> None:
        _require("optimiser.lr", self.lr, self.lr is None or self.lr > 0, "above 0")
        _require("optimiser.betas", list(self.betas), all(0 <= beta < 1 for beta in self.betas), "at least 0, below 1")
        _require("optimiser.eps", self.eps, self.eps > 0, "above 0")
        _require("optimiser.weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0")
        _require("optimiser.clip", self.clip, self.clip is None or self.clip > 0, "above 0")


@dataclass(frozen=True, slots=True)
class Schedule:
    """Of the learning rate: `warmup` steps up from 0, then constant, or down to `final` times the rate at the end."""

    kind: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    final: float = 0.0

    def __post_init__(self) -> None:
        _require("schedule.warmup", self.warmup, self.warmup >= 0, "at least 0")
        _require("schedule.final", self.final, 0 <= self.final <= 1, "between 0 and 1")
        if self.final and self.kind == "constant":
            remedy = "leave it out, or set schedule.kind to linear or cosine"
            raise RequestError("schedule.final is of a rate that falls", value=self.final, remedy=remedy)


@dataclass(frozen=True, slots=True)
class Checkpoints:
    """Written every so many steps and at the end; the last `keep` stay."""

    every: int = 500
    keep: int = 2

    def __post_init__(self) -> None:
        _require("checkpoints.every", self.every, self.every >= 1, "at least 1")
        _require("checkpoints.keep", self.keep, self.keep >= 1, "at least 1")


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The loss of the rows held out, every so many steps, at `draws` noise levels a row, always the same.

    Of rollouts, the rewards of `draws` samples a prompt held out, and what `judges` say of the same: named as rewards
    are, independent of them, never trained on. `parameters` are those of a request in which these samples differ from
    what is learnt from, for instance more steps.
    """

    every: int = 500
    draws: int = 4
    judges: Mapping[str, float | Mapping[str, str | int | float]] = field(default_factory=dict)
    parameters: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require("evaluation.every", self.every, self.every >= 1, "at least 1")
        _require("evaluation.draws", self.draws, self.draws >= 1, "at least 1")
        refuse("evaluation.parameters", self.parameters, {**SETTLED, "prompt": "set rollout.held_out"})


@dataclass(frozen=True, slots=True)
class Previews:
    """What the network generates every so many steps, through the engine; `parameters` are those of a request.
    `image` is the file that all of them begin with, of a model that makes videos of a first frame."""

    prompts: tuple[str, ...]
    image: str | None = None
    every: int = 500
    seed: int = 0
    parameters: Mapping[str, str | int | float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require("previews.every", self.every, self.every >= 1, "at least 1")
        _require("previews.prompts", list(self.prompts), bool(self.prompts), "one prompt at least")
        for name, remedy in (("prompt", "set previews.prompts"), ("image", "set previews.image"), ("video", "")):
            if name in self.parameters:
                raise RequestError(f"previews.parameters take no {name}", value=self.parameters[name], remedy=remedy)


@dataclass(frozen=True, slots=True)
class Run:
    """A run. Give `steps`, or `epochs`: every row is seen exactly so often.

    Attributes:
        data, drawn, rollout: what is trained on: a data set, batches that a Python file draws, or samples of the
            network itself; one of them.
        rewards: of rollouts, by name, as `rewards.parse` takes them: {"ocr": 1.0}, {"mine.py:brightness": 0.5}.
        model: a shipped id, a Diffusers folder or a hub name.
        output: the folder for checkpoints, metrics and the result; a run found there is continued.
        batch_size: rows a step, over all processes and all `accumulate` parts together; of rollouts samples a step, so
            that an epoch has rollout.samples / batch_size steps. None is 1, and of rollouts half of an
            epoch's samples.
        train: the networks to train, by their names on the card; none means all that generate, or the autoencoder for
            the method of that name.
        precision: what is computed in; the weights trained are float32. "auto" is bfloat16 on CUDA, else float32.
        stored: the precision in which the result's weights are written; adapters are always float32.
        ema: decay of the averaged weights; None keeps none.
        log_every: steps between two measurements, which are means over them; the host waits for the device only then.
        sinks: where metrics go besides `metrics.csv` in the run's folder.
        compile: the blocks, which is faster and rounds otherwise than serving does without. One process alone then
            computes in `precision` by autocast, which rounds otherwise, too.
        parallel: what several processes hold: "shard", each a part of the weights and of the optimiser; "replicate",
            each all of them, which is faster where they fit, and computes in `precision` by autocast.
        sleep: who leaves the device while the other works: "serving", encoders, autoencoder, served scorers and graphs
            while networks are updated; "both", also the optimiser's state and averages while samples are made; or
            "nobody". None is "serving", or "nobody" where sampling and training overlap (`rollout.staleness`).
        train_only: no engine is started, whatever else is asked for; what needs one is refused.
    """

    model: str
    output: str
    data: Data | None = None
    drawn: Drawn | None = None
    rollout: Rollout | None = None
    rewards: Mapping[str, float | Mapping[str, str | int | float]] = field(default_factory=dict)
    revision: str | None = None
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    accumulate: int = 1
    seed: int = 0
    train: tuple[str, ...] = ()
    method: Method = "sft"
    sft: Sft = field(default_factory=Sft)
    grpo: Grpo = field(default_factory=Grpo)
    nft: Nft = field(default_factory=Nft)
    autoencoder: Autoencoder = field(default_factory=Autoencoder)
    lora: Lora | None = None
    optimiser: Optimiser = field(default_factory=Optimiser)
    schedule: Schedule = field(default_factory=Schedule)
    ema: float | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    stored: Literal["float32", "bfloat16"] = "float32"
    gradient_checkpointing: bool = False
    attention: str = "sdpa"
    compile: bool = False
    parallel: Literal["shard", "replicate"] = "shard"
    device: str = "auto"
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    evaluation: Evaluation | None = None
    previews: Previews | None = None
    log_every: int = 1
    sinks: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ("tensorboard",)
    sleep: Literal["nobody", "serving", "both"] | None = None
    train_only: bool = False

    def __post_init__(self) -> None:
        for name in ("steps", "epochs"):
            value = getattr(self, name)
            _require(name, value, value is None or value >= 1, "at least 1")
        if (self.steps is None) == (self.epochs is None):
            given = "neither" if self.steps is None else "both"
            raise RequestError("a run's length is given once", value=given, choices=("steps", "epochs"))
        if self.batch_size is None:
            samples = 1 if self.rollout is None else self.rollout.samples
            usual = samples if samples % 2 else samples // 2
            object.__setattr__(self, "batch_size", usual)
        _require("batch_size", self.batch_size, self.rows >= 1, "at least 1")
        fits = 1 <= self.accumulate <= self.rows
        _require("accumulate", self.accumulate, fits, f"between 1 and batch_size ({self.rows})")
        _require("log_every", self.log_every, self.log_every >= 1, "at least 1")
        _require("ema", self.ema, self.ema is None or 0 < self.ema < 1, "between 0 and 1")
        self._agree()

    @property
    def rows(self) -> int:
        """Of a step."""
        assert self.batch_size is not None, "settled when the run was made"
        return self.batch_size

    def _agree(self) -> None:
        """Raise RequestError for settings that contradict each other."""
        sources = [name for name in ("data", "drawn", "rollout") if getattr(self, name) is not None]
        if len(sources) != 1:
            given = " and ".join(sources) or "none"
            raise RequestError("a run trains on one thing", value=given, choices=("data", "drawn", "rollout"))
        self._agree_method()
        self._agree_rollout()
        if self.drawn and self.steps is None:
            raise RequestError("drawn batches have no epochs", value=f"epochs {self.epochs}", remedy="give steps")
        if self.method == "autoencoder":
            self._agree_autoencoder()
        if self.evaluation and self.data and not self.data.held_out:
            raise RequestError("evaluation needs rows held out", value="data.held_out 0", remedy="set data.held_out")
        if self.data and self.data.held_out and not self.evaluation:
            remedy = "leave it out, or give evaluation, which measures them"
            raise RequestError("data.held_out keeps rows that nothing reads", value=self.data.held_out, remedy=remedy)
        if self.lora and self.stored != "float32":
            remedy = "leave it out: adapters are always float32"
            raise RequestError(
                "stored is of whole networks, and lora trains adapters", value=self.stored, remedy=remedy
            )
        if self.previews and self.train_only:
            raise RequestError("previews need an engine", value="train_only", remedy="drop previews or train_only")
        if len(set(self.sinks)) < len(self.sinks):
            raise RequestError("sinks names one twice", value=list(self.sinks))

    def _agree_method(self) -> None:
        """Raise RequestError for a setting of a method that is not this run's."""
        for method in get_args(Method):
            given = getattr(self, method)
            usual = type(given)()
            names = [each.name for each in fields(given) if getattr(given, each.name) != getattr(usual, each.name)]
            if names and method != self.method:
                what = " and ".join(f"{method}.{name}" for name in names)
                values = [getattr(given, name) for name in names]
                remedy = f"leave {method} out, or set method to {method}"
                raise RequestError(f"method {self.method} does not read {what}", value=values, remedy=remedy)

    def _agree_rollout(self) -> None:
        if (self.method in ("grpo", "nft")) != (self.rollout is not None):
            remedy = "method grpo and nft learn from a rollout, the others from data or drawn"
            raise RequestError("method and rollout do not go together", value=self.method, remedy=remedy)
        if self.rollout is None and self.evaluation:
            for name in ("judges", "parameters"):
                if given := getattr(self.evaluation, name):
                    raise RequestError(f"evaluation.{name} are of rollouts", value=list(given))
        if bool(self.rewards) != (self.rollout is not None):
            raise RequestError("rollouts and rewards go together", value=f"rewards {dict(self.rewards)}")
        if self.rollout is None:
            return
        _require("batch_size", self.batch_size, self.rollout.samples % self.rows == 0,
                 f"a divisor of groups times group_size ({self.rollout.samples})")  # fmt: skip
        each = self.rollout.samples // self.rows
        _require("checkpoints.every", self.checkpoints.every, self.checkpoints.every % each == 0,
                 f"whole epochs, a multiple of {each}, for no rollout is kept")  # fmt: skip
        if self.steps is not None:
            _require("steps", self.steps, self.steps % each == 0, f"whole epochs, a multiple of {each}")
        for name, value in (("accumulate", self.accumulate != 1), ("compile", self.compile), ("lora.dropout",
                self.lora is not None and self.lora.dropout), ("train_only", self.train_only)):  # fmt: skip
            if value:
                raise RequestError(f"rollouts take no {name}", value=value, remedy="leave it out")
        if self.rollout.staleness and self.sleep not in (None, "nobody"):
            remedy = "set sleep to nobody, or rollout.staleness to 0"
            raise RequestError("nobody sleeps where sampling and training overlap", value=self.sleep, remedy=remedy)

    def _agree_autoencoder(self) -> None:
        for name in ("data", "lora", "previews", "train", "gradient_checkpointing"):
            if value := getattr(self, name):
                remedy = "leave it out" if name != "data" else "give drawn, a file that draws videos"
                raise RequestError(f"method autoencoder takes no {name}", value=value, remedy=remedy)


def read(path: str | Path, overrides: Iterable[str] = ()) -> Run:
    """A run from a .yaml, .json or .py file, with settings of it replaced by texts such as "optimiser.lr=3e-4".

    A Python file leaves a `Run` in the variable `run`. Raises RequestError naming the file and what is wrong in it.
    """
    path = Path(path)
    values = _from_python(path) if path.suffix == ".py" else _from_text(path)
    for override in overrides:
        values = change(values, override)
    return build(Run, values)


def text(run: Run) -> str:
    """All of a run's settings as YAML."""
    return str(yaml.safe_dump(plain(run), sort_keys=False, allow_unicode=True))


def _from_text(path: Path) -> Plain:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))  # which JSON is, too
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise RequestError(f"cannot read {path} ({reason})", remedy="give a run's YAML or Python file") from error
    except yaml.YAMLError as error:
        raise RequestError(f"{path} is not YAML ({error})", remedy="write lines such as batch_size: 8") from error
    if not isinstance(values, dict):
        raise RequestError(f"{path} holds no settings", value=values, remedy="write lines such as batch_size: 8")
    return values


def _from_python(path: Path) -> Plain:
    if not path.is_file():
        raise RequestError(f"cannot read {path} (no such file)", remedy="give a run's YAML or Python file")
    run = runpy.run_path(str(path)).get("run")
    if not isinstance(run, Run):
        raise RequestError(f"{path} leaves no run", value=type(run).__name__, remedy="write run = Run(...)")
    return plain(run)


def _require(name: str, value: object, fits: bool, what: str) -> None:
    if not fits:
        raise RequestError(f"{name} must be {what}", value=value)
