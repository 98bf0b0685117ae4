"""Encodings on disk: a file each, named by its key, never half written, never trusted unseen.

    cache = Cache("encoded")
    cache.write(key, latents)
    cache.read(key)             # the same bits, None if there is no entry; raises EntryError for one that is not right

An entry is a safetensors file with one tensor, its key and a checksum of both. Any number of processes may share a
folder: whoever writes an entry writes the same values, in one atomic step. Deliberately absent: a size limit, since no
entry is worth less than another, and pickles.
"""

import hashlib
import json
import re
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from ..caches.feature import content
from ..errors import LoopwrightError
from ..files import replacing
from .keys import Key

ABANDONED = 3600.0  # seconds after which a file that was never renamed has nobody who still writes it
_ENTRY = re.compile(r"[0-9a-f]{40}\.safetensors")
_TEMPORARY = re.compile(r"\.loopwright-[0-9a-f]{32}\.safetensors")


class EntryError(LoopwrightError):
    """A file of the cache is not the entry that its name says, or is damaged."""


class CacheError(LoopwrightError):
    """The cache's folder cannot be used."""


class Cache:
    """A folder of entries: `latent/ab/abcd....safetensors`, `cond/...`. Raises CacheError for what cannot be one."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        for place in (self.folder, *self.folder.parents):
            if place.exists() and not place.is_dir():
                raise CacheError("not a folder", value=str(place), remedy="give a folder for the cache")

    def path(self, key: Key) -> Path:
        """Where the key's entry lies, or would."""
        return self.folder / key.kind / key.name[:2] / f"{key.name}.safetensors"

    def read(self, key: Key) -> torch.Tensor | None:
        """The entry's tensor; None if there is none. Raises EntryError for a file that is not what was written."""
        path = self.path(key)
        try:
            found, tensor = _parse(path)
        except FileNotFoundError:
            return None
        if found != key:
            raise EntryError(f"{path} is the entry of another key")
        return tensor

    def write(self, key: Key, tensor: torch.Tensor) -> None:
        """Store the entry, in place of what may be there. Raises CacheError if the folder does not let it."""
        tensors = {"value": tensor.detach().cpu().contiguous()}
        about = {"kind": key.kind, "content": key.content, "sha256": _checksum(key, tensors["value"])}
        # one key of metadata alone: several are written in no certain order, and equal entries shall be equal files
        data = save(tensors, metadata={"loopwright": json.dumps(about, ensure_ascii=False)})
        path = self.path(key)
        try:
            with replacing(path) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            reason = error.strerror or error
            raise CacheError(f"cannot write {path} ({reason})", remedy="make room, or choose another folder") from error

    def files(self) -> Iterator[Path]:
        """Every file that is named as an entry, right or not, in the order of their names."""
        return self._named(_ENTRY)

    def abandoned(self) -> Iterator[Path]:
        """Files that a process which ended left half written."""
        for path in self._named(_TEMPORARY):
            if time.time() - size_of(path)[1] > ABANDONED:
                yield path

    def _named(self, pattern: re.Pattern[str]) -> Iterator[Path]:
        for path in sorted(self.folder.glob("*/??/*")):
            if pattern.fullmatch(path.name):
                yield path


def check(path: Path) -> None:
    """Raise EntryError unless the file is the entry that its place and name say."""
    try:
        key, _ = _parse(path)
    except FileNotFoundError:  # removed since it was listed
        return
    if (key.kind, f"{key.name}.safetensors") != (path.parents[1].name, path.name):
        raise EntryError(f"{path} is the entry of another key")


def size_of(path: Path) -> tuple[int, float]:
    """Bytes and time of a file; (0, now) if it has been removed."""
    try:
        status = path.stat()
    except OSError:
        return 0, time.time()
    return status.st_size, status.st_mtime


def _parse(path: Path) -> tuple[Key, torch.Tensor]:
    """Key and tensor of an entry whose checksum holds. Raises EntryError or FileNotFoundError."""
    try:
        data = path.read_bytes()  # not mapped: a file cut short under a map ends the process
    except FileNotFoundError:
        raise
    except OSError as error:
        raise EntryError(f"{path} cannot be read ({error.strerror or error})") from error
    try:
        (tensor,) = load(data).values()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        about = json.loads(header["__metadata__"]["loopwright"])
        key, checksum = Key(about["kind"], about["content"]), about["sha256"]
    except (SafetensorError, struct.error, ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise EntryError(f"{path} is not an entry ({str(error) or type(error).__name__})") from error
    if checksum != _checksum(key, tensor):
        raise EntryError(f"{path} is damaged: its checksum does not hold")
    return key, tensor


def _checksum(key: Key, tensor: torch.Tensor) -> str:
    return hashlib.sha256(f"{key.kind} {key.content} {content({'value': tensor})}".encode()).hexdigest()
