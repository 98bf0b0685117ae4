"""`loopwright backends`, and a generation whose kernels are chosen on the command line."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from loopwright.backends.registry import KERNELS
from loopwright.cli import main

SMALL = ("--height", "32", "--width", "48", "--num-frames", "5", "--num-inference-steps", "2", "--device", "cpu")


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable:
    """Exit status, stdout and stderr of a command run in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(arguments)
        return status, *capsys.readouterr()

    return run


def test_every_kernel_is_listed_for_the_cpu_with_the_reason_where_it_cannot_run(said: Callable) -> None:
    status, out, _ = said("backends", "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    kernels = {row["kernel"]: row for row in rows if row["device"] == "cpu" and "kernel" in row}
    assert status == 0 and list(kernels) == list(KERNELS)
    assert all(row["available"] is (row["reason"] == "") for row in kernels.values())
    assert kernels["sdpa"]["available"] and kernels["sdpa"]["backward"]
    assert kernels["fa3"] == kernels["fa3"] | {"available": False, "reason": "needs cuda", "precisions": []}
    assert [row["architecture"] for row in rows if row["device"] == "cpu" and "kernel" not in row] == ["cpu"]


def test_the_tables_say_the_same(said: Callable) -> None:
    status, out, _ = said("backends")
    devices, kernels = out.split("\n\n")[0].splitlines(), out.split("\n\n")[1].splitlines()
    assert status == 0
    assert devices[-1].startswith("cpu") and "float32" in devices[-1]
    assert kernels[0].split()[:4] == ["device", "kernel", "kind", "available"]
    assert [line.split()[1] for line in kernels if line.startswith("cpu")] == list(KERNELS)


def test_a_chosen_attention_is_in_the_file_and_is_repeated_from_it(said: Callable, checkpoint: Callable) -> None:
    _, out, _ = said("generate", str(checkpoint("t2v")), *SMALL, "--prompt", "a fox", "--seed", "1",
                     "--attention", "math", "--output-path", "fox.mp4", "--json")  # fmt: skip
    assert json.loads(out)["request"]["attention"] == "math"
    _, out, _ = said("generate", "--like", "fox.mp4", "--output-path", "again.mp4", "--json")
    assert json.loads(out)["request"]["attention"] == "math"
    _, out, _ = said("generate", "--like", "fox.mp4", "--attention", "sdpa", "--output-path", "usual.mp4", "--json")
    assert (request := json.loads(out)["request"])["attention"] == "sdpa" and request["kernels"] == "plain"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--attention", "cudnn"), "attention not available on cpu (needs cuda): 'cudnn'; choices: sdpa, math, flash"),
        (("--kernels", "fused"), "kernels not available on cpu (adaptive_norm needs cuda): 'fused'; choices: plain"),
        (("--attention", "fast"), "unknown attention: 'fast'; choices: sdpa, math, flash"),
    ],
)
def test_what_cannot_run_here_is_one_line_before_weights_are_read(
    flags: tuple[str, ...], message: str, said: Callable, checkpoint: Callable
) -> None:
    status, out, err = said("generate", str(checkpoint("t2v")), *SMALL, "--prompt", "a fox", *flags)
    assert (status, out) == (2, "")
    assert message in err and "load" not in err.splitlines()[0]
    assert len(err.splitlines()) == 1
