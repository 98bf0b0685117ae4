"""What nobody should send: each is refused by its own reason, and the server serves on."""

import io
import json
import socket
import struct
import time
import zlib

import pytest
from live import SMALL, served
from PIL import Image

from loopwright.serving.settings import Limits

LIMITS = Limits(body=200_000, prompt=300, pixels=64 * 64 * 9, uploads=64 * 64 * 9, steps=10, upload_seconds=1.0)


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with served(checkpoint("t2v"), folder=tmp_path_factory.mktemp("hostile"), limits=LIMITS) as running:
        yield running


def png(width: int, height: int) -> bytes:
    """A picture of that size by its header, and next to no bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(64))) + chunk(b"IEND", b"")


def drawn(kind: str) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32)).save(file, kind)
    return file.getvalue()


PLAYLIST = b"#EXTM3U\n#EXT-X-MEDIA-SEQUENCE:0\n#EXTINF:1.0,\nfile:///etc/passwd\n"
SCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"
BODIES = {
    "a field nobody knows": ({"prompt": "a", "guidance": 3}, "unknown parameter: 'guidance'; known: model, prompt"),
    "a name without end": ({"prompt": "a", "x" * 5000: 3}, f"unknown parameter: '{'x' * 80}'; known: model, prompt"),
    "a shift to nothing": ({"prompt": "a", "flow_shift": 5e-324}, "no steps come of that flow_shift: 5e-324"),
    "what a stream alone has": ({"prompt": "a", "partial_images": 2}, "partial_images come with stream: true alone"),
    "no prompt": ({}, "prompt: Field required"),
    "a number for text": ({"prompt": 3}, "prompt: Input should be a valid string"),
    "text for a number": ({"prompt": "a", "seed": "3"}, "seed: Input should be a valid integer, not '3'"),
    "a list of prompts": ({"prompt": ["a"]}, "prompt: Input should be a valid string"),
    "a seed out of range": ({"prompt": "a", "seed": -1}, "seed must be a whole number of at least 0"),
    "an enormous seed": ({"prompt": "a", "seed": 10**30}, "seed: "),
    "a crooked size": ({"prompt": "a", "size": "33x32"}, "width must be a multiple of 16: 33; nearest: 32 or 48"),
    "no size at all": ({"prompt": "a", "size": "../../etc"}, "size must be WIDTHxHEIGHT"),
    "two sizes": ({"prompt": "a", "size": "32x32", "height": 32}, "give size, or height and width, not both"),
    "too many pixels": ({"prompt": "a", "size": "8192x8192"}, "size is too large here"),
    "too many steps": ({"prompt": "a", "num_inference_steps": 10**9}, "num_inference_steps is too large here"),
    "too long a text": ({"prompt": "a", "max_sequence_length": 10**7}, "max_sequence_length is too large here"),
    "too long a prompt": ({"prompt": "a" * 301}, "prompt is too large here: 301 characters; at most 300"),
    "too much guidance": ({"prompt": "a", "guidance_scale": 1e39}, "guidance_scale is too large here"),
    "too many images": ({"prompt": "a", "n": 9}, "n must lie between 1 and 8"),
    "images without end": ({"prompt": "a", "n": 10**18}, "n must lie between 1 and 8"),
    "no images": ({"prompt": "a", "n": 0}, "n must lie between 1 and 8"),
    "no such mode": ({"prompt": "a", "mode": "fast"}, "'exact', 'fixed' or 'throughput', not 'fast'"),
    "no such kernels": ({"prompt": "a", "attention": "../x"}, "choices"),
    "rows without end": ({"prompt": "a", "mode": "fixed", "rows": 10**6}, "rows is too large here"),
    "a deadline before now": ({"prompt": "a", "deadline": -1}, "deadline: Input should be greater than 0"),
}
TEXTS = {
    "no JSON": ('{"prompt": ', "Invalid JSON"),
    "nothing": ("", "Invalid JSON"),
    "a list": ("[]", "should be an object"),
    "not a number": ('{"prompt": "a", "guidance_scale": NaN}', "guidance_scale"),
    "infinity": ('{"prompt": "a", "guidance_scale": 1e999}', "guidance_scale"),
    "half a character": ('{"prompt": "\\ud800"}', "Invalid JSON"),
    "endless digits": ('{"prompt": "a", "seed": ' + "9" * 6000 + "}", "number out of range"),
    "a tower": ("[" * 90_000, "Invalid JSON"),
}
FILES = {
    "a picture of next to no bytes": (png(8_000, 8_000), "the image has too many pixels: '8000x8000'"),
    "a picture that explodes": (png(30_000, 30_000), "exceeds limit"),
    "a picture cut off": (drawn("PNG")[:60], "cannot read the image"),
    "a picture that is a script": (SCRIPT, "of no kind that is read here"),
    "a list of files to play": (PLAYLIST, "of no kind that is read here"),
    "a video that is none": (b"\0\0\0\x18ftypmp42" + bytes(100), "holds a video where this needs an image"),
    "nothing": (b"", "of no kind that is read here"),
}


def refused(answer, status: int, message: str) -> None:
    error = answer.json()["error"]
    assert (answer.status_code, set(error)) == (status, {"type", "message", "param", "code"}), answer.text
    assert message in error["message"]
    assert answer.headers["x-request-id"]


def serves(server) -> None:
    made = server.post("/v1/images/generations", prompt="a fox", **SMALL)
    assert made["data"][0]["b64_json"]


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_refused_by_what_is_wrong_with_it(server, name):
    body, message = BODIES[name]
    refused(server.http.post("/v1/images/generations", json=SMALL | body), 400, message)


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_body_is_refused(server, name):
    text, message = TEXTS[name]
    headers = {"content-type": "application/json"}
    refused(server.http.post("/v1/images/generations", content=text, headers=headers), 400, message)
    serves(server)


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_before_it_is_decoded(server, name):
    contents, message = FILES[name]
    files, data = {"image": ("../../x.png", contents)}, {"prompt": "a fox"}
    refused(server.http.post("/v1/images/edits", files=files, data=data), 400, message)
    assert not list(server.service.records.files.iterdir())
    serves(server)


@pytest.mark.parametrize("url", ["http://169.254.169.254/latest", "file:///etc/passwd"])
def test_nothing_is_fetched(server, url):
    for body in ({"json": {"prompt": "a", "input_reference": url}}, {"data": {"prompt": "a", "input_reference": url}}):
        refused(server.http.post("/v1/videos", **body), 400, "URLs are not fetched")


@pytest.mark.parametrize(
    "path", ["..%2f..%2fjobs.sqlite", "%2e%2e", "video_" + "0" * 32, "x" * 5000, "%00", "' OR 1=1 --"]
)
def test_an_id_is_looked_up_and_nothing_else(server, path):
    for url in (f"/v1/videos/{path}/content", f"/v1/videos/{path}", f"/v1/images/{path}/content"):
        refused(server.http.get(url), 404, "")
    assert server.http.delete(f"/v1/videos/{path}").status_code in (404, 405)


def test_a_form_is_read_within_bounds(server):
    twice = {"files": [("prompt", (None, "a")), ("prompt", (None, "b"))]}
    refused(server.http.post("/v1/videos", **twice), 400, "given twice: 'prompt'")
    other = {"files": {"mask": ("m.png", drawn("PNG"))}, "data": {"prompt": "a"}}
    refused(server.http.post("/v1/images/edits", **other), 400, "no file is taken as 'mask'; choices: image")
    many = {"files": [(f"f{i}", (None, "a")) for i in range(100)]}
    refused(server.http.post("/v1/videos", **many), 400, "the form cannot be read")
    broken = {"content": b"--x\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=y"}}
    refused(server.http.post("/v1/videos", **broken), 400, "the form cannot be read")
    without = {"content": b"a", "headers": {"content-type": "multipart/form-data"}}
    refused(server.http.post("/v1/videos", **without), 400, "the form cannot be read")
    serves(server)


def test_bodies_of_other_kinds_are_refused(server):
    plain = {"content": b"{}", "headers": {"content-type": "text/plain"}}
    refused(server.http.post("/v1/videos", **plain), 415, "choices: application/json, multipart/form-data")
    packed = {"content": b"{}", "headers": {"content-type": "application/json", "content-encoding": "gzip"}}
    refused(server.http.post("/v1/videos", **packed), 415, "compressed bodies are not read")


def test_a_body_too_large_is_refused_unread_or_as_soon_as_it_is(server):
    headers = {"content-type": "application/json"}
    refused(server.http.post("/v1/videos", content=b" " * 200_001, headers=headers), 413, "at most 200000 bytes")

    def pieces():
        for _ in range(100):
            yield b" " * 4096

    refused(server.http.post("/v1/videos", content=pieces(), headers=headers), 413, "at most 200000 bytes")
    serves(server)


def raw(server, request: bytes, *, wait: float = 5.0) -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as sock:
        sock.sendall(request)
        return sock.recv(65536)


def test_a_body_that_does_not_come_is_not_waited_for(server):
    head = f"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
    begun = time.monotonic()
    assert b" 408 " in raw(server, f"{head}Content-Length: 100\r\n\r\n{{".encode()).split(b"\r\n")[0]
    assert time.monotonic() - begun < 4
    for wrong in ("Content-Length: -1", "Content-Length: x", "Content-Length: " + "9" * 500):
        assert raw(server, f"{head}{wrong}\r\n\r\n".encode()).split()[1] in (b"400", b"413")
    assert raw(server, head.encode() + b"X: " + b"a" * 200_000 + b"\r\n\r\n").split()[1] == b"400"
    serves(server)


def test_pages_of_other_sites_are_refused(server):
    refused(server.http.get("/v1/models", headers={"Host": "evil.example"}), 403, "no such host here")
    for origin in ("https://evil.example", "null", "http://[::1", ""):
        refused(server.http.post("/v1/videos", json={}, headers={"Origin": origin}), 403, "may not use this server")
    same = {"Origin": server.url}
    answer = server.http.get("/v1/models", headers=same)
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_a_request_id_is_kept_if_it_is_a_plain_one(server):
    for given, kept in (("abc-1", True), ("a b", False), ("x" * 65, False), ("a;b", False)):
        answer = server.http.get("/v1/models", headers={"X-Request-ID": given})
        assert (answer.headers["x-request-id"] == given) is kept


def test_what_is_not_there_is_told_in_the_same_shape(server):
    refused(server.http.get("/v1/nothing"), 404, "Not Found")
    refused(server.http.put("/v1/videos"), 405, "Method Not Allowed")
    refused(server.http.get("/v1/videos", params={"limit": 0}), 400, "limit")
    refused(server.http.get("/v1/videos", params={"page": 3}), 400, "page")
    refused(server.http.get("/v1/models/nobody"), 404, "no such model: 'nobody'; choices")


def test_a_form_is_as_strict_as_json(server):
    for data, message in (
        ({"prompt": "a", "seed": "x"}, "seed"),
        ({"prompt": "a", "guidance_scale": "nan"}, "guidance_scale"),
        ({"prompt": "a", "colour": "red"}, "unknown parameter: 'colour'"),
        ({"prompt": "a", "seconds": "inf"}, "seconds must be a number above 0"),
        ({"prompt": "a", "seconds": "1e300"}, "seconds must be a number above 0"),
        ({"prompt": "a", "seconds": "1", "num_frames": "9"}, "give seconds or num_frames, not both"),
    ):
        refused(server.http.post("/v1/videos", data=data), 400, message)
    assert json.loads(server.http.get("/health").text)["status"] == "ok"
