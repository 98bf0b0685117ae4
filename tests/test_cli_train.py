"""`loopwright train`: trains what a file says, shows it beforehand, and ends well when interrupted."""

import os
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from encoded import write_rows
from loopwright.cli import main
from loopwright.cli.train import resume_command
from loopwright.training import session
from loopwright.training.run import read

Train = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("set"))


@pytest.fixture
def file(rows_file, checkpoint, tmp_path) -> Path:
    """A run of four steps."""
    model = str(checkpoint("t2v"))
    data = {"dataset": str(rows_file), "encoder_checkpoint": model, "cache": str(tmp_path / "cache")}
    run = {"model": model, "output": str(tmp_path / "out"), "steps": 4, "batch_size": 2, "device": "cpu", "sinks": []}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**run, "data": {**data, "geometry": ["32x32x5"]}}))
    return path


@pytest.fixture
def command(file, monkeypatch, capsys) -> Train:
    """`command(*flags)`: train as the file says; gives status, stdout and stderr."""
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)

    def run(*flags: str, run: Path | str = file):
        status = main(["train", str(run), *flags])
        return status, *capsys.readouterr()

    return run


def test_it_trains_tells_and_prints_where_the_result_is(command, tmp_path):
    status, out, err = command()
    assert (status, out) == (0, f"{tmp_path / 'out' / 'model'}\n")
    assert err.splitlines()[-1].startswith("step 4/4  loss ") and "lr 1.00e-05" in err
    assert (tmp_path / "out" / "model" / "card.json").is_file()
    assert command("--quiet") == (0, out, "continuing after step 4 of 4\n")


def test_a_dry_run_prints_a_run_that_reads_the_same_and_writes_nothing(command, file, tmp_path):
    before = sorted(tmp_path.rglob("*"))
    status, out, err = command("--dry-run", "--set", "lora.rank=2", "--set", "optimiser.betas=[0.8, 0.9]")
    assert status == 0 and "# 4 steps, 2 epochs of 5 rows; trains transformer" in err
    assert sorted(tmp_path.rglob("*")) == before
    again = tmp_path / "again.yaml"
    again.write_text(out)
    run = read(again)
    assert (run.lora.rank, run.optimiser.lr, run.optimiser.betas, run.precision) == (2, 1e-4, (0.8, 0.9), "float32")
    assert command("--dry-run", run=again)[1] == out


def test_the_geometry_flags_are_those_of_generate_and_encode(command, tmp_path):
    def geometry(*flags: str) -> tuple[list[str], int, str]:
        data = yaml.safe_load(command("--dry-run", *flags)[1])["data"]
        return data["geometry"], data["frame_stride"], data["crop"]

    assert geometry("--height", "32", "--width", "48", "--num-frames", "1", "--crop", "none") == (
        ["32x48x1"],
        1,
        "none",
    )
    assert geometry("--bucket", "32x32x1", "--bucket", "32x32x5") == (["32x32x1", "32x32x5"], 1, "center")
    assert command("--height", "32")[2].startswith("loopwright: error: half a geometry; add --width, --num-frames")


def test_an_interrupted_run_says_how_to_continue_and_does(command, monkeypatch, tmp_path):
    real = session.Session._due

    def interrupting(self, trainer):
        if trainer.step == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, trainer)

    monkeypatch.setattr(session.Session, "_due", interrupting)
    monkeypatch.setattr(sys, "argv", ["loopwright", "train", "my run.yaml", "--set", "seed=0"])
    status, out, err = command()
    assert (status, out) == (130, "")
    assert err.splitlines()[-1] == "interrupted after step 2; to continue: loopwright train 'my run.yaml' --set seed=0"
    monkeypatch.setattr(session.Session, "_due", real)
    status, _, err = command()
    assert status == 0 and "continuing after step 2 of 4" in err


def test_the_command_to_continue_is_the_one_given():
    argv = ["train", "my run.yaml", "--set", "a.b=[1, 2]"]
    assert shlex.split(resume_command(argv)) == ["loopwright", *argv]


def test_two_processes_train_one_run_and_speak_once(file, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(Path(session.__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "loopwright", "train", str(file), "--processes", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{tmp_path / 'out' / 'model'}\n" and done.stderr.count("step 4/4") == 1
    (shards,) = {len(list(p.glob("*.safetensors"))) for p in (tmp_path / "out" / "checkpoints").iterdir()}
    assert shards == 2


def test_a_dry_run_checks_what_so_many_processes_need(command, tmp_path):
    (tmp_path / "feeds.py").write_text("def numbers(device): ...\n")
    drawn = ("--set", "data=null", "--set", f"drawn={{file: {tmp_path / 'feeds.py'}, source: numbers}}")
    assert command("--dry-run", *drawn, "--processes", "2")[0] == 0
    status, out, err = command("--dry-run", *drawn, "--processes", "3")
    assert (status, out) == (2, "") and "drawn rows are shared out evenly: 2; make batch_size a multiple of 3" in err


@pytest.mark.slow
def test_what_all_processes_find_out_while_running_is_told_once(file, rows_file, tmp_path, monkeypatch, capfd):
    """A row that cannot be read is met by the process alone that encodes it, and ends all."""
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    dataset = shutil.copytree(rows_file.parent, tmp_path / "clips") / rows_file.name
    (dataset.parent / "1.mp4").write_bytes(b"no video")
    status = main(["train", str(file), "--processes", "2", "--set", f"data.dataset={dataset}"])
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert status == 2 and line.startswith(f"loopwright: error: {dataset}:2: ")
    assert line.endswith("1 in all; loopwright encode lists them")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--set", "optimiser.lr=fast"], "optimiser.lr must be a number: 'fast'"),
        (["--set", "optimizer.lr=1"], "no such setting: 'optimizer'; choices: optimiser"),
        (["--set", "lr"], "not a setting: 'lr'; write --set NAME=VALUE"),
        (["--set", "lora.targets=[to_z]"], "lora.targets: no linear layer has a name that ends so: 'to_z'"),
        (["--set", "grpo.clip=0.01"], "method sft does not read grpo.clip"),
        (["--set", "precision=float16"], "unknown precision: 'float16'; choices: auto, float32, bfloat16"),
        (["--set", "evaluation.every=1"], "evaluation needs rows held out"),
        (["--processes", "0"], "processes must be at least 1: 0"),
        (["--processes", "2", "--set", "data.held_out=2"], "data.held_out must be at least 0 and below 1: 2.0"),
        (["--set", "output=/dev/null"], "output is not a folder: '/dev/null'"),
        (["--set", "model=./nowhere"], "no such folder: 'nowhere'"),
    ],
)
def test_bad_input_is_one_line(flags, message, command, tmp_path):
    status, out, err = command(*flags)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith("loopwright: error: ") and message in err and not (tmp_path / "out").exists()


def test_a_file_that_is_not_there_is_told(command):
    status, _, err = command(run="nowhere.py")
    assert status == 2 and "cannot read nowhere.py (no such file)" in err


def test_help_is_quick_and_imports_no_torch():
    code = "import sys\nfrom loopwright.cli import main\ntry: main(['train', '--help'])\nexcept SystemExit: pass\n"

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3
