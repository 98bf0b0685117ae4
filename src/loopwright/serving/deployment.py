"""A server as an outer orchestrator sees it: what to start, what it needs, when it lives and when it can be asked.

    describe(order, replicas=4, command=["loopwright", "serve", ...])   # values for JSON

Made of cards and settings: no weights are read, no port is opened. Kubernetes, Dynamo and the like each have forms of
their own for the same few facts; the fields are named after what they say, not after one of them.
"""

from collections.abc import Mapping, Sequence

from .. import __version__, catalog
from ..backends.device import pick
from ..card import Card
from .order import Order

FORMAT = "loopwright.deployment/v1"


def describe(order: Order, *, replicas: int, command: Sequence[str]) -> dict[str, object]:
    """Raises what `catalog.find` and `backends.device.pick` raise."""
    settings, device = order.settings, pick(str(order.options.get("device", "auto")))
    revision = order.options.get("revision")
    cards = [catalog.find(name, revision=None if revision is None else str(revision)) for name in order.models]
    scheme = "http" if settings.tls_cert is None else "https"
    return {
        "format": FORMAT,
        "version": __version__,
        "command": list(command),
        "models": [_model(card) for card in cards],
        "endpoint": {
            "scheme": scheme,
            "host": settings.host,
            "port": settings.port,
            "openapi": "/openapi.json",
            "metrics": "/metrics",
            "authenticated": settings.keys is not None,
        },
        "probes": {
            "liveness": {"path": "/livez", "period_seconds": 5, "failures": 3, "otherwise": "restart"},
            "readiness": {
                "path": "/health",
                "period_seconds": max(1, round(settings.health_seconds)),
                "failures": 2,
                "otherwise": "send nothing",
            },
        },
        "resources": {
            "replicas": replicas,
            "device": device.partition(":")[0],
            "gpus": replicas if device.startswith("cuda") else 0,
            "parameters": sum(part.parameters for card in cards for part in card.components.values()),
        },
        "state": {"folder": str(settings.folder), "kept": True, "shared": False},
        "stopping": {"signal": "SIGTERM", "grace_seconds": settings.drain_seconds, "renewing": _renewing(replicas)},
    }


def _model(card: Card) -> Mapping[str, object]:
    return {"name": card.name, "family": card.family, "digest": card.digest, "tasks": list(card.programs)}


def _renewing(replicas: int) -> str | None:
    """What has the replicas replaced one after another while the others serve."""
    return "SIGHUP" if replicas > 1 else None
