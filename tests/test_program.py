"""A card is checked before any weight is read, and a request is complete and possible before any step is run."""

import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from loopwright.card import Card, Claim, Component, Program, Recipe, Stage, derive
from loopwright.engine.instance import Instance, Store
from loopwright.errors import CardError, RequestError
from loopwright.models import wan
from loopwright.program import MAX_SEED, bind, resolve, task_of, validate
from loopwright.request import Frames, Request
from loopwright.sampling.schedules import euler_flow, first_step
from support import IMAGE, VIDEO, media_for

BY_NAME = {card.name.rpartition("/")[2]: card for card in wan.KNOWN}
TEXT, IMAGE_CARD, BOTH, TWO = (BY_NAME[name] for name in (
    "Wan2.1-T2V-1.3B-Diffusers", "Wan2.1-I2V-14B-480P-Diffusers", "Wan2.2-TI2V-5B-Diffusers",
    "Wan2.2-T2V-A14B-Diffusers"))  # fmt: skip
TASK = "text_to_video"


def frames(count: int = 1) -> Frames:
    return Frames(bytes(count * 2 * 2 * 3), (count, 2, 2, 3))


def refused(card: Card) -> str:
    """The error of making an instance, with components that explode when touched."""

    def explode(*args: object) -> None:
        raise AssertionError("weights were located")

    with pytest.raises(CardError) as caught:
        Instance(card, wan.loops(TEXT), Store(), device="cpu", locate=explode)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def with_stage(index: int, **changes: object) -> Card:
    program = TEXT.programs[TASK]
    stages = tuple(replace(s, **changes) if i == index else s for i, s in enumerate(program.stages))
    return derive(TEXT, programs={TASK: replace(program, stages=stages)})


def with_default(**changes: object) -> Card:
    kept = {name: value for name, value in {**TEXT.defaults[TASK], **changes}.items() if value != "drop"}
    return derive(TEXT, defaults={TASK: kept})


CONTRADICTIONS = {
    "unknown loop": (derive(TEXT, loops={"denoise": "ddim/v9"}), "'ddim/v9'", "flow_euler.cfg/v1", "name one of these"),
    "wrong semantics": (
        derive(TEXT, recipe=replace(TEXT.recipe, assumes=("wan.text/v1", "wan_vae.decode/v1", "flow_euler.cfg/v1"))),
        "'flow_unipc.cfg/v1'", "flow_euler.cfg/v1", "weights made for that loop"),
    "wrong precision": (
        derive(TEXT, components={"transformer": replace(TEXT.components["transformer"], dtype="float16")}),
        "'float16'", "float32, bfloat16", "set the component's dtype"),
    "undeclared component": (with_stage(0, uses=("tokeniser",)), "'tokeniser'", "text_encoder", "declare it"),
    "undeclared loop": (with_stage(1, loop="refine"), "'refine'", "decode, denoise", "declare it"),
    "dangling read": (with_stage(1, reads=("pose",)), "'pose'", "negative_embeds, prompt_embeds", "earlier stage"),
    "read before written": (with_stage(0, reads=("latents",)), "'latents'", "", "earlier stage"),
    "unwritten output": (
        derive(TEXT, programs={TASK: replace(TEXT.programs[TASK], outputs={"video": "film"})}),
        "'film'", "frames, latents", "add the stage"),
    "unknown output": (
        derive(TEXT, programs={TASK: replace(TEXT.programs[TASK], outputs={"gif": "frames"})}),
        "'gif'", "video, latents", "name one"),
    "unknown input": (
        derive(TEXT, programs={TASK: replace(TEXT.programs[TASK], inputs=("sound",))}),
        "'sound'", "image, video", "name one"),
    "unknown default": (with_default(hieght=480), "'hieght'", "height, width", "remove it"),
    "missing default": (with_default(height="drop", fps="drop"), "height, fps", "", "add them under defaults"),
    "claim of no task": (
        derive(TEXT, claims=(Claim("output", "diffusers", "sound_to_video"),)),
        "'sound_to_video'", "text_to_video, video_to_video", "claim one of these"),
}  # fmt: skip


@pytest.mark.parametrize("contradiction", CONTRADICTIONS)
def test_a_contradiction_is_refused_before_weights_with_value_choices_and_remedy(contradiction: str) -> None:
    card, value, choices, remedy = CONTRADICTIONS[contradiction]
    message = refused(card)
    assert TEXT.name in message
    assert value in message
    assert choices in message and ("choices: " in message or not choices)
    assert remedy in message


def test_defaults_of_a_task_may_not_be_missing_altogether() -> None:
    assert "no default for negative_prompt" in refused(replace(TEXT, defaults={}))


