"""Serve models over HTTP, in OpenAI's shapes.

    loopwright serve loopwright/tiny-wan
    loopwright serve MODEL MODEL --host 0.0.0.0 --keys keys.txt
    loopwright serve --keys keys.txt --new-key alice          # prints a new key once, and ends
    loopwright serve MODEL --replicas 4                       # processes behind one port, a GPU each
    loopwright serve MODEL --replicas 4 --deployment-card deployment.json     # says what that needs, and ends

Answers come in fixed mode unless a request asks for another: the same bits whoever else is served, and
`generate --mode fixed --rows N` repeats them. Jobs and results lie in --folder and outlive the server.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RequestError
from . import flags
from .chatter import quiet
from .flags import Flag

if TYPE_CHECKING:
    from socket import socket

    from ..serving.order import Order
    from ..serving.settings import Settings

NAME, HELP = "serve", "serve models over HTTP, in OpenAI's shapes"
_PACKAGES = ("fastapi", "uvicorn", "python_multipart", "prometheus_client", "opentelemetry")
_MODELS = ("revision", "device", "dtype", "memory", "graphs", "compile", "sampler", "lora")
_LIMITS = {"max_queue": "queue", "max_per_key": "concurrent", "max_pixels": "pixels", "max_body": "body"}
_MANY = {"webhook_host": "webhook_hosts", "manager": "managers", "model_root": "model_roots"}
_PATHS = ("folder", "keys", "tls_cert", "tls_key", "webhook_secret")
FLAGS = (
    Flag("revision", "branch, tag or commit of a hub name", group="models"),
    Flag("device", "auto (the fastest here), cpu, cuda, cuda:1 ...", group="models"),
    Flag("dtype", "precision of the generators, such as bfloat16", group="models"),
    Flag("memory", "auto, high (weights stay on the device) or low (they come when needed)", group="models"),
    Flag("graphs", "auto (always on CUDA), always or never: capture steps as CUDA graphs", group="models"),
    Flag("compile", "compile the generators' blocks", bool, "models"),
    Flag("sampler", "another sampler than the models', such as euler", group="models"),
    Flag(
        "lora",
        "an adapter of the generator, FILE:0.8 to scale it; may be given again; for one of two experts NAME=FILE",
        group="models",
        metavar="FILE",
        many=True,
    ),
    Flag("threads", "CPU threads", int, "models", "N"),
    Flag("log_format", "text, or json: an object a line on stderr", group="access"),
    Flag("replicas", "so many servers, each a process with an engine, behind one port; 1", int, "fleet", "N"),
    Flag("deployment_card", "write what an orchestrator has to know as JSON, and end", group="fleet", metavar="FILE"),
    Flag("host", "address to listen on; 127.0.0.1, this machine alone", group="access"),
    Flag("port", "port to listen on; 8000", int, "access", "N"),
    Flag("keys", "file of API keys' hashes; without it nobody needs a key", group="access", metavar="FILE"),
    Flag("new_key", "add a key of that name to --keys, print it and end", group="access", metavar="NAME"),
    Flag("anonymous", "listen beyond this machine although nobody needs a key", bool, "access"),
    Flag("tls_cert", "certificate in PEM format: HTTPS instead of HTTP", group="access", metavar="FILE"),
    Flag("tls_key", "its key in PEM format, without a passphrase", group="access", metavar="FILE"),
    Flag(
        "manager",
        "a key's name that may load and unload models; may be given again",
        group="access",
        metavar="NAME",
        many=True,
    ),
    Flag(
        "model_root",
        "folder with models that managers may load, besides those named; may be given again",
        group="access",
        metavar="FOLDER",
        many=True,
    ),
    Flag(
        "idle_evict",
        "minutes after which a model nobody asks for lets its memory go, until somebody does",
        float,
        "models",
        "N",
    ),
    Flag(
        "safety",
        "filter of prompts and pictures: opennsfw, or module:function of your own; none if left out",
        group="access",
    ),
    Flag("folder", "where jobs and results are kept; in the cache folder", group="jobs", metavar="FOLDER"),
    Flag(
        "webhook_host",
        "a host, or HOST:PORT, that may be told of videos' ends; may be given again",
        group="jobs",
        metavar="HOST",
        many=True,
    ),
    Flag("webhook_secret", "file with the key that signs it; made if there is none", group="jobs", metavar="FILE"),
    Flag("webhook_private", "such hosts may lie in private networks, and be spoken to without TLS", bool, "jobs"),
    Flag("save_seconds", "how often a job under way is saved; 0, after every step", float, "jobs", "N"),
    Flag("policy", "fifo, shortest or deadline: whose step is next", group="jobs"),
    Flag("retain_seconds", "how long results are kept; a week", float, "jobs", "N"),
    Flag("retain_bytes", "how much of them is kept; 10 GiB", int, "jobs", "N"),
    Flag("drain_seconds", "how long waiting requests may take when the server stops; 20", float, "jobs", "N"),
    Flag("max_queue", "requests under way, in all; 256", int, "limits", "N"),
    Flag("max_per_key", "requests under way for one key; 64", int, "limits", "N"),
    Flag("max_pixels", "height x width x frames of one request; 2^27", int, "limits", "N"),
    Flag("max_body", "bytes of one request; 64 MiB", int, "limits", "N"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help="shipped ids, Diffusers folders or hub names")
    parser.add_argument("--config", metavar="FILE", help="YAML or JSON with the names of these flags")
    flags.add_arguments(parser, FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Listen, load, serve; or make a key."""
    if arguments.config:
        flags.fill(arguments, flags.read_config(arguments.config, FLAGS), FLAGS)
    if arguments.new_key:
        return _new_key(arguments)
    if not arguments.models:
        raise RequestError("no model to serve", remedy="name one, such as loopwright/tiny-wan")
    _require(_PACKAGES, "serve")
    with quiet():
        order = _order(arguments)
    replicas = 1 if arguments.replicas is None else arguments.replicas
    if replicas < 1:
        raise RequestError("a fleet has one replica at least", value=replicas)
    if arguments.deployment_card:
        return _describe(order, replicas, Path(arguments.deployment_card))
    with quiet():
        from ..serving import server

        sock = server.listen(order.settings)
    with sock:
        if replicas > 1:
            _serve_fleet(order, replicas, sock)
        else:
            with quiet():
                service = order.service(_say)
            server.run(service, sock)
    return 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _serve_fleet(order: "Order", replicas: int, sock: "socket") -> None:
    _require(("ray", "httpx"), "fleet")
    from ..serving.fleet import run

    run.serve(order, replicas=replicas, sock=sock)


