"""The command line: quick to ask, its files repeat themselves, and nothing of the user's is overwritten unasked."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from safetensors.torch import load_file

import loopwright
from loopwright import catalog, media
from loopwright.card import Claim
from loopwright.cli import main
from loopwright.cli.outputs import slug
from loopwright.weights import sync

SMALL = ("--height", "32", "--width", "48", "--num-frames", "5", "--num-inference-steps", "2", "--device", "cpu")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(loopwright.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

Run = Callable[..., str]


@pytest.fixture
def generate(checkpoint, tmp_path, monkeypatch, capsys) -> Run:
    """`generate(*flags)`: run in an empty folder on a tiny checkpoint, small by default; gives stdout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)

    def run(*flags: str, small: bool = True, model: str = "t2v") -> str:
        named = [] if "--like" in flags or "--model-path" in flags else [str(checkpoint(model))]
        status = main(["generate", *named, *(SMALL if small else ()), *flags])
        output = capsys.readouterr()
        assert status == 0, output.err
        return output.out

    return run


def python(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], env=ENVIRONMENT, check=True, capture_output=True, text=True
    ).stdout


def record_of(output: str) -> dict[str, object]:
    """The one record that --json printed."""
    (line,) = output.splitlines()
    return json.loads(line)


def pixels(file: Path | str) -> np.ndarray:
    return media.read_video(file)[0]


# Asking for help


