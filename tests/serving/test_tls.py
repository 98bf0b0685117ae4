"""A server with a certificate speaks HTTPS; without its key it does not begin."""

import asyncio
import ssl
import threading

import httpx
import pytest
import trustme
from cryptography.hazmat.primitives import serialization
from live import free_port

import loopwright
from loopwright.errors import RequestError
from loopwright.serving.server import listen, server_of
from loopwright.serving.service import Service
from loopwright.serving.settings import Settings


@pytest.fixture(scope="module")
def authority():
    return trustme.CA()


@pytest.fixture(scope="module")
def files(authority, tmp_path_factory):
    """A certificate of 127.0.0.1 and its key."""
    issued, folder = authority.issue_cert("127.0.0.1"), tmp_path_factory.mktemp("tls")
    issued.cert_chain_pems[0].write_to_path(folder / "cert.pem")
    issued.private_key_pem.write_to_path(folder / "key.pem")
    return folder / "cert.pem", folder / "key.pem"


def test_with_a_certificate_https_alone_is_spoken(checkpoint, authority, files, tmp_path):
    settings = Settings(folder=tmp_path, port=free_port(), tls_cert=files[0], tls_key=files[1])
    with listen(settings) as sock:
        server = server_of(Service([loopwright.load(checkpoint("t2v"), device="cpu")], settings))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[sock])))
        thread.start()
        try:
            trust = ssl.create_default_context()
            authority.configure_trust(trust)
            with httpx.Client(base_url=f"https://127.0.0.1:{settings.port}", verify=trust, timeout=60) as client:
                assert client.get("/health").json()["status"] == "ok"
                body = {"prompt": "a fox", "size": "32x32", "num_inference_steps": 2, "response_format": "url"}
                made = client.post("/v1/images/generations", json=body).json()
                assert made["data"][0]["url"].startswith(f"https://127.0.0.1:{settings.port}/v1/images/")
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://127.0.0.1:{settings.port}/health")
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                httpx.get(f"https://127.0.0.1:{settings.port}/health")
        finally:
            server.should_exit = True
            thread.join()


def test_a_certificate_needs_its_key_and_a_key_its_certificate(files):
    with pytest.raises(RequestError, match="--tls-cert needs its other half; give --tls-key too"):
        Settings(tls_cert=files[0])
    with pytest.raises(RequestError, match="--tls-key needs its other half; give --tls-cert too"):
        Settings(tls_key=files[1])


def test_files_that_are_no_certificate_and_its_key_are_refused_before_anything_is_loaded(files, authority, tmp_path):
    other, locked = tmp_path / "other.pem", tmp_path / "locked.pem"
    authority.issue_cert("127.0.0.1").private_key_pem.write_to_path(other)
    key = serialization.load_pem_private_key(files[1].read_bytes(), None)
    form, secret = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, form, secret))
    for chosen, message in (
        ((files[0], tmp_path / "none.pem"), "cannot read .*none.pem \\(No such file or directory\\)"),
        ((tmp_path, files[1]), "cannot read .* \\(Is a directory\\)"),
        ((files[0], other), "no certificate and its key \\(KEY_VALUES_MISMATCH\\)"),
        ((files[1], files[1]), "no certificate and its key"),
        ((files[0], locked), "no certificate and its key \\(the key has a passphrase\\)"),
    ):
        with pytest.raises(RequestError, match=message):
            listen(Settings(port=free_port(), tls_cert=chosen[0], tls_key=chosen[1]))
