"""Who is told of a video's end, how, and who never is."""

import ipaddress
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from live import SMALL, Running, served
from openai import InvalidWebhookSignatureError

from loopwright.errors import RequestError
from loopwright.serving.delivery import DeliveryError, Hosts, _public, post
from loopwright.serving.refusal import Refusal
from loopwright.serving.settings import Settings
from loopwright.serving.webhooks import Webhooks, secret

VIDEO = SMALL | {"prompt": "a fox", "num_frames": 5}


@dataclass
class Hook:
    """Somebody who listens: what it was sent, and what it answers next; 200 once that is used up."""

    port: int = 0
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/done?who=me"


@pytest.fixture
def hook() -> Iterator[Hook]:
    told = Hook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            told.seen.append((self.path, dict(self.headers), body))
            self.send_response(told.answers.pop(0) if told.answers else 200)
            self.send_header("Location", f"http://127.0.0.1:{told.port}/elsewhere")
            self.end_headers()

        do_GET = do_POST

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        told.port = listening.server_address[1]
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,))
        thread.start()
        yield told
        listening.shutdown()
        thread.join()


def serving(checkpoint, folder, hook: Hook, **more: object):
    hosts = (f"127.0.0.1:{hook.port}", "127.0.0.1:1")
    return served(checkpoint("t2v"), folder=folder / "jobs", webhook_hosts=hosts, webhook_private=True,
                  webhook_secret=folder / "secret", **more)  # fmt: skip


def told(server: Running, id: str, status: str) -> dict[str, object]:
    """What the video says of its webhook, once that has come so far."""
    until = time.monotonic() + 10
    while True:
        webhook = server.http.get(f"/v1/videos/{id}").json()["webhook"]
        if webhook["status"] == status or time.monotonic() > until:
            return webhook
        time.sleep(0.02)


def test_an_end_is_told_signed_as_openais_client_verifies(checkpoint, tmp_path, hook):
    with serving(checkpoint, tmp_path, hook) as server:
        video = server.post("/v1/videos", **VIDEO, webhook=hook.url)
        assert video["webhook"] == {"url": hook.url, "status": "pending", "attempts": 0}
        assert told(server, video["id"], "delivered") == {"url": hook.url, "status": "delivered", "attempts": 1}
        ((path, headers, body),) = hook.seen
        key = (tmp_path / "secret").read_text().strip()
        event = server.openai.webhooks.unwrap(body, headers, secret=key)
        assert (path, event.type, event.data.id) == ("/done?who=me", "video.completed", video["id"])
        assert server.http.get(f"/v1/videos/{video['id']}/content").status_code == 200
        with pytest.raises(InvalidWebhookSignatureError):
            server.openai.webhooks.unwrap(body.replace(b"completed", b"cancelled"), headers, secret=key)
        cancelled = server.post("/v1/videos", **VIDEO | {"num_inference_steps": 150}, webhook=hook.url)
        server.http.delete(f"/v1/videos/{cancelled['id']}")
        until = time.monotonic() + 10
        while len(hook.seen) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        assert b'"video.cancelled"' in hook.seen[1][2]


def test_what_is_not_taken_is_sent_again_and_redirects_are_not_followed(checkpoint, tmp_path, hook):
    with serving(checkpoint, tmp_path, hook) as server:
        server.service.webhooks.delays = (0.0, 0.02, 0.02)
        hook.answers = [500, 302]
        video = server.post("/v1/videos", **VIDEO, webhook=hook.url)
        assert told(server, video["id"], "delivered")["attempts"] == 3
        assert [path for path, _, _ in hook.seen] == ["/done?who=me"] * 3
        assert len({headers["webhook-id"] for _, headers, _ in hook.seen}) == 1
        lost = server.post("/v1/videos", **VIDEO, webhook="http://127.0.0.1:1/")
        assert told(server, lost["id"], "given_up")["attempts"] == 3
        assert server.http.get(f"/v1/videos/{lost['id']}").json()["status"] == "completed"


