"""One POST to an address that a client has named: only to hosts that are allowed, never to a private address.

    target = Hosts(["hooks.example.org"]).target("https://hooks.example.org/done")     # Refusal for any other
    post(target, body, headers)                                                        # DeliveryError

A name is looked up once and the connection made to what was found, so that it cannot mean two things. Redirects are not
followed, no answer is read, and proxies are not asked.
"""

import ipaddress
import socket
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from urllib.parse import urlsplit

from ..errors import RequestError
from .refusal import Refusal

_SECONDS = 10.0
_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class DeliveryError(Exception):
    """Nobody has taken it; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to, and whether it may lie in a private network."""

    scheme: str
    host: str
    port: int
    path: str
    private: bool


class Hosts:
    """The hosts that may be named: "example.org" at the scheme's own port, or "example.org:8443".

    Where `private`, they may lie in private networks, this machine included, and be spoken to without TLS.
    """

    def __init__(self, allowed: Iterable[str], *, private: bool = False) -> None:
        self._allowed, self._private = frozenset(host.lower() for host in allowed), private
        for host in self._allowed:
            if "/" in host or not host or host.startswith(":"):
                raise RequestError("a host is named HOST or HOST:PORT", value=host)

    def target(self, url: str) -> Target:
        """Raises Refusal for an address that may not be named, or is none."""
        if not self._allowed:
            raise _refused("this server calls nobody; leave it out")
        try:
            parts = urlsplit(url)
            host, port = (parts.hostname or "").lower(), parts.port
        except ValueError as error:
            raise _refused(f"not an address ({error})") from error
        if any(ord(letter) <= 32 or ord(letter) > 126 for letter in url) or parts.username is not None:
            raise _refused("not a plain address: no spaces, no letters beyond ASCII, no user's name")
        if parts.scheme not in (("https", "http") if self._private else ("https",)):
            raise _refused(f"cannot be spoken to by {parts.scheme or 'no scheme'!r}; choices: https")
        usual = port in (None, _PORTS[parts.scheme])
        if f"{host}:{port}" not in self._allowed and not (usual and host in self._allowed):
            raise _refused(f"the host {parts.netloc[:80]!r} is not one this server calls")
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        return Target(parts.scheme, host, port or _PORTS[parts.scheme], path, self._private)


def post(target: Target, body: bytes, headers: Mapping[str, str]) -> None:
    """Send it, and see that it is taken (2xx). Blocks. Raises DeliveryError."""
    connection = HTTPConnection(target.host, target.port, timeout=_SECONDS)
    connection.default_port = _PORTS[target.scheme]  # which Host leaves out
    try:
        connection.sock = _connected(target)
        connection.request("POST", target.path, body, {**headers, "Connection": "close"})
        status = connection.getresponse().status
    except (OSError, HTTPException) as error:
        raise DeliveryError(f"{type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise DeliveryError(f"answered {status}")


def _connected(target: Target) -> socket.socket:
    found = socket.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    addresses = [str(entry[4][0]) for entry in found]
    inside = [address for address in addresses if not _public(ipaddress.ip_address(address.partition("%")[0]))]
    if inside and not target.private:
        raise DeliveryError(f"{target.host} lies in a private network")
    plain = socket.create_connection((addresses[0], target.port), timeout=_SECONDS)
    if target.scheme == "http":
        return plain
    try:
        return ssl.create_default_context().wrap_socket(plain, server_hostname=target.host)
    except BaseException:
        plain.close()
        raise


def _public(address: Address) -> bool:
    """Whether it is of the public network, also where it stands for another address."""
    if isinstance(address, ipaddress.IPv6Address):
        within = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if address in _NAT64:
            within = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if within is not None:
            return _public(within)
    return address.is_global and not address.is_multicast


def _refused(why: str) -> Refusal:
    return Refusal(f"webhook: {why}", param="webhook", code="webhook_not_allowed")
