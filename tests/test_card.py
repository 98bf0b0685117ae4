"""A card is data: it goes to JSON and back, has a content digest, and its variants say only what differs."""

import json
import shutil
from collections.abc import Callable
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import loopwright
from loopwright.card import SCHEMA, Card, Component, Recipe, derive, dumps, load_card, loads
from loopwright.engine.instance import Store
from loopwright.errors import CardError, LoopwrightError, RequestError
from loopwright.models import wan
from loopwright.weights import load as weights
from support import media_for, run, same

CARD = wan.KNOWN[0]
STUDENT = Recipe(
    kind="distilled", assumes=tuple(s for s in CARD.recipe.assumes if s != "flow_unipc.cfg/v1"), steps=(4,)
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@pytest.mark.parametrize("card", wan.KNOWN, ids=lambda card: card.name)
def test_a_card_goes_to_json_and_back(card: Card) -> None:
    again = loads(dumps(card))
    assert again == card
    assert again.digest == card.digest
    assert dumps(again) == dumps(card)


def test_the_digest_depends_on_the_content_alone() -> None:
    elsewhere = replace(CARD, home="/somewhere/else")
    assert elsewhere.digest == CARD.digest == loads(dumps(CARD), home="/a/third/place").digest
    reordered = replace(CARD, components=dict(reversed(CARD.components.items())))
    assert reordered.digest == CARD.digest
    assert len({card.digest for card in wan.KNOWN}) == len(wan.KNOWN)


def test_the_digest_is_the_same_in_every_version() -> None:
    """It is stored in saved jobs and records: if this fails, they all become invalid; raise SCHEMA instead."""
    card = Card("n", "f", {"a": Component("l.C")}, {"x": "y/v1"}, {}, {"t": {"v": (1, 2.5, None, True)}}, {})
    assert card.digest == "faf20093a3c86a2b"


@pytest.mark.parametrize("field", [f for f in asdict(CARD) if f != "home"])
def test_every_field_but_home_is_in_the_digest(field: str) -> None:
    other = wan.KNOWN[-1]
    changed = replace(CARD, **{field: getattr(other, field)})
    if field in ("family", "claims", "recipe", "loops", "defaults"):  # equal among the known ones, or nearly
        changed = replace(CARD, **{field: {"family": "x", "claims": (), "recipe": STUDENT}.get(field, {})})
    assert changed.digest != CARD.digest


def test_home_is_set_by_where_the_card_is_found(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_text(dumps(replace(CARD, home="/not/written")), encoding="utf-8")
    assert "not/written" not in path.read_text()
    assert load_card(path).home == str(tmp_path)


@pytest.mark.parametrize(("version", "shown"), [(SCHEMA + 1, str(SCHEMA + 1)), ("1", "'1'"), (None, "schema")])
def test_another_schema_version_is_refused(version: object, shown: str) -> None:
    text = json.dumps({**json.loads(dumps(CARD)), "schema": version})
    with pytest.raises(CardError, match="unknown schema version") as caught:
        loads(text, origin="my.json")
    assert "my.json" in str(caught.value) and shown in str(caught.value) and f"choices: {SCHEMA}" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "not json", dumps(CARD)[:-20], "\x00"])
def test_broken_json_is_one_line_that_names_the_file(text: str) -> None:
    with pytest.raises(CardError, match=r"my\.json is not JSON") as caught:
        loads(text, origin="my.json")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_text_is_a_card_error(tmp_path: Path) -> None:
    path = tmp_path / "card.json"
    path.write_bytes(b"\xff\xfe{}")
    with pytest.raises(CardError, match="is not text"):
        load_card(path)


def edited(*path: str | int, value: object) -> str:
    data = json.loads(dumps(CARD))
    at = data
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return json.dumps(data)


STAGE = ("programs", "text_to_video", "stages", 0)


@pytest.mark.parametrize(
    ("path", "named"),
    [
        (("colour",), "colour"),
        (("components", "vae", "colour"), "colour"),
        (("recipe", "colour"), "colour"),
        ((*STAGE, "colour"), "colour"),
        (("claims", 0, "colour"), "colour"),
    ],
)
def test_an_unknown_field_is_refused_by_name_wherever_it_is(path: tuple[str | int, ...], named: str) -> None:
    with pytest.raises(CardError, match=named) as caught:
        loads(edited(*path, value="red"), origin="my.json")
    assert "my.json" in str(caught.value) and "choices: name, family" in str(caught.value)


@pytest.mark.parametrize("field", ["name", "components", "loops", "programs", "settings", "recipe", "claims"])
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    data = json.loads(dumps(CARD))
    del data[field]
    with pytest.raises(CardError, match=field):
        loads(json.dumps(data))


@given(st.data())
def test_no_edit_of_a_cards_json_raises_anything_but_a_card_error(data: st.DataObject) -> None:
    """Replace a node of the JSON by anything: either it is still a card or the error is ours."""
    tree = json.loads(dumps(CARD))
    at, depth = tree, data.draw(st.integers(1, 5))
    for _ in range(depth):
        keys = list(at) if isinstance(at, dict) else list(range(len(at)))
        if not keys:
            break
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], (dict, list)) or data.draw(st.booleans()):
            at[key] = data.draw(JSON)
            break
        at = at[key]
    try:
        assert isinstance(loads(json.dumps(tree)), Card)
    except CardError as error:
        assert "\n" not in str(error)


