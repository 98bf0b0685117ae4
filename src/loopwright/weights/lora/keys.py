"""Names of an adapter's tensors in the layouts that files have.

    name_of("blocks.0.attn1.to_q", "kohya")                        # "lora_unet_blocks_0_self_attn_q"
    parse("diffusion_model.blocks.0.self_attn.q.lora_A.weight")    # ("comfyui", "blocks.0.attn1.to_q", "down")

diffusers names the modules of its own classes; ComfyUI those of the original release, and kohya the same with
underscores. The original names are Wan's; they are here and not in the family because a file is read before anyone
knows whose it is.
"""

import re

LAYOUTS = ("diffusers", "comfyui", "kohya")
PREFIX = {"diffusers": "transformer.", "comfyui": "diffusion_model.", "kohya": "lora_unet_"}
SUFFIX = {
    "diffusers": {"down": ".lora_A.weight", "up": ".lora_B.weight"},
    "comfyui": {"down": ".lora_A.weight", "up": ".lora_B.weight"},
    "kohya": {"down": ".lora_down.weight", "up": ".lora_up.weight"},
}
ALPHA = ".alpha"
_ROLES = {suffix: role for layout in SUFFIX.values() for role, suffix in layout.items()} | {ALPHA: "alpha"}

_ATTENTION = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
_IN_BLOCK = {
    **{f"attn1.{ours}": f"self_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    **{f"attn2.{ours}": f"cross_attn.{theirs}" for ours, theirs in _ATTENTION.items()},
    "attn2.add_k_proj": "cross_attn.k_img",
    "attn2.add_v_proj": "cross_attn.v_img",
    "ffn.net.0.proj": "ffn.0",
    "ffn.net.2": "ffn.2",
}
_OUTSIDE = {
    "patch_embedding": "patch_embedding",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "proj_out": "head.head",
}
_ORIGINAL = {**_IN_BLOCK, **_OUTSIDE}
_OURS = {
    "comfyui": {theirs: ours for ours, theirs in _ORIGINAL.items()},
    "kohya": {theirs.replace(".", "_"): ours for ours, theirs in _ORIGINAL.items()},
}
_BLOCK = re.compile(r"(blocks[._]\d+[._])?(.+)")


def name_of(module: str, layout: str) -> str | None:
    """A module's name in a layout, with its prefix; None for a module that the layout has no name for."""
    if layout == "diffusers":
        return PREFIX[layout] + module
    block, rest = _split(module)
    if (rest in _IN_BLOCK) is not bool(block):
        return None
    original = block + _ORIGINAL[rest]
    return PREFIX[layout] + (original.replace(".", "_") if layout == "kohya" else original)


def parse(key: str) -> tuple[str, str, str] | None:
    """A key's layout, the module's name in diffusers, and "down", "up" or "alpha"; None for a key of another kind."""
    key = key.replace(".default.", ".")  # peft's name of the adapter, which some trainers leave in
    layout = next((name for name, prefix in PREFIX.items() if key.startswith(prefix)), None)
    suffix = next((suffix for suffix in _ROLES if key.endswith(suffix)), None)
    if layout is None or suffix is None:
        return None
    module = _ours(key.removeprefix(PREFIX[layout]).removesuffix(suffix), layout)
    return None if module is None else (layout, module, _ROLES[suffix])


def _ours(name: str, layout: str) -> str | None:
    if layout == "diffusers":
        return name
    block, rest = _split(name)
    ours = _OURS[layout].get(rest)
    return None if ours is None or (ours in _IN_BLOCK) is not bool(block) else block.replace("_", ".") + ours


def _split(name: str) -> tuple[str, str]:
    """ "blocks.0." and the rest; "" and the name for what is in no block."""
    match = _BLOCK.fullmatch(name)
    return ("", name) if match is None else (match[1] or "", match[2])
