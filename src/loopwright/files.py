"""Atomic files: written under another name beside the target, then renamed."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the target's folder, with its suffix; renamed on success, removed on failure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".loopwright-{uuid.uuid4().hex}{path.suffix.lower()}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def cache_folder() -> Path:
    """Where this user's machine keeps what can be learnt again: $LOOPWRIGHT_CACHE, else the usual place for caches."""
    named = os.environ.get("LOOPWRIGHT_CACHE")
    usual = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "loopwright"
    return Path(named).expanduser() if named else usual
