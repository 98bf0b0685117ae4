"""Which encoders a checkpoint holds, told by content: the same on every machine, whatever the folder is called.

    identity(card, ("vae",))        # a hash of its class, its configuration and every byte of its weights

Digests of large files are remembered in the user's cache folder for as long as a file's time and size stay. Fetches the
components from the hub if they are not here; reads no weights into tensors.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from .. import catalog
from ..card import Card
from ..errors import WeightsError
from ..files import cache_folder, replacing
from ..weights.hub import needed

REMEMBERED = 2**20  # bytes from which on reading a file costs more than remembering it
_CONFIGURATION = (".json", ".txt", ".model", ".jinja", ".tiktoken")


def identity(card: Card, parts: Iterable[str]) -> str:
    """A hash of the components' classes and files. Raises WeightsError for files that are missing."""
    total = hashlib.sha256()
    for part in parts:
        component = card.components[part]
        total.update(f"{part} {component.kind}\n".encode())
        for file in _files(catalog.locate(card, component) / component.subfolder):
            total.update(f"{file.name} {_digest(file)}\n".encode())
    return total.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    """What a component is loaded from: configurations, and weights without their variants in other precisions."""
    try:
        names = sorted(file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    except OSError as error:
        raise WeightsError(
            f"cannot read {folder} ({error.strerror})", remedy="download the checkpoint again"
        ) from error
    weights = set(needed(names))
    for name in names:
        if name in weights or name.endswith(_CONFIGURATION):
            yield folder / name


def _digest(file: Path) -> str:
    file = file.resolve()
    before = _state(file)
    if before["size"] < REMEMBERED:
        return _read(file)
    note = cache_folder() / "digests" / f"{hashlib.sha256(str(file).encode()).hexdigest()[:32]}.json"
    known = _note(note)
    if {**known, "sha256": ""} == {**before, "sha256": ""} and isinstance(known["sha256"], str):
        return known["sha256"]
    digest = _read(file)
    if _state(file) == before:
        _remember(note, {**before, "sha256": digest})
    return digest


def _state(file: Path) -> dict[str, int]:
    status = file.stat()
    return {"size": status.st_size, "modified": status.st_mtime_ns}


def _read(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _note(note: Path) -> dict[str, int | str]:
    """What was remembered; nothing if it is missing or no longer makes sense."""
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {"sha256": ""}
    return known if isinstance(known, dict) and "sha256" in known else {"sha256": ""}


def _remember(note: Path, known: dict[str, int | str]) -> None:
    try:
        with replacing(note) as temporary:
            temporary.write_text(json.dumps(known), encoding="utf-8")
    except OSError:  # it will be read again, that is all
        return
