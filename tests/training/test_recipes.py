"""The runs in this repository, and those that its documents show, are runs."""

import re
from pathlib import Path

import pytest

from loopwright.training.run import Run, read

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "runs").rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_recipe_reads(file):
    assert isinstance(read(file), Run)


def test_there_is_a_recipe():
    assert FILES


def test_the_runs_in_the_documentation_read(tmp_path):
    shown = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "training.md").read_text(), re.DOTALL)
    for text, method in zip(shown, ("sft", "grpo"), strict=True):
        (tmp_path / "run.yaml").write_text(text)
        run = read(tmp_path / "run.yaml")
        assert run.lora.rank == 32 and run.method == method
