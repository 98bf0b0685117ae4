"""`loopwright models pull`, `list` and `remove`, against a hub on this machine."""

import json
import os
import subprocess
import sys

import pytest

from loopwright.cli import main
from standin_hub import StandinHub

REPO = "tester/tiny-wan"
PROGRAM = """
import json, sys
from loopwright.cli import main
for command in json.loads(sys.argv[1]):
    print("status", main(["models", *command]), flush=True)
assert "torch" not in sys.modules
"""


@pytest.fixture
def run(checkpoint, tmp_path):
    """`run(*commands)` of `loopwright models`, in one process, with a cache of its own."""
    with StandinHub() as hub:
        commit = hub.add(REPO, checkpoint("t2v", "euler"))

        def commands(*given: tuple[str, ...]) -> tuple[list[str], str]:
            environment = {**os.environ, **hub.env(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
            command = [sys.executable, "-c", PROGRAM, json.dumps(given)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
            assert done.returncode == 0, done.stderr
            return done.stdout.splitlines(), done.stderr

        commands.commit, commands.hub = commit, hub
        yield commands


def test_a_model_is_fetched_listed_and_removed(run, checkpoint, tmp_path):
    pull = ("pull", REPO)
    out, err = run(("list", "--json"), pull, ("list", "--json"), pull, ("list",))
    before = [json.loads(line)["name"] for line in out if line.startswith("{")]
    assert before.count("loopwright/tiny-wan") == 2 and before.count(REPO) == 1
    row = next(json.loads(line) for line in out if REPO in line and line.startswith("{"))
    assert row["revision"] == f"main, {run.commit[:12]}" and out.count(row["folder"]) == 2
    assert "fetching transformer\n" in err and "fetching vae\n" in err
    files = {path.name: path.stat().st_size for path in checkpoint("t2v", "euler").rglob("*.safetensors")}
    here = {path.name for path in (tmp_path / "home").rglob("*.safetensors")}
    assert set(files) <= here and row["size"] > sum(files.values())
    fetched = [seen for seen in run.hub.seen if seen.method == "GET" and seen.path.endswith(".safetensors")]
    assert len(fetched) == len({seen.path for seen in fetched})  # the second pull fetched nothing again
    out, err = run(("remove", REPO, "--revision", "v9"), ("remove", REPO), ("remove", REPO), ("list", "--json"))
    assert [line for line in out if line.startswith("status")] == ["status 2", "status 0", "status 2", "status 0"]
    assert out[1].startswith(f"removed {REPO}, ")
    assert f"no such revision of {REPO} in the cache: 'v9'; choices: main" in err
    assert f"no such model in the cache: '{REPO}'" in err
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("pull", "loopwright/tiny-wan"), "nothing to fetch: this model is here: 'loopwright/tiny-wan'"),
        (("pull", "."), "nothing to fetch: this model is here: '.'"),
        (("remove", "loopwright/tiny-wan"), "a model that ships cannot be removed"),
        (("drop", "x"), "invalid choice: 'drop'"),
        (("pull",), "the following arguments are required: MODEL"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(command, message, capsys):
    assert main(["models", *command]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