@pytest.mark.parametrize("flags", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_imports_no_torch(flags):
    code = f"""
import sys
from loopwright.cli import main
try:
    main({flags!r})
except SystemExit as end:
    assert not end.code
heavy = {{"torch", "numpy", "rich", "av", "diffusers"}} & set(sys.modules)
assert not heavy, heavy
"""
    assert "loopwright" in python(code)


@pytest.mark.parametrize("flags", [["--help"], ["generate", "--help"]])
def test_help_is_quick(flags):
    def seconds() -> float:
        """Of the processor, which a busy machine does not change; it waits for nothing."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "loopwright", *flags], env=ENVIRONMENT, check=True, capture_output=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.3


def test_models_lists_what_is_known_without_torch():
    listed = python("import sys; from loopwright.cli import main; main(['models']); assert 'torch' not in sys.modules")
    rows = {line.split()[0]: line for line in listed.splitlines()}
    assert set(rows) == {"name", *(card.name for card in catalog.known())}
    fields = rows["Wan-AI/Wan2.1-T2V-1.3B-Diffusers"].split("  ")
    assert {"832x480", "81", "7.2 B", "hub"} <= {field.strip() for field in fields}
    assert rows["loopwright/tiny-wan"].endswith("ships")


def test_models_as_json(capsys):
    assert main(["models", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    (row,) = (row for row in rows if row["name"] == "Wan-AI/Wan2.2-TI2V-5B-Diffusers")
    assert row["tasks"] == ["text_to_video", "image_to_video"]
    assert (row["size"], row["frames"], row["where"]) == ("1280x704", 121, "hub")


def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "loopwright", "models"]
    with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


# Generating


def test_a_file_carries_the_record_that_is_printed(generate):
    printed = record_of(generate("--prompt", "a fox", "--seed", "5", "--output-path", "fox.mp4", "--json"))
    carried = media.read_metadata("fox.mp4")
    assert printed.pop("files") == ["fox.mp4"]
    assert set(printed.pop("seconds")) == {"load", "generate", "encode"}
    assert printed.pop("memory") == "high"
    peak = printed.pop("peak_memory")
    assert peak["bytes"] > 2**20 and peak["of"] == "the process"
    assert printed == carried
    assert carried["request"]["prompt"] == "a fox"
    assert (carried["request"]["seed"], carried["sampler"], carried["device"]) == (5, "euler", "cpu")
    assert pixels("fox.mp4").shape == (5, 32, 48, 3)


def test_every_resolved_parameter_is_printed(generate):
    lines = generate("--prompt", "a fox", "--seed", "5").splitlines()
    values = {name: value.strip() for name, _, value in (line.strip().partition(" ") for line in lines[1:])}
    assert lines[0] == "outputs/a-fox-5.mp4"
    record = media.read_metadata(lines[0])
    told = {"seconds", "memory", "peak_memory"}
    assert set(record["request"]) | set(record) - {"request"} | told == set(values)
    assert values["memory"] == "high"
    assert re.fullmatch(r"[\d.]+ [GM]iB of the process", values["peak_memory"])
    assert values["card"] == record["card"]
    assert values["guidance_scale"] == "5.0"
    assert values["dtypes"] == "text_encoder float32, transformer float32, vae float32"


def test_an_unset_flag_is_the_cards_default(generate, model):
    request = record_of(generate("--prompt", "a fox", "--json"))["request"]
    defaults = model("t2v").card.defaults["text_to_video"]
    for name in ("guidance_scale", "flow_shift", "strength", "max_sequence_length", "fps", "negative_prompt"):
        assert request[name] == defaults[name]


def test_one_frame_becomes_a_png(generate):
    (file,) = record_of(generate("--prompt", "a fox", "--num-frames", "1", "--seed", "1", "--json"))["files"]
    assert file == "outputs/a-fox-1.png"
    assert media.read_image(file).shape == (32, 48, 3)


def test_a_contact_sheet_carries_the_record_too(generate):
    generate("--prompt", "a fox", "--output-path", "fox.mp4", "--contact-sheet", "sheet.png")
    assert media.read_metadata("sheet.png") == media.read_metadata("fox.mp4")
    assert media.read_image("sheet.png").shape[1] > 3 * 48


def test_several_prompts_share_one_seed(generate):
    Path("prompts.txt").write_text("# animals\na cat\n\n  a dog \n", encoding="utf-8")
    lines = generate("--prompt-file", "prompts.txt", "--prompt", "a fox", "--json").splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["request"]["prompt"] for record in records] == ["a fox", "a cat", "a dog"]
    (seed,) = {record["request"]["seed"] for record in records}
    assert sorted(os.listdir("outputs")) == [f"a-{animal}-{seed}.mp4" for animal in ("cat", "dog", "fox")]
    assert f"seed                 {seed} (the same for all 2 prompts)" in generate(
        "--prompt", "a", "--prompt", "b", "--seed", str(seed)
    )


def test_several_prompts_and_sheets_go_into_a_folder(generate):
    out = generate(
        "--prompt", "a", "--prompt", "a", "--seed", "1", "--output-path", "o", "--contact-sheet", "o", "--quiet"
    )
    assert out.split() == ["o/a-1.mp4", "o/a-1.png", "o/a-1-2.mp4", "o/a-1-2.png"]
    assert sorted(os.listdir("o")) == sorted(Path(file).name for file in out.split())


def test_own_names_never_replace_a_file(generate):
    taken = Path("outputs/a-fox-1.mp4")
    taken.parent.mkdir()
    taken.write_text("mine")
    files = [generate("--prompt", "A fox!", "--seed", "1", "--quiet").strip() for _ in range(2)]
    assert files == ["outputs/a-fox-1-2.mp4", "outputs/a-fox-1-3.mp4"]
    assert taken.read_text() == "mine"


def test_a_named_file_is_replaced(generate):
    Path("fox.webp").write_text("old")
    generate("--prompt", "a fox", "--output-path", "fox.webp")
    assert pixels("fox.webp").shape == (5, 32, 48, 3)
    assert os.listdir() == ["fox.webp"]


@pytest.mark.parametrize(
    ("prompt", "name"),
    [("A red fox, running!", "a-red-fox-running"), ("狐狸 在跑", "狐狸-在跑"), ("../../etc/passwd", "etc-passwd"),
     ("  ...  ", "untitled"), ("x" * 400, "x" * 48)],
)  # fmt: skip
def test_a_prompt_becomes_a_file_name(prompt, name):
    assert slug(prompt) == name


def test_progress_goes_to_stderr_a_line_a_stage(checkpoint, tmp_path, capsys):
    main(["generate", str(checkpoint("t2v")), *SMALL, "--prompt", "a", "--output-path", f"{tmp_path}/a.mp4"])
    lines = capsys.readouterr().err.splitlines()
    assert lines[:4] == [f"loading {part} ({i} of 4)" for i, part in enumerate(
        ("tokenizer", "text_encoder", "transformer", "vae"), 1)]  # fmt: skip
    assert re.fullmatch(r"loaded 4 components, [\d.]+ KiB in \d+\.\d s", lines[4])
    assert [line.split(":")[0] for line in lines[5:]] == ["text", "denoise", "decode"]
    assert lines[6].startswith("denoise: 2 steps in ")


def test_several_prompts_are_numbered_and_share_calls_where_their_mode_lets_them(checkpoint, tmp_path, capsys):
    def lines(mode, *more):
        prompts = ["--prompt", "a", "--prompt", "b"]
        main(["generate", str(checkpoint("t2v")), *SMALL, *prompts, "--output-path", f"{tmp_path}/{mode}/", *more])
        return [line.split(":")[0] for line in capsys.readouterr().err.splitlines()[5:]]

    stages = ["text", "denoise", "decode"]
    assert lines("exact") == [f"[{number}/2] {stage}" for number in (1, 2) for stage in stages]
    together = lines("fixed", "--mode", "fixed", "--rows", "2")
    assert together[:4] == [f"[{number}/2] {stage}" for stage in stages[:2] for number in (1, 2)]
    assert sorted(together[4:]) == ["[1/2] decode", "[2/2] decode"]


def test_like_in_another_mode_leaves_the_number_of_rows_behind(generate):
    generate("--prompt", "a", "--mode", "fixed", "--rows", "2", "--output-path", "a.webp")
    fixed = record_of(generate("--like", "a.webp", "--json", small=False))["request"]
    assert (fixed["mode"], fixed["rows"]) == ("fixed", 2)
    exact = record_of(generate("--like", "a.webp", "--mode", "exact", "--json", small=False))["request"]
    assert (exact["mode"], exact["rows"]) == ("exact", 1)


def test_quiet_says_the_file_and_nothing_else(checkpoint, tmp_path):
    """In a process of its own, where libraries have not been silenced yet."""
    flags = [*SMALL, "--prompt", "a", "--output-path", "a.mp4", "--quiet", "--threads", "1"]
    command = [sys.executable, "-m", "loopwright", "generate", str(checkpoint("t2v")), *flags]
    loud = {**ENVIRONMENT, "HF_HUB_DISABLE_PROGRESS_BARS": ""}
    done = subprocess.run(command, cwd=tmp_path, env=loud, check=False, capture_output=True, text=True)
    assert (done.stdout, done.stderr, done.returncode) == ("a.mp4\n", "", 0)


def test_ctrl_c_says_so(generate, checkpoint, capsys, monkeypatch):
    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr("loopwright.api.Model.run_all", interrupted)
    assert main(["generate", str(checkpoint("t2v")), *SMALL, "--prompt", "a", "--quiet"]) == 130
    assert capsys.readouterr().err == "loopwright: cancelled\n"
    assert os.listdir() == []


def test_a_bug_keeps_its_traceback(generate, checkpoint, monkeypatch):
    def broken(*args, **kwargs):
        raise KeyError("a bug")

    monkeypatch.setattr("loopwright.api.Model.run_all", broken)
    with pytest.raises(KeyError, match="a bug"):
        main(["generate", str(checkpoint("t2v")), *SMALL, "--prompt", "a", "--quiet"])


# Repeating


@pytest.mark.parametrize("name", ["a.mp4", "a.webp", "a.gif"])
def test_like_repeats_a_result_bit_for_bit(generate, name):
    generate("--prompt", "a fox", "--negative-prompt", "bad", "--guidance-scale", "3", "--sampler", "unipc",
             "--dtype", "bfloat16", "--output-path", name)  # fmt: skip
    generate("--like", name, "--output-path", f"again-{name}", small=False)
    assert np.array_equal(pixels(name), pixels(f"again-{name}"))
    assert media.read_metadata(name) == media.read_metadata(f"again-{name}")


def test_like_repeats_latents_bit_for_bit(generate):
    generate("--prompt", "a fox", "--output", "latents", "--output-path", "a.safetensors")
    (file,) = generate("--like", "a.safetensors", "--quiet", small=False).split()
    assert file.endswith(".safetensors")
    assert load_file("a.safetensors")["latents"].equal(load_file(file)["latents"])


def test_like_is_refused_where_the_weights_that_made_the_file_are_not_there(generate, checkpoint, capsys):
    model = loopwright.load(checkpoint("t2v"), device="cpu")
    small = {"height": 32, "width": 48, "num_frames": 1, "num_inference_steps": 1, "output": "latents"}
    model.update_weights("transformer", checkpoint("t2v"))
    model.generate("a fox", **small).save("a.safetensors")
    generate("--like", "a.safetensors", "--quiet", small=False)  # the files hold the same
    state = model.instance.part("transformer").state_dict()
    other = sync.Delivery.of("full", {name: tensor * 1.01 for name, tensor in state.items()})
    model.update_weights("transformer", other)
    model.generate("a fox", **small).save("b.safetensors")
    assert main(["generate", "--like", "b.safetensors", "--quiet"]) == 2
    assert "made with other weights of transformer" in capsys.readouterr().err
    generate("--like", "b.safetensors", "--model-path", str(checkpoint("t2v")), "--quiet", small=False)


def test_like_gives_the_latents_behind_a_video(generate):
    generate("--prompt", "a fox", "--seed", "1", "--output-path", "a.mp4")
    generate("--prompt", "a fox", "--seed", "1", "--output-path", "a.safetensors")
    generate("--like", "a.mp4", "--output-path", "b.safetensors", small=False)
    assert load_file("a.safetensors")["latents"].equal(load_file("b.safetensors")["latents"])


def test_flags_change_what_like_repeats(generate):
    generate("--prompt", "a fox", "--seed", "1", "--output-path", "a.mp4")
    again = record_of(generate("--like", "a.mp4", "--prompt", "a cat", "--sampler", "unipc", "--json", small=False))
    before = media.read_metadata("a.mp4")
    assert (again["request"]["prompt"], again["sampler"]) == ("a cat", "unipc")
    assert {**again["request"], "prompt": "a fox"} == before["request"]


def test_like_repeats_from_an_image(generate):
    media.write("first.png", np.full((32, 48, 3), 90, np.uint8), fps=1, metadata={})
    generate("--prompt", "a fox", "--image", "first.png", "--width", "32", "--output-path", "a.webp", model="ti2v")
    generate("--like", "a.webp", "--output-path", "b.webp", small=False)
    assert np.array_equal(pixels("a.webp"), pixels("b.webp"))


def test_like_runs_another_model_when_named(generate, checkpoint):
    generate("--prompt", "a fox", "--seed", "1", "--output-path", "a.mp4")
    other = str(checkpoint("t2v", "unipc"))
    again = record_of(generate("--like", "a.mp4", "--model-path", other, "--json", small=False))
    assert (again["model"], again["sampler"]) == (other, "euler")


def test_low_memory_changes_no_bit_and_is_not_part_of_the_record(generate):
    printed = record_of(generate("--prompt", "a fox", "--memory", "low", "--output-path", "a.webp", "--json"))
    assert printed["memory"] == "low"
    again = record_of(generate("--like", "a.webp", "--output-path", "b.webp", "--json", small=False))
    assert again["memory"] == "high"
    low_again = generate("--like", "b.webp", "--memory", "low", "--output-path", "c.webp", "--json", small=False)
    assert record_of(low_again)["memory"] == "low"
    assert np.array_equal(pixels("a.webp"), pixels("b.webp")) and np.array_equal(pixels("b.webp"), pixels("c.webp"))
    assert media.read_metadata("a.webp") == media.read_metadata("b.webp")


def test_compiling_is_in_the_record_and_repeated(generate, monkeypatch):
    blocks = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda self, **options: blocks.append(self))
    printed = record_of(generate("--prompt", "a fox", "--compile", "--output-path", "a.webp", "--json"))
    assert printed["compile"] is True and len(blocks) == 2
    again = record_of(generate("--like", "a.webp", "--output-path", "b.webp", "--json", small=False))
    assert again["compile"] is True and len(blocks) == 4
    named = ("--model-path", printed["model"], "--output-path", "c.webp")
    plain = generate("--like", "a.webp", *named, "--json", small=False)
    assert record_of(plain)["compile"] is False and len(blocks) == 4


# Configuration


def test_the_command_line_beats_the_file_and_the_file_the_record(generate):
    generate("--prompt", "a fox", "--seed", "1", "--output-path", "a.mp4")
    Path("c.yaml").write_text("seed: 2\nguidance-scale: 3\nnum_inference_steps: 3\nfps: null\n", encoding="utf-8")
    again = record_of(
        generate("--like", "a.mp4", "--config", "c.yaml", "--num-inference-steps", "1", "--json", small=False)
    )
    request = again["request"]
    assert (request["prompt"], request["seed"], request["guidance_scale"]) == ("a fox", 2, 3)
    assert (request["num_inference_steps"], request["fps"]) == (1, 16)


@pytest.mark.parametrize("name", ["c.yaml", "c.json"])
def test_a_file_holds_a_whole_command(generate, checkpoint, capsys, name):
    small = {"num-frames": 1, "num_inference_steps": 1, "height": 32, "width": 32, "flow_shift": "3e0"}
    rest = {"model": str(checkpoint("t2v")), "prompt": ["a", "b"], "output-path": "o", "seed": 4, "quiet": True}
    Path(name).write_text(json.dumps(small | rest), encoding="utf-8")
    assert main(["generate", "--config", name]) == 0
    assert capsys.readouterr().out.split() == ["o/a-4.png", "o/b-4.png"]
    assert media.read_metadata("o/a-4.png")["request"]["flow_shift"] == 3


def test_prompts_of_the_command_line_replace_those_of_the_file(generate):
    Path("p.txt").write_text("one\ntwo\n", encoding="utf-8")
    Path("c.yaml").write_text("prompt_file: p.txt\nmodel: nowhere/at-all\n", encoding="utf-8")
    assert record_of(generate("--config", "c.yaml", "--prompt", "three", "--json"))["request"]["prompt"] == "three"


# Verifying


@dataclass(frozen=True)
class Finding:
    claim: Claim
    measured: float
    holds: bool
    detail: str = ""


@pytest.fixture
def verify(monkeypatch, capsys):
    """`verify(findings, *flags)`: status and lines, with the findings instead of measured ones."""

    def run(findings: list[Finding], *flags: str) -> tuple[int, list[str], dict[str, object]]:
        asked: dict[str, object] = {}
        module = ModuleType("loopwright.parity")
        module.verify = lambda source, **given: (asked.update(given, source=source), iter(findings))[1]
        monkeypatch.setitem(sys.modules, "loopwright.parity", module)
        monkeypatch.setattr(loopwright, "parity", module, raising=False)
        status = main(["verify", "some/model", *flags])
        return status, capsys.readouterr().out.splitlines(), asked

    return run


HOLDS = Finding(Claim("trajectory", "diffusers", "text_to_video", bound=1e-5), 0.0, True, "every step equal")
FAILS = Finding(Claim("output", "diffusers", "text_to_video", "psnr", 60.0), 41.25, False)


def test_verify_prints_a_line_a_finding(verify):
    status, lines, asked = verify([HOLDS, FAILS], "--against", "diffusers", "--dtype", "bfloat16")
    assert status == 1
    assert lines[0].split(maxsplit=7) == ["trajectory", "diffusers", "text_to_video", "relative", "0", "<=", "1e-05",
                                          "holds  every step equal"]  # fmt: skip
    assert lines[1].split() == ["output", "diffusers", "text_to_video", "psnr", "41.25", ">=", "60", "FAILS"]
    assert asked == {"source": "some/model", "against": "diffusers", "task": None, "device": "auto",
                     "dtype": "bfloat16", "revision": None}  # fmt: skip


def test_verify_passes_when_all_holds(verify):
    assert verify([HOLDS])[0] == 0


def test_verify_of_nothing_is_no_success(verify):
    assert verify([])[0] == 2


def test_verify_as_json(verify):
    same = Finding(FAILS.claim, float("inf"), True)
    first, second = (json.loads(line) for line in verify([HOLDS, same], "--json")[1])
    assert (first["level"], first["measured"], first["holds"]) == ("trajectory", 0.0, True)
    assert (second["measured"], second["bound"]) == ("inf", 60.0)
