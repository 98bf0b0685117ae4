"""Deliveries as files: those of a checkpoint, and those of another process on this machine.

    read("runs/fox/model/transformer", component)      # a component's folder, its shards, one file, or an adapter

    with shared(full(transformer)) as path:            # in memory that both processes see
        tell(path)
    read(path, component)                              # there; the checksum is compared

What is read is a copy in memory of its own: nobody can change it after it was checked.
"""

import json
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...card import Component
from ...errors import WeightsError
from ...files import replacing
from .. import lora
from ..load import check_files, load_component
from ..lora.keys import parse
from .delivery import Delivery
from .packing import full

SHARED = Path("/dev/shm")
_METADATA = "loopwright_delivery"


def read(source: str | Path, component: Component) -> Delivery:
    """A delivery for the component, on the host. Raises WeightsError for what is missing, damaged or altered.

    A folder is a component's own, or one with the component's in it. What transformers saves it also reads, because it
    renames weights on the way.
    """
    path = Path(source).expanduser()
    if path.is_dir() and not list(path.glob("*.safetensors")) and (path / component.subfolder).is_dir():
        path = path / component.subfolder
    if path.is_dir() and component.kind.startswith("transformers."):
        module = load_component(replace(component, subfolder=""), path, "cpu")
        assert isinstance(module, torch.nn.Module)
        return replace(full(module), stored=True)
    tensors, head = _read(path)
    if head:
        delivery = Delivery.arrived(head, tensors)
        delivery.verify()
        return delivery
    if any(map(parse, tensors)):
        found = lora.read(path)
        return replace(Delivery.of("adapter", found.tensors, alphas=found.alphas), stored=True)
    return replace(Delivery.of("full", tensors, config=_config(path)), stored=True)


@contextmanager
def shared(delivery: Delivery, folder: Path = SHARED) -> Iterator[Path]:
    """The delivery as a file in memory, readable by this user alone, until the end of the block.

    Raises WeightsError where it cannot be written, as where there is no such folder or no room in it.
    """
    path = folder / f"loopwright-{uuid.uuid4().hex}.safetensors"
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in _apart(delivery.tensors).items()}
    try:
        if not folder.is_dir():
            raise OSError("no such folder")
        with replacing(path) as temporary:
            temporary.touch(0o600)
            save_file(tensors, temporary, {_METADATA: json.dumps(delivery.head)})
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"cannot share weights in {folder} ({error})", remedy="name another folder") from error
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def _apart(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tied weights as copies: a file holds each name by itself."""
    seen: set[int] = set()
    out = {}
    for name, tensor in tensors.items():
        address = tensor.untyped_storage().data_ptr()
        out[name] = tensor.clone() if address in seen else tensor
        seen.add(address)
    return out


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, object]]:
    """The tensors of a file or of all files of a folder, and what the file says of its delivery."""
    if path.is_dir():
        check_files(path)
    elif not path.is_file():
        raise WeightsError("no such weights", value=str(path), remedy="name a folder or a .safetensors file")
    tensors: dict[str, torch.Tensor] = {}
    head: dict[str, object] = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        try:
            with safe_open(file, framework="pt") as opened:
                tensors |= {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
                head = json.loads((opened.metadata() or {}).get(_METADATA, "{}"))
        except (OSError, SafetensorError, ValueError) as error:
            raise WeightsError(f"{file} is not a safetensors file ({error})", remedy="write it again") from error
    return tensors, head


def _config(path: Path) -> Mapping[str, object]:
    """What stands beside the files; nothing beside a single file."""
    file = path / "config.json"
    if not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WeightsError(f"{file} is damaged ({error})", remedy="write it again") from error
    return config if isinstance(config, dict) else {}
