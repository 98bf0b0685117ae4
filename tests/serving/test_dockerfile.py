"""What the Dockerfile says, as far as that can be seen without Docker: its commands, files and extras exist."""

import fnmatch
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest

from loopwright.cli import parser, serve
from loopwright.serving.settings import Settings

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def lines() -> dict[str, list[str]]:
    """The arguments of each instruction, by its name, in order; continued lines are joined."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text())
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, rest = line.partition(" ")
            found.setdefault(name, []).append(rest.strip())
    return found


def test_what_runs_is_a_server_on_loopback(lines):
    (entry,), (command,) = map(json.loads, lines["ENTRYPOINT"]), map(json.loads, lines["CMD"])
    scripts = {script.name for script in distribution("loopwright").entry_points if script.group == "console_scripts"}
    assert entry == ["loopwright"] and "loopwright" in scripts
    arguments = parser().parse_args(command)
    assert arguments.run is serve.run and arguments.models == ["loopwright/tiny-wan"] and arguments.host is None
    settings = Settings()
    assert settings.local and f"{settings.port}" in lines["EXPOSE"]


def test_the_examples_are_commands(lines):
    text = (ROOT / "Dockerfile").read_text()
    examples = re.findall(r"^#.*?\bserve (.*)$", text, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        flags = example.partition(" makes one")[0].rstrip(")").replace("NAME", "alice").split()
        assert parser().parse_args(["serve", *flags]).keys == "/data/keys"
    assert set(re.findall(r"--build-arg (\w+)=", text)) <= {line.partition("=")[0] for line in lines["ARG"]}


def test_who_runs_it_is_not_root_and_owns_what_it_writes_to(lines):
    (user,) = lines["USER"]
    made = next(line for line in lines["RUN"] if "useradd" in line)
    assert user.isdecimal() and int(user) > 0 and f"--uid {user} " in made  # a number can be seen not to be root's
    assert f"--owner {made.split()[4]} /data" in made and lines["VOLUME"] == ["/data"]
    text = (ROOT / "Dockerfile").read_text()
    assert text.index('pip install --no-cache-dir ".[') < text.index("\nUSER ") < text.index("\nENTRYPOINT ")
    (variables,) = lines["ENV"]
    assert "LOOPWRIGHT_CACHE=/data/" in variables and "HF_HOME=/data/" in variables


def test_what_is_copied_and_installed_exists(lines):
    ignored = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line]
    kept = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    for line in lines["COPY"]:
        for source in line.split()[:-1]:
            assert (ROOT / source).exists() and any(fnmatch.fnmatch(source, pattern) for pattern in kept)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert any('".[$EXTRAS]"' in line for line in lines["RUN"])
    named = re.findall(r"EXTRAS=([\w,]+)", (ROOT / "Dockerfile").read_text())
    assert len(named) == 2 and all(set(each.split(",")) <= set(project["optional-dependencies"]) for each in named)
    needed = {project["readme"], *project["license-files"], "pyproject.toml", "src"}
    assert needed <= {source for line in lines["COPY"] for source in line.split()[:-1]}
    (image,) = lines["FROM"]
    assert image.startswith("python:3.11") and project["requires-python"].startswith(">=3.11")


def test_the_health_check_sees_a_server_and_its_absence(lines, server):
    (check,) = lines["HEALTHCHECK"]
    command = json.loads(check.partition("CMD ")[2])
    assert command[0] == "python" and "/health" in lines["ENV"][0]

    def healthy(url: str) -> bool:
        environment, ask = {**os.environ, "HEALTH": url}, [sys.executable, *command[1:]]
        return subprocess.run(ask, env=environment, capture_output=True, check=False).returncode == 0

    assert healthy(f"{server.url}/health")
    assert not healthy(f"{server.url}/nothing") and not healthy("http://127.0.0.1:1/health")
