"""Prompts come with their facts, and each once before any comes again."""

import json

import pytest

from loopwright.errors import DataError, RequestError
from loopwright.training.prompts import Prompt, read, taken


def test_rows_have_facts_and_lines_none(tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "the word CAT", "text": "CAT"}) + "\n\n")
    (tmp_path / "lines.txt").write_text("a fox\n\na bird \n")
    assert read(str(tmp_path / "rows.jsonl")) == (Prompt("the word CAT", {"text": "CAT"}),)
    assert read(str(tmp_path / "lines.txt")) == (Prompt("a fox", {}), Prompt("a bird", {}))


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "holds no prompts"), ("{", "rows.jsonl:1: is not JSON"), ('{"text": "CAT"}', "rows.jsonl:1: has no prompt"),
     ('{"prompt": "a"}\n{"prompt": 3}', "rows.jsonl:2: is not an object of texts")],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, said):
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(DataError, match=said):
        read(str(tmp_path / "rows.jsonl"))
    with pytest.raises(RequestError, match="cannot read prompts"):
        read(str(tmp_path / "nowhere.txt"))


def test_every_prompt_comes_once_before_any_comes_again_over_epochs():
    numbers = [number for epoch in range(9) for number in taken(6, 4, epoch, seed=1)]
    rounds = [sorted(numbers[first : first + 6]) for first in range(0, 36, 6)]
    assert rounds == [list(range(6))] * 6
    assert taken(6, 4, 2, seed=1) == numbers[8:12] != taken(6, 4, 2, seed=2)
