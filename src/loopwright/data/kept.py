"""Tensors that take long to make, in one file of a cache's folder: made again only when what they depend on changes.

    tensors = kept(Path("cache"), "latents", {"autoencoder": digest, "count": "300000"}, make)

For what a run needs whole and is too much for a file each. The file says what it was made of and is read only where
that is what is asked for. Deliberately absent: more than one version of a name, and checksums, which at gigabytes cost
more than they find; a file is whole because it is renamed into place.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from ..files import replacing

Tensors = dict[str, torch.Tensor]
_ABOUT = "about"


def kept(folder: Path, name: str, about: Mapping[str, str], make: Callable[[], Tensors]) -> Tensors:
    """The tensors on the host: of the file `name`.safetensors if it was made of `about`, else made and written."""
    path = folder / f"{name}.safetensors"
    said = json.dumps(dict(about), sort_keys=True)
    if _said(path) == said:
        stored: Tensors = load_file(path)
        return stored
    made = {key: tensor.cpu().contiguous() for key, tensor in make().items()}
    with replacing(path) as temporary:
        save_file(made, temporary, metadata={_ABOUT: said})
    return made


def _said(path: Path) -> str | None:
    """What a file says it was made of; None where there is none, or no such file of ours."""
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
    except (FileNotFoundError, SafetensorError):
        return None
    found: str | None = metadata.get(_ABOUT)
    return found
