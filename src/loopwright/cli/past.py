"""What a saved result says of how it was made, for `generate --like`.

past = read("fox.mp4")
model = past.load()                       # refused if the model's card has changed since
past.check_media("image", request.image)  # refused if the pixels have
past.check_weights(model)                 # refused if its weights have, once they are read
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from ..errors import MediaError, RequestError, WeightsError
from ..request import Frames

if TYPE_CHECKING:
    from ..api import Model

Parameter = str | int | float | None
_NEEDED = ("model", "card", "device", "dtypes", "sampler", "request")
_APART = ("model", "task", "prompt", "image", "video", "image_digest", "video_digest")


@dataclass(frozen=True, slots=True)
class Past:
    """The record in `file`, its request taken apart. `media` are the sources, `digests` the pixels' hashes.

    `lora` names its adapters as `--lora` does, and `adapters` are their digests; `weights` are checksums by component.
    """

    file: str
    model: str
    revision: str | None
    card: str
    device: str
    dtypes: Mapping[str, str]
    sampler: str
    compile: bool
    lora: tuple[str, ...]
    adapters: tuple[str, ...]
    task: str
    prompt: str
    parameters: Mapping[str, Parameter]
    media: Mapping[str, str]
    digests: Mapping[str, str]
    weights: Mapping[str, str]

    def load(self, device: str | None = None, memory: str = "auto", lora: Sequence[str] | None = None) -> "Model":
        """The model as it ran, its weights not read yet, with these adapters if given, else with its own.

        Raises RequestError if its card or an adapter has changed since.
        """
        from .. import api

        try:
            model = api.load(
                self.model,
                revision=self.revision,
                device=device or self.device,
                dtype=self.dtypes,
                sampler=self.sampler,
                memory=memory,
                compile=self.compile,
                lora=lora or self.lora,
            )
        except WeightsError as error:
            flags = "--lora for an adapter, or --model-path" if self.lora else "--model-path"
            raise WeightsError(
                f"cannot load the model that made {self.file}: {error}",
                remedy=f"if it lies elsewhere now, add {flags}",
            ) from error
        if model.card.digest != self.card:
            raise RequestError(
                f"{self.model} is not the model that made {self.file}: its card is {model.card.digest}, not",
                value=self.card,
                remedy=f"to run it as it is now, add --model-path {self.model}",
            )
        if not lora:
            self._check_adapters(model)
        return model

    def _check_adapters(self, model: "Model") -> None:
        for use, digest in zip(model.instance.adapters, self.adapters, strict=True):
            if use.adapter.digest != digest:
                raise RequestError(
                    f"{use.adapter.file} is not the adapter that made {self.file}: it is {use.adapter.digest}, not",
                    value=digest,
                    remedy=f"bring it back, or add --lora {use.adapter.file} to use it as it is now",
                )

    def source(self, name: str) -> str:
        """The file of its image or video. Raises RequestError if the pixels came from none."""
        if not self.media.get(name):
            raise RequestError(f"the {name} that {self.file} was made from was no file", remedy=f"give --{name}")
        return self.media[name]

    def check_media(self, name: str, frames: Frames | None) -> None:
        """Raise RequestError if the image or video holds other pixels than it did."""
        if frames is None or frames.digest != self.digests[name]:
            source = self.media.get(name, "")
            raise RequestError(
                f"{source} no longer holds the {name} that {self.file} was made from",
                remedy=f"bring it back, or add --{name} {source} to use it as it is now",
            )

    def check_weights(self, model: "Model") -> None:
        """Raise RequestError if the model's weights, which have been read, are others than those that made the file."""
        for name, weights in model.instance.weights().items():
            if name in self.weights and weights.checksum != self.weights[name]:
                raise RequestError(
                    f"{self.file} was made with other weights of {name} than {self.model} has, with the checksum",
                    value=self.weights[name],
                    remedy=f"to run it with these, add --model-path {self.model}",
                )


def read(file: str) -> Past:
    """The record of a saved result. Raises MediaError for a file without one."""
    from .. import api

    record = api.read_record(file)
    missing = [name for name in _NEEDED if not record.get(name)]
    request, dtypes, revision = record.get("request"), record.get("dtypes"), record.get("revision")
    adapters = _adapters(record, file)
    if missing or not isinstance(request, Mapping) or not isinstance(dtypes, Mapping) or not request.get("task"):
        raise MediaError(
            f"{file} carries a record that lacks {', '.join(missing or ['its request'])}",
            remedy="give a file that loopwright generate wrote",
        )
    return Past(
        file=file,
        model=str(record["model"]),
        revision=None if revision is None else str(revision),
        card=str(record["card"]),
        device=str(record["device"]),
        dtypes=dtypes,
        sampler=str(record["sampler"]),
        compile=bool(record.get("compile")),
        lora=tuple(text for text, _ in adapters),
        adapters=tuple(digest for _, digest in adapters),
        task=str(request["task"]),
        prompt=str(request.get("prompt", "")),
        parameters={name: value for name, value in request.items() if name not in _APART},
        media={name: str(request[name]) for name in ("image", "video") if request.get(name)},
        digests={name: str(request[f"{name}_digest"]) for name in ("image", "video") if f"{name}_digest" in request},
        weights=_checksums(record),
    )


def _adapters(record: Mapping[str, object], file: str) -> list[tuple[str, str]]:
    """Each as `--lora` names it, and its digest. Records of models without adapters may not speak of them."""
    listed = cast(Sequence[Mapping[str, object]], record.get("lora", ()))
    try:
        return [(f"{one['component']}={one['file']}:{one['scale']}", str(one["digest"])) for one in listed]
    except (KeyError, TypeError) as error:
        remedy = "give a file that loopwright generate wrote"
        raise MediaError(
            f"{file} carries a record that does not say which adapters ran ({error!r})", remedy=remedy
        ) from error


def _checksums(record: Mapping[str, object]) -> dict[str, str]:
    """Of the components' weights, as far as the record speaks of them."""
    weights = cast(Mapping[str, Mapping[str, object]], record.get("weights", {}))
    return {name: str(one["checksum"]) for name, one in weights.items()}
