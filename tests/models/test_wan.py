"""Wan on our loops is Wan in diffusers: the same latents, frames, embeddings and number of network calls."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanPipeline
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from PIL import Image

import tiny
from loopwright import catalog
from loopwright.api import Model
from loopwright.card import derive
from loopwright.engine.instance import Instance, Store
from loopwright.engine.job import Job
from loopwright.errors import CardError, WeightsError
from loopwright.models import wan
from loopwright.request import Request
from support import IMAGE, KINDS, TASKS, VIDEO, finished, media_for, relative, run

PROMPT = "a fox  &amp; a dog"
SCHEDULERS = ("euler", "unipc")
GUIDANCE = (1.0, 5.0)
LONG = media_for("t2v") | {"max_sequence_length": 512}


class Reference:
    """diffusers' pipelines on the tiny checkpoints; each answer is computed once."""

    def __init__(self, checkpoint: Callable) -> None:
        self._checkpoint = checkpoint
        self._pipelines: dict[tuple[str, str], object] = {}
        self._answers: dict[object, object] = {}

    def pipeline(self, kind: str, scheduler: str = "euler"):
        if (kind, scheduler) not in self._pipelines:
            folder = self._checkpoint(kind, scheduler)
            if kind == "ti2v_text":
                made = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32)
                made.set_progress_bar_config(disable=True)
            else:
                made = tiny.reference(folder, kind)
            self._pipelines[kind, scheduler] = made
        return self._pipelines[kind, scheduler]

    def decoded(self, kind: str, latents: torch.Tensor) -> np.ndarray:
        """Latents through diffusers' autoencoder and postprocessing, uint8 [T, H, W, 3]."""
        pipeline = self.pipeline(kind)
        vae = pipeline.vae
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
        with torch.no_grad():
            video = vae.decode(latents / (1.0 / std) + mean, return_dict=False)[0]
        return (pipeline.video_processor.postprocess_video(video, output_type="np")[0] * 255).round().astype(np.uint8)

    def __call__(self, kind: str, scheduler: str, output: str, **changes: object):
        """ "latent" as a tensor, "np" as uint8 frames [T, H, W, 3]."""
        key = (kind, scheduler, output, tuple(sorted(changes.items())))
        if key not in self._answers:
            given = {**media_for(kind), "negative_prompt": "bad", **changes}
            seed = given.pop("seed")
            del given["task"]
            if "image" in given:
                given["image"] = Image.fromarray(IMAGE)
            if "video" in given:
                given["video"] = [Image.fromarray(frame) for frame in VIDEO]
                given.pop("num_frames", None)
            out = self.pipeline(kind, scheduler)(
                prompt=PROMPT, generator=torch.Generator("cpu").manual_seed(seed), output_type=output, **given
            ).frames
            self._answers[key] = out if output == "latent" else (out[0] * 255).round().astype(np.uint8)
        return self._answers[key]


@pytest.fixture(scope="module")
def reference(checkpoint: Callable) -> Reference:
    return Reference(checkpoint)


def request_of(model: Model, kind: str, **changes: object) -> Request:
    return model.request(PROMPT, **(media_for(kind) | {"negative_prompt": "bad"} | changes))


def scales(kind: str, guidance: float) -> dict[str, float]:
    return {"guidance_scale": guidance} | ({"guidance_scale_2": 3.0} if "a14b" in kind else {})


