"""API keys: a file with a name and the SHA-256 of a key a line. A key itself is shown once, when it is made.

    key = new_key(Path("keys"), "alice")
    Keys(Path("keys")).owner(key)                  # "alice"

Keys are random and long, so that a plain hash is enough.
"""

import hashlib
import hmac
import os
import re
import secrets
from pathlib import Path

from ..errors import RequestError

_LINE = re.compile(r"([A-Za-z0-9_.-]{1,64})\s+([0-9a-f]{64})")


class Keys:
    """The keys of a file, read once. Raises RequestError for a file that holds none."""

    def __init__(self, path: Path) -> None:
        self._hashes = dict(_entries(path))
        if not self._hashes:
            raise RequestError("no API key in the file", value=str(path), remedy="make one with --new-key NAME")

    @property
    def names(self) -> list[str]:
        """Whose keys there are."""
        return list(self._hashes)

    def owner(self, key: str) -> str | None:
        """Whose key it is; None for a key of nobody's. Takes as long for the one as for the other."""
        given, found = _hash(key), None
        for name, known in self._hashes.items():
            if hmac.compare_digest(known, given):
                found = name
        return found


def new_key(path: Path, name: str) -> str:
    """A new key for that name, its hash added to the file, which only its owner may read."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise RequestError("a key's name has up to 64 letters, digits, dots, dashes", value=name)
    if path.exists() and name in dict(_entries(path)):
        raise RequestError("the file has a key of that name", value=name, remedy="remove its line, or choose another")
    key = f"lw-{secrets.token_urlsafe(32)}"
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "a", encoding="utf-8") as file:
        file.write(f"{name} {_hash(key)}\n")
    return key


def _entries(path: Path) -> list[tuple[str, str]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise RequestError(f"cannot read {path} ({error})", remedy="make it with --new-key NAME") from error
    entries = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not line.startswith("#"):
            found = _LINE.fullmatch(line.strip())
            if found is None:
                raise RequestError(f"{path}:{number} is not a name and a hash", remedy="make keys with --new-key NAME")
            entries.append((found[1], found[2]))
    return entries


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
