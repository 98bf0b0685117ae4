"""A key names an encoding by all that its content depends on, and by nothing else."""

import shutil
from dataclasses import replace

import pytest

from encoded import SHAPE, encodings, write_rows
from loopwright import encoders
from loopwright.data import dataset, keys
from loopwright.encoders import identity as identities
from loopwright.encoders.identity import identity
from loopwright.errors import WeightsError


@pytest.fixture
def rows(tmp_path):
    (tmp_path / "set").mkdir()
    return dataset.read(write_rows(tmp_path / "set", 2))


@pytest.fixture(scope="module")
def makers(checkpoint):
    card = encoders.find(checkpoint("t2v"))
    return {kind: keys.maker(card, kind) for kind in ("latent", "cond")}


@pytest.fixture
def copied(checkpoint, tmp_path):
    """A checkpoint of the test's own, at another place."""
    return shutil.copytree(checkpoint("t2v"), tmp_path / "elsewhere")


def test_latents_depend_on_the_media_its_shape_and_what_makes_them(rows, makers):
    maker = makers["latent"]
    output = maker.output
    names = [
        keys.media_key(maker, rows[0], SHAPE).name,
        keys.media_key(maker, rows[1], SHAPE).name,
        keys.media_key(maker, replace(rows[0], kind="image"), SHAPE).name,
        *(
            keys.media_key(maker, rows[0], replace(SHAPE, **change)).name
            for change in ({"height": 48}, {"width": 48}, {"num_frames": 1}, {"frame_stride": 2}, {"crop": "none"})
        ),
        *(
            keys.media_key(replace(maker, **change), rows[0], SHAPE).name
            for change in (
                {"family": "other"},
                {"identity": "other"},
                {"output": replace(output, compute="bfloat16")},
                {"output": replace(output, stored="bfloat16")},
            )
        ),
    ]
    assert len(set(names)) == len(names)


def test_embeddings_depend_on_the_prompt_its_length_and_what_makes_them(makers):
    maker = makers["cond"]
    output = maker.output
    changed = [replace(maker, output=replace(output, **c)) for c in ({"tokens": 7}, {"stored": "a"}, {"compute": "a"})]
    changed += [replace(maker, family="other"), replace(maker, identity="other"), makers["latent"]]
    names = [keys.prompt_key(m, "a fox").name for m in (maker, *changed)] + [keys.prompt_key(maker, "a fox ").name]
    assert len(set(names)) == len(names)


def test_a_schema_of_its_own_voids_what_was_stored(makers, monkeypatch):
    before = keys.prompt_key(makers["cond"], "a fox")
    monkeypatch.setattr(keys, "SCHEMA", keys.SCHEMA + 1)
    assert keys.prompt_key(makers["cond"], "a fox").name != before.name


def test_neither_depends_on_the_other_nor_on_places(rows, checkpoint, copied, tmp_path):
    here = encodings(tmp_path / "a", checkpoint("t2v"))
    moved = shutil.copytree(tmp_path / "set", tmp_path / "moved")
    there = encodings(tmp_path / "b", copied)
    assert [here.keys(row) for row in rows] == [there.keys(row) for row in dataset.read(moved / "rows.jsonl")]
    first, again = here.keys(rows[0]), here.keys(rows[-1])
    assert first["latent"] == again["latent"] and first["cond"] != again["cond"]


def test_the_seed_follows_from_the_key(rows, makers):
    one, other = (keys.media_key(makers["latent"], row, SHAPE) for row in rows[:2])
    assert one.seed == keys.media_key(makers["latent"], rows[0], SHAPE).seed != other.seed
    assert 0 <= one.seed < 2**63


def test_names_stay(makers):
    """They are what a cache on disk is found by: changing how they are made needs a new SCHEMA."""
    fixed = keys.Maker("wan", makers["cond"].output, "0" * 64)
    assert keys.prompt_key(fixed, "füchse").name == "2de3632efeb2f2891856a51d9f55afe1753c1255"


@pytest.mark.parametrize("file", ["config.json", "diffusion_pytorch_model.safetensors"])
def test_any_byte_of_the_autoencoder_changes_its_identity_alone(file, copied):
    card = encoders.find(copied)
    before = identity(card, ("vae",)), identity(card, ("tokenizer", "text_encoder"))
    path = copied / "vae" / file
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    assert identity(card, ("vae",)) != before[0]
    assert identity(card, ("tokenizer", "text_encoder")) == before[1]


def test_what_is_not_loaded_does_not_count(copied):
    before = identity(encoders.find(copied), ("vae",))
    (copied / "vae" / "README.md").write_text("read me")
    (copied / "vae" / "diffusion_pytorch_model.fp16.safetensors").write_bytes(b"half")
    shutil.rmtree(copied / "transformer" / "nothing", ignore_errors=True)
    (copied / "transformer" / "diffusion_pytorch_model.safetensors").write_bytes(b"never read")
    assert identity(encoders.find(copied), ("vae",)) == before


def test_large_files_are_read_once_until_they_change(copied, monkeypatch):
    read = []
    monkeypatch.setattr(identities, "REMEMBERED", 1)
    monkeypatch.setattr(
        identities, "_read", lambda file, real=identities._read: (read.append(file.name), real(file))[1]
    )
    card = encoders.find(copied)
    first = identity(card, ("vae",))
    count = len(read)
    assert count == 2 and identity(card, ("vae",)) == first and len(read) == count
    weights = copied / "vae" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\1")
    assert identity(card, ("vae",)) != first and len(read) == count + 1


@pytest.mark.parametrize("note", ["", "[]", '{"sha256": 3}', "\0"])
def test_a_damaged_memory_is_no_memory(note, copied, monkeypatch):
    from loopwright.files import cache_folder

    monkeypatch.setattr(identities, "REMEMBERED", 1)
    card = encoders.find(copied)
    first = identity(card, ("vae",))
    for file in (cache_folder() / "digests").iterdir():
        file.write_text(note)
    assert identity(card, ("vae",)) == first


def test_a_checkpoint_without_its_encoders_is_told(copied):
    card = encoders.find(copied)
    shutil.rmtree(copied / "vae")
    with pytest.raises(WeightsError, match=r"cannot read .*vae"):
        identity(card, ("vae",))