@contextmanager
def calls(model: Instance, name: str = "transformer") -> Iterator[list[Mapping[str, torch.Tensor]]]:
    """The arguments of each forward of a component."""
    seen: list[Mapping[str, torch.Tensor]] = []
    hook = model.part(name).register_forward_pre_hook(lambda m, args, kwargs: seen.append(kwargs), with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def text_slots(model: Instance, request: Request) -> dict[str, torch.Tensor]:
    """What the text stage writes."""
    job = Job(model, request)
    while job.stage == 0:
        job.step()
    assert job.error is None
    return dict(job.slots)


def from_latents(model: Instance, request: Request, latents: torch.Tensor) -> np.ndarray:
    """Latents through our decode stage."""
    job = Job(model, request)
    job.stage = [bound.stage.name for bound in job.stages].index("decode")
    job.slots = {"latents": latents}
    return finished(job)["frames"][0].numpy()


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_euler_latents_are_the_references_bit_for_bit(kind, guidance, model, reference: Reference) -> None:
    given = scales(kind, guidance)
    ours = run(model(kind).instance, request_of(model(kind), kind, output="latents", **given))
    assert torch.equal(ours["latents"], reference(kind, "euler", "latent", **given))


@pytest.mark.parametrize("guidance", GUIDANCE)
@pytest.mark.parametrize("kind", KINDS)
def test_unipc_latents_are_the_references_within_rounding(kind, guidance, model, reference: Reference) -> None:
    given = scales(kind, guidance)
    ours = run(model(kind, "unipc").instance, request_of(model(kind, "unipc"), kind, output="latents", **given))
    assert relative(ours["latents"], reference(kind, "unipc", "latent", **given)) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_sampler_by_name_is_the_references_scheduler_of_that_name(kind, model, checkpoint, reference) -> None:
    """A checkpoint with UniPC, sampled with Euler at its own shift, is the same as diffusers with Euler there."""
    import loopwright

    switched = loopwright.load(checkpoint(kind, "unipc"), device="cpu", sampler="euler")
    ours = run(switched.instance, request_of(switched, kind, output="latents", guidance_scale=1.0, flow_shift=5.0))
    assert torch.equal(ours["latents"], reference(kind, "euler", "latent", **({"guidance_scale": 1.0})))


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_the_references_given_its_latents(kind, model, reference: Reference) -> None:
    given = scales(kind, 5.0)
    latents = reference(kind, "unipc", "latent", **given)
    frames = from_latents(model(kind).instance, request_of(model(kind), kind), latents)
    assert frames.shape == (9, 32, 32, 3) and frames.std() > 5
    np.testing.assert_array_equal(frames, reference.decoded(kind, latents))


@pytest.mark.parametrize("kind", KINDS)
def test_frames_are_the_references_from_prompt_to_pixel(kind, model, reference: Reference) -> None:
    given = scales(kind, 5.0)
    ours = run(model(kind).instance, request_of(model(kind), kind, **given))
    np.testing.assert_array_equal(ours["frames"][0].numpy(), reference(kind, "euler", "np", **given))


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("t2v", {"height": 16, "width": 48, "num_frames": 1}),
        ("t2v", {"height": 48, "width": 16, "num_frames": 13, "num_inference_steps": 1}),
        ("t2v", {"num_inference_steps": 2, "seed": 2**40}),
        ("i2v", {"height": 48, "width": 16, "num_frames": 5}),
        ("ti2v", {"height": 64, "width": 32, "num_frames": 5}),
        ("ti2v", {"num_frames": 1}),
        ("v2v", {"height": 16, "width": 64, "strength": 1.0}),
        ("v2v", {"num_inference_steps": 5, "strength": 0.39}),
    ],
)
def test_other_sizes_lengths_and_seeds_are_the_references_too(kind, changes, model, reference: Reference) -> None:
    ours = run(model(kind).instance, request_of(model(kind), kind, **changes))
    assert torch.equal(ours["latents"], reference(kind, "euler", "latent", **changes))
    np.testing.assert_array_equal(ours["frames"][0].numpy(), reference(kind, "euler", "np", **changes))


def test_different_seeds_prompts_and_images_give_different_latents(model) -> None:
    """The equalities above mean something: what should change the answer does."""
    loaded = model("i2v")
    first = run(loaded.instance, request_of(loaded, "i2v", output="latents"))["latents"]
    for changes in ({"seed": 4}, {"image": IMAGE[::-1].copy()}, {"negative_prompt": "worse"}, {"flow_shift": 4.0},
                    {"guidance_scale": 4.0}):  # fmt: skip
        other = run(loaded.instance, request_of(loaded, "i2v", output="latents", **changes))["latents"]
        assert relative(other, first) > 1e-4, changes
    prompted = loaded.request("a different prompt", **media_for("i2v"), output="latents")
    assert relative(run(loaded.instance, prompted)["latents"], first) > 1e-4


