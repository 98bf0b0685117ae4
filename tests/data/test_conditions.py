"""What a first frame becomes: as serving makes it of the same picture, stored once, and refused where it has no use."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

import loopwright
from encoded import SHAPE, encodings, write_rows
from loopwright import encoders, media
from loopwright.data import dataset, keys
from loopwright.data.decode import first_frame, pixels
from loopwright.data.row import Condition
from loopwright.data.wants import Want
from loopwright.engine.instance import Store
from loopwright.engine.job import Job
from loopwright.errors import DataError, RequestError
from loopwright.models.wan import forward

MADE = {"i2v": ("image_embeds", "condition"), "ti2v": ("first_frame",), "a14b_i2v": ("condition",)}
PICTURE = np.random.default_rng(3).integers(0, 256, (32, 32, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("set")
    file = write_rows(folder, 3)
    media.write(folder / "first.png", PICTURE[None], fps=1, metadata={})
    return dataset.read(file)


def showing(row, *conditions: Condition):
    """The row with a picture of its own folder as its first frame, or with these conditions."""
    return replace(row, conditions=conditions or (Condition("image", row.file.parent / "first.png", "first_frame"),))


def served(folder, names, picture, row) -> dict[str, torch.Tensor]:
    """The slots of a request for a video of the row's prompt and shape that begins with that picture."""
    model = loopwright.load(folder, device="cpu", store=Store(0))
    size = {"height": SHAPE.height, "width": SHAPE.width, "num_frames": SHAPE.num_frames}
    job = Job(model.instance, model.request(row.prompt, task="image_to_video", image=picture, **size))
    while not {*names, "prompt_embeds"} <= set(job.slots):
        job.step()
        assert job.error is None
    return {name: job.slots[name][0].bfloat16() for name in (*names, "prompt_embeds")}


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", MADE)
def test_a_sample_has_what_serving_makes_of_the_same_picture(kind, named, rows, checkpoint, tmp_path):
    row = showing(rows[0]) if named else rows[0]
    picture = PICTURE if named else first_frame(row, SHAPE)
    sample = encodings(tmp_path, checkpoint(kind), first_frame=not named).sample(row)
    slots = served(checkpoint(kind), MADE[kind], picture, row)
    assert set(sample) == {"latent", "cond", *MADE[kind]}
    assert all(torch.equal(sample[name], slots[name]) for name in MADE[kind])
    assert torch.equal(sample["cond"], slots["prompt_embeds"])


@pytest.mark.parametrize("kind", MADE)
def test_the_forward_takes_a_sample_by_its_names(kind, rows, checkpoint, model, tmp_path):
    sample = encodings(tmp_path, checkpoint(kind), first_frame=True).sample(rows[0])
    latents, text, *_ = (sample.pop(name).float()[None] for name in ("latent", "cond"))
    transformer = model(kind).instance.part("transformer")
    forward_of = forward.velocity_per_token if kind == "ti2v" else forward.velocity
    given = {name: tensor.float()[None] for name, tensor in sample.items()}
    with torch.no_grad():
        out, other = (
            forward_of(transformer, latents, torch.tensor([500.0]), text, **some)
            for some in (given, {name: tensor + 1 for name, tensor in given.items()})
        )
    assert out.shape == latents.shape and not torch.equal(out, other)


def test_the_first_frame_is_that_of_the_pixels_rounded(rows):
    video, still = rows[0], rows[-2]
    frames, _ = media.read_video(video.path)
    assert np.array_equal(first_frame(video, replace(SHAPE, height=40)), frames[0])
    assert np.array_equal(first_frame(video, replace(SHAPE, height=40, num_frames=1)), frames[2])
    shown = pixels(still, SHAPE)[:, 0].permute(1, 2, 0)
    assert (torch.from_numpy(first_frame(still, SHAPE)) / 127.5 - 1 - shown).abs().max() <= 0.5 / 127.5 + 1e-6
    named = showing(video)
    assert np.array_equal(first_frame(named.shown(named.conditions[0]), SHAPE), PICTURE)


def test_rows_that_show_the_same_picture_share_what_it_becomes(rows, checkpoint, tmp_path):
    ours = encodings(tmp_path, checkpoint("i2v"))
    shown = [showing(row) for row in rows[:3]]
    count = {str(key): number for key, number in ours.fill(shown).count().items()}
    assert count["('condition', 'encoded')"] == count["('image_embeds', 'encoded')"] == 1
    assert count["('latent', 'encoded')"] == 3