@pytest.mark.parametrize("card", wan.KNOWN, ids=lambda card: card.name)
def test_the_published_cards_do_not_contradict_themselves(card: Card) -> None:
    validate(card, wan.loops(card))


def test_an_instance_of_a_good_card_reads_no_weight_before_it_is_used() -> None:
    located: list[str] = []
    model = Instance(TEXT, wan.loops(TEXT), Store(), device="cpu", locate=lambda card, c: located.append(c.kind))
    assert located == []
    with pytest.raises(CardError, match=r"no such component: 'unet'; choices: .*transformer"):
        model.part("unet")


@pytest.mark.parametrize(
    ("task", "output", "stages"),
    [
        ("text_to_video", "video", ["text", "denoise", "decode"]),
        ("text_to_video", "latents", ["text", "denoise"]),
        ("image_to_video", "video", ["text", "condition", "denoise", "pin", "decode"]),
        ("image_to_video", "latents", ["text", "condition", "denoise", "pin"]),
    ],
)
def test_a_request_binds_the_stages_its_output_needs(task: str, output: str, stages: list[str]) -> None:
    image = frames() if task == "image_to_video" else None
    request = resolve(BOTH, prompt="x", image=image, output=output)
    assert [bound.stage.name for bound in bind(BOTH, request, wan.loops(BOTH))] == stages
    assert all(bound.loop.semantics == BOTH.loops[bound.stage.loop] for bound in bind(BOTH, request, wan.loops(BOTH)))


def test_a_stage_whose_writes_nobody_needs_is_left_out() -> None:
    program = TEXT.programs[TASK]
    card = derive(
        TEXT, programs={TASK: replace(program, stages=(Stage("idle", "text", (), ("unused",)), *program.stages))}
    )
    request = resolve(card, prompt="x")
    assert "idle" not in [bound.stage.name for bound in bind(card, request, wan.loops(card))]


@pytest.mark.parametrize(
    ("card", "media", "task"),
    [
        (TEXT, {}, "text_to_video"),
        (TEXT, {"video": frames(5)}, "video_to_video"),
        (BOTH, {}, "text_to_video"),
        (BOTH, {"image": frames()}, "image_to_video"),
        (IMAGE_CARD, {"image": frames()}, "image_to_video"),
    ],
)
def test_the_task_follows_from_the_media(card: Card, media: dict[str, Frames], task: str) -> None:
    assert resolve(card, prompt="x", **media).task == task


def test_media_no_task_takes_are_refused_with_what_each_task_needs() -> None:
    with pytest.raises(
        RequestError, match=r"no task that takes image; choices: text_to_video \(prompt alone\), video_to"
    ):
        resolve(TEXT, prompt="x", image=frames())
    with pytest.raises(RequestError, match=r"no task that takes a prompt alone; choices: image_to_video \(image\)"):
        resolve(IMAGE_CARD, prompt="x")
    with pytest.raises(RequestError, match="image and video"):
        resolve(TEXT, prompt="x", image=frames(), video=frames(5))


def test_a_task_by_name_needs_its_media_and_takes_no_other() -> None:
    with pytest.raises(RequestError, match=r"needs video; give video="):
        resolve(TEXT, task="video_to_video", prompt="x")
    with pytest.raises(RequestError, match=r"takes no video; choices: video_to_video"):
        resolve(TEXT, task="text_to_video", prompt="x", video=frames(5))
    with pytest.raises(RequestError, match=r"no such task: 'dream'; choices: text_to_video, video_to_video"):
        resolve(TEXT, task="dream", prompt="x")
    assert task_of(TEXT, "video_to_video", ()) == "video_to_video"


def test_what_is_left_out_is_the_cards_default_and_none_counts_as_left_out() -> None:
    request = resolve(TEXT, prompt="x", height=None, guidance_scale=7)
    given_here = {name: getattr(request, name) for name in TEXT.defaults[TASK]}
    assert given_here == {**TEXT.defaults[TASK], "guidance_scale": 7}
    assert (request.model, request.task, request.output) == (TEXT.name, TASK, "video")


def test_an_unknown_parameter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"unknown parameter: 'cfg_scale'; choices: .*guidance_scale"):
        resolve(TEXT, prompt="x", cfg_scale=3.0)
    with pytest.raises(RequestError, match="unknown parameter: 'model'"):
        resolve(TEXT, prompt="x", **{"model": "y"})


def test_a_missing_prompt_is_refused_and_an_empty_one_is_not() -> None:
    with pytest.raises(RequestError, match="no prompt; give prompt="):
        resolve(TEXT)
    assert resolve(TEXT, prompt="").prompt == ""