def test_the_next_server_tells_what_the_one_before_has_not(checkpoint, tmp_path, hook, monkeypatch):
    hook.answers = [503]
    with serving(checkpoint, tmp_path, hook) as server:
        server.service.webhooks.delays = (0.0, 1000.0)
        video = server.post("/v1/videos", **VIDEO, webhook=hook.url)
        server.openai.videos.poll(video["id"], poll_interval_ms=20)
        until = time.monotonic() + 10
        while not hook.seen and time.monotonic() < until:
            time.sleep(0.02)
        time.sleep(0.1)  # until that is written
    monkeypatch.setattr(Webhooks, "delays", (0.0, 0.0))
    with serving(checkpoint, tmp_path, hook) as server:
        assert told(server, video["id"], "delivered")["attempts"] == 2


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://evil.example/", "the host 'evil.example' is not one this server calls"),
        ("https://hooks.example.evil.org/", "is not one this server calls"),
        ("https://hooks.example:444/", "is not one this server calls"),
        ("https://other.example/", "is not one this server calls"),
        ("https://hooks.example@evil.example/", "not a plain address"),
        ("https://hooks.example\r\n/", "not a plain address"),
        ("https://hooks.example\u3002evil/", "not a plain address"),
        ("http://hooks.example/", "cannot be spoken to by 'http'"),
        ("file:///etc/passwd", "cannot be spoken to by 'file'"),
        ("hooks.example", "cannot be spoken to by 'no scheme'"),
        ("https://[", "not an address"),
        ("https://hooks.example:x/", "not an address"),
    ],
)
def test_an_address_that_is_not_allowed_is_refused(url, message):
    hosts = Hosts(["hooks.example", "other.example:8443"])
    with pytest.raises(Refusal, match=message):
        hosts.target(url)


def test_an_allowed_host_is_called_at_its_own_port():
    hosts = Hosts(["hooks.example", "other.example:8443"])
    assert hosts.target("https://HOOKS.example:443/a?b=c").path == "/a?b=c"
    assert (hosts.target("https://hooks.example").port, hosts.target("https://other.example:8443").port) == (443, 8443)


@pytest.mark.parametrize("name", ["localhost", "127.0.0.1", "0.0.0.0", "169.254.169.254", "10.0.0.1", "2130706433"])
def test_a_private_address_is_not_called_whatever_its_name(name):
    with pytest.raises(DeliveryError, match="lies in a private network"):
        post(Hosts([name]).target(f"https://{name}/"), b"", {})


@pytest.mark.parametrize(
    ("address", "public"),
    [("8.8.8.8", True), ("2001:4860:4860::8888", True), ("::ffff:8.8.8.8", True), ("100.64.0.1", False),
     ("::1", False), ("fe80::1", False), ("fd00::1", False), ("::ffff:10.0.0.1", False), ("224.0.0.1", False),
     ("2002:7f00:1::", False), ("64:ff9b::a9fe:a9fe", False), ("0.0.0.0", False)],
)  # fmt: skip
def test_addresses_within_addresses_are_seen(address, public):
    assert _public(ipaddress.ip_address(address)) is public


def test_without_hosts_nobody_is_called_and_a_rollout_calls_nobody(server):
    answer = server.http.post("/v1/videos", json=VIDEO | {"webhook": "https://hooks.example/"})
    assert answer.status_code == 400 and "this server calls nobody" in answer.json()["error"]["message"]
    answer = server.http.post("/rollout/generate", json=VIDEO | {"webhook": "https://hooks.example/"})
    assert answer.status_code == 400 and "webhook is of videos alone" in answer.json()["error"]["message"]


def test_a_key_is_made_once_for_its_owner_alone(tmp_path):
    path = tmp_path / "secret"
    key = secret(path)
    assert len(key) == 32 and secret(path) == key and stat.S_IMODE(path.stat().st_mode) == 0o600
    for text in ("", "whsec_", "whsec_!!", "whsec_YWJj", "lw-abc"):
        path.write_text(text)
        with pytest.raises(RequestError):
            secret(path)
    with pytest.raises(RequestError, match="webhooks are signed, and there is no key; give --webhook-secret FILE"):
        Settings(webhook_hosts=("hooks.example",))
    with pytest.raises(RequestError, match="a host is named HOST or HOST:PORT: 'https://x'"):
        Hosts(["https://x"])
