"""Clients of every kind, well-behaved and not, each an exchange with a server from first byte to last.

    crowd = Crowd("127.0.0.1", 8000, Tally(), random.Random(1))
    await crowd.one()                              # some exchange, by chance

What is sent is drawn from one generator, so that a seed repeats the load. Every answer is noted with its kind, its
status and its seconds, and one that should not have come as a problem. `Sample`s are kept to be made again by hand.
"""

import asyncio
import base64
import json
import random
import struct
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

import httpx

BUSY, STOPPING = 429, 503  # said on purpose
PROMPTS = ("a fox", "a fish moving left", "a red car", "a star on a blue background")
_REFUSED = range(400, 429)
Given = dict[str, object]


@dataclass(frozen=True, slots=True)
class Sample:
    """What was asked for, as parameters of `Model.request` but the pixels, and the file that came."""

    given: Mapping[str, object]
    suffix: str
    content: bytes


@dataclass(slots=True)
class Tally:
    """Seconds and statuses by kind, what should not have been, and answers kept for comparison."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    statuses: dict[str, Counter[int]] = field(default_factory=lambda: defaultdict(Counter))
    problems: list[str] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def note(self, kind: str, status: int, begun: float, expected: Collection[int], text: str = "") -> None:
        """An answer, and whether it is one that may come."""
        self.seconds[kind].append(time.perf_counter() - begun)
        self.statuses[kind][status] += 1
        if status not in expected and status != BUSY:
            self.problems.append(f"{kind}: {status} {text[:300]}")


class Crowd:
    """Exchanges with one server. `kept` is the share of files that become samples."""

    def __init__(self, host: str, port: int, tally: Tally, rng: random.Random, kept: float = 0.1) -> None:
        self.tally, self._rng, self._host, self._port, self._kept = tally, rng, host, port, kept
        self._http = httpx.AsyncClient(
            base_url=f"http://{host}:{port}",
            timeout=httpx.Timeout(240.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=64),
        )
        self.kinds: Mapping[Callable[[], Awaitable[None]], int] = {
            self.image: 6, self.image_by_url: 3, self.image_streamed: 3, self.edit: 3, self.image_left: 6,
            self.stream_left: 4, self.video: 5, self.video_cancelled: 5, self.video_deleted: 3, self.video_watched: 3,
            self.video_read_slowly: 2, self.rollout: 2, self.bad: 10, self.sent_slowly: 3, self.sent_in_part: 3,
            self.looked_around: 10, self.dry_run: 6, self.late: 2, self.announced: 1,
        }  # fmt: skip

    async def one(self) -> None:
        """Some exchange. Connections that break where nobody broke them are problems."""
        (kind,) = self._rng.choices(list(self.kinds), list(self.kinds.values()))
        try:
            await kind()
        except (httpx.HTTPError, OSError, asyncio.IncompleteReadError) as error:
            self.tally.problems.append(f"{kind.__name__}: {type(error).__name__} {error}")

    async def close(self) -> None:
        """Remove what was made, and leave."""
        while videos := (await self._http.get("/v1/videos", params={"limit": 100})).json()["data"]:
            for video in videos:
                await self._http.delete(f"/v1/videos/{video['id']}")
        await self._http.aclose()

    async def metrics(self) -> dict[str, float]:
        """Prometheus' lines, by name."""
        lines = (await self._http.get("/metrics")).text.splitlines()
        return {name: float(value) for name, value in (ln.rsplit(" ", 1) for ln in lines if not ln.startswith("#"))}

    # --- those who behave

    async def image(self) -> None:
        asked = self._asked() | {"n": self._rng.choice((1, 1, 2))}
        answer = await self._call("image", "POST", "/v1/images/generations", json=asked)
        if answer.status_code == 200:
            self._keep(asked, {"num_frames": 1}, ".png", base64.b64decode(answer.json()["data"][0]["b64_json"]))

    async def image_by_url(self) -> None:
        asked = self._asked() | {"response_format": "url"}
        answer = await self._call("image by url", "POST", "/v1/images/generations", json=asked)
        if answer.status_code == 200:
            content = await self._call("image content", "GET", answer.json()["data"][0]["url"])
            self._keep(asked, {"num_frames": 1}, ".png", content.content)

    async def image_streamed(self) -> None:
        asked = self._asked(steps=3) | {"stream": True, "partial_images": 1}
        begun, last = time.perf_counter(), ""
        async with self._http.stream("POST", "/v1/images/generations", json=asked) as answer:
            async for line in answer.aiter_lines():
                last = line if line.startswith("data: ") else last
        self.tally.note("image streamed", answer.status_code, begun, (200,))
        if answer.status_code == 200:
            told = json.loads(last.removeprefix("data: "))
            self._keep(asked, {"num_frames": 1}, ".png", base64.b64decode(told["b64_json"]))

    async def edit(self) -> None:
        asked = {"prompt": self._rng.choice(PROMPTS), "seed": str(self._rng.randrange(10**6)), "size": "16x16"}
        asked |= {"num_inference_steps": "2", "max_sequence_length": "32"}
        files = {"image": ("picture.png", picture(self._rng.randrange(256)), "image/png")}
        await self._call("edit", "POST", "/v1/images/edits", data=asked, files=files)

    async def rollout(self) -> None:
        await self._call("rollout", "POST", "/rollout/generate", json=self._asked() | {"num_frames": 1})

    async def dry_run(self) -> None:
        path = self._rng.choice(("/v1/images/generations", "/v1/videos", "/rollout/generate"))
        await self._call("dry run", "POST", path, json=self._asked() | {"dry_run": True})

    async def looked_around(self) -> None:
        path = self._rng.choice(
            ("/v1/models", "/v1/videos", "/health", "/metrics", "/", "/v1/videos?limit=5&order=asc")
        )
        await self._call(f"GET {path.split('?')[0]}", "GET", path)

    async def late(self) -> None:
        asked = self._asked() | {"deadline": 0.01}
        await self._call("too late", "POST", "/v1/images/generations", (422,), json=asked)

    async def video(self) -> None:
        """Made, polled, fetched whole and in part."""
        video, asked = await self._created()
        if video is None or (done := await self._polled(video)) != "completed":
            return
        content = await self._call("video content", "GET", f"/v1/videos/{video}/content")
        part = await self._call("video range", "GET", f"/v1/videos/{video}/content", (206,),
                                headers={"Range": "bytes=10-99"})  # fmt: skip
        if part.content != content.content[10:100]:
            self.tally.problems.append(f"a range of {video}, which is {done}, is not a part of it")
        self._keep(asked, {"num_frames": 5}, ".mp4", content.content)

    async def video_cancelled(self) -> None:
        video, _ = await self._created()
        if video is not None:
            await asyncio.sleep(self._rng.uniform(0, 2))
            await self._call("cancel", "POST", f"/v1/videos/{video}/cancel")

    async def video_deleted(self) -> None:
        video, _ = await self._created()
        if video is not None:
            await asyncio.sleep(self._rng.uniform(0, 4))
            await self._call("preview", "GET", f"/v1/videos/{video}/preview", (200, 409))
            await self._call("delete", "DELETE", f"/v1/videos/{video}")
            await self._call("after delete", "GET", f"/v1/videos/{video}", (404,))

    async def video_watched(self) -> None:
        """Its events, from a connection that breaks and one that goes on."""
        video, _ = await self._created()
        if video is None:
            return
        last, begun = "", time.perf_counter()
        for most in (self._rng.randrange(2, 6), 10**6):
            seen = 0
            async with self._http.stream("GET", f"/v1/videos/{video}/events", headers={"Last-Event-ID": last}) as told:
                async for line in told.aiter_lines():
                    if line.startswith("id: "):
                        last, seen = line[4:], seen + 1
                    if seen == most:
                        break
        self.tally.note("events", told.status_code, begun, (200,))

    # --- those who do not

    async def image_left(self) -> None:
        """Gone at some moment."""
        await self._left(self._asked(steps=8), "image left")

    async def stream_left(self) -> None:
        await self._left(self._asked(steps=8) | {"stream": True, "partial_images": 2}, "stream left")

    async def video_read_slowly(self) -> None:
        """A little at a time, and given up in the middle at times."""
        video, _ = await self._created()
        if video is None or await self._polled(video) != "completed":
            return
        reader, writer = await self._connected(f"GET /v1/videos/{video}/content HTTP/1.1", limit=512)
        begun, left = time.perf_counter(), self._rng.choice((4, 10**6))
        while left and await reader.read(256):
            await asyncio.sleep(0.05)
            left -= 1
        self.tally.note("read slowly", 200, begun, (200,))
        writer.close()

    async def sent_slowly(self) -> None:
        body = json.dumps(self._asked() | {"dry_run": True}).encode()
        reader, writer = await self._connected(*_head("/v1/images/generations", len(body)))
        begun = time.perf_counter()
        for start in range(0, len(body), 40):
            writer.write(body[start : start + 40])
            await asyncio.sleep(0.2)
        status = int((await reader.readline()).split()[1])
        self.tally.note("sent slowly", status, begun, (200,))
        writer.close()

    async def announced(self) -> None:
        """More than is read."""
        reader, writer = await self._connected(*_head("/v1/videos", 2**40))
        begun = time.perf_counter()
        self.tally.note("announced", int((await reader.readline()).split()[1]), begun, (413,))
        writer.close()

    async def sent_in_part(self) -> None:
        """Less than was announced, and then nothing."""
        _, writer = await self._connected(*_head("/v1/videos", 5000))
        writer.write(b'{"prompt": "a')
        await asyncio.sleep(self._rng.uniform(0, 1))
        writer.close()

    async def bad(self) -> None:
        """What is refused, in some way or other."""
        path = self._rng.choice(("/v1/images/generations", "/v1/videos", "/rollout/generate"))
        usual, json_type = self._asked(), {"Content-Type": "application/json"}
        ways: list[Given] = [
            {"content": b'{"prompt": "a', "headers": json_type},
            {"content": b'{"prompt": "a", "guidance_scale": NaN}', "headers": json_type},
            {"content": bytes(self._rng.randrange(256) for _ in range(200)), "headers": json_type},
            {"content": b"--x\r\nContent-Disposition: form-data; na", "headers":
                {"Content-Type": "multipart/form-data; boundary=x"}},
            {"content": b"prompt", "headers": {"Content-Type": "text/plain"}},
            {"json": usual | {"unheard_of": 1}},
            {"json": usual | {"prompt": 7}},
            {"json": usual | {"size": "17x16"}},
            {"json": usual | {"size": "100000x100000"}},
            {"json": usual | {"num_inference_steps": 10**9}},
            {"json": usual | {"model": "../../etc"}},
            {"data": {"prompt": "a"}, "files": {"input_reference": ("a.png", b"\x89PNG\r\n\x1a\nno", "image/png")}},
        ]  # fmt: skip
        await self._call("bad", "POST", path, _REFUSED, **self._rng.choice(ways))

    # --- what they have in common

    async def _call(
        self, kind: str, method: str, path: str, expected: Collection[int] = (200,), **more: object
    ) -> httpx.Response:
        begun = time.perf_counter()
        answer = await self._http.request(method, path, **more)
        self.tally.note(kind, answer.status_code, begun, expected, "" if answer.is_success else answer.text)
        if answer.status_code == BUSY:
            await asyncio.sleep(0.5)
        return answer

    def _asked(self, steps: int = 2) -> Given:
        """A request as small as can be, in some mode and of some size."""
        rng = self._rng
        mode = rng.choice(({}, {"mode": "fixed", "rows": 2}, {"mode": "fixed", "rows": 4}, {"mode": "exact"}))
        size = rng.choice(("16x16", "16x16", "32x16"))
        given = {"prompt": rng.choice(PROMPTS), "seed": rng.randrange(10**6), "size": size}
        return given | {"num_inference_steps": rng.randrange(1, steps + 1), "max_sequence_length": 32} | mode

    def _keep(self, asked: Given, more: Given, suffix: str, content: bytes) -> None:
        """Some of the answers, for comparison."""
        if self._rng.random() < self._kept:
            width, height = map(int, str(asked["size"]).split("x"))
            names = ("prompt", "seed", "num_inference_steps", "max_sequence_length")
            given = {name: asked[name] for name in names} | {"width": width, "height": height} | more
            mode = {"mode": asked.get("mode", "fixed"), "rows": asked.get("rows", 1)}
            self.tally.samples.append(Sample(given | mode, suffix, content))

    async def _created(self) -> tuple[str | None, Given]:
        asked = self._asked() | {"num_frames": 5}
        answer = await self._call("video", "POST", "/v1/videos", json=asked)
        return (answer.json()["id"] if answer.status_code == 200 else None), asked

    async def _polled(self, video: str) -> str:
        """Its status at the end; none of these is ever cancelled."""
        begun = time.perf_counter()
        while True:
            answer = await self._call("poll", "GET", f"/v1/videos/{video}")
            if answer.json()["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(self._rng.uniform(0.2, 2))
        done = str(answer.json()["status"])
        self.tally.note("video until done", 200 if done == "completed" else 500, begun, (200,), answer.text)
        return done

    async def _left(self, asked: Given, kind: str) -> None:
        body, begun = json.dumps(asked).encode(), time.perf_counter()
        _, writer = await self._connected(*_head("/v1/images/generations", len(body)))
        writer.write(body)
        await asyncio.sleep(self._rng.expovariate(0.5))
        writer.close()
        self.tally.note(kind, 499, begun, (499,))

    async def _connected(self, *lines: str, limit: int = 2**16) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(self._host, self._port, limit=limit)
        head = [lines[0], f"Host: {self._host}:{self._port}", *lines[1:]]
        writer.write("".join(f"{line}\r\n" for line in [*head, "Connection: close", ""]).encode())
        return reader, writer


def _head(path: str, length: int) -> tuple[str, ...]:
    return f"POST {path} HTTP/1.1", "Content-Type: application/json", f"Content-Length: {length}"


def picture(grey: int) -> bytes:
    """A PNG of 16 x 16."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes([grey, 255 - grey, x] * 1) * 16 for x in range(16))
    head = struct.pack(">IIBBBBB", 16, 16, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
