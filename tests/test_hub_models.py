"""A model by its hub name, end to end: card from the small files, weights on first use, the commit in the record."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

import loopwright
import tiny
from loopwright.weights import lora
from lora_files import matrices
from standin_hub import StandinHub
from support import media_for

REPO = "tester/tiny-wan"
PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from loopwright.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def hub(checkpoint, tmp_path):
    with StandinHub() as standin:
        standin.commit = standin.add(REPO, checkpoint("t2v", "euler"))
        yield standin


def generate(hub, home, *arguments):
    small = ["--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2", "--seed", "3"]
    environment = {**os.environ, **hub.env(home), "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", PROGRAM, "generate", *arguments, *small, "--json", "--output", "latents"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_a_hub_name_generates_what_the_folder_does_and_records_the_commit(hub, checkpoint, tmp_path):
    target = tmp_path / "out.safetensors"
    done = generate(hub, tmp_path / "home", REPO, "--prompt", "a fox", "--output-path", str(target))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["model"] == REPO and record["revision"] == hub.commit
    local = loopwright.load(checkpoint("t2v", "euler"), device="cpu")
    small = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 2, "seed": 3, "output": "latents"}
    from safetensors.numpy import load_file

    expected = local.generate("a fox", **small).latents.numpy()
    assert np.array_equal(load_file(target)["latents"], expected)
    assert media_for("t2v")["task"] == record["request"]["task"]


def test_an_interrupted_download_goes_on_and_the_result_is_the_same(hub, checkpoint, tmp_path):
    weights = checkpoint("t2v", "euler") / "transformer" / "diffusion_pytorch_model.safetensors"
    hub.cut(weights.read_bytes(), after=20_000, dead=True)
    arguments = (REPO, "--prompt", "a fox", "--output-path", str(tmp_path / "out.safetensors"))
    broken = generate(hub, tmp_path / "home", *arguments)
    assert broken.returncode == 2 and broken.stderr.count("loopwright: error:") == 1, broken.stderr
    assert "Traceback" not in broken.stderr and "run again" in broken.stderr
    assert not (tmp_path / "out.safetensors").exists()
    hub.heal()
    done = generate(hub, tmp_path / "home", *arguments)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.safetensors").exists()


def test_an_unknown_revision_is_one_line(hub, tmp_path):
    failed = generate(hub, tmp_path / "home", REPO, "--prompt", "a fox", "--revision", "v9")
    assert failed.returncode == 2
    assert failed.stderr.strip().splitlines()[-1].startswith("loopwright: error: tester/tiny-wan has no such revision")


def test_an_adapter_that_does_not_fit_is_refused_before_weights_are_fetched(hub, checkpoint, tmp_path):
    other = tiny.reference(checkpoint("ti2v"), "ti2v").transformer
    file = lora.save(tmp_path / "other.safetensors", matrices(other, ["proj_out"]), alpha=4)
    failed = generate(hub, tmp_path / "home", REPO, "--prompt", "a fox", "--lora", str(file))
    assert failed.returncode == 2
    assert "other.safetensors: the matrices of proj_out do not fit" in failed.stderr.strip().splitlines()[-1]
    fetched = {path.name for path in (tmp_path / "home").rglob("*")}
    assert "model_index.json" in fetched and not any(name.endswith(".safetensors") for name in fetched)
