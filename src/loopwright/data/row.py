"""One example of a data set: a caption, the picture or video it tells of, and what else the model is shown.

row.prompt, row.path, row.kind       # "a red fox", clips/fox.mp4, "video"
row.content                          # sha256 of the file's bytes
row.where                            # clips/rows.jsonl:3
row.shown(row.conditions[0])         # a condition's picture, as media of its own
"""

import functools
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from ..errors import DataError

Kind = Literal["image", "video"]
ROLES = ("first_frame",)


class Media(Protocol):
    """A picture or video, and where it was named: what is read and hashed. A row is its own."""

    @property
    def path(self) -> Path: ...
    @property
    def kind(self) -> Kind: ...
    @property
    def where(self) -> str: ...
    @property
    def content(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Shown:
    """Media without the rest of a row. `where` is the place of the declaration, as errors name it."""

    path: Path
    kind: Kind
    where: str

    @property
    def content(self) -> str:
        """The sha256 of the file's bytes, in hexadecimal. Raises DataError for a file that cannot be read."""
        return content(self.path, self.where)


@dataclass(frozen=True, slots=True)
class Condition:
    """Another picture or video that the model is shown; `role` says as what, such as "first_frame"."""

    kind: Kind
    path: Path
    role: str


@dataclass(frozen=True, slots=True)
class Row:
    """A caption and its media. `file` and `line` (from 1) are where it was declared."""

    prompt: str
    path: Path
    kind: Kind
    file: Path
    line: int
    conditions: tuple[Condition, ...] = ()

    @property
    def where(self) -> str:
        """The place of the declaration, as errors name it."""
        return f"{self.file}:{self.line}"

    @property
    def content(self) -> str:
        """The sha256 of the media file's bytes, in hexadecimal. Raises DataError for a file that cannot be read."""
        return content(self.path, self.where)

    def problems(self) -> Iterator[DataError]:
        """What is wrong with the conditions whatever the model is, without a look into files."""
        for condition in self.conditions:
            if condition.role not in ROLES:
                yield DataError(self.where, "unknown role of a condition", value=condition.role, choices=ROLES)
            elif condition.kind != "image":
                yield DataError(self.where, "a first frame is an image", value=condition.kind)
        if sum(condition.role in ROLES for condition in self.conditions) > 1:
            yield DataError(self.where, "more than one first frame", remedy="keep one")

    def shown(self, condition: Condition) -> Shown:
        """A condition of this row, as media to read."""
        return Shown(condition.path, condition.kind, self.where)


def content(path: Path, where: str) -> str:
    """The sha256 of a file's bytes, read again only when its time or size has changed since this process did."""
    try:
        status = path.stat()
        return _digest(path, status.st_mtime_ns, status.st_size)
    except OSError as error:
        raise DataError(where, f"cannot read {path} ({error.strerror or error})", remedy="check the file") from error


@functools.cache
def _digest(path: Path, modified: int, size: int) -> str:
    """`modified` and `size` are part of what is remembered, and nothing else."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
