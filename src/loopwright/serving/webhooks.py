"""Tells whoever a video's client has named that it has ended, in the form of OpenAI's webhooks, signed.

    webhooks = Webhooks(records, Hosts(["hooks.example.org"]), secret(path))
    webhooks.check("https://hooks.example.org/done")           # Refusal
    webhooks.tell(record)                                      # an ended one; returns at once

Headers and signature are those of Standard Webhooks: `openai.webhooks.unwrap` verifies them. What is not taken is sent
again, less and less often, for about an hour, also by the next server; it may come twice, with the same id. Whether it
comes at all makes no difference to the job.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import json
import logging
import os
import secrets
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import RequestError
from .delivery import DeliveryError, Hosts, post
from .records import Record, Records

WEBHOOK = "webhook"  # its name in a record's echo, and so in answers: {"url", "status", "attempts"}
PENDING, DELIVERED, GIVEN_UP = "pending", "delivered", "given_up"
_START = "whsec_"
_TOGETHER = 4
_log = logging.getLogger("loopwright.serving")


def promised(url: str) -> dict[str, object]:
    """What a record says of a call that is still to be made."""
    return {WEBHOOK: {"url": url, "status": PENDING, "attempts": 0}}


class Webhooks:
    """On the event loop. `delays` are the seconds before each attempt."""

    delays: Sequence[float] = (0.0, 2.0, 10.0, 60.0, 600.0, 3000.0)

    def __init__(self, records: Records, hosts: Hosts, key: bytes) -> None:
        self._records, self._hosts, self._key = records, hosts, key
        self._calling: dict[str, asyncio.Task[None]] = {}
        self._places = asyncio.Semaphore(_TOGETHER)

    def check(self, url: str) -> None:
        """Raise Refusal for an address that this server does not call."""
        self._hosts.target(url)

    def tell(self, record: Record) -> None:
        """Call who is to hear of the record's end, if anybody is."""
        if WEBHOOK in record.echo and record.id not in self._calling:
            task = self._calling[record.id] = asyncio.create_task(self._tell(record))
            task.add_done_callback(lambda _: self._calling.pop(record.id))

    async def recover(self) -> None:
        """Go on with what a server before this one, or another, has not delivered."""
        for record in await asyncio.to_thread(self._records.untold):
            self.tell(record)

    async def leave(self) -> None:
        """Leave what is not delivered to the next server."""
        calling = list(self._calling.values())
        for task in calling:
            task.cancel()
        await asyncio.gather(*calling, return_exceptions=True)

    async def _tell(self, record: Record) -> None:
        """Try until it is taken, or often enough; what has been tried is kept."""
        hook = record.echo[WEBHOOK]
        assert isinstance(hook, dict)
        url, done = str(hook["url"]), int(hook["attempts"])
        for attempt, delay in enumerate(self.delays[done:], done + 1):
            await asyncio.sleep(delay)
            status = await self._call(record, url, last=attempt == len(self.delays))
            told = {**record.echo, WEBHOOK: {"url": url, "status": status, "attempts": attempt}}
            await asyncio.to_thread(self._records.change, record.id, echo=told)
            if status != PENDING:
                return

    async def _call(self, record: Record, url: str, *, last: bool) -> str:
        try:
            target, body = self._hosts.target(url), payload(record)
            async with self._places:
                await asyncio.to_thread(post, target, body, headers(record, body, self._key))
            return DELIVERED
        except DeliveryError as error:
            _log.warning("the webhook of %s was not taken: %s", record.id, error)
        except Exception:
            _log.exception("the webhook of %s could not be sent", record.id)
        return GIVEN_UP if last else PENDING


def payload(record: Record) -> bytes:
    """The event, as JSON."""
    event = {
        "id": f"evt_{record.id}",
        "object": "event",
        "type": f"video.{record.status}",
        "created_at": int(record.ended or record.created),
        "data": {"id": record.id, "model": record.model, "status": record.status, "error": record.error},
    }
    return json.dumps(event).encode()


def headers(record: Record, body: bytes, key: bytes) -> dict[str, str]:
    """Those of a call that is made now: its id, the time, and the signature of both and of the body."""
    name, now = f"evt_{record.id}", str(int(time.time()))
    signature = hmac.digest(key, f"{name}.{now}.".encode() + body, hashlib.sha256)
    return {
        "Content-Type": "application/json",
        "User-Agent": "loopwright",
        "webhook-id": name,
        "webhook-timestamp": now,
        "webhook-signature": f"v1,{base64.b64encode(signature).decode()}",
    }


def secret(path: Path) -> bytes:
    """The key in the file, which is made, for its owner alone, where there is none. Raises RequestError."""
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii") as file:
                file.write(_START + base64.b64encode(secrets.token_bytes(32)).decode() + "\n")
        text = path.read_text(encoding="ascii").strip()
        key = base64.b64decode(text.removeprefix(_START), validate=True)
    except (OSError, ValueError, binascii.Error) as error:
        raise RequestError(f"cannot read {path} ({error})", remedy=f"it holds {_START} and a key in base64") from error
    if not text.startswith(_START) or len(key) < 24:
        raise RequestError(
            f"{path} holds no key for webhooks", remedy=f"it holds {_START} and 24 bytes or more in base64"
        )
    return key
