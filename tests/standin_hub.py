"""A hub on this machine: what huggingface_hub needs to download a model, and switches to make that go wrong.

    with StandinHub() as hub:
        commit = hub.add("org/model", folder)                      # also revision="v1.0"
        subprocess.run(..., env={**os.environ, **hub.env(home)})   # huggingface_hub reads HF_ENDPOINT when imported

Like the public hub, it keeps large files (`*.safetensors`) in a store on another host, known by their SHA-256, and
redirects there. Deliberately absent: uploads, Xet, datasets, pages of a long listing.
"""

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit


@dataclass(frozen=True)
class Seen:
    """One request: `start` is the first byte asked for, 0 without a Range header."""

    method: str
    path: str
    start: int
    token: str | None


@dataclass
class Repo:
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.refs.get(revision)


class StandinHub:
    """Serves from `__enter__` to `stop` or `__exit__`. `seen` lists the requests in order."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.seen: list[Seen] = []
        self.store: dict[str, bytes] = {}
        self.broken: dict[str, int] = {}  # content's SHA-256 -> bytes until the connection breaks
        self.dead: set[str] = set()  # contents whose requests get no answer at all
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._running = False

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "StandinHub":
        self._thread.start()
        self._running = True
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Refuse connections from now on, as a hub that is down."""
        if self._running:
            self._running = False
            self._server.shutdown()
            self._server.server_close()

    def env(self, home: Path) -> dict[str, str]:
        """What to add to a process's environment. An outer token, offline mode or proxy must not reach the test."""
        direct = {name: "127.0.0.1,localhost" for name in ("NO_PROXY", "no_proxy")}
        quiet = {f"HF_HUB_DISABLE_{name}": "1" for name in ("XET", "TELEMETRY", "PROGRESS_BARS")}
        places = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_CACHE": str(home / "hub")}
        places["HF_TOKEN_PATH"] = str(home / "token")
        return {**places, **quiet, **direct, "HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_TOKEN": ""}

    def add(self, repo: str, folder: Path, revision: str = "main", *, gated: bool = False) -> str:
        """Commit the folder's files as they are now, point the branch or tag there, and return the commit's hash."""
        files = {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*")) if f.is_file()}
        commit = hashlib.sha1(repr([(name, sha256(data)) for name, data in files.items()]).encode()).hexdigest()
        entry = self.repos.setdefault(repo, Repo())
        entry.commits[commit], entry.refs[revision], entry.gated = files, commit, gated
        self.store.update({sha256(data): data for name, data in files.items() if is_large(name)})
        return commit

    def cut(self, data: bytes, after: int, *, dead: bool = False) -> None:
        """Break the next download of this large file after so many bytes; `dead`: nor answer for it until `heal`."""
        self.broken[sha256(data)] = after
        if dead:
            self.dead.add(sha256(data))

    def heal(self) -> None:
        self.broken.clear()
        self.dead.clear()

    def downloads(self, data: bytes) -> list[Seen]:
        """The requests for the content of this large file."""
        return [seen for seen in self.seen if seen.path == f"/store/{sha256(data)}"]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def is_large(name: str) -> bool:
    return name.endswith(".safetensors")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub: StandinHub = self.server.hub
        path = urlsplit(self.path).path
        asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        hub.seen.append(Seen(self.command, unquote(path), start, self.headers.get("Authorization")))
        if stored := re.fullmatch(r"/store/(\w+)", path):
            self._content(hub, stored[1], start)
        elif listed := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._about(hub, *(unquote(part or "") for part in listed.groups()))
        elif resolved := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(hub, *(unquote(part) for part in resolved.groups()))
        else:
            self._answer(404)

    def _find(self, hub: StandinHub, name: str, revision: str) -> tuple[Repo, str] | None:
        repo = hub.repos.get(name)
        if repo is None:
            self._answer(404, headers={"X-Error-Code": "RepoNotFound"})
        elif repo.gated and not self.headers.get("Authorization"):
            self._answer(401, headers={"X-Error-Code": "GatedRepo"})
        elif (commit := repo.commit(revision or "main")) is None:
            self._answer(404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            return repo, commit
        return None

    def _about(self, hub: StandinHub, name: str, kind: str, revision: str) -> None:
        if found := self._find(hub, name, revision):
            files = found[0].commits[found[1]]
            info = {"id": name, "sha": found[1], "siblings": [{"rfilename": file} for file in files]}
            tree = [_entry(file, data) for file, data in files.items()]
            body = json.dumps(tree if kind == "tree" else info).encode()
            self._answer(200, body, {"Content-Type": "application/json"})

    def _file(self, hub: StandinHub, name: str, revision: str, file: str) -> None:
        found = self._find(hub, name, revision)
        if not found:
            return
        data = found[0].commits[found[1]].get(file)
        headers = {"X-Repo-Commit": found[1]}
        if data is None:
            self._answer(404, headers={**headers, "X-Error-Code": "EntryNotFound"})
        elif is_large(file):
            place = f"http://localhost:{hub.port}/store/{sha256(data)}"
            linked = {"X-Linked-Etag": f'"{sha256(data)}"', "X-Linked-Size": str(len(data)), "Location": place}
            self._answer(302, headers={**headers, **linked})
        else:
            self._answer(200, data, {**headers, "ETag": f'"{blob_id(data)}"'})

    def _content(self, hub: StandinHub, digest: str, start: int) -> None:
        after = hub.broken.pop(digest, None)
        data = hub.store[digest]
        if after is None and digest in hub.dead:
            self.close_connection = True
            return
        headers = {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._answer(206 if start else 200, data[start:], headers, after)

    def _answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, after: int | None = None):
        """`after` breaks the promise that Content-Length made."""
        self.send_response(status)
        for key, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:after])
        if after is not None:
            self.close_connection = True


def _entry(file: str, data: bytes) -> dict[str, object]:
    entry: dict[str, object] = {"type": "file", "path": file, "size": len(data), "oid": blob_id(data)}
    if is_large(file):
        entry["lfs"] = {"oid": sha256(data), "size": len(data), "pointerSize": 134}
    return entry
