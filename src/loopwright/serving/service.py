"""A server's parts, put together: engine, models, jobs, records, limits.

    service = Service(models, settings)
    async with service.running():
        ...

`Service` is what routes are given. Starting reads every weight; stopping saves what is under way.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from ..api.model import Model
from ..backends.usage import peak_bytes
from ..engine.instance import Instance
from ..errors import RequestError
from ..program import task_of
from . import safety
from .admission import Admission
from .delivery import Hosts
from .driver import Driver
from .health import Health
from .images import Images
from .jobs import Jobs
from .keys import Keys
from .lifecycle import Lifecycle, Load, by_name, read_weights
from .metrics import Metrics, Reading
from .models import Models
from .records import Records
from .repeats import Repeats
from .safety import Guard
from .saver import Saver
from .settings import Settings
from .videos import Videos
from .webhooks import Webhooks, secret
from .weights import Renewal

_UPKEEP_SECONDS = 60.0
_log = logging.getLogger("loopwright.serving")


class Service:
    """Of models on one device that share a store. `closing` is set when no new work is taken."""

    def __init__(self, models: Sequence[Model], settings: Settings, load: Load | None = None) -> None:
        by_name(models)
        self.settings, self.limits = settings, settings.limits
        self.keys = None if settings.keys is None else Keys(settings.keys)
        for name in settings.managers:
            if self.keys is not None and name not in self.keys.names:
                raise RequestError("no key of that name", value=name, choices=self.keys.names)
        self.guard = Guard(safety.load(settings.safety))
        self.records = Records(settings.folder)
        self.records.sweep()
        for model in models:
            read_weights(model)
        self._saver = Saver(settings.save_seconds)
        self.metrics = Metrics(self._readings(models[0].instance))
        execute = self.metrics.counting(models[0].execute)
        scheduler = models[0].scheduler(policy=settings.policy, execute=execute)
        self.driver = Driver(scheduler, between=self._saver)
        self.lifecycle = Lifecycle(
            models, self.driver, load=load, roots=settings.model_roots, idle_seconds=settings.idle_seconds
        )
        self.renewal = Renewal(self.lifecycle)
        self.jobs = Jobs(self.driver, self.metrics, self.lifecycle, self.guard)
        self.admission = Admission(self.limits, self.jobs.soonest)
        self.models = Models(self.lifecycle, self.driver, self.limits, self.guard)
        self.images = Images(self.jobs, self.records, self.limits)
        hosts = Hosts(settings.webhook_hosts, private=settings.webhook_private)
        key = b"" if settings.webhook_secret is None else secret(settings.webhook_secret)
        self.webhooks = Webhooks(self.records, hosts, key)
        self.repeats = Repeats(self.records)
        self.videos = Videos(self.jobs, self.models, self.records, self._saver, self.admission, webhooks=self.webhooks)
        self.health = Health(self.jobs, self.lifecycle, settings.health_seconds)
        self.closing = asyncio.Event()

    def _readings(self, instance: Instance) -> dict[str, tuple[str, Reading]]:
        features, pools, device = instance.store.features, instance.store.pools, instance.binding.device
        return {
            "requests_under_way": ("Images, videos and rollouts accepted and not ended", lambda: len(self.admission)),
            "jobs_scheduled": ("Jobs that the engine has", lambda: len(self.driver.scheduler)),
            "embedding_cache_hits_total": ("Embeddings that had been computed before", lambda: features.hits),
            "embedding_cache_misses_total": ("Embeddings that had not", lambda: features.misses),
            "embedding_cache_bytes": ("What the embeddings kept take", lambda: features.bytes),
            "leased_bytes": ("Pages that requests have", lambda: sum(pool.leased_bytes for pool in pools)),
            "peak_memory_bytes": ("The most memory used, of the device or the process", lambda: peak_bytes(device)[0]),
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Measure what is asked by default, take up what was left, and keep house until the end."""
        upkeep: list[asyncio.Task[None]] = []
        try:
            for model in self.models.named.values():
                await self._measure(model)
            await self.videos.recover()
            await self.webhooks.recover()
            upkeep = [asyncio.create_task(self._keep_house()), asyncio.create_task(self._keep_models())]
            yield
        finally:
            self.closing.set()
            self.renewal.give_up()
            for task in upkeep:
                task.cancel()
            await asyncio.to_thread(self.driver.close, self._saver.save_all)
            await self.videos.leave()
            await self.webhooks.leave()
            await asyncio.to_thread(self.jobs.close)
            self.records.close()

    async def _measure(self, model: Model) -> None:
        """The rows of requests that leave everything to the model."""
        task = task_of(model.card, None, ()) if any(not p.inputs for p in model.card.programs.values()) else None
        if task is not None:
            await self.models.rows(model, model.request("a circle", task=task, seed=0, mode="fixed", rows=1))

    async def _keep_house(self) -> None:
        """Remove results that are too old or too many."""
        while True:
            try:
                await asyncio.to_thread(self.tidy)
            except OSError:
                _log.exception("results that have expired could not be removed")
            await asyncio.sleep(_UPKEEP_SECONDS)

    async def _keep_models(self) -> None:
        """Let go of what nobody asks for."""
        if self.settings.idle_seconds is None:
            return
        while True:
            await asyncio.sleep(min(_UPKEEP_SECONDS, self.settings.idle_seconds / 4))
            await self.lifecycle.evict()

    def tidy(self) -> None:
        """Remove what has expired."""
        settings = self.settings
        for record in self.records.expired(time.time(), settings.retain_seconds, settings.retain_bytes):
            self.records.remove(record)
