"""A model's name becomes a folder, whatever the network does; and the error is one line when it cannot."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import loopwright
from loopwright.errors import WeightsError
from loopwright.weights.hub import fetch, is_local, needed

sys.path.append(str(Path(__file__).parents[1]))  # pytest adds a test's own folder only
from standin_hub import StandinHub

FETCH = """
import json, sys, time
time.sleep = lambda seconds: None  # retries need not wait here
from loopwright.errors import LoopwrightError
from loopwright.weights.hub import fetch
try:
    found = fetch(**json.loads(sys.argv[1]))
    print(json.dumps([str(found.folder), found.commit]))
except LoopwrightError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[StandinHub]:
    with StandinHub() as running:
        yield running


def put(folder: Path, **files: bytes | str) -> Path:
    """Keywords name files; `__` stands for `/`, since keywords have none."""
    for name, content in files.items():
        file = folder / name.replace("__", "/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def pipeline(folder: Path, mark: str) -> Path:
    """The shape of a Diffusers repository, with all the rubbish that real ones carry along."""
    parts = {"model_index.json": json.dumps({"_class_name": mark}), "README.md": "x", "whole.safetensors": b"whole"}
    parts |= {"tokenizer__spiece.model": b"model", "tokenizer__merges.txt": "a b", "tokenizer__tokenizer.json": "{}"}
    parts |= {"vae__config.json": "{}", "vae__diffusion_pytorch_model.safetensors": f"vae {mark}".encode()}
    parts |= {"vae__diffusion_pytorch_model.fp16.safetensors": b"half", "vae__diffusion_pytorch_model.bin": b"pickle"}
    shards = {f"te__model-0000{i}-of-00002.safetensors": f"shard {i} {mark}".encode() for i in (1, 2)}
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    parts |= {"te__config.json": "{}", "te__model.safetensors.index.json": json.dumps(index), **shards}
    parts |= {"te__model.fp16-00001-of-00001.safetensors": b"half"}
    return put(folder, **parts)


def run(hub: StandinHub, home: Path, name: str, **request: object) -> subprocess.CompletedProcess[str]:
    extra = {key: str(request.pop(key)) for key in ("HF_HUB_OFFLINE", "HF_TOKEN") if key in request}
    path = os.pathsep.join([str(Path(loopwright.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, **hub.env(home), "PYTHONPATH": path, **extra}
    arguments = [sys.executable, "-c", FETCH, json.dumps({"name": name, **request})]
    return subprocess.run(arguments, env=env, cwd=home.parent, capture_output=True, text=True, timeout=60, check=False)


def got(*args: object, **request: object) -> tuple[Path, str]:
    done = run(*args, **request)
    assert done.returncode == 0, done.stderr
    folder, commit = json.loads(done.stdout)
    return Path(folder), commit


def refused(*args: object, **request: object) -> str:
    done = run(*args, **request)
    lines = [line for line in done.stderr.splitlines() if line.startswith("WeightsError: ")]
    assert done.returncode == 1 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.rstrip().endswith(lines[0]), "the error is more than one line"
    return lines[0]


def files(folder: Path) -> set[str]:
    return {file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()}


SMALL = {"model_index.json", "tokenizer/spiece.model", "tokenizer/merges.txt", "tokenizer/tokenizer.json"} | {
    "vae/config.json", "te/config.json", "te/model.safetensors.index.json",
}  # fmt: skip
WEIGHTS = {"vae/diffusion_pytorch_model.safetensors"} | {f"te/model-0000{i}-of-00002.safetensors" for i in (1, 2)}


def test_first_the_small_files_then_the_weights_and_nothing_twice(hub: StandinHub, tmp_path: Path):
    commit = hub.add("org/pipe", pipeline(tmp_path / "pipe", "One"))
    folder, found = got(hub, tmp_path / "home", "org/pipe", weights=False)
    assert (files(folder), found) == (SMALL, commit)
    folder, found = got(hub, tmp_path / "home", "org/pipe", weights=True)
    assert (files(folder), found) == (SMALL | WEIGHTS, commit)
    for name in SMALL | WEIGHTS:
        assert (folder / name).read_bytes() == (tmp_path / "pipe" / name).read_bytes()
    read = [seen.path for seen in hub.seen if seen.method == "GET" and "/api/" not in seen.path]
    assert len(read) == len(set(read)), "a file was downloaded twice"
    hub.seen.clear()
    got(hub, tmp_path / "home", "org/pipe", revision=commit, weights=True)
    assert not [seen for seen in hub.seen if "pipe" in seen.path], "a pinned commit in the cache needs no network"


def test_a_revision_pins_the_content_by_branch_tag_and_commit(hub: StandinHub, tmp_path: Path):
    old = hub.add("org/two", pipeline(tmp_path / "old", "Old"), revision="v1.0")
    new = hub.add("org/two", pipeline(tmp_path / "new", "New"))
    for revision, commit, mark in ((None, new, "New"), ("v1.0", old, "Old"), (old, old, "Old")):
        folder, found = got(hub, tmp_path / "home", "org/two", revision=revision, weights=True)
        assert found == commit
        assert (folder / "vae/diffusion_pytorch_model.safetensors").read_text() == f"vae {mark}"
        assert json.loads((folder / "model_index.json").read_text()) == {"_class_name": mark}


def test_one_part_of_a_repository_can_be_fetched_alone(hub: StandinHub, tmp_path: Path):
    commit = hub.add("org/part", pipeline(tmp_path / "pipe", "Part"))
    folder, found = got(hub, tmp_path / "home", "org/part", subfolder="vae", weights=True)
    assert found == commit and folder.name == "vae"
    assert files(folder) == {"config.json", "diffusion_pytorch_model.safetensors"} and files(folder.parent) == {
        f"vae/{name}" for name in files(folder)
    }
    message = refused(hub, tmp_path / "home", "org/part", subfolder="unet", weights=False)
    assert "unet" in message and "te, tokenizer, vae" in message


def test_a_cut_connection_goes_on_within_the_run(hub: StandinHub, tmp_path: Path):
    data = os.urandom(12_000_000)
    hub.add("org/cut", put(tmp_path / "cut", **{"config.json": "{}", "model.safetensors": data}))
    hub.cut(data, after=11_000_000)
    folder, _ = got(hub, tmp_path / "home", "org/cut", weights=True)
    assert (folder / "model.safetensors").read_bytes() == data
    starts = [seen.start for seen in hub.downloads(data)]
    assert len(starts) == 2 and starts[0] == 0 and starts[1] >= 10_000_000


def test_a_run_that_broke_off_goes_on_in_the_next(hub: StandinHub, tmp_path: Path):
    data = os.urandom(12_000_000)
    hub.add("org/dead", put(tmp_path / "dead", **{"config.json": "{}", "model.safetensors": data}))
    hub.cut(data, after=11_000_000, dead=True)
    message = refused(hub, tmp_path / "home", "org/dead", weights=True)
    assert "org/dead" in message and "run again" in message
    hub.heal()
    hub.seen.clear()
    folder, _ = got(hub, tmp_path / "home", "org/dead", weights=True)
    assert (folder / "model.safetensors").read_bytes() == data
    starts = [seen.start for seen in hub.downloads(data)]
    assert len(starts) == 1 and starts[0] >= 10_000_000
    assert not list((tmp_path / "home").rglob("*.partial"))


def test_a_damaged_partial_file_is_noticed_and_downloaded_anew(hub: StandinHub, tmp_path: Path):
    data = os.urandom(1000)
    hub.add("org/hurt", put(tmp_path / "hurt", **{"config.json": "{}", "model.safetensors": data}))
    folder, _ = got(hub, tmp_path / "home", "org/hurt", weights=False)
    partial = folder.parent.parent / "blobs" / f"{hashlib.sha256(data).hexdigest()}.partial"
    partial.write_bytes(b"x" * 600)
    assert "damaged" in refused(hub, tmp_path / "home", "org/hurt", weights=True)
    partial.write_bytes(b"x" * 6000)  # longer than the file can be
    folder, _ = got(hub, tmp_path / "home", "org/hurt", weights=True)
    assert (folder / "model.safetensors").read_bytes() == data


def test_the_token_reaches_the_hub_but_not_the_store(hub: StandinHub, tmp_path: Path):
    data = os.urandom(100)
    hub.add("org/gated", put(tmp_path / "gated", **{"config.json": "{}", "model.safetensors": data}), gated=True)
    message = refused(hub, tmp_path / "home", "org/gated", weights=False)
    assert "gated" in message and "HF_TOKEN" in message and f"{hub.endpoint}/org/gated" in message
    hub.seen.clear()
    got(hub, tmp_path / "home", "org/gated", weights=True, HF_TOKEN="hf_secret")
    assert {seen.token for seen in hub.seen if "gated" in seen.path} == {"Bearer hf_secret"}
    assert {seen.token for seen in hub.downloads(data)} == {None}


def test_unknown_names_and_revisions_say_what_to_check(hub: StandinHub, tmp_path: Path):
    hub.add("org/known", put(tmp_path / "known", **{"config.json": "{}"}))
    message = refused(hub, tmp_path / "home", "org/unknwon", weights=False)
    assert "'org/unknwon'" in message and "spelling" in message and "HF_TOKEN" in message
    for revision in ("v9", "0" * 40):
        message = refused(hub, tmp_path / "home", "org/known", revision=revision, weights=False)
        assert "org/known has no such revision" in message and revision in message
    with pytest.raises(WeightsError, match=r"not a hub name: 'org/a--b'.*org/name"):
        fetch("org/a--b", weights=False)


def test_pickles_are_never_fetched_and_said_so(hub: StandinHub, tmp_path: Path):
    hub.add("org/old", put(tmp_path / "old", **{"config.json": "{}", "pytorch_model.bin": b"pickle"}))
    message = refused(hub, tmp_path / "home", "org/old", weights=True)
    assert "safetensors" in message and "pytorch_model.bin" in message
    assert not [seen for seen in hub.seen if seen.path.endswith(".bin")]


def test_the_cache_serves_alone_when_the_hub_is_down_or_forbidden(tmp_path: Path):
    with StandinHub() as hub:
        commit = hub.add("org/pipe", pipeline(tmp_path / "pipe", "Kept"))
        hub.add("org/half", pipeline(tmp_path / "pipe", "Half"))
        folder, _ = got(hub, tmp_path / "home", "org/pipe", weights=True)
        got(hub, tmp_path / "home", "org/half", weights=False)
        count = len(hub.seen)
        assert got(hub, tmp_path / "home", "org/pipe", weights=True, HF_HUB_OFFLINE=1) == (folder, commit)
        message = refused(hub, tmp_path / "home", "org/half", weights=True, HF_HUB_OFFLINE=1)
        assert "HF_HUB_OFFLINE" in message and "org/half" in message
        assert "HF_HUB_OFFLINE" in refused(hub, tmp_path / "home", "org/never", weights=False, HF_HUB_OFFLINE=1)
        assert len(hub.seen) == count, "offline means offline"
    assert got(hub, tmp_path / "home", "org/pipe", weights=True) == (folder, commit)
    message = refused(hub, tmp_path / "home", "org/never", weights=False)
    assert hub.endpoint in message and "HF_ENDPOINT" in message and "network" in message


def test_a_cache_that_cannot_be_written_names_the_setting(hub: StandinHub, tmp_path: Path):
    hub.add("org/disk", put(tmp_path / "disk", **{"config.json": "{}", "model.safetensors": b"x"}))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "hub").write_text("a file where the cache should be")
    message = refused(hub, tmp_path / "home", "org/disk", weights=True)
    assert "cannot store org/disk" in message and "HF_HOME" in message


def test_a_folder_here_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put(tmp_path / "org/here", **{"vae__config.json": "{}"})
    monkeypatch.chdir(tmp_path)
    for name in ("org/here", "./org/here", str(tmp_path / "org/here")):
        assert is_local(name)
        assert fetch(name, weights=True).folder.samefile(tmp_path / "org/here")
    found = fetch("org/here", subfolder="vae", weights=False)
    assert (found.folder, found.commit) == (Path("org/here/vae"), "")
    with pytest.raises(WeightsError, match=r"revisions.*'v1'.*leave the revision out"):
        fetch("org/here", revision="v1", weights=False)


def test_names_that_are_paths_never_reach_the_hub():
    assert not is_local("org/model") and not is_local("gpt2") and not is_local("Org-1/model_2.1")
    for name in ("./nowhere", "/no/where", "~/nowhere", "a/b/c", "no where"):
        assert is_local(name)
    with pytest.raises(WeightsError, match=r"no such folder.*nowhere.*org/name"):
        fetch("./nowhere", weights=False)


@pytest.mark.parametrize(
    ("offered", "wanted"),
    [
        (["model.safetensors", "model.fp16.safetensors", "model.bin"], ["model.safetensors"]),
        (["model.fp16.safetensors"], ["model.fp16.safetensors"]),
        (["unet/m.safetensors", "vae/m.fp16.safetensors"], ["unet/m.safetensors", "vae/m.fp16.safetensors"]),
        (["m-00001-of-00001.safetensors", "m-00001-of-00001.fp16.safetensors"], ["m-00001-of-00001.safetensors"]),
        (["wan2.1.safetensors", "wan2.safetensors"], ["wan2.1.safetensors", "wan2.safetensors"]),
        (["model_index.json", "all.safetensors", "vae/m.safetensors"], ["vae/m.safetensors"]),
        (["config.json", "all.safetensors", "vae/m.safetensors"], ["all.safetensors", "vae/m.safetensors"]),
        (["vae/[a].safetensors", "x.ckpt", "y.pt"], ["vae/[a].safetensors"]),
    ],
)
def test_needed_weights_are_those_read_once(offered: list[str], wanted: list[str]):
    assert needed(offered) == wanted