@pytest.mark.parametrize(("guidance", "forwards"), [(0.0, 1), (1.0, 1), (1.01, 2), (5.0, 2)])
@pytest.mark.parametrize("kind", ["t2v", "i2v", "ti2v", "v2v"])
def test_a_step_costs_one_forward_without_guidance_and_two_with_it(kind, guidance, forwards, model) -> None:
    loaded = model(kind)
    request = request_of(loaded, kind, output="latents", guidance_scale=guidance)
    steps = int(request.num_inference_steps * request.strength) if kind == "v2v" else request.num_inference_steps
    with calls(loaded.instance) as seen, calls(loaded.instance, "text_encoder") as read:
        run(loaded.instance, request)
    assert len(seen) == forwards * steps
    assert all(len(kwargs["hidden_states"]) == 1 for kwargs in seen)
    assert len(read) == forwards  # no negative prompt is encoded where it is not used


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_each_expert_runs_its_own_steps_with_its_own_guidance(scheduler, model) -> None:
    loaded = model("a14b", scheduler)
    request = request_of(
        loaded, "a14b", output="latents", num_inference_steps=8, guidance_scale=5.0, guidance_scale_2=1.0
    )
    with calls(loaded.instance) as high, calls(loaded.instance, "transformer_2") as low:
        run(loaded.instance, request)
    above = [float(kwargs["timestep"]) for kwargs in high]
    below = [float(kwargs["timestep"]) for kwargs in low]
    assert above and below
    assert min(above) >= 900 > max(below)
    assert len(above) == 2 * len(set(above)) and len(below) == len(set(below))
    assert len(set(above)) + len(below) == 8


def test_a_second_scale_of_one_is_the_reference_within_rounding(model, reference: Reference) -> None:
    """diffusers runs both branches and combines them to the conditional one."""
    given = {"guidance_scale": 5.0, "guidance_scale_2": 1.0}
    ours = run(model("a14b").instance, request_of(model("a14b"), "a14b", output="latents", **given))
    assert relative(ours["latents"], reference("a14b", "euler", "latent", **given)) < 1e-5


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("nudge", [-1e-3, -1e-7, 0.0, 1e-7, 1e-3])
@pytest.mark.parametrize("step", range(1, 8))
def test_experts_change_over_at_the_boundary_as_in_the_reference(scheduler, nudge, step, model) -> None:
    if scheduler == "euler":
        theirs = FlowMatchEulerDiscreteScheduler(shift=5.0)
    else:
        theirs = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    theirs.set_timesteps(8)
    boundary = float(theirs.timesteps[step]) / 1000 + nudge
    loaded = model("a14b", scheduler)
    card = derive(loaded.card, settings={"boundary": boundary})
    own = Instance(card, wan.loops(card), Store(), device="cpu", locate=lambda c, p: None)
    request = request_of(loaded, "a14b", num_inference_steps=8)
    state = own.loops[card.loops["denoise"]].init(request, {}, own)
    chosen = ["transformer" if t >= boundary * 1000 else "transformer_2" for t in theirs.timesteps]
    assert list(state.experts) == chosen


