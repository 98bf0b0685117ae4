"""What a Wan checkpoint is, read from the small JSON files of its Diffusers folder.

    card = describe(Path("Wan2.1-T2V-1.3B-Diffusers"))

Reads configurations only. What a checkpoint can do follows from them: channels and strides of the autoencoder,
whether the transformer takes an image, whether timesteps are per token, whether there are two experts.
"""

import json
from collections.abc import Mapping
from pathlib import Path

from ...card import Card, Claim, Component, Program, Recipe, Stage, Value, experts, whole
from ...errors import CardError, WeightsError

PIPELINES = ("WanPipeline", "WanImageToVideoPipeline", "WanVideoToVideoPipeline")
Config = Mapping[str, object]

_SCHEDULERS = {"UniPCMultistepScheduler": "unipc", "FlowMatchEulerDiscreteScheduler": "euler"}
_UNSUPPORTED = (
    "use_karras_sigmas",
    "use_exponential_sigmas",
    "use_beta_sigmas",
    "use_dynamic_shifting",
    "invert_sigmas",
    "shift_terminal",
    "stochastic_sampling",
    "rescale_betas_zero_snr",
    "thresholding",
)
# What UniPC's table assumes of the rest of its configuration.
UNIPC = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "predict_x0": True,
    "solver_type": "bh2",
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "disable_corrector": [],
}
_UNIPC_DEFAULTS = {"prediction_type": "epsilon", "use_flow_sigmas": False}


SETTINGS = (
    "channels",
    "spatial_stride",
    "frame_stride",
    "size_multiple",
    "train_steps",
    "solver_order",
    "experts",
    "boundary",
    "per_token",
    "guidance",
)
GUIDANCE = ("serial", "batched")


def check_settings(card: Card) -> None:
    """Raise CardError for a setting that is missing or that no Wan model can have. Before weights are read."""
    settings, positive = card.settings, ("channels", "spatial_stride", "frame_stride", "size_multiple", "train_steps")
    if missing := [name for name in SETTINGS if name not in settings]:
        raise CardError(f"card {card.name} lacks settings of a Wan model", value=missing[0], choices=SETTINGS)
    for name in (*positive, "solver_order"):
        if whole(settings, name) < 1:
            raise CardError(f"card {card.name}: setting {name} must be at least 1", value=settings[name])
    if not isinstance(settings["per_token"], bool):
        raise CardError(f"card {card.name}: setting per_token must be true or false", value=settings["per_token"])
    if settings["guidance"] not in GUIDANCE:
        raise CardError(f"card {card.name}: unknown guidance", value=settings["guidance"], choices=GUIDANCE)
    boundary, names = settings["boundary"], experts(card)
    if boundary is not None and not (isinstance(boundary, float) and 0 < boundary < 1):
        raise CardError(f"card {card.name}: setting boundary must lie between 0 and 1", value=boundary)
    if len(names) != (1 if boundary is None else 2):
        raise CardError(f"card {card.name}: two experts and a boundary come together", value=names)


def describe(folder: Path, name: str = "") -> Card:
    """The card of a Diffusers folder. Raises WeightsError or CardError naming the file and what is wrong with it."""
    index = read_json(folder / "model_index.json")
    parts = ["transformer", "transformer_2", "vae", "scheduler", "text_encoder", "image_encoder"]
    configs = {
        part: read_json(folder / part / ("scheduler_config.json" if part == "scheduler" else "config.json"))
        for part in parts
        if _present(index, part)
    }
    return build(name or folder.resolve().name, index, configs, home=str(folder))


