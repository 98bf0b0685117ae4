"""A certificate and its key, looked at before anything is loaded.

    require(Path("cert.pem"), Path("key.pem"))

Deliberately absent: certificates of clients, and keys with a passphrase, which nobody is there to type.
"""

import ssl
from pathlib import Path

from ..errors import RequestError


def require(certificate: Path, key: Path) -> None:
    """Raise RequestError unless a server can show this certificate (PEM, its chain after it) with this key (PEM)."""
    for path in (certificate, key):
        try:
            path.read_bytes()
        except OSError as error:
            raise RequestError(f"cannot read {path} ({error.strerror})", remedy="give files in PEM format") from error
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password=_nobody)
    except (ssl.SSLError, _LockedError) as error:
        raise RequestError(
            f"{certificate} and {key} are no certificate and its key ({_reason(error)})",
            remedy="give both in PEM format, the key without a passphrase",
        ) from error


class _LockedError(Exception):
    """A key asks for a passphrase."""


def _nobody() -> str:
    raise _LockedError("the key has a passphrase")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