WHOLE = ("height", "width", "num_frames", "num_inference_steps", "max_sequence_length", "fps", "seed")
NUMBERS = ("guidance_scale", "flow_shift", "strength")


@pytest.mark.parametrize("value", ["480", 480.0, True, [480], math.nan, 1j, -16], ids=repr)
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_of_another_type_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=name):
        resolve(TEXT, prompt="x", **{name: value})


@pytest.mark.parametrize("value", ["3", True, [3.0], math.nan, math.inf, -1, 1j], ids=repr)
@pytest.mark.parametrize("name", [*NUMBERS, "guidance_scale_2"])
def test_a_number_of_another_type_or_out_of_range_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=f"{name} must be a number"):
        resolve(TWO, prompt="x", **{name: value})


@pytest.mark.parametrize("value", [3, b"x", ["a", "b"], {"a": 1}], ids=repr)
@pytest.mark.parametrize("name", ["prompt", "negative_prompt", "output", "task"])
def test_text_of_another_type_is_refused(name: str, value: object) -> None:
    with pytest.raises(RequestError):
        resolve(TEXT, **({"prompt": "x"} | {name: value}))


def test_an_unknown_output_is_refused_with_those_of_the_task() -> None:
    with pytest.raises(RequestError, match=r"unknown output: 'gif'; choices: video, latents"):
        resolve(TEXT, prompt="x", output="gif")


def nearest(error: RequestError) -> list[int]:
    found = re.search(r"nearest: (\d+)(?: or (\d+))?$", str(error))
    assert found, error
    return [int(n) for n in found.groups() if n]


@given(st.sampled_from(["height", "width"]), st.integers(1, 5000), st.sampled_from([TEXT, BOTH]))
def test_every_nearest_size_is_valid_and_none_is_nearer(name: str, size: int, card: Card) -> None:
    multiple = card.settings["size_multiple"]
    if size % multiple == 0:
        assert getattr(resolve(card, prompt="x", **{name: size}), name) == size
        return
    with pytest.raises(RequestError, match=f"{name} must be a multiple of {multiple}: {size}") as caught:
        resolve(card, prompt="x", **{name: size})
    offered = nearest(caught.value)
    for other in offered:
        assert getattr(resolve(card, prompt="x", **{name: other}), name) == other
    assert min(abs(size - n) for n in offered) == min(abs(size - n) for n in range(multiple, 6000, multiple))


@given(st.integers(1, 500), st.none() | st.integers(1, 60))
def test_every_nearest_frame_count_is_valid_and_none_is_nearer(count: int, video_frames: int | None) -> None:
    media = {} if video_frames is None else {"video": frames(video_frames)}
    stride = TEXT.settings["frame_stride"]
    most = 600 if video_frames is None else video_frames
    if (count - 1) % stride == 0:
        if count <= most:
            assert resolve(TEXT, prompt="x", num_frames=count, **media).num_frames == count
        return
    with pytest.raises(RequestError, match=f"num_frames must be a multiple of {stride} plus 1: {count}") as caught:
        resolve(TEXT, prompt="x", num_frames=count, **media)
    offered = nearest(caught.value)
    if video_frames is None or count <= video_frames:
        for other in offered:
            assert resolve(TEXT, prompt="x", num_frames=other, **media).num_frames == other
        assert min(abs(count - n) for n in offered) == min(abs(count - n) for n in range(1, most + 1, stride))


@given(st.integers(1, 100))
def test_a_videos_frames_are_cut_to_what_the_model_takes(count: int) -> None:
    request = resolve(TEXT, prompt="x", video=frames(count))
    assert 1 <= request.num_frames <= count < request.num_frames + TEXT.settings["frame_stride"]
    assert (request.num_frames - 1) % TEXT.settings["frame_stride"] == 0


def test_more_frames_than_the_video_has_are_refused() -> None:
    with pytest.raises(RequestError, match=r"the video has 5 frames, 9 are asked for; give a longer video"):
        resolve(TEXT, prompt="x", video=frames(5), num_frames=9)


def test_an_image_of_several_frames_is_refused() -> None:
    with pytest.raises(RequestError, match="an image is one frame: 3"):
        resolve(IMAGE_CARD, prompt="x", image=frames(3))


