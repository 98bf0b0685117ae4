"""`--lora` on the command line: echoed, repeated by --like, and refused in one line before weights are read."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import tiny
from loopwright import api
from loopwright.cli import main
from lora_files import written

SMALL = ("--height", "32", "--width", "32", "--num-frames", "5", "--num-inference-steps", "2", "--device", "cpu",
         "--prompt", "a fox", "--seed", "3", "--output", "latents")  # fmt: skip
Run = Callable[..., str]


@pytest.fixture
def generate(checkpoint: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Run:
    """`generate(*flags)` in a folder with the adapters a and b; stdout, or stderr if refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)
    transformer = tiny.reference(checkpoint("t2v"), "t2v").transformer
    for seed, name in enumerate(("a", "b")):
        written(tmp_path / f"{name}.safetensors", transformer, alpha=3, seed=seed)

    def run(*flags: str, status: int = 0) -> str:
        named = () if "--like" in flags else (str(checkpoint("t2v")), *SMALL)
        assert main(["generate", *named, *flags]) == status
        output = capsys.readouterr()
        return output.err if status else output.out

    return run


def same_latents(one: str, two: str) -> bool:
    return load_file(one)["latents"].equal(load_file(two)["latents"])


def test_adapters_are_echoed_and_change_the_result(generate: Run, tmp_path: Path) -> None:
    generate("--output-path", "plain.safetensors")
    printed = generate("--lora", "a.safetensors:0.5", "--lora", "b.safetensors", "--output-path", "1.safetensors")
    assert f"component transformer, file {tmp_path / 'a.safetensors'}, digest " in printed and "scale 0.5; " in printed
    as_json = generate("--lora", "a.safetensors:0", "--output-path", "0.safetensors", "--json")
    (adapter,) = json.loads(as_json)["lora"]
    assert adapter["file"] == str(tmp_path / "a.safetensors") and adapter["scale"] == 0
    assert same_latents("plain.safetensors", "0.safetensors")
    assert not same_latents("plain.safetensors", "1.safetensors")


def test_like_repeats_adapters_and_flags_replace_them(generate: Run) -> None:
    generate("--lora", "a.safetensors:0.5", "--output-path", "1.safetensors")
    generate("--lora", "b.safetensors", "--output-path", "2.safetensors")
    generate("--like", "1.safetensors", "--output-path", "again.safetensors")
    generate("--like", "1.safetensors", "--lora", "b.safetensors", "--output-path", "other.safetensors")
    assert same_latents("1.safetensors", "again.safetensors") and same_latents("2.safetensors", "other.safetensors")
    assert api.read_record("1.safetensors") == api.read_record("again.safetensors")


def test_like_runs_another_sampler_with_the_same_adapters(generate: Run) -> None:
    generate("--lora", "a.safetensors", "--output-path", "1.safetensors")
    again = json.loads(generate("--like", "1.safetensors", "--sampler", "unipc", "--json"))
    assert again["sampler"] == "unipc" and again["lora"] == api.read_record("1.safetensors")["lora"]


def test_like_says_which_adapter_is_missing_or_another(generate: Run, tmp_path: Path) -> None:
    generate("--lora", "a.safetensors", "--output-path", "1.safetensors")
    before = Path("a.safetensors").read_bytes()
    Path("a.safetensors").write_bytes(Path("b.safetensors").read_bytes())
    told = generate("--like", "1.safetensors", status=2)
    assert f"{tmp_path / 'a.safetensors'} is not the adapter that made 1.safetensors" in told and "--lora" in told
    Path("a.safetensors").unlink()
    told = generate("--like", "1.safetensors", status=2)
    assert f"no such adapter: '{tmp_path / 'a.safetensors'}'" in told and "add --lora for an adapter" in told
    Path("moved.safetensors").write_bytes(before)
    generate("--like", "1.safetensors", "--lora", "moved.safetensors", "--output-path", "2.safetensors")
    assert same_latents("1.safetensors", "2.safetensors")


def test_results_of_before_there_were_adapters_are_repeated(generate: Run) -> None:
    generate("--output-path", "1.safetensors")
    record = api.read_record("1.safetensors")
    del record["lora"]
    save_file(load_file("1.safetensors"), "1.safetensors", metadata={"loopwright": json.dumps(record)})
    generate("--like", "1.safetensors", "--output-path", "2.safetensors")
    assert same_latents("1.safetensors", "2.safetensors")
    for broken in ([{"file": "a.safetensors"}], ["a.safetensors"], 3):
        damaged = {**record, "lora": broken}
        save_file(load_file("2.safetensors"), "1.safetensors", metadata={"loopwright": json.dumps(damaged)})
        assert "does not say which adapters ran" in generate("--like", "1.safetensors", status=2)


@pytest.mark.parametrize("given, told", [
    ("missing.safetensors", "no such adapter: 'missing.safetensors'; give a .safetensors file"),
    ("a.safetensors:inf", "the scale of an adapter must be a finite number: 'a.safetensors:inf'"),
    ("vae=a.safetensors", "adapters are for components that generate: 'vae'; choices: transformer; "),
])  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(given: str, told: str, generate: Run) -> None:
    error = generate("--lora", given, status=2)
    assert told in error and "Traceback" not in error


def test_a_configuration_file_lists_adapters(generate: Run) -> None:
    Path("c.yaml").write_text("lora: [a.safetensors:0.5, b.safetensors]\n", encoding="utf-8")
    listed = json.loads(generate("--config", "c.yaml", "--output-path", "1.safetensors", "--json"))["lora"]
    assert [(Path(one["file"]).name, one["scale"]) for one in listed] == [("a.safetensors", 0.5), ("b.safetensors", 1)]
