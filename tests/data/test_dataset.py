"""Every form gives the same rows, and what is wrong with one is told with its place."""

import os
from pathlib import Path

import pytest

from footage import jsonl
from loopwright.data.dataset import entries, read
from loopwright.data.row import Row
from loopwright.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two films and a photo, in name only."""
    for name in ("fox.mp4", "owl.webm", "sea.png"):
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def problems(path: Path) -> list[str]:
    """Everything wrong, the folder cut from the places."""
    return [str(e).replace(f"{path.parent}{os.sep}", "") for e in entries(path) if isinstance(e, DataError)]


def told(rows: list[Row]) -> list[tuple[str, str, str]]:
    return [(row.prompt, row.path.name, row.kind) for row in rows]


def test_all_forms_declare_the_same_rows(folder: Path):
    expected = [("a fox", "fox.mp4", "video"), ("an owl", "owl.webm", "video"), ("the sea, calm", "sea.png", "image")]
    short = jsonl(folder / "short.jsonl", [{"prompt": "a fox", "video": "fox.mp4"}, "",
                                           {"prompt": "an owl", "file_name": "owl.webm"},
                                           {"text": "the sea, calm", "image": "sea.png"}])  # fmt: skip
    general = jsonl(
        folder / "general.jsonl", [{"text": text, "target": {"visual": name}} for text, name, _ in expected]
    )
    assert told(read(short)) == told(read(general)) == expected
    assert [row.line for row in read(short)] == [1, 3, 4]
    for name, text in {"fox": "a fox\n", "owl": " an owl", "sea": "the sea, calm"}.items():
        (folder / f"{name}.txt").write_text(text)
    assert told(read(folder)) == expected
    assert [row.file.name for row in read(str(folder))] == ["fox.txt", "owl.txt", "sea.txt"]
    table = 'file_name,text\nfox.mp4,a fox\nowl.webm,an owl\nsea.png,"the sea, calm"\n'
    (folder / "metadata.csv").write_text(table)
    assert told(read(folder)) == told(read(folder / "metadata.csv")) == expected
    (folder / "metadata.csv").write_bytes(b"\xef\xbb\xbf" + table.replace("\n", "\r\n").encode())
    assert told(read(folder)) == expected


def test_a_csv_names_the_line_a_record_begins_on(folder: Path):
    file = folder / "rows.csv"
    file.write_text('image,prompt\nsea.png,"the sea\nat night"\n\nsea.png,\nsea.png,a,b\n')
    (row,) = (entry for entry in entries(file) if isinstance(entry, Row))
    assert (row.prompt, row.where) == ("the sea\nat night", f"{file}:2")
    assert problems(file) == [
        "rows.csv:5: empty prompt; write what is seen, or take the row out",
        "rows.csv:6: more cells than columns: 3; choices: image, prompt; put quotes around a caption with commas",
    ]


def test_wrong_columns_are_said_once(folder: Path):
    file = folder / "rows.csv"
    file.write_text("path,text\nfox.mp4,a fox\nowl.webm,an owl\n")
    assert problems(file) == [
        "rows.csv:1: unknown column: 'path'; choices: video, image, file_name, prompt, text",
        "rows.csv:1: no column with the media file: 'path,text'; choices: video, image, file_name",
    ]
    file.write_text('image,text\nsea.png,"half\n')
    (problem,) = problems(file)
    assert problem.startswith("rows.csv:2: not CSV")


def test_conditions_are_read_with_their_roles(folder: Path):
    condition = {"type": "image", "uri": "sea.png", "role": "first_frame"}
    (row,) = read(jsonl(folder / "a.jsonl", [{"text": "t", "target": {"visual": "fox.mp4", "audio": None},
                                              "conditions": [condition]}]))  # fmt: skip
    (found,) = row.conditions
    assert (found.kind, found.path.name, found.role) == ("image", "sea.png", "first_frame")


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ('{"prompt": "a', "not JSON (Unterminated string"),
        ("[1]", "not an object: [1]"),
        ({"prompt": "a"}, "no media file; choices: video, image, file_name"),
        ({"video": "fox.mp4"}, "no caption; choices: prompt, text"),
        ({"prompt": " ", "video": "fox.mp4"}, "empty prompt"),
        ({"prompt": 3, "video": "fox.mp4"}, "prompt must be text: 3"),
        ({"prompt": "\udce9", "video": "fox.mp4"}, "not text in UTF-8"),
        ({"prompt": "a", "text": "b", "video": "fox.mp4"}, "more than one caption: 'prompt and text'"),
        ({"prompt": "a", "video": "fox.mp4", "image": "sea.png"}, "more than one media file: 'video and image'"),
        ({"prompt": "a", "video": "dog.mp4"}, "no such file"),
        ({"prompt": "a", "video": ""}, "video must be the path of a file: ''"),
        ({"prompt": "a", "video": "."}, "no such file"),
        ({"prompt": "a", "video": "https://example.org/fox.mp4"}, "not on this machine"),
        ({"prompt": "a", "file_name": "rows.jsonl"}, "cannot tell an image from a video"),
        ({"prompt": "a", "video": "fox.mp4", "fps": 8}, "unknown key: 'fps'"),
        ({"text": "a", "target": "fox.mp4"}, "target must be an object: 'fox.mp4'"),
        ({"text": "a", "target": {}}, "target.visual must be the path of a file"),
        ({"text": "a", "target": {"visual": "fox.mp4", "audio": "a.wav"}}, "sound cannot be trained on: 'a.wav'"),
        ({"text": "a", "target": {"visual": "fox.mp4", "depth": 1}}, "unknown key of target: 'depth'"),
        ({"text": "a", "target": {"visual": "fox.mp4"}, "conditions": {}}, "conditions must be a list"),
        ({"text": "a", "target": {"visual": "fox.mp4"}, "conditions": [{"type": "image", "uri": "sea.png"}]},
         "conditions[0].role must be text"),
        ({"text": "a", "target": {"visual": "fox.mp4"}, "conditions": [{"type": "x", "uri": "sea.png", "role": "r"}]},
         "unknown conditions[0].type: 'x'; choices: image, video"),
    ],
)  # fmt: skip
def test_a_bad_row_is_told_with_its_line(row: object, expected: str, folder: Path):
    good = {"prompt": "a fox", "video": "fox.mp4"}
    file = jsonl(folder / "rows.jsonl", [good, row, good])
    assert [p for p in problems(file) if p.startswith("rows.jsonl:2: ") and expected in p]
    assert not [p for p in problems(file) if not p.startswith("rows.jsonl:2: ")]
    assert len([entry for entry in entries(file) if isinstance(entry, Row)]) == 2
    with pytest.raises(DataError, match=r"rows\.jsonl:2") as caught:
        read(file)
    assert "\n" not in str(caught.value) and caught.value.where == f"{file}:2"


def test_everything_wrong_with_a_row_is_told_at_once(folder: Path):
    file = jsonl(folder / "rows.jsonl", [{"prompt": "", "vidoe": "fox.mp4"}, {"prompt": "a", "video": "no.mp4"}])
    assert [p.split(":")[1] for p in problems(file)] == ["1", "1", "1", "2"]
    with pytest.raises(DataError, match=r"and 3 more; loopwright data check .*rows\.jsonl lists them all"):
        read(file)


def test_bytes_that_are_no_text_are_told_with_their_line(folder: Path):
    for name, first in (("rows.jsonl", b"\n"), ("rows.csv", b"image,text\n")):
        (folder / name).write_bytes(first + b"\xff\xfe\n")
        assert [p for p in problems(folder / name) if p.startswith(f"{name}:2: not text in UTF-8")]


def test_media_without_a_caption_and_captions_without_media_are_told(folder: Path):
    (folder / "deep").mkdir()
    (folder / "deep" / "fox.mp4").write_bytes(b"")
    (folder / "deep" / "fox.txt").write_text("a deep fox")
    (folder / ".hidden.png").write_bytes(b"")
    (folder / "fox.txt").write_text("")
    (folder / "dog.txt").write_text("a dog")
    found = [p.removeprefix(f"{folder.name}{os.sep}") for p in problems(folder)]
    assert found == [
        "fox.txt:1: empty text; write what is seen, or take the row out",
        "owl.webm: no caption; write owl.txt beside it",
        "sea.png: no caption; write sea.txt beside it",
        *[p for p in found if p.startswith("dog.txt: a caption without its media")],
    ]
    assert len(found) == 4
    assert [row.prompt for row in entries(folder) if isinstance(row, Row)] == ["a deep fox"]


def test_what_is_no_data_set_says_what_would_be(folder: Path):
    (folder / "none").mkdir()
    (folder / "none.jsonl").write_text("\n")
    for name, message in {"absent": "no such data set", "fox.mp4": "not a data set", "none": "no rows",
                          "none.jsonl": "no rows"}.items():  # fmt: skip
        with pytest.raises(DataError, match=rf"{message}.*a folder of media"):
            read(folder / name)
    (folder / "metadata.csv").write_text("")
    (folder / "metadata.jsonl").write_text("")
    with pytest.raises(DataError, match="two declarations"):
        read(folder)


def test_content_is_the_bytes_wherever_they_lie(folder: Path):
    (folder / "copy.mp4").write_bytes(b"fox.mp4")
    fox, copy, owl = read(
        jsonl(folder / "a.jsonl", [{"prompt": "x", "video": n} for n in ("fox.mp4", "copy.mp4", "owl.webm")])
    )
    assert fox.content == copy.content != owl.content
    before = fox.content
    fox.path.write_bytes(b"another film")
    assert fox.content != before
    fox.path.unlink()
    with pytest.raises(DataError, match=r"a\.jsonl:1: cannot read .*fox\.mp4"):
        _ = fox.content