def test_the_second_guidance_scale_defaults_to_the_first_and_needs_a_second_expert() -> None:
    assert resolve(TWO, prompt="x", guidance_scale=3.5).guidance_scale_2 == 3.5
    assert resolve(TWO, prompt="x", guidance_scale=3.5, guidance_scale_2=2.0).guidance_scale_2 == 2.0
    assert resolve(TEXT, prompt="x", guidance_scale=3.5).guidance_scale_2 is None
    with pytest.raises(RequestError, match=r"one expert and no guidance_scale_2: 3\.0; leave it out"):
        resolve(TEXT, prompt="x", guidance_scale_2=3.0)


@given(st.integers(1, 2000), st.floats(0, 1))
def test_strength_is_refused_exactly_when_it_leaves_no_step_and_the_remedy_leaves_one(
    steps: int, strength: float
) -> None:
    def request(value: float) -> Request:
        return resolve(TEXT, prompt="x", video=frames(5), num_inference_steps=steps, strength=value)

    def to_run(value: float) -> int:
        return steps - first_step(euler_flow(steps, shift=3.0), value)

    if to_run(strength):
        assert request(strength).strength == strength
        return
    with pytest.raises(RequestError, match=f"of {steps} steps leaves none to run; at least ") as caught:
        request(strength)
    least = float(str(caught.value).rpartition("at least ")[2])
    assert to_run(request(least).strength) >= 1


@pytest.mark.parametrize("steps", [1, 2, 3, 9, 49, 64, 1000])
def test_strength_limits_nothing_where_no_video_is_given(steps: int) -> None:
    assert resolve(TEXT, prompt="x", num_inference_steps=steps, strength=0.1).num_inference_steps == steps


def test_a_missing_seed_is_drawn_and_recorded() -> None:
    requests = [resolve(TEXT, prompt="x") for _ in range(4)]
    assert len({request.seed for request in requests}) > 1
    for request in requests:
        assert isinstance(request.seed, int) and 0 <= request.seed <= MAX_SEED
        assert request.record()["seed"] == request.seed


@pytest.mark.parametrize("seed", [0, 2**32, MAX_SEED])
def test_a_seed_in_range_is_kept_and_torch_takes_it(seed: int) -> None:
    assert resolve(TEXT, prompt="x", seed=seed).seed == seed
    torch.Generator("cpu").manual_seed(seed)


@pytest.mark.parametrize("seed", [-1, MAX_SEED + 1])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(RequestError, match="seed"):
        resolve(TEXT, prompt="x", seed=seed)


@pytest.mark.parametrize("name", ["fps", "max_sequence_length", "num_inference_steps", "num_frames", "flow_shift"])
def test_zero_is_refused_where_nothing_would_remain(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        resolve(TEXT, prompt="x", **{name: 0})


def test_a_record_holds_every_parameter_and_media_by_digest(ask: Callable) -> None:
    _, request = ask("v2v")
    record = request.record()
    assert record["video_digest"] == request.video.digest and record["image"] is None
    assert {f for f in request.__dataclass_fields__} <= set(record)
    assert all(record[name] == value for name, value in media_for("v2v").items() if name not in ("video", "task"))


def test_the_digest_of_frames_is_of_pixels_and_shape_not_of_their_source() -> None:
    a = Frames(VIDEO.tobytes(), VIDEO.shape, "a.mp4")
    assert a.digest == Frames(VIDEO.tobytes(), VIDEO.shape, "b.mp4").digest
    assert a.digest != Frames(VIDEO.tobytes(), (9, 50, 40, 3)).digest
    assert a.digest != Frames(VIDEO[::-1].tobytes(), VIDEO.shape).digest


@pytest.mark.parametrize("shape", [(1, 40, 50, 4), (2, 40, 50, 3), (1, 40, 50, 1)])
def test_bytes_that_are_not_frames_of_that_shape_are_refused(shape: tuple[int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="are not RGB frames"):
        Frames(IMAGE.tobytes(), shape)


def test_a_small_card_of_another_kind_is_checked_the_same_way() -> None:
    """`validate` knows nothing of the family: it runs on whatever loops it is given."""
    stage = Stage("only", "a", (), ("frames",), ("net",))
    defaults = TEXT.defaults[TASK]
    program = Program((stage,), (), {"video": "frames"})
    recipe = Recipe(assumes=("a/v1",))
    card = Card(
        "tiny",
        "x",
        {"net": Component("l.C", dtype="float32")},
        {"a": "a/v1"},
        {"t": program},
        {"t": defaults},
        {"experts": ("net",)},
        recipe,
    )
    validate(card, {"a/v1": object()})
    with pytest.raises(CardError, match="'a/v1'; choices: b/v1"):
        validate(card, {"b/v1": object()})
    with pytest.raises(CardError, match=r"experts must name its generating components: .*choices: net; correct"):
        validate(derive(card, settings={"experts": ("gone",)}), {"a/v1": object()})