def test_a_key_holds_what_changes_a_first_frame_and_nothing_else(rows, checkpoint):
    card = encoders.find(checkpoint("i2v"))
    whole, embeds = keys.maker(card, "condition"), keys.maker(card, "image_embeds")
    video, still = rows[0], rows[-2]

    def names(maker, shown, *changes) -> int:
        return len({keys.frame_key("x", maker, shown, replace(SHAPE, **change)).name for change in ({}, *changes)})

    size, frames, stride = ({"height": 48}, {"width": 48}, {"crop": "none"}), {"num_frames": 9}, {"frame_stride": 2}
    assert names(embeds, still, *size) == 4 and names(embeds, still, frames, stride) == 1
    assert names(whole, still, *size, frames) == 5 and names(whole, still, stride) == 1
    assert names(embeds, video, *size, frames, stride) == 6
    changed = [replace(embeds, identity="other"), replace(embeds, family="other"), embeds]
    assert len({keys.frame_key("x", maker, still, SHAPE).name for maker in changed}) == 3
    assert keys.frame_key("x", embeds, still, SHAPE) != keys.frame_key("y", embeds, still, SHAPE)


def test_the_image_encoder_is_part_of_what_it_makes_alone(rows, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("i2v"), tmp_path / "copy")
    before = encodings(tmp_path / "a", folder, first_frame=True).keys(rows[0])
    settings = folder / "image_processor" / "preprocessor_config.json"
    settings.write_text(settings.read_text() + " ")
    after = encodings(tmp_path / "b", folder, first_frame=True).keys(rows[0])
    assert {name for name in before if before[name] != after[name]} == {"image_embeds"}


def test_image_encoders_are_not_asked_for_where_no_row_has_a_first_frame(rows, checkpoint, tmp_path):
    folder = shutil.copytree(checkpoint("i2v"), tmp_path / "copy")
    shutil.rmtree(folder / "image_encoder")
    (folder / "image_encoder").mkdir()
    shutil.copy(checkpoint("i2v") / "image_encoder" / "config.json", folder / "image_encoder")
    assert set(encodings(tmp_path / "cache", folder).sample(rows[0])) == {"latent", "cond"}


def test_a_still_has_no_first_frame_of_its_own_unless_the_card_must_have_one(rows, checkpoint, tmp_path):
    still = rows[-2]
    either = encodings(tmp_path, checkpoint("ti2v"), first_frame=True)
    assert "first_frame" in either.sample(rows[0])
    assert "first_frame" not in either.sample(still) and "first_frame" in either.sample(showing(still))
    assert encodings(tmp_path, checkpoint("i2v"), first_frame=True).sample(still)["condition"].shape == (20, 1, 4, 4)


@pytest.mark.parametrize(
    ("kind", "conditions", "message"),
    [
        ("t2v", [("image", "first_frame")], "makes no videos of a first frame"),
        ("i2v", [("image", "style")], "unknown role of a condition: 'style'; choices: first_frame"),
        ("i2v", [("video", "first_frame")], "a first frame is an image: 'video'"),
        ("i2v", [("image", "first_frame")] * 2, "more than one first frame; keep one"),
    ],
)
def test_conditions_that_cannot_be_met_are_told_with_their_line(kind, conditions, message, rows, checkpoint, tmp_path):
    path = rows[0].file.parent / "first.png"
    row = showing(rows[1], *(Condition(of, path, role) for of, role in conditions))
    with pytest.raises(DataError, match=f"rows.jsonl:2: .*{message}"):
        encodings(tmp_path, checkpoint(kind)).keys(row)


def test_first_frames_are_refused_for_a_card_that_takes_none(checkpoint, tmp_path):
    with pytest.raises(RequestError, match="makes no videos of a first frame"):
        encodings(tmp_path, checkpoint("t2v"), first_frame=True)


def test_a_picture_that_cannot_be_read_is_its_rows_problem(rows, checkpoint, tmp_path):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    bad = showing(rows[1], Condition("image", tmp_path / "broken.png", "first_frame"))
    filled = encodings(tmp_path / "cache", checkpoint("i2v")).fill([rows[0], bad])
    (problem,) = filled.problems
    assert problem.where == rows[1].where and "broken.png" in problem.problem


def test_wants_travel_as_text(rows, checkpoint, tmp_path):
    plan = encodings(tmp_path, checkpoint("i2v"), first_frame=True)._plan
    wants = plan.of(replace(rows[0], prompt="füchse \N{FOX FACE}"))
    assert set(wants) == {"latent", "cond", "uncond", "condition", "image_embeds"}
    assert all(Want.loads(want.dumps()) == want for want in wants.values())
