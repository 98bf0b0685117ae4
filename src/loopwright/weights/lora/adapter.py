"""An adapter as a file, in any of the three layouts; what is read does not depend on which.

    adapter = read("style.safetensors")
    save("style-kohya.safetensors", adapter.tensors, alpha=adapter.alphas, layout="kohya")

The product of a module's two matrices counts alpha / rank. diffusers' layout keeps alphas in the file's metadata, as
diffusers and peft write them; the others as scalars beside the matrices. Where a file says nothing, alpha is the rank.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...errors import WeightsError
from ...files import replacing
from .config import METADATA, alphas_of, config_for, config_of
from .keys import ALPHA, LAYOUTS, PREFIX, SUFFIX, name_of, parse

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, eq=False)
class Adapter:
    """The matrices of one module's adapter.

    Attributes:
        file: where it was read, for errors and records.
        tensors: `transformer.<name>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank], dtypes as stored.
        alphas: alpha by name, for every name.
    """

    file: str
    tensors: Tensors
    alphas: Mapping[str, float]

    @cached_property
    def pairs(self) -> Mapping[str, tuple[torch.Tensor, torch.Tensor]]:
        """A and B of each adapted module, by its name."""
        return {name: (self.tensors[key(name, "down")], self.tensors[key(name, "up")]) for name in self.alphas}

    @property
    def bytes(self) -> int:
        """Of all matrices, as stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def digest(self) -> str:
        """Hash of the content: the same in every layout, 16 hexadecimal digits."""
        total = hashlib.sha256(json.dumps(dict(sorted(self.alphas.items()))).encode())
        for key, tensor in sorted(self.tensors.items()):
            total.update(f"{key} {tensor.dtype} {list(tensor.shape)}".encode())
            total.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        return total.hexdigest()[:16]


def read(path: str | Path) -> Adapter:
    """An adapter from a safetensors file of any layout. Raises WeightsError naming the file and the key."""
    file = Path(path).expanduser()
    stored, metadata = _stored(file)
    layout, found = _parsed(stored, file)
    config = config_of(metadata, file) if layout == "diffusers" else {}
    ranks = _checked(found, file)
    alphas = alphas_of(config, ranks, file)
    for name, roles in found.items():
        if "alpha" in roles:
            alphas[name] = _number(roles["alpha"], name, file)
    names = sorted(found)
    tensors = {key(name, role): found[name][role] for name in names for role in ("down", "up")}
    return Adapter(str(file.resolve()), tensors, {name: alphas[name] for name in names})


def save(path: str | Path, tensors: Tensors, *, alpha: float | Mapping[str, float], layout: str = "diffusers") -> Path:
    """Write an adapter, atomically.

    Args:
        tensors: as `Adapter.tensors`: A and B of each module, in diffusers' names.
        alpha: of all modules, or by name.
        layout: "diffusers", "comfyui" or "kohya".

    diffusers reads all three, with two exceptions of its own: in kohya's layout it wants every attention and
    feed-forward layer of every block, and in ComfyUI's it takes alphas for layers of the blocks alone.

    Raises WeightsError for halves without their other, unknown keys, and modules that the layout has no name for.
    """
    path = Path(path)
    if layout not in LAYOUTS:
        raise WeightsError("unknown layout", value=layout, choices=LAYOUTS)
    _, found = _parsed(tensors, path, ("diffusers",))
    ranks = _checked(found, path)
    alphas = {name: float(alpha[name] if isinstance(alpha, Mapping) else alpha) for name in ranks}
    named = {name: _named(name, layout, path) for name in ranks}
    out = {named[name] + SUFFIX[layout][role]: found[name][role] for name in ranks for role in ("down", "up")}
    metadata = {"format": "pt"}
    if layout == "diffusers":
        config = {PREFIX[layout] + field: value for field, value in config_for(ranks, alphas).items()}
        metadata[METADATA] = json.dumps(config, sort_keys=True)
    else:
        always = layout == "kohya"
        out |= {named[n] + ALPHA: _scalar(alphas[n]) for n in ranks if always or alphas[n] != ranks[n]}
    try:
        with replacing(path) as temporary:
            save_file({key: tensor.detach().cpu().contiguous() for key, tensor in out.items()}, temporary, metadata)
    except OSError as error:
        raise WeightsError(f"cannot write {path} ({error})", remedy="choose another place") from error
    return path


def key(module: str, role: str) -> str:
    """The name of a module's matrix in `Adapter.tensors`: "down" is A, "up" is B."""
    return PREFIX["diffusers"] + module + SUFFIX["diffusers"][role]


def _stored(file: Path) -> tuple[dict[str, torch.Tensor], Mapping[str, str]]:
    if not file.is_file():
        raise WeightsError("no such adapter", value=str(file), remedy="give a .safetensors file")
    try:
        with safe_open(file, framework="pt") as opened:
            return {key: opened.get_tensor(key) for key in opened.keys()}, opened.metadata() or {}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{file} is not a safetensors file ({error})", remedy="download it again") from error


def _parsed(
    stored: Tensors, file: Path, layouts: tuple[str, ...] = LAYOUTS
) -> tuple[str, dict[str, dict[str, torch.Tensor]]]:
    """The layout, that of the first key, and the tensors by module and role."""
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in stored.items():
        parsed = parse(key)
        if parsed is None or parsed[0] not in layouts:
            choices = [f"{PREFIX[layout]}<module>{SUFFIX[layout]['down']}" for layout in layouts]
            raise WeightsError(f"{file}: not the key of an adapter", value=key, choices=choices)
        layouts, name, role = (parsed[0],), parsed[1], parsed[2]
        if role in found.setdefault(name, {}):
            raise WeightsError(f"{file}: the same matrix twice", value=key)
        found[name][role] = tensor
    if not found:
        raise WeightsError(f"{file} holds no adapter")
    return layouts[0], found


def _checked(found: Mapping[str, Mapping[str, torch.Tensor]], file: Path) -> dict[str, int]:
    """The rank of each module. Raises WeightsError for what is missing or does not fit."""
    ranks = {}
    for name, roles in found.items():
        missing = [role for role in ("down", "up") if role not in roles]
        if missing:
            half = SUFFIX["diffusers"][missing[0]].removesuffix(".weight")
            raise WeightsError(f"{file}: {name} lacks its {half.lstrip('.')}", remedy="write both halves of each pair")
        down, up = roles["down"], roles["up"]
        shapes = f"{list(down.shape)} and {list(up.shape)}"
        if down.ndim < 2 or up.ndim != down.ndim or down.shape[0] != up.shape[1]:
            raise WeightsError(f"{file}: the matrices of {name} are of no common rank", value=shapes)
        if not (down.is_floating_point() and up.is_floating_point()):
            raise WeightsError(f"{file}: the matrices of {name} are no floats", value=f"{down.dtype} and {up.dtype}")
        ranks[name] = down.shape[0]
    return ranks


def _number(alpha: torch.Tensor, name: str, file: Path) -> float:
    if alpha.numel() != 1 or not math.isfinite(alpha.item()):
        raise WeightsError(f"{file}: the alpha of {name} is no number", value=alpha.tolist())
    return float(alpha.item())


def _scalar(alpha: float) -> torch.Tensor:
    """In float32 as others write it, unless that would be another number."""
    single = torch.tensor(alpha, dtype=torch.float32)
    return single if single.item() == alpha else torch.tensor(alpha, dtype=torch.float64)


def _named(module: str, layout: str, file: Path) -> str:
    name = name_of(module, layout)
    if name is None:
        raise WeightsError(
            f"{file}: the {layout} layout has no name for this module", value=module, remedy='use layout="diffusers"'
        )
    return name