def test_cards_are_frozen() -> None:
    stage = CARD.programs["text_to_video"].stages[0]
    for thing, name in [(CARD, "name"), (CARD.recipe, "steps"), (CARD.components["vae"], "dtype"), (stage, "reads"),
                        (CARD.programs["text_to_video"], "stages"), (CARD.claims[0], "bound")]:  # fmt: skip
        with pytest.raises(FrozenInstanceError):
            setattr(thing, name, None)


def test_derive_merges_mappings_key_by_key_and_leaves_the_base_alone() -> None:
    before = dumps(CARD)
    fast = derive(CARD, name="fast", settings={"guidance": "batched"}, recipe=STUDENT, claims=())
    assert dumps(CARD) == before
    assert fast.settings == {**CARD.settings, "guidance": "batched"}
    assert (fast.name, fast.recipe, fast.claims) == ("fast", STUDENT, ())
    assert (fast.components, fast.loops, fast.programs) == (CARD.components, CARD.loops, CARD.programs)
    assert derive(CARD) == CARD


def test_derive_refuses_a_field_no_card_has() -> None:
    with pytest.raises(CardError, match=r"no such field: 'colour'; choices: name, family"):
        derive(CARD, colour="red")


@pytest.fixture
def student(checkpoint: Callable[..., Path], tmp_path: Path) -> tuple[Path, Path]:
    """A teacher's folder, and a student's that holds a transformer of its own and names the teacher for the rest."""
    teacher, folder = checkpoint("t2v", "euler"), tmp_path / "student"
    shutil.copytree(teacher / "transformer", folder / "transformer")
    shared = ("vae", "text_encoder", "tokenizer")
    base = loopwright.load(teacher, device="cpu").card
    recipe = replace(STUDENT, parents=(base.digest,))
    components = {name: replace(base.components[name], source=str(teacher)) for name in shared}
    components["transformer"] = replace(base.components["transformer"], dtype="auto")
    defaults = {"text_to_video": {**base.defaults["text_to_video"], "num_inference_steps": 4}}
    card = derive(base, name="student", components=components, recipe=recipe, defaults=defaults)
    (folder / "card.json").write_text(dumps(card), encoding="utf-8")
    return teacher, folder


def test_a_student_shares_its_teachers_encoder_and_autoencoder_by_reference(student: tuple[Path, Path]) -> None:
    store = Store()
    teacher, own = (loopwright.load(folder, device="cpu", store=store) for folder in student)
    request = media_for("t2v") | {"num_inference_steps": 4}
    results = [m.generate("a red fox", **request) for m in (teacher, own)]
    assert same({"x": results[0].latents}, {"x": results[1].latents})
    for name in ("vae", "text_encoder", "tokenizer"):
        assert teacher.instance.part(name) is own.instance.part(name)
    assert teacher.instance.part("transformer") is not own.instance.part("transformer")
    assert len(store) == 5


def test_a_change_of_a_shared_component_is_seen_by_all_who_share_it(student: tuple[Path, Path]) -> None:
    store = Store()
    teacher, own = (loopwright.load(folder, device="cpu", store=store).instance for folder in student)
    teacher.changed("vae")
    teacher.changed("transformer")
    assert (teacher.version("vae"), own.version("vae")) == (2, 2)
    assert (teacher.version("transformer"), own.version("transformer")) == (2, 1)


def test_models_with_stores_of_their_own_share_nothing(student: tuple[Path, Path]) -> None:
    one, two = (loopwright.load(folder, device="cpu").instance for folder in student)
    assert one.part("vae") is not two.part("vae")


def test_another_precision_of_the_same_files_is_another_component(student: tuple[Path, Path]) -> None:
    store = Store()
    wide, narrow = (loopwright.load(student[0], device="cpu", store=store, dtype=dtype).instance
                    for dtype in ("float32", "bfloat16"))  # fmt: skip
    assert wide.part("transformer") is not narrow.part("transformer")
    assert wide.part("vae") is narrow.part("vae")


@pytest.mark.parametrize("steps", [1, 3, 5, 50])
def test_a_distilled_card_refuses_step_counts_it_was_not_made_for(student: tuple[Path, Path], steps: int) -> None:
    model = loopwright.load(student[1], device="cpu")
    assert model.request("a fox").num_inference_steps == 4
    with pytest.raises(RequestError, match=f"student is distilled for certain step counts.*: {steps}; choices: 4"):
        model.request("a fox", num_inference_steps=steps)


def test_a_distilled_card_refuses_a_sampler_its_weights_do_not_assume(
    student: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(weights, "load_component", explode)
    with pytest.raises(CardError, match=r"'flow_unipc\.cfg/v1'; choices: .*flow_euler\.cfg/v1.*; pick one"):
        loopwright.load(student[1], device="cpu", sampler="unipc")
    loopwright.load(student[0], device="cpu", sampler="unipc")


def test_a_card_file_runs_as_the_folder_it_was_made_from(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(checkpoint("t2v"), folder)
    plain = loopwright.load(folder, device="cpu")
    described = wan.describe(folder)
    (folder / "card.json").write_text(dumps(described), encoding="utf-8")
    again = loopwright.load(folder, device="cpu")
    request = plain.request("a fox", **media_for("t2v"))
    assert again.card.digest == plain.card.digest
    assert same(run(plain.instance, request), run(again.instance, request))


def test_every_error_of_ours_is_a_value_error_on_one_line() -> None:
    error = LoopwrightError("two\nlines", value="x", choices=("a", "b"), remedy="do\tthis")
    assert isinstance(error, ValueError)
    assert str(error) == "two lines: 'x'; choices: a, b; do this"
