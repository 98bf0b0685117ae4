"""Frozen encoders give what serving and diffusers compute, bit for bit, and refuse what they cannot take."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from transformers import AutoTokenizer, UMT5EncoderModel

import loopwright
from loopwright import encoders
from loopwright.card import derive
from loopwright.encoders.encoder import Encoder, run
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.errors import CardError, ModelError, RequestError, WeightsError

PROMPT = "a fox  &amp; a dog  ﬁn"
TINY = "loopwright/tiny-wan"
KINDS = ("t2v", "ti2v", "i2v", "a14b", TINY)  # both autoencoders; other sizes; a checkpoint that must have an image
CLIP = np.random.default_rng(5).integers(0, 256, (9, 32, 64, 3), dtype=np.uint8)


def pixels_of(video: np.ndarray) -> torch.Tensor:
    """uint8 [T, H, W, 3] as float32 [3, T, H, W] in -1..1, by the arithmetic of diffusers' processor."""
    return torch.from_numpy(video.astype(np.float32) / 255.0).permute(3, 0, 1, 2) * 2.0 - 1.0


def generator(seed: int = 11) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


@pytest.fixture(scope="module")
def encoder(checkpoint):
    built: dict[str, Encoder] = {}

    def load(kind: str) -> Encoder:
        if kind not in built:
            built[kind] = encoders.load_encoder(encoders.find(kind if kind == TINY else checkpoint(kind)), "cpu")
        return built[kind]

    return load


@pytest.fixture(scope="module")
def folder(checkpoint):
    return lambda kind: loopwright.catalog.SHIPPED[TINY] if kind == TINY else checkpoint(kind)


