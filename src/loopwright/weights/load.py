"""Loads one component of a card: a module or a tokenizer, by its class, from its folder.

    module = load_component(component, folder, device="cuda")

diffusers and transformers build the module and place its weights; this adds what they leave out: damaged or missing
files and missing weights are errors that name the file, and nothing is ever filled with random numbers.
"""

import importlib
import json
import struct
from pathlib import Path

import torch

from ..card import Component
from ..errors import CardError, WeightsError

DTYPES = ("float32", "bfloat16", "float16")
LIBRARIES = ("diffusers", "transformers")


def load_component(component: Component, folder: Path, device: str) -> torch.nn.Module | object:
    """The component on `device`, in its dtype, frozen and in evaluation mode. Raises WeightsError or CardError."""
    library, _, name = component.kind.rpartition(".")
    if library not in LIBRARIES:
        raise CardError("a component's class comes from an unknown library", value=component.kind, choices=LIBRARIES)
    cls = getattr(importlib.import_module(library), name, None)
    if cls is None:
        raise CardError(f"{library} has no class of that name", value=name, remedy="correct the card, or update it")
    path = folder / component.subfolder if component.subfolder else folder
    if not path.is_dir():
        raise WeightsError(f"{path} is missing", remedy="download the checkpoint again")
    if not component.dtype:
        return _host_side(cls, path)
    check_files(path)
    return _module(cls, library, path, component.dtype).to(device)


def _host_side(cls: type, path: Path) -> object:
    try:
        return cls.from_pretrained(path, local_files_only=True)  # type: ignore[attr-defined]
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path} cannot be loaded ({_first_line(error)})", remedy="download it again") from error


def _module(cls: type, library: str, path: Path, dtype: str) -> torch.nn.Module:
    precision = {("torch_dtype" if library == "diffusers" else "dtype"): getattr(torch, dtype)}
    try:
        module, info = cls.from_pretrained(  # type: ignore[attr-defined]
            path, local_files_only=True, use_safetensors=True, output_loading_info=True, **precision
        )
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
    size = file.stat().st_size
    try:
        with file.open("rb") as stream:
            length = struct.unpack("<Q", stream.read(8))[0]
            if length > size - 8:
                raise WeightsError(f"{file} is truncated inside its header", remedy="download it again")
            header = json.loads(stream.read(length))
        ends = [item["data_offsets"][1] for name, item in header.items() if name != "__metadata__"]
        end = 8 + length + max(ends, default=0)
    except (
        struct.error,
        json.JSONDecodeError,
        UnicodeDecodeError,
        KeyError,
        TypeError,
        AttributeError,
        IndexError,
    ) as error:
        raise WeightsError(f"{file} is not a safetensors file ({error})", remedy="download it again") from error
    if size != end:
        raise WeightsError(f"{file} is damaged: {size} bytes where its header says {end}", remedy="download it again")


def count_parameters(folder: Path) -> int:
    """Parameters stored in a folder's safetensors files, from their headers; 0 where there are none."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            header = json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
        for name, item in header.items():
            if name != "__metadata__":
                size = 1
                for n in item["shape"]:
                    size *= n
                total += size
    return total
