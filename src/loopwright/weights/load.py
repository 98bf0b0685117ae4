"""Loads one component of a card: a module or a tokenizer, by its class, from its folder.

    module = load_component(component, folder, device="cuda")

diffusers and transformers build the module and put each tensor straight from its file on the device; this adds what
they leave out: damaged or missing files and missing weights are errors that name the file, and nothing is ever filled
with random numbers.
"""

import importlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from ..backends.precision import torch_dtype
from ..card import Component
from ..errors import CardError, WeightsError

LIBRARIES = ("diffusers", "transformers")
_OWN = "loopwright.models."  # classes of families that no library has


def load_component(component: Component, folder: Path, device: str) -> torch.nn.Module | object:
    """The component on `device`, in its dtype, frozen and in evaluation mode. Raises WeightsError or CardError.

    On the device "meta" it is an outline: modules of the right shapes without weights, for which none are read.
    """
    library, _, name = component.kind.rpartition(".")
    if library not in LIBRARIES and not library.startswith(_OWN):
        raise CardError("a component's class comes from an unknown library", value=component.kind, choices=LIBRARIES)
    cls = getattr(importlib.import_module(library), name, None)
    if not isinstance(cls, type) or not hasattr(cls, "from_pretrained"):
        raise CardError(f"{library} loads no class of that name", value=name, remedy="correct the card, or update it")
    path = folder / component.subfolder if component.subfolder else folder
    if not path.is_dir():
        raise WeightsError(f"{path} is missing", remedy="download the checkpoint again")
    if not component.dtype:
        return _host_side(cls, path)
    if not (path / "config.json").is_file():
        raise WeightsError(f"{path / 'config.json'} is missing", remedy="download the checkpoint again")
    if device == "meta":
        return _outline(cls, library, path, component.dtype)
    check_files(path)
    return _module(cls, library, path, component.dtype, device)


def _host_side(cls: type, path: Path) -> object:
    try:
        return cls.from_pretrained(path, local_files_only=True)  # type: ignore[attr-defined]
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be loaded ({_first_line(error)})", remedy="download it again") from error


def _module(cls: type, library: str, path: Path, dtype: str, device: str) -> torch.nn.Module:
    precision = {("dtype" if library == "transformers" else "torch_dtype"): torch_dtype(dtype)}

    def load(**placed: str) -> tuple[torch.nn.Module, Mapping[str, Iterable[str]]]:
        options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
        loaded: tuple[torch.nn.Module, Mapping[str, Iterable[str]]] = cls.from_pretrained(  # type: ignore[attr-defined]
            path, **options, **precision, **placed
        )
        return loaded

    try:
        try:
            module, info = load(device_map=device)
        except NotImplementedError:  # diffusers cannot move what the file lacks; without moving it tells the names
            module, info = load()
    except torch.OutOfMemoryError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise WeightsError(f"{path} cannot be loaded ({_first_line(error)})", remedy="download it again") from error
    if missing := sorted(info["missing_keys"]):
        raise WeightsError(
            f"{path} lacks {len(missing)} weights of {cls.__name__}",
            value=missing[0],
            remedy="download the checkpoint again",
        )
    assert isinstance(module, torch.nn.Module)
    return module.eval().requires_grad_(False)


def _outline(cls: type, library: str, path: Path, dtype: str) -> torch.nn.Module:
    with torch.device("meta"):
        if library == "transformers":
            module = cls(cls.config_class.from_pretrained(path))  # type: ignore[attr-defined]
        else:
            module = cls.from_config(cls.load_config(path))  # type: ignore[attr-defined]
    assert isinstance(module, torch.nn.Module)
    return module.to(torch_dtype(dtype)).eval().requires_grad_(False)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def check_files(path: Path) -> None:
    """Raise WeightsError if there is no safetensors file, a wrong length in one, or a shard missing."""
    for index in path.glob("*.safetensors.index.json"):
        try:
            shards = {path / name for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
            raise WeightsError(f"{index} is damaged ({error})", remedy="download it again") from error
        for shard in sorted(shards):
            if not shard.is_file():
                raise WeightsError(f"{shard} is missing", remedy="download the checkpoint again")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise WeightsError(f"{path} holds no safetensors weights", remedy="convert or download them as safetensors")
    for file in files:
        _check_file(file)


def _check_file(file: Path) -> None:
    length, header = _header(file)
    end = 8 + length + max((item["data_offsets"][1] for item in header.values()), default=0)
    size = file.stat().st_size
    if size != end:
        raise WeightsError(f"{file} is damaged: {size} bytes where its header says {end}", remedy="download it again")


def count_parameters(folder: Path) -> int:
    """Parameters stored in a folder's safetensors files, from their headers; 0 where there are none."""
    return sum(math.prod(item["shape"]) for file in folder.glob("*.safetensors") for item in _header(file)[1].values())


def stored_bytes(component: Component, folder: Path) -> int:
    """Bytes the component's weights will take in its dtype, from its files' headers. Raises WeightsError.

    What a library keeps in float32 whatever is asked for counts in the dtype asked for; it is little.
    """
    path, width = folder / component.subfolder, torch_dtype(component.dtype).itemsize
    items = [item for file in path.glob("*.safetensors") for item in _header(file)[1].values()]
    return sum(math.prod(item["shape"]) * width for item in items)


def _header(file: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    """The header's length, and shape and offsets of each tensor. Raises WeightsError."""
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > size - 8:
                raise WeightsError(f"{file} is truncated inside its header", remedy="download it again")
            header = json.loads(stream.read(length))
        tensors = {name: item for name, item in header.items() if name != "__metadata__"}
        for item in tensors.values():
            int(item["data_offsets"][1]), math.prod(item["shape"])
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        if isinstance(error, WeightsError):
            raise
        raise WeightsError(f"{file} is not a safetensors file ({error})", remedy="download it again") from error
    return length, tensors