def _describe(order: "Order", replicas: int, path: Path) -> int:
    """Write the deployment card; its command is this one without that flag."""
    from ..serving.deployment import describe

    command = ["loopwright", *_without("--deployment-card", sys.argv[1:])]
    path.write_text(json.dumps(describe(order, replicas=replicas, command=command), indent=1) + "\n", encoding="utf-8")
    return 0


def _without(flag: str, words: Sequence[str]) -> list[str]:
    """The words but for a flag and its value."""
    kept, skip = list[str](), False
    for word in words:
        if not skip and word != flag and not word.startswith(f"{flag}="):
            kept.append(word)
        skip = word == flag
    return kept


def _new_key(arguments: argparse.Namespace) -> int:
    if not arguments.keys:
        raise RequestError("a new key needs its file", remedy="give --keys FILE")
    from ..serving.keys import new_key

    print(new_key(Path(arguments.keys), arguments.new_key))
    return 0


def _require(packages: Sequence[str], extra: str) -> None:
    """Raise RequestError where what a server needs is not installed."""
    for name in packages:
        if find_spec(name) is None:
            raise RequestError(
                "serving needs a package that is not installed",
                value=name,
                remedy=f'pip install "loopwright[{extra}]"',
            )


def _settings(arguments: argparse.Namespace) -> "Settings":
    from ..serving.settings import Limits, Settings

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    for name in _PATHS:
        if name in given:
            given[name] = Path(given[name]).expanduser().absolute()
    given |= {name: tuple(given[flag]) for flag, name in _MANY.items() if flag in given}
    given["model_roots"] = tuple(Path(root).expanduser().absolute() for root in given.get("model_roots", ()))
    if "idle_evict" in given:
        given["idle_seconds"] = 60 * given["idle_evict"]
    limits = Limits(**{name: given[flag] for flag, name in _LIMITS.items() if flag in given})
    known = {field.name for field in fields(Settings)} - {"limits"}
    return Settings(limits=limits, **{name: value for name, value in given.items() if name in known})


def _order(arguments: argparse.Namespace) -> "Order":
    from ..serving.order import OF_ONE, Order

    for name in OF_ONE:
        if getattr(arguments, name) and len(arguments.models) > 1:
            raise RequestError(f"--{name} is of one model, and several are named", remedy="serve that one by itself")
    options = {name: value for name in _MODELS if (value := getattr(arguments, name)) is not None}
    options = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
    return Order(tuple(arguments.models), options, arguments.threads, _settings(arguments))
