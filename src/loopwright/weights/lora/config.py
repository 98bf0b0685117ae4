"""What stands beside an adapter's matrices in diffusers' layout: peft's configuration, as JSON in the file's metadata.

    config_of({"lora_adapter_metadata": '{"transformer.r": 4, "transformer.lora_alpha": 8}'}, file)

diffusers makes a `peft.LoraConfig` of it, so a field that changes what the matrices mean cannot be passed over.
"""

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from ...errors import WeightsError
from .keys import PREFIX

METADATA = "lora_adapter_metadata"
# Fields that do not change what the matrices compute: what is adapted shows in the keys, the rest is of training.
_NO_MATTER = (
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "inference_mode", "lora_dropout"),
    *("peft_type", "peft_version", "task_type", "base_model_name_or_path", "revision", "auto_mapping"),
    *("megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
)
_READ = ("r", "lora_alpha", "rank_pattern", "alpha_pattern")
_PLAIN = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
_EMPTY: tuple[object, ...] = (None, False, [], {})


def config_of(metadata: Mapping[str, str], file: Path) -> dict[str, object]:
    """The fields in a file's metadata, empty if it has none. Raises WeightsError for what is not plain LoRA."""
    text = metadata.get(METADATA)
    if text is None:
        return {}
    try:
        config = {key.removeprefix(PREFIX["diffusers"]): value for key, value in json.loads(text).items()}
    except (ValueError, AttributeError) as error:
        raise WeightsError(f"{file}: its {METADATA} is no JSON ({error})", remedy="write the file again") from error
    for field, value in config.items():
        plain = value in _EMPTY or value in _PLAIN.get(field, ())
        if not plain and field not in (*_NO_MATTER, *_READ):
            raise WeightsError(f"{file}: only plain LoRA can be read, and this has {field}", value=value)
    return config


def alphas_of(config: Mapping[str, object], ranks: Mapping[str, int], file: Path) -> dict[str, float]:
    """Alpha by module; its rank where the configuration says nothing. Raises WeightsError where it says other ranks."""
    for name, rank in ranks.items():
        if (said := _said(config, name, "r", "rank_pattern", rank)) != rank:
            raise WeightsError(f"{file}: {name} has rank {rank}, and its {METADATA} says", value=said)
    alphas = {name: _said(config, name, "lora_alpha", "alpha_pattern", rank) for name, rank in ranks.items()}
    for name, alpha in alphas.items():
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise WeightsError(f"{file}: the alpha of {name} is no number", value=alpha)
    return {name: float(alpha) for name, alpha in alphas.items()}  # type: ignore[arg-type]


def config_for(ranks: Mapping[str, int], alphas: Mapping[str, float]) -> dict[str, object]:
    """peft's fields: the usual rank and alpha, and the exceptions by name."""
    rank, alpha = Counter(ranks.values()).most_common(1)[0][0], Counter(alphas.values()).most_common(1)[0][0]
    return {
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {f"^{name}": value for name, value in ranks.items() if value != rank},
        "alpha_pattern": {f"^{name}": value for name, value in alphas.items() if value != alpha},
        "target_modules": sorted(ranks),
    }


def _said(config: Mapping[str, object], name: str, usual: str, exceptions: str, otherwise: object) -> object:
    """What the configuration says of a module, by peft's rule: a pattern matches the end of a name."""
    patterns = config.get(exceptions) or {}
    assert isinstance(patterns, Mapping)
    for pattern, value in patterns.items():
        if re.match(rf"(.*\.)?({pattern})$", name):
            return value
    return config.get(usual, otherwise)
