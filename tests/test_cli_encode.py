"""`loopwright encode`: builds a cache, goes on where it stopped, looks after it, and says what is wrong in one line."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from encoded import write_rows
from loopwright import encoders
from loopwright.cli import main

SMALL = ("--height", "32", "--width", "32", "--num-frames", "5")
Encode = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return write_rows(tmp_path_factory.mktemp("set"))


@pytest.fixture
def encode(file, checkpoint, tmp_path, monkeypatch, capsys) -> Encode:
    """`encode(*flags)`: run on the data set and a tiny checkpoint; gives status, stdout and stderr."""
    monkeypatch.setattr("loopwright.cli.chatter._hush", lambda: None)

    def run(*flags: str, data: Path | str = file, model: str | None = None, shape: tuple[str, ...] = SMALL):
        named = ["--encoder-checkpoint", model or str(checkpoint("t2v")), "--cache", str(tmp_path / "cache")]
        status = main(["encode", str(data), *named, "--device", "cpu", *shape, *flags])
        return status, *capsys.readouterr()

    return run


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache").rglob("*.safetensors"))


def test_a_second_run_finds_what_the_first_encoded_and_loads_nothing(encode, tmp_path, monkeypatch):
    status, out, err = encode()
    assert (status, err) == (0, "") and "5 rows in" in out and out.endswith("complete\n")
    rows = dict(re.findall(r"^(latents|prompts) +(\d+ +\d+ +\d+) ", out, re.MULTILINE))
    assert {name: cells.split() for name, cells in rows.items()} == {
        "latents": ["0", "4", "0"],
        "prompts": ["0", "5", "0"],  # and the empty one
    }
    monkeypatch.setattr(encoders, "load_encoder", lambda *given: pytest.fail("loaded"))
    status, out, _ = encode("--json")
    report = json.loads(out)
    assert status == 0 and report.pop("seconds") >= 0
    sizes = [sum(path.stat().st_size for path in files(tmp_path) if kind in path.parts) for kind in ("latent", "cond")]
    assert report == {
        **{"rows": 5, "problems": [], "latent_bytes": sizes[0], "cond_bytes": sizes[1]},
        **{"latent_found": 4, "latent_encoded": 0, "latent_redone": 0},
        **{"cond_found": 5, "cond_encoded": 0, "cond_redone": 0},
    }


def test_a_run_that_broke_off_goes_on(encode, tmp_path, monkeypatch):
    calls, real = [], encoders.encode_media

    def interrupted(*given):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given)

    monkeypatch.setattr(encoders, "encode_media", interrupted)
    assert encode()[0] == 130
    report = json.loads(encode("--json")[1])
    assert (report["latent_found"], report["latent_encoded"]) == (2, 2) and len(calls) == 5


def test_verify_tells_each_entry_that_is_wrong_or_missing_and_encoding_redoes_them(encode, tmp_path):
    encode()
    assert encode("--verify")[:2] == (0, f"9 right, 0 wrong, 0 missing; {total(tmp_path)}\n")
    first, second, *_ = files(tmp_path)
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    status, out, err = encode("--verify")
    assert status == 1 and out.startswith("7 right, 1 wrong, 1 missing; ")
    assert str(first) in err.splitlines()[0] and err.splitlines()[1] == f"{second} is missing"
    status, out, err = encode()
    assert status == 0 and err.startswith(str(first)) and err.endswith("encoded anew\n")
    assert encode("--verify", "--json")[0] == 0


def total(tmp_path: Path) -> str:
    return f"{sum(path.stat().st_size for path in files(tmp_path)) / 1000:.1f} KB"


def test_prune_lists_first_and_deletes_only_what_no_row_needs(encode, tmp_path):
    encode()
    kept = files(tmp_path)
    other = ("--bucket", "32x32x1")
    encode(shape=other)
    extra = sorted(set(files(tmp_path)) - set(kept))
    assert len(extra) == 3  # the picture is the same in both, prompts too
    status, out, _ = encode("--prune")
    assert status == 0 and out.splitlines()[:-1] == list(map(str, extra)) and "add --yes" in out
    assert files(tmp_path) == sorted([*kept, *extra])
    report = json.loads(encode("--prune", "--yes", "--json")[1])
    assert (report["unneeded"], report["deleted"], report["files"]) == (3, True, list(map(str, extra)))
    assert files(tmp_path) == kept
    assert encode("--prune")[1] == "nothing to delete\n"


def test_without_a_geometry_it_is_the_checkpoints_own(encode, tmp_path):
    """64x64 and 9 frames, of which the clips have 6; the picture is one frame whatever was asked for."""
    status, out, err = encode("--json", shape=(), model="loopwright/tiny-wan")
    report = json.loads(out)
    assert status == 2 and len(report["problems"]) == 4 and report["latent_encoded"] == 1
    assert report["problems"] == err.splitlines() and all("9" in problem for problem in report["problems"])
    assert encode("--verify", shape=("--bucket", "64x64x1"), model="loopwright/tiny-wan")[0] == 1


def test_rows_that_cannot_be_encoded_are_told_and_the_rest_is_encoded(encode, tmp_path):
    write_rows(tmp_path, 2)
    (tmp_path / "1.mp4").write_bytes(b"no video")
    status, out, err = encode(data=tmp_path / "rows.jsonl")
    assert status == 2 and "1 row could not be encoded" in out
    assert len(err.splitlines()) == 1 and err.startswith(f"{tmp_path / 'rows.jsonl'}:2: ")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--num-frames", "6"], "num_frames must be a multiple of 4 plus 1: 6; nearest: 5 or 9"),
        (["--width", "40"], "width must be a multiple of 16: 40; nearest: 32 or 48"),
        (["--verify", "--prune"], "two kinds of upkeep at once; choices: --verify, --prune"),
        (["--yes"], "--yes is about --prune; leave it out"),
        (["--encoder-checkpoint", ""], "no encoder checkpoint; give --encoder-checkpoint"),
        (["--cache", ""], "no cache; give --cache"),
        (["--encoder-checkpoint", "./nowhere"], "no such folder: 'nowhere'"),
        (["--revision", "main"], "a local folder has no revisions"),
        (["--device", "abacus"], "abacus"),
        (["--cache", __file__], "not a folder"),
        (["--cache", f"{__file__}/deep/er"], f"not a folder: '{__file__}'"),
        (["--crop", "top"], "unknown crop: 'top'; choices: center, none"),
        (["--workers", "0"], "workers must be at least 1: 0"),
        (["--dedicated"], "dedicated encoders need a GPU each: '1 on cpu'; there are"),
        (["--first-frame"], "makes no videos of a first frame"),
    ],
)
def test_bad_input_is_one_line(flags, message, encode):
    status, out, err = encode(*flags)
    assert (status, out) == (2, "") and len(err.splitlines()) == 1
    assert err.startswith("loopwright: error: ") and message in err


def test_a_device_that_is_not_here_is_refused_even_where_nothing_is_to_do(encode):
    encode()
    status, out, err = encode("--device", "abacus")
    assert (status, out) == (2, "") and "this machine has no such device: 'abacus'" in err


def test_first_frames_are_encoded_counted_and_needed(encode, checkpoint, tmp_path):
    image = {"model": str(checkpoint("i2v"))}
    status, out, _ = encode("--first-frame", **image)
    counted = dict(re.findall(r"^(condition|image_embeds) +(\d+ +\d+ +\d+) ", out, re.MULTILINE))
    assert status == 0 and {name: cells.split() for name, cells in counted.items()} == {
        "condition": ["0", "4", "0"],
        "image_embeds": ["0", "4", "0"],
    }
    assert encode("--first-frame", "--verify", **image)[0] == 0
    assert encode("--first-frame", "--prune", **image)[1] == "nothing to delete\n"
    assert "8 files" in encode("--prune", **image)[1]
    report = json.loads(encode("--first-frame", "--json", **image)[1])
    assert (report["condition_found"], report["image_embeds_found"]) == (4, 4) and report["image_embeds_bytes"] > 0


def test_several_workers_who_find_all_encoded_start_no_ray(encode, file, checkpoint, tmp_path):
    encode()
    code = "import sys; from loopwright.cli import main; sys.exit(main(sys.argv[1:]) or 'ray' in sys.modules)"
    given = ["--encoder-checkpoint", checkpoint("t2v"), "--cache", tmp_path / "cache", "--workers", "2", *SMALL]
    out = subprocess.run([sys.executable, "-c", code, "encode", file, *given], check=True, capture_output=True).stdout
    assert re.search(rb"^latents +4 +0 +0 ", out, re.MULTILINE)


def test_the_help_tells_the_exit_statuses(capsys):
    with pytest.raises(SystemExit):
        main(["encode", "--help"])
    assert "exit status is 0 if all is encoded, 1 if --verify finds" in " ".join(capsys.readouterr().out.split())


def test_a_data_set_that_is_none_is_told_first(encode, tmp_path):
    status, _, err = encode(data=tmp_path / "none.jsonl", model="./nowhere")
    assert status == 2 and "no such data set" in err


def test_help_is_quick_and_imports_no_torch():
    code = "import sys\nfrom loopwright.cli import main\ntry: main(['encode', '--help'])\nexcept SystemExit: pass\n"

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", f"{code}assert 'torch' not in sys.modules"], check=True, stdout=subprocess.DEVNULL
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.3