def read_json(path: Path) -> Config:
    """A JSON object. Raises WeightsError naming the file."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise WeightsError(f"{path} is missing", remedy="a Diffusers folder has it") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise WeightsError(f"{path} is not valid JSON ({error})", remedy="download it again") from error
    if not isinstance(data, dict):
        raise WeightsError(f"{path} does not hold a JSON object", value=type(data).__name__)
    return data


def build(
    name: str,
    index: Config,
    configs: Mapping[str, Config],
    *,
    home: str = "",
    source: str = ".",
    parameters: Mapping[str, int] | None = None,
) -> Card:
    """A card from a pipeline's index and its components' configurations."""
    for part in ("transformer", "vae", "scheduler", "text_encoder", "tokenizer"):
        if not _present(index, part):
            raise CardError(f"{name}: model_index.json names no {part}", remedy="use a complete Diffusers checkpoint")
    settings = _settings(name, index, configs)
    solver = _solver(name, configs["scheduler"])
    tasks = _tasks(settings)
    components = _components(index, source, parameters or {})
    return Card(
        name=name,
        family="wan",
        components=components,
        loops=_loops(settings, solver, tasks),
        programs={task: _program(task, settings) for task in tasks},
        defaults={task: _defaults(settings, configs["scheduler"], solver) for task in tasks},
        settings=settings,
        recipe=Recipe(assumes=_assumes(), precision=_precisions(configs["transformer"])),
        claims=tuple(claim for task in tasks for claim in _claims(task, solver)),
        home=home,
    )


def _present(index: Config, part: str) -> bool:
    entry = index.get(part)
    return isinstance(entry, list) and len(entry) == 2 and entry[1] is not None


def _int(config: Config, key: str, default: int) -> int:
    value = config.get(key, default)
    if not isinstance(value, int):
        raise CardError(f"configuration value {key} must be a whole number", value=value)
    return value


def _settings(name: str, index: Config, configs: Mapping[str, Config]) -> dict[str, Value]:
    transformer, vae, scheduler = configs["transformer"], configs["vae"], configs["scheduler"]
    spatial = _int(vae, "scale_factor_spatial", 8)
    temporal = _int(vae, "scale_factor_temporal", 4)
    patch = transformer.get("patch_size", [1, 2, 2])
    if not isinstance(patch, list) or len(patch) != 3 or not all(isinstance(n, int) for n in patch):
        raise CardError(f"{name}: transformer patch_size must be three whole numbers", value=patch)
    boundary = index.get("boundary_ratio")
    two = "transformer_2" in configs
    if two != (boundary is not None):
        raise CardError(
            f"{name}: two experts and boundary_ratio come together",
            value=boundary,
            remedy="give both transformer_2 and boundary_ratio, or neither",
        )
    per_token = bool(index.get("expand_timesteps", False))
    channels = _int(vae, "z_dim", 16)
    takes = _int(transformer, "in_channels", 16)
    if takes not in (channels, 2 * channels + temporal):
        raise CardError(
            f"{name}: transformer in_channels do not fit the autoencoder",
            value=takes,
            choices=(f"{channels} (text)", f"{2 * channels + temporal} (image)"),
        )
    return {
        "channels": channels,
        "spatial_stride": spatial,
        "frame_stride": temporal,
        # the reference's pipelines ask for multiples of 16 and then round to the patch
        "size_multiple": max(16, spatial * int(patch[1])),
        "train_steps": _int(scheduler, "num_train_timesteps", 1000),
        "solver_order": _int(scheduler, "solver_order", 2),
        "experts": ("transformer", "transformer_2") if two else ("transformer",),
        "boundary": float(boundary) if isinstance(boundary, (int, float)) else None,
        "per_token": per_token,
        "image_channels": takes != channels,
        "image_encoder": transformer.get("image_dim") is not None,
        "guidance": "serial",
    }


def _solver(name: str, scheduler: Config) -> str:
    kind = scheduler.get("_class_name")
    if kind not in _SCHEDULERS:
        raise CardError(f"{name}: unknown scheduler", value=kind, choices=sorted(_SCHEDULERS))
    for option in _UNSUPPORTED:
        if scheduler.get(option):
            raise CardError(
                f"{name}: scheduler option {option} is not supported",
                value=scheduler[option],
                remedy="switch it off in scheduler_config.json",
            )
    if kind == "UniPCMultistepScheduler":
        for option, wanted in UNIPC.items():
            if scheduler.get(option, _UNIPC_DEFAULTS.get(option, wanted)) != wanted:
                raise CardError(
                    f"{name}: scheduler option {option} is not supported",
                    value=scheduler.get(option),
                    choices=(wanted,),
                )
    return _SCHEDULERS[str(kind)]


def _precisions(transformer: Config) -> tuple[str, ...]:
    """8 bits for the feed-forward layers where they are wide enough to gain by it and to bear it."""
    width = _int(transformer, "num_attention_heads", 40) * _int(transformer, "attention_head_dim", 128)
    fits = width >= 1024 and width % 16 == 0 and _int(transformer, "ffn_dim", 13824) % 16 == 0
    return ("float32", "bfloat16", *(("float8",) if fits else ()))


def _assumes() -> tuple[str, ...]:
    """Plain flow-matching weights integrate under any solver of the flow."""
    return (
        "wan.text/v1",
        "wan.image/v1",
        "wan_vae.encode/v1",
        "wan_vae.condition/v1",
        "wan_vae.decode/v1",
        "wan.pin_first_frame/v1",
        "flow_euler.cfg/v1",
        "flow_unipc.cfg/v1",
        "flow_sde.cfg/v1",
        "dance_sde.cfg/v1",
        "cps.cfg/v1",
    )


def _loops(settings: Mapping[str, Value], solver: str, tasks: tuple[str, ...]) -> dict[str, str]:
    loops = {"text": "wan.text/v1", "denoise": f"flow_{solver}.cfg/v1", "decode": "wan_vae.decode/v1"}
    if "video_to_video" in tasks:
        loops["encode"] = "wan_vae.encode/v1"
    if "image_to_video" in tasks:
        loops["condition"] = "wan_vae.encode/v1" if settings["per_token"] else "wan_vae.condition/v1"
        loops |= {"pin": "wan.pin_first_frame/v1"} if settings["per_token"] else {}
        loops |= {"image": "wan.image/v1"} if settings["image_encoder"] else {}
    return loops


def _tasks(settings: Mapping[str, Value]) -> tuple[str, ...]:
    if settings["image_channels"]:
        return ("image_to_video",)
    if settings["per_token"]:
        return ("text_to_video", "image_to_video")
    # the reference's video-to-video knows one expert only
    return ("text_to_video", "video_to_video") if settings["boundary"] is None else ("text_to_video",)


def _components(index: Config, source: str, parameters: Mapping[str, int]) -> dict[str, Component]:
    weighted = ("text_encoder", "transformer", "transformer_2", "vae", "image_encoder")
    components = {}
    for part in ("tokenizer", "image_processor", *weighted):
        if not _present(index, part):
            continue
        entry = index[part]
        assert isinstance(entry, list)  # _present has looked
        kind = "transformers.AutoTokenizer" if part == "tokenizer" else f"{entry[0]}.{entry[1]}"
        dtype = "auto" if part.startswith("transformer") else "float32" if part in weighted else ""
        components[part] = Component(kind, source, "", part, dtype, parameters.get(part, 0))
    return components


def _program(task: str, settings: Mapping[str, Value]) -> Program:
    experts = settings["experts"]
    assert isinstance(experts, tuple)
    lent = ["prompt_embeds", "negative_embeds"]
    given = [Stage("text", "text", (), tuple(lent), ("tokenizer", "text_encoder"))]
    after: list[Stage] = []
    if task == "video_to_video":
        given.append(Stage("encode", "encode", (), ("source",), ("vae",)))
        lent.append("source")
    elif task == "image_to_video":
        slot = "first_frame" if settings["per_token"] else "condition"
        if settings["image_encoder"]:
            given.append(Stage("image", "image", (), ("image_embeds",), ("image_processor", "image_encoder")))
            lent.append("image_embeds")
        given.append(Stage("condition", "condition", (), (slot,), ("vae",)))
        lent.append(slot)
        if settings["per_token"]:
            after.append(Stage("pin", "pin", ("latents", "first_frame"), ("latents",)))
    denoise = Stage("denoise", "denoise", tuple(lent), ("latents",), tuple(str(e) for e in experts))
    decode = Stage("decode", "decode", ("latents",), ("frames",), ("vae",))
    inputs = {"video_to_video": ("video",), "image_to_video": ("image",)}.get(task, ())
    return Program((*given, denoise, *after, decode), inputs, {"video": "frames", "latents": "latents"})


def _defaults(settings: Mapping[str, Value], scheduler: Config, solver: str) -> dict[str, Value]:
    """The defaults of the reference's pipelines, and the checkpoint's own shift."""
    shift = scheduler.get("flow_shift" if solver == "unipc" else "shift", 1.0)
    if isinstance(shift, bool) or not isinstance(shift, (int, float)):
        raise CardError("the scheduler's shift must be a number", value=shift)
    return {
        "negative_prompt": "",
        "height": 480,
        "width": 832,
        "num_frames": 81,
        "num_inference_steps": 50,
        "guidance_scale": 5.0,
        "guidance_scale_2": None,
        "flow_shift": float(shift),
        "strength": 0.8,
        "max_sequence_length": 512,
        "fps": 16,
    }


def _claims(task: str, solver: str) -> tuple[Claim, ...]:
    """What `verify` holds a Wan card to. Bounds in bfloat16 are what was measured on one H200, see docs/parity.md."""
    return (
        Claim("component", "diffusers", task),
        Claim("trajectory", "diffusers", task, bound=0.0 if solver == "euler" else 1e-5),
        Claim("output", "diffusers", task, metric="psnr", bound=50.0),
        Claim("batch", "self", task),
        Claim("component", "diffusers", task, precision="bfloat16"),
        Claim("trajectory", "diffusers", task, bound=3e-2, precision="bfloat16"),
        Claim("batch", "self", task, precision="bfloat16"),
    )
