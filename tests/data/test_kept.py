"""What takes long is made once, and again when what it depends on changes."""

import torch

from loopwright.data.kept import kept


def test_made_once_and_anew_for_other_things(tmp_path):
    made = []

    def make() -> dict[str, torch.Tensor]:
        made.append(1)
        return {"numbers": torch.arange(4).float() + len(made)}

    first = kept(tmp_path / "cache", "numbers", {"count": "4", "of": "a"}, make)
    again = kept(tmp_path / "cache", "numbers", {"of": "a", "count": "4"}, make)
    assert len(made) == 1 and torch.equal(first["numbers"], again["numbers"])
    other = kept(tmp_path / "cache", "numbers", {"count": "4", "of": "b"}, make)
    assert len(made) == 2 and not torch.equal(first["numbers"], other["numbers"])


def test_a_file_of_others_is_replaced(tmp_path):
    (tmp_path / "numbers.safetensors").write_bytes(b"not one of ours")
    found = kept(tmp_path, "numbers", {}, lambda: {"numbers": torch.ones(2)})
    assert torch.equal(kept(tmp_path, "numbers", {}, dict)["numbers"], found["numbers"])