@pytest.mark.parametrize("frames", [1, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_latents_are_diffusers_own_draw_normalised(kind, frames, encoder, folder):
    pixels = pixels_of(CLIP[:frames])
    ours = encoders.encode_media(encoder(kind), pixels, generator())
    vae = AutoencoderKLWan.from_pretrained(folder(kind), subfolder="vae", torch_dtype=torch.float32)
    mean, std = (torch.tensor(v).view(-1, 1, 1, 1) for v in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        drawn = vae.encode(pixels[None]).latent_dist.sample(generator())[0]
    assert torch.equal(ours, (drawn - mean) * (1.0 / std))
    stride = vae.config.scale_factor_spatial
    assert ours.shape == (vae.config.z_dim, 1 + frames // 4, 32 // stride, 64 // stride)


def test_the_same_posterior_without_noise_is_what_serving_encodes(encoder, folder):
    """Video-to-video takes the mode: what its stage writes, from the same frames."""
    served = loopwright.load(folder("t2v"), device="cpu", store=Store(0))
    request = served.request(
        PROMPT, task="video_to_video", video=CLIP, height=32, width=64, num_frames=9, num_inference_steps=2
    )
    job = Job(served.instance, request)
    while "source" not in job.slots:
        job.step()
        assert job.error is None
    ours, pixels = encoder("t2v"), pixels_of(CLIP)
    posterior = run(ours, "wan_vae.posterior/v1", request, {"pixels": pixels[None]})
    noise = torch.zeros(1, posterior.shape[1] // 2, *posterior.shape[2:])
    mode = run(ours, "wan_vae.draw/v1", request, {"posterior": posterior, "noise": noise})
    assert torch.equal(mode, job.slots["source"])
    drawn = encoders.encode_media(ours, pixels, generator())
    assert not torch.equal(drawn, mode[0])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["t2v", "ti2v", TINY])
def test_embeddings_are_what_serving_computes(kind, dtype, encoder, folder):
    served = loopwright.load(folder(kind), device="cpu", dtype=dtype, store=Store(0))
    job = Job(served.instance, served.request(PROMPT, task="text_to_video", height=32, width=64, num_frames=1))
    while "prompt_embeds" not in job.slots:
        job.step()
        assert job.error is None
    ours = encoders.encode_prompt(encoder(kind), PROMPT)
    assert ours.dtype == torch.float32
    assert torch.equal(ours.to(job.slots["prompt_embeds"].dtype), job.slots["prompt_embeds"][0])


@pytest.mark.parametrize("prompt", [PROMPT, "", "long " * 200])
def test_embeddings_are_the_text_encoders_zero_past_the_prompt(prompt, encoder, folder):
    ours = encoders.encode_prompt(encoder("t2v"), prompt)
    tokenizer = AutoTokenizer.from_pretrained(folder("t2v") / "tokenizer")
    module = UMT5EncoderModel.from_pretrained(folder("t2v") / "text_encoder", dtype=torch.float32).eval()
    tokens = tokenizer(
        [prompt_clean(prompt)], padding="max_length", max_length=512, truncation=True, return_tensors="pt"
    )
    with torch.no_grad():
        hidden = module(tokens.input_ids, tokens.attention_mask).last_hidden_state[0]
    length = int(tokens.attention_mask.sum())
    assert ours.shape == (512, 32) and torch.equal(ours[:length], hidden[:length]) and not ours[length:].any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("kind", "names"),
    [("i2v", ("image_embeds", "condition")), ("ti2v", ("first_frame",)), ("a14b_i2v", ("condition",))],
)
def test_what_a_first_frame_becomes_is_what_serving_computes(kind, names, dtype, encoder, folder):
    served = loopwright.load(folder(kind), device="cpu", dtype=dtype, store=Store(0))
    request = served.request(
        PROMPT, task="image_to_video", image=CLIP[0], height=32, width=64, num_frames=9, num_inference_steps=2
    )
    job = Job(served.instance, request)
    while not set(names) <= set(job.slots):
        job.step()
        assert job.error is None
    ours = encoder(kind)
    assert encoders.of_first_frame(ours.card) == names
    for name in names:
        made = encoders.encode_first_frame(ours, name, CLIP[0], 9)
        assert made.dtype == torch.float32
        assert torch.equal(made.to(job.slots[name].dtype), job.slots[name][0])


@pytest.mark.parametrize("kind", ["t2v", "a14b"])
def test_cards_that_make_no_videos_of_pictures_make_nothing_of_a_first_frame(kind, folder):
    card = encoders.find(folder(kind))
    assert encoders.of_first_frame(card) == () and set(encoders.outputs(card)) == {"latent", "cond"}


def test_a_first_frame_of_a_size_that_no_video_has_is_refused(encoder):
    with pytest.raises(RequestError, match="width must be a multiple of 16: 60; nearest: 48 or 64"):
        encoders.encode_first_frame(encoder("i2v"), "condition", CLIP[0][:, :60], 9)


def test_a_sample_is_both_and_repeats_with_its_generator(encoder):
    pixels = pixels_of(CLIP)
    first, again, other = (encoders.encode_sample(encoder(TINY), pixels, PROMPT, generator(seed)) for seed in (1, 1, 2))
    assert set(first) == {"latent", "cond"}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["latent"], other["latent"]) and torch.equal(first["cond"], other["cond"])
    assert first["cond"].shape == (96, 160), "as long as the card's prompts"


def test_generators_are_never_read(encoder):
    loaded = encoders.load_encoder(encoders.find(TINY), "cpu")
    encoders.encode_sample(loaded, pixels_of(CLIP[:1]), PROMPT, generator())
    assert loaded.instance.store.loaded.components == 3  # tokenizer, text encoder, autoencoder
    assert all(loaded.instance.origin(name) in loaded.instance.store for name in ("tokenizer", "text_encoder", "vae"))


def test_weights_that_do_not_run_in_float32_have_encoders_all_the_same(checkpoint):
    card = encoders.find(TINY)
    only = derive(
        card,
        recipe=replace(card.recipe, precision=("bfloat16",)),
        components={"transformer": replace(card.components["transformer"], dtype="bfloat16")},
    )
    assert encoders.encode_prompt(encoders.load_encoder(only, "cpu"), "a").dtype == torch.float32


def test_what_is_known_before_weights_are_read():
    outputs = encoders.outputs(encoders.find(TINY))
    assert (outputs["latent"].compute, outputs["latent"].stored, outputs["latent"].tokens) == ("float32", "float16", 0)
    assert (outputs["cond"].compute, outputs["cond"].stored, outputs["cond"].tokens) == ("float32", "bfloat16", 96)


def test_sizes_the_encoders_cannot_take_name_the_nearest():
    card = encoders.find(TINY)
    encoders.validate_args(card, height=64, width=48, num_frames=1)
    with pytest.raises(RequestError, match="num_frames must be a multiple of 4 plus 1: 10; nearest: 9 or 13"):
        encoders.validate_args(card, height=64, width=64, num_frames=10)
    with pytest.raises(RequestError, match="width must be a multiple of 16: 60; nearest: 48 or 64"):
        encoders.validate_args(card, height=64, width=60, num_frames=9)


@pytest.mark.parametrize(
    ("pixels", "message"),
    [
        (torch.zeros(9, 3, 32, 32), r"pixels must .*float32 \[9, 3, 32, 32\]"),
        (torch.zeros(3, 9, 32, 32, dtype=torch.uint8), "pixels must .*uint8"),
        (torch.zeros(3, 8, 32, 32), "nearest: 5 or 9"),
    ],
)
def test_pixels_of_another_form_are_refused(pixels, message, encoder):
    with pytest.raises(RequestError, match=message):
        encoders.encode_media(encoder(TINY), pixels, generator())


def test_nan_in_pixels_ends_with_an_error(encoder):
    with pytest.raises(ModelError, match="NaN"):
        encoders.encode_media(encoder(TINY), torch.full((3, 1, 32, 32), torch.nan), generator())


def test_an_unknown_family_is_told_which_are_known():
    card = derive(encoders.find(TINY), family="other")
    with pytest.raises(CardError, match="no encoders for its family: 'other'; choices: wan"):
        encoders.load_encoder(card, "cpu")


@pytest.mark.parametrize(("name", "error"), [("", RequestError), ("loopwright/none", WeightsError)])
def test_the_checkpoint_is_named_and_exists(name, error):
    with pytest.raises(error):
        encoders.find(name)


def test_a_precision_left_to_the_machine_is_refused(tmp_path):
    from loopwright.card import dumps

    card = encoders.find(TINY)
    (tmp_path / "card.json").write_text(
        dumps(derive(card, components={"vae": replace(card.components["vae"], dtype="auto")}))
    )
    with pytest.raises(CardError, match="vae must have a precision that is the same on every machine"):
        encoders.find(tmp_path)


def test_importing_the_package_imports_no_torch():
    subprocess.run(
        [sys.executable, "-c", "import sys, loopwright.encoders; assert 'torch' not in sys.modules"], check=True
    )