@pytest.mark.parametrize("kind", ["ti2v", "ti2v_text"])
def test_timesteps_are_per_token_and_zero_on_a_given_first_frame(kind, model) -> None:
    loaded = model(kind)
    request = request_of(loaded, kind, output="latents", guidance_scale=1.0)
    with calls(loaded.instance) as seen:
        run(loaded.instance, request)
    frames, per_frame = 3, (32 // 16 // 2) ** 2
    sigmas = FlowMatchEulerDiscreteScheduler(shift=5.0)
    sigmas.set_timesteps(3)
    for kwargs, t in zip(seen, sigmas.timesteps, strict=True):
        tokens = kwargs["timestep"].view(frames, per_frame)
        first = torch.zeros(per_frame) if kind == "ti2v" else t.expand(per_frame)
        assert torch.equal(tokens[0], first)
        assert torch.equal(tokens[1:], t.expand(frames - 1, per_frame))


def test_a_given_first_frame_is_in_every_input_and_in_the_result(model) -> None:
    loaded = model("ti2v")
    with calls(loaded.instance) as seen:
        out = run(loaded.instance, request_of(loaded, "ti2v", output="latents", guidance_scale=1.0))["latents"]
    assert all(torch.equal(kwargs["hidden_states"][:, :, :1], out[:, :, :1]) for kwargs in seen)
    assert not torch.equal(seen[0]["hidden_states"][:, :, 1:], out[:, :, 1:])


PROMPTS = {
    "plain": "a red fox",
    "html entities": "a fox &amp; a &lt;dog&gt; &amp;quot;x&amp;quot; &#39;y&#39;",
    "whitespace": "  a\tfox \n\n jumps   over\r\nit  ",
    "mojibake": "a cafÃ© by the sea â€“ schÃ¶n",
    "chinese": "一只红色的狐狸，在雪地里奔跑。",
    "quotes and width": "“ｆｕｌｌ　ｗｉｄｔｈ”",
    "emoji": "🦊 fox",
    "empty": "",
    "long": "a fox " * 300,
}


@pytest.mark.parametrize("name", PROMPTS)
def test_prompts_are_cleaned_and_encoded_as_in_the_reference(name, model, reference: Reference) -> None:
    loaded, pipeline = model("t2v"), reference.pipeline("t2v")
    request = loaded.request(PROMPTS[name], **(LONG | {"negative_prompt": PROMPTS["mojibake"]}))
    ours = text_slots(loaded.instance, request)
    with torch.no_grad():
        prompt, negative = pipeline.encode_prompt(PROMPTS[name], PROMPTS["mojibake"], max_sequence_length=512)
    assert torch.equal(ours["prompt_embeds"], prompt) and torch.equal(ours["negative_embeds"], negative)


@pytest.mark.parametrize("name", ["html entities", "whitespace", "mojibake", "quotes and width"])
def test_cleaning_changes_the_text_before_it_is_read(name, model) -> None:
    loaded, clean = model("t2v"), prompt_clean(PROMPTS[name])
    assert clean != PROMPTS[name]
    embeds = [text_slots(loaded.instance, loaded.request(text, **LONG))["prompt_embeds"]
              for text in (PROMPTS[name], clean, clean + "!")]  # fmt: skip
    assert torch.equal(embeds[0], embeds[1]) and not torch.equal(embeds[0], embeds[2])


@pytest.mark.parametrize("length", [1, 7, 64, 226, 512])
def test_max_sequence_length_is_the_number_of_tokens(length, model, reference: Reference) -> None:
    loaded, pipeline = model("t2v"), reference.pipeline("t2v")
    request = loaded.request(PROMPTS["html entities"], **(LONG | {"max_sequence_length": length}))
    ours = text_slots(loaded.instance, request)
    assert ours["prompt_embeds"].shape == (1, length, 32)
    with torch.no_grad():
        theirs = pipeline.encode_prompt(PROMPTS["html entities"], "bad", max_sequence_length=length)
    assert torch.equal(ours["prompt_embeds"], theirs[0]) and torch.equal(ours["negative_embeds"], theirs[1])


@pytest.mark.parametrize("kind", ["t2v", "i2v", "a14b_i2v"])
def test_batched_guidance_means_the_same_as_serial_within_rounding(kind, model) -> None:
    loaded = model(kind)
    card = derive(loaded.card, settings={"guidance": "batched"})
    batched = Instance(card, wan.loops(card), loaded.instance.store, device="cpu", locate=loaded.instance.locate)
    request = request_of(loaded, kind, output="latents")
    with calls(batched) as seen:
        ours = run(batched, request)["latents"]
    assert seen and all(len(kwargs["hidden_states"]) == 2 for kwargs in seen)
    assert relative(ours, run(loaded.instance, request)["latents"]) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_a_description_reads_no_weights_and_offers_the_kinds_task(kind, checkpoint, tmp_path) -> None:
    source = checkpoint(kind)
    for file in source.rglob("*.json"):
        copy = tmp_path / file.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    card = wan.describe(tmp_path, "tiny")
    assert TASKS[kind] in card.programs
    assert replace(card, home="") == replace(wan.describe(source, "tiny"), home="")


@pytest.mark.parametrize("part", ["transformer", "vae", "scheduler", "text_encoder"])
@pytest.mark.parametrize("damage", ["missing", "garbage", "a list"])
def test_a_missing_or_damaged_configuration_is_an_error_that_names_the_file(part, damage, checkpoint, tmp_path) -> None:
    for file in checkpoint("t2v").rglob("*.json"):
        copy = tmp_path / file.relative_to(checkpoint("t2v"))
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(file.read_bytes())
    name = "scheduler_config.json" if part == "scheduler" else "config.json"
    if damage == "missing":
        (tmp_path / part / name).unlink()
    else:
        (tmp_path / part / name).write_text("{" if damage == "garbage" else "[1]")
    with pytest.raises(WeightsError, match=f"{part}/{name}") as caught:
        wan.describe(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("part", "change", "match"),
    [
        ("scheduler", {"_class_name": "DDIMScheduler"}, "unknown scheduler: 'DDIMScheduler'; choices: Flow"),
        ("scheduler", {"use_karras_sigmas": True}, "use_karras_sigmas is not supported: True; switch it off"),
        ("scheduler", {"use_dynamic_shifting": True}, "use_dynamic_shifting is not supported"),
        ("transformer", {"in_channels": 17}, "do not fit the autoencoder: 17; choices: 16"),
        ("vae", {"z_dim": "16"}, "z_dim must be a whole number: '16'"),
    ],
)
def test_a_configuration_nothing_here_runs_is_refused(part, change, match, checkpoint) -> None:
    index = wan.card.read_json(checkpoint("t2v") / "model_index.json")
    configs = {
        p: wan.card.read_json(checkpoint("t2v") / p / ("scheduler_config.json" if p == "scheduler" else "config.json"))
        for p in ("transformer", "vae", "scheduler", "text_encoder")
    }
    wan.card.build("tiny", index, configs)
    with pytest.raises(CardError, match=match):
        wan.card.build("tiny", index, {**configs, part: {**configs[part], **change}})


@pytest.mark.parametrize(
    "change",
    [{"solver_type": "bh1"}, {"prediction_type": "epsilon"}, {"use_flow_sigmas": False}, {"predict_x0": False},
     {"lower_order_final": False}, {"final_sigmas_type": "sigma_min"}, {"disable_corrector": [0]}],
    ids=str,
)  # fmt: skip
def test_a_unipc_other_than_the_one_computed_here_is_refused(change, checkpoint) -> None:
    folder = checkpoint("t2v", "unipc")
    index = wan.card.read_json(folder / "model_index.json")
    configs = {p: wan.card.read_json(folder / p / ("scheduler_config.json" if p == "scheduler" else "config.json"))
               for p in ("transformer", "vae", "scheduler", "text_encoder")}  # fmt: skip
    configs["scheduler"] = {**configs["scheduler"], **change}
    with pytest.raises(CardError, match=f"scheduler option {next(iter(change))} is not supported"):
        wan.card.build("tiny", index, configs)


@pytest.mark.parametrize(
    ("setting", "value", "match"),
    [
        ("spatial_stride", 0, "spatial_stride must be at least 1: 0"),
        ("solver_order", 0, "solver_order must be at least 1"),
        ("per_token", "no", "per_token must be true or false: 'no'"),
        ("guidance", "vibes", "unknown guidance: 'vibes'; choices: serial, batched"),
        ("boundary", 1, "boundary must lie between 0 and 1: 1"),
        ("boundary", 0.9, "two experts and a boundary come together"),
    ],
)
def test_a_setting_no_wan_model_can_have_is_refused_before_weights_are_read(checkpoint, setting, value, match) -> None:
    card = derive(catalog.find(str(checkpoint("t2v"))), settings={setting: value})
    with pytest.raises(CardError, match=match):
        catalog.loops(card)
