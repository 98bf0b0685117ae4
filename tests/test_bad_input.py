"""Bad input is one line that names what is wrong and what would do, exit status 2, and costs the user nothing."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loopwright import media
from loopwright.cli import main

SMALL = ("--height", "32", "--width", "48", "--num-frames", "5", "--num-inference-steps", "2", "--device", "cpu")

Refused = Callable[..., str]


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)
    return tmp_path


@pytest.fixture
def refused(here, capsys) -> Refused:
    """`refused(*arguments)`: the one line, after checking that nothing else was said, left behind or raised."""

    def run(*arguments: str) -> str:
        before = contents()
        status = main(arguments)
        out, err = capsys.readouterr()
        lines = [line for line in err.splitlines() if not line.startswith(("load", "text: ", "denoise: "))]
        assert status == 2, err
        assert out == ""
        assert contents() == before
        (line,) = lines
        return line.removeprefix("loopwright: error: ")

    return run


@pytest.fixture
def generate(refused, checkpoint) -> Refused:
    """`refused` for a small generation that would work without the flags given."""
    return lambda *flags, model="t2v": refused("generate", str(checkpoint(model)), *SMALL, "--prompt", "a", *flags)


@pytest.fixture
def broken(here, checkpoint) -> Callable[[str], Path]:
    """A copy of a tiny checkpoint, to be damaged."""
    return lambda kind: Path(shutil.copytree(checkpoint(kind), "model"))


def contents() -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in Path(".").rglob("*") if path.is_file()}


def poison(file: Path) -> None:
    """One NaN among the weights of the layer that comes last."""
    weights = load_file(file)
    weights["proj_out.weight"][0, 0] = torch.nan
    save_file(weights, file, metadata={"format": "pt"})


# The command itself


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: COMMAND; see loopwright --help"),
        (["generates"], "invalid choice: 'generates'"),
        (["generate"], "no model; name one, such as loopwright/tiny-wan"),
        (["generate", "a/b", "--model-path", "c/d"], "two models: 'a/b and c/d'; name one"),
        (["generate", "a/b"], 'no prompt; give --prompt "..." or --prompt-file'),
        (["generate", "a/b", "--heigth", "3"], "unrecognized arguments: --heigth 3 (did you mean --height?)"),
        (["generate", "a/b", "--prompt", "x", "--height", "tall"], "argument --height: invalid int value: 'tall'"),
        (["generate", "a/b", "--prompt"], "argument --prompt: expected one argument"),
        (["verify"], "the following arguments are required: MODEL"),
        (["verify", "./nowhere"], "no such folder: 'nowhere'"),
    ],
)  # fmt: skip
def test_wrong_usage(refused, arguments, said):
    assert said in refused(*arguments)


def test_debugging_says_where_an_error_comes_from(here, capsys, monkeypatch):
    monkeypatch.setenv("LOOPWRIGHT_DEBUG", "1")
    assert main(["generate", "./nowhere", "--prompt", "a"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("Traceback") and said.splitlines()[-1].startswith("loopwright: error: no such folder")


# The model


def test_missing_folder(refused):
    assert "no such folder: 'nowhere'; choices: loopwright/tiny-wan" in refused(
        "generate", "./nowhere", "--prompt", "a"
    )


def test_unknown_shipped_model(refused):
    assert "no model of that name ships" in refused("generate", "loopwright/huge", "--prompt", "a")


def test_folder_that_is_no_checkpoint(refused, here):
    assert "holds neither card.json nor model_index.json" in refused("generate", str(here), "--prompt", "a")


def test_broken_model_index(refused, broken):
    folder = broken("t2v")
    (folder / "model_index.json").write_text('{"_class_name": ')
    assert "model/model_index.json is not valid JSON" in refused("generate", "./model", "--prompt", "a")


def test_unknown_pipeline(refused, broken):
    index = broken("t2v") / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "_class_name": "OtherPipeline"}))
    said = refused("generate", "./model", "--prompt", "a")
    assert "no family makes this pipeline: 'OtherPipeline'; choices: WanImageToVideoPipeline" in said


def test_truncated_weights(refused, broken):
    file = broken("t2v") / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    said = refused("generate", "./model", *SMALL, "--prompt", "a", "--output-path", "a.mp4")
    assert re.search(r"model/transformer/\S+ is damaged: \d+ bytes where its header says \d+; download it again", said)


def test_missing_shard(refused, broken):
    folder = broken("t2v") / "transformer"
    os.rename(folder / "diffusion_pytorch_model.safetensors", folder / "a-00001-of-00002.safetensors")
    shards = {"x": "a-00001-of-00002.safetensors", "y": "a-00002-of-00002.safetensors"}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    said = refused("generate", "./model", *SMALL, "--prompt", "a")
    assert "model/transformer/a-00002-of-00002.safetensors is missing" in said


# The parameters


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--height", "33"], "height must be a multiple of 16: 33; nearest: 32 or 48"),
        (["--width", "5"], "width must be a multiple of 16: 5; nearest: 16"),
        (["--num-frames", "10"], "num_frames must be a multiple of 4 plus 1: 10; nearest: 9 or 13"),
        (["--output", "gif"], "unknown output: 'gif'; choices: video, latents"),
        (["--sampler", "magic"], "unknown sampler: 'magic'; choices: euler, unipc"),
        (["--device", "tpu"], "this machine has no such device: 'tpu'; choices: auto"),
        (["--dtype", "int3"], "unknown dtype: 'int3'; choices: float32, bfloat16, float16"),
        (["--task", "text_to_smell"], "has no such task: 'text_to_smell'; choices: text_to_video, video_to_video"),
        (["--revision", "v1"], "a local folder has no revisions: 'v1'"),
        (["--guidance-scale", "-1"], "guidance_scale must be a number at least 0: -1.0"),
        (["--guidance-scale", "nan"], "guidance_scale must be a number at least 0: nan"),
        (["--guidance-scale-2", "3"], "has one expert and no guidance_scale_2: 3.0; leave it out"),
        (["--num-inference-steps", "0"], "num_inference_steps must be a whole number of at least 1: 0"),
        (["--strength", "2"], "strength must be a number from 0 to 1: 2.0"),
        (["--flow-shift", "0"], "flow_shift must be above 0: 0.0"),
        (["--fps", "0"], "fps must be a whole number of at least 1: 0"),
        (["--threads", "0"], "threads must be at least 1: 0"),
        (["--seed", "-1"], "seed must be a whole number of at least 0: -1"),
        (["--seed", str(2**63)], f"seed is out of range: {2**63}; 0 to {2**63 - 1}"),
        (["--negative-prompt", "\udcff"], "a prompt is not text in UTF-8"),
    ],
)
def test_parameter_out_of_range(generate, flags, said):
    assert said in generate(*flags)


def test_empty_prompt_file(refused, checkpoint):
    Path("none.txt").write_text("# only a comment\n\n", encoding="utf-8")
    said = refused("generate", str(checkpoint("t2v")), "--prompt-file", "none.txt")
    assert said.startswith("none.txt holds no prompt")


def test_prompt_file_that_is_no_text(generate, here):
    Path("noise.txt").write_bytes(b"\xff\xfe\xfa")
    assert generate("--prompt-file", "noise.txt").startswith("cannot read noise.txt")
    assert generate("--prompt-file", str(here)).startswith("cannot read ")
    assert "cannot read gone.txt (No such file or directory)" in generate("--prompt-file", "gone.txt")


def test_image_for_a_text_model(generate):
    media.write("a.png", np.zeros((32, 48, 3), np.uint8), fps=1, metadata={})
    assert "has no task that takes image; choices: text_to_video (prompt alone)" in generate("--image", "a.png")
    assert "task text_to_video of" in generate("--image", "a.png", "--task", "text_to_video")


def test_image_that_is_missing_or_broken(generate):
    Path("a.png").write_bytes(b"\x89PNG and no more")
    assert "no such file: 'gone.png'" in generate("--image", "gone.png", model="ti2v")
    assert "cannot read a.png" in generate("--image", "a.png", model="ti2v")


def test_video_shorter_than_the_frames_asked_for(generate):
    media.write("short.mp4", np.zeros((5, 32, 48, 3), np.uint8), fps=16, metadata={})
    assert "the video has 5 frames, 9 are asked for" in generate("--video", "short.mp4", "--num-frames", "9")


# The configuration


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_framez: 9", "c.yaml: unknown key: 'num_framez'; choices: model, model_path, revision"),
        ("config: c.yaml", "c.yaml: unknown key: 'config'"),
        ("seed: 1\nSeed: 2", "c.yaml: unknown key: 'Seed'"),
        ("num-frames: 1\nnum_frames: 5", "c.yaml: key given twice: 'num_frames'"),
        ("seed: one", "c.yaml: seed must be a whole number: 'one'"),
        ("seed: true", "c.yaml: seed must be a whole number: True"),
        ("guidance_scale: high", "c.yaml: guidance_scale must be a number: 'high'"),
        ("image: 7", "c.yaml: image must be text: 7"),
        ("quiet: 1", "c.yaml: quiet must be true or false: 1"),
        ("a: [b", "c.yaml is neither YAML nor JSON"),
        ("- seed", "c.yaml holds no settings: ['seed']"),
        ("# nothing yet", "c.yaml holds no settings; write lines such as seed: 7"),
    ],
)
def test_bad_configuration(generate, text, said):
    Path("c.yaml").write_text(text, encoding="utf-8")
    assert generate("--config", "c.yaml").startswith(said)


def test_missing_configuration(generate):
    assert generate("--config", "gone.yaml").startswith("cannot read gone.yaml (No such file or directory)")


# The files to write


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--output-path", "a.avi"], "cannot tell the format from the file's suffix: 'a.avi'; choices: .mp4, .gif"),
        (["--contact-sheet", "a.txt"], "cannot tell the format from the file's suffix: 'a.txt'"),
        (["--output-path", "file/a.mp4"], "cannot write file/a.mp4 (Not a directory)"),
        (["--output-path", "file/a.safetensors"], "cannot write file/a.safetensors (Not a directory)"),
        (["--output-path", "file"], "(Not a directory); choose another place"),
        (["--output-path", f"{'a' * 300}.mp4"], "(File name too long)"),
        (["--output-path", "a\0.mp4"], "(embedded null byte)"),
        (["--output-path", ""], "--output-path is empty"),
        (["--output-path", "a.png"], "a .png holds one frame: 5; choices: .mp4, .gif, .webp"),
        (["--output-path", "a.gif", "--fps", "60"], "too fast for a GIF, in frames per second: 60"),
        (["--output-path", "a.mp4", "--prompt", "b"], "--output-path names one file for several prompts: 'a.mp4'"),
        (["--output-path", "a.mp4", "--output", "latents"], "--output latents needs another suffix: 'a.mp4'"),
        (["--output-path", "a.safetensors", "--output", "video"], "--output video needs another suffix"),
        (["--output", "latents", "--contact-sheet", "a.png"], "latents have no frames for a contact sheet"),
        (["--output-path", "a.gif", "--contact-sheet", "a.gif"], "--contact-sheet is the file of --output-path"),
        (["--output-path", "s.mp4", "--video", "s.mp4"], "--output-path is the file of --video: 's.mp4'"),
    ],
)  # fmt: skip
def test_place_that_cannot_be_written(generate, monkeypatch, flags, said):
    """Said before any weight is read."""

    def unwanted(*args: object) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr("loopwright.engine.instance.Instance.part", unwanted)
    Path("file").write_text("in the way")
    assert said in generate(*flags)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_permission(generate, here):
    (here / "locked").mkdir(mode=0o500)
    assert "cannot write locked/a.mp4 (Permission denied)" in generate("--output-path", "locked/a.mp4")


# What is repeated


@pytest.fixture
def made(here, checkpoint, capsys) -> Callable[..., Path]:
    """`made(*flags)`: a.webp, made by a copy of a tiny checkpoint in ./model."""

    def run(*flags: str, kind: str = "t2v") -> Path:
        shutil.copytree(checkpoint(kind), "model")
        flags = ("--prompt", "a", "--output-path", "a.webp", "--quiet", *flags)
        assert main(["generate", "./model", *SMALL, *flags]) == 0
        capsys.readouterr()
        return Path("a.webp")

    return run


def test_like_a_file_without_a_record(refused):
    media.write("foreign.mp4", np.zeros((1, 16, 16, 3), np.uint8), fps=1, metadata={"title": "x"})
    save_file({"latents": torch.zeros(1)}, "foreign.safetensors")
    Path("foreign.txt").write_text("x")
    assert "carries a record that lacks model, card" in refused("generate", "--like", "foreign.mp4")
    assert "foreign.safetensors carries no record" in refused("generate", "--like", "foreign.safetensors")
    assert "cannot read foreign.txt" in refused("generate", "--like", "foreign.txt")
    assert "no such file: 'gone.mp4'" in refused("generate", "--like", "gone.mp4")


def test_like_when_the_card_has_changed(refused, made):
    made()
    config = Path("model/scheduler/scheduler_config.json")
    config.write_text(json.dumps({**json.loads(config.read_text()), "shift": 2.0}))
    said = refused("generate", "--like", "a.webp", "--seed", "3")
    model = Path("model").resolve()
    assert said.startswith(f"{model} is not the model that made a.webp: its card is ")
    assert said.endswith(f"to run it as it is now, add --model-path {model}")
    assert main(["generate", "--like", "a.webp", "--model-path", "./model", "--quiet"]) == 0


def test_like_when_the_model_is_gone(refused, made):
    made()
    model = Path("model").resolve()
    shutil.rmtree("model")
    said = refused("generate", "--like", "a.webp")
    assert said.startswith(f"cannot load the model that made a.webp: no such folder: '{model}'")
    assert said.endswith("add --model-path")


def test_like_when_the_image_has_changed(refused, made):
    media.write("first.png", np.zeros((32, 48, 3), np.uint8), fps=1, metadata={})
    made("--image", "first.png", "--width", "32", kind="ti2v")
    media.write("first.png", np.ones((32, 48, 3), np.uint8), fps=1, metadata={})
    said = refused("generate", "--like", "a.webp")
    assert said.startswith(
        f"{Path('first.png').resolve()} no longer holds the image that a.webp was made from; bring it back"
    )
    assert main(["generate", "--like", "a.webp", "--image", "first.png", "--quiet"]) == 0


def test_like_on_a_machine_without_the_device(refused, made, monkeypatch):
    made()
    monkeypatch.setattr("loopwright.backends.device.available", lambda: ("warp", "auto"))
    assert "this machine has no such device: 'cpu'; choices: auto, warp" in refused("generate", "--like", "a.webp")


# The model's own failures


def test_nan_names_its_step_and_leaves_the_old_file(refused, broken):
    poison(broken("t2v") / "transformer" / "diffusion_pytorch_model.safetensors")
    Path("a.mp4").write_text("precious")
    said = refused("generate", "./model", *SMALL, "--prompt", "a", "--output-path", "a.mp4")
    assert said.startswith("the model produced NaN or infinity in denoising step 1 of 2")
    assert Path("a.mp4").read_text() == "precious"


def test_nan_of_a_later_step_is_named(refused, broken):
    poison(broken("a14b") / "transformer_2" / "diffusion_pytorch_model.safetensors")
    said = refused("generate", "./model", *SMALL, "--num-inference-steps", "6", "--prompt", "a")
    step = int(re.match(r"the model produced NaN or infinity in denoising step (\d) of 6", said)[1])
    assert 1 < step < 6
