"""What a server has promised and made, on disk: a row a job or result in SQLite, its files beside it by its id.

    records = Records(folder)
    records.add(record)
    records.change(record.id, status="completed", ended=now)

A row is written before its client hears of it, and survives the process. Every method blocks: call it off the event
loop.
"""

import json
import os
import re
import shutil
import sqlite3
import threading
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from ..errors import StateError

QUEUED, IN_PROGRESS, COMPLETED, FAILED, CANCELLED = "queued", "in_progress", "completed", "failed", "cancelled"
UNFINISHED = (QUEUED, IN_PROGRESS)
_ID = re.compile(r"(video|image)_[0-9a-f]{32}")
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Record:
    """A job or a result. Times in seconds since 1970; `echo` is what answers say of its request.

    `key` and `fingerprint` are of an idempotent request: its name, and the hash of what it asked for. `suffix` is that
    of the result's file, and `bytes` its size.
    """

    id: str
    owner: str
    model: str
    status: str
    created: float
    echo: Mapping[str, object]
    priority: str = "normal"
    deadline: float | None = None
    started: float | None = None
    ended: float | None = None
    suffix: str = ""
    bytes: int = 0
    error: Mapping[str, object] | None = None
    key: str | None = None
    fingerprint: str = ""
    kind: str = field(default="video")


_COLUMNS = tuple(f.name for f in fields(Record))
_JSON = ("echo", "error")


def new_id(kind: str) -> str:
    """An id nobody can guess."""
    return f"{kind}_{uuid.uuid4().hex}"


class Records:
    """In `folder`, which one server has to itself. Raises StateError if another server has it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files = folder / "files"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.files.mkdir(exist_ok=True, mode=0o700)
        self._lock = threading.Lock()
        self._database = sqlite3.connect(folder / "jobs.sqlite", check_same_thread=False, timeout=1)
        try:
            self._prepare()
        except sqlite3.OperationalError as error:
            raise StateError(
                f"{folder} is another server's ({error})", remedy="give this one its own --folder"
            ) from error

    def _prepare(self) -> None:
        run = self._database.execute
        run("PRAGMA locking_mode=EXCLUSIVE")
        run("PRAGMA journal_mode=WAL")
        run("PRAGMA synchronous=FULL")
        (found,) = run("PRAGMA user_version").fetchone()
        if found not in (0, _VERSION):
            raise StateError(f"{self.folder} was written by another version", value=found, choices=(_VERSION,))
        run(f"CREATE TABLE IF NOT EXISTS jobs ({', '.join(_COLUMNS)}, PRIMARY KEY (id))")
        run("CREATE UNIQUE INDEX IF NOT EXISTS keys ON jobs (owner, key) WHERE key IS NOT NULL")
        run("CREATE INDEX IF NOT EXISTS owners ON jobs (owner, kind, created, id)")
        run(f"PRAGMA user_version={_VERSION}")
        self._database.commit()

    def file(self, record: Record) -> Path:
        """Where its result lies. The name is made of the id alone, which is of our making."""
        assert _ID.fullmatch(record.id)
        return self.files / f"{record.id}{record.suffix}"

    def saved(self, record: Record) -> Path:
        """Where the job is saved while it is under way."""
        assert _ID.fullmatch(record.id)
        return self.files / f"{record.id}.job"

    def add(self, record: Record) -> None:
        """Keep a new record. Raises sqlite3.IntegrityError if its owner has used its key before."""
        marks = ", ".join("?" * len(_COLUMNS))
        self._write(f"INSERT INTO jobs ({', '.join(_COLUMNS)}) VALUES ({marks})", *_row(record))

    def change(self, id: str, **values: object) -> None:
        """Set columns of a record."""
        assert set(values) <= set(_COLUMNS)
        given = [json.dumps(value) if name in _JSON else value for name, value in values.items()]
        self._write(f"UPDATE jobs SET {', '.join(f'{name}=?' for name in values)} WHERE id=?", *given, id)

    def get(self, owner: str, id: str) -> Record | None:
        """The record of that id, if it is the owner's."""
        found = self._read("WHERE owner=? AND id=?", owner, id)
        return found[0] if found else None

    def has(self, id: str) -> bool:
        """Whether there is a record of that id, whoever's."""
        return bool(self._read("WHERE id=?", id))

    def by_key(self, owner: str, key: str) -> Record | None:
        """The record that this key has made."""
        found = self._read("WHERE owner=? AND key=?", owner, key)
        return found[0] if found else None

    def page(self, owner: str, *, after: str | None, limit: int, ascending: bool) -> list[Record]:
        """At most `limit` videos of the owner's, by age, those that come after one of them."""
        way, order = (">", "ASC") if ascending else ("<", "DESC")
        where, given = "WHERE owner=? AND kind='video'", [owner]
        if after is not None:
            where += f" AND (created, id) {way} (SELECT created, id FROM jobs WHERE owner=? AND id=?)"
            given += [owner, after]
        return self._read(f"{where} ORDER BY created {order}, id {order} LIMIT ?", *given, limit)

    def unfinished(self) -> list[Record]:
        """Jobs that a server before this one has left, the oldest first."""
        return self._read("WHERE status IN (?, ?) ORDER BY created, id", *UNFINISHED)

    def untold(self) -> list[Record]:
        """Jobs that have ended, of which somebody is still to be told."""
        pending = "json_extract(echo, '$.webhook.status')='pending'"
        return self._read(f"WHERE status NOT IN (?, ?) AND {pending} ORDER BY ended", *UNFINISHED)

    def expired(self, now: float, seconds: float, most: int) -> list[Record]:
        """Ended records that are older than so many seconds, or that with the newer ones take more bytes than that."""
        ended = self._read("WHERE status NOT IN (?, ?) ORDER BY ended DESC, id", *UNFINISHED)
        gone, held = [], 0
        for record in ended:
            held += record.bytes
            if held > most or now - (record.ended or record.created) > seconds:
                gone.append(record)
        return gone

    def remove(self, record: Record) -> None:
        """Forget a record; then its files."""
        self._write("DELETE FROM jobs WHERE id=?", record.id)
        for path in (self.file(record), self.saved(record)):
            path.unlink(missing_ok=True)

    def inherit(self, folder: Path) -> list[Record]:
        """Take over all that lies in the folder of a server that has ended, which is then gone; what was taken.

        Whenever this process ends, each record is whole in one of the two folders: a file is linked, its record
        written, and only then are those of the other folder removed. Raises StateError if that server still runs.
        """
        other = Records(folder)
        try:
            taken = other._read("ORDER BY created, id")
            for record in taken:
                self._take(record, other)
        finally:
            other.close()
        shutil.rmtree(folder)
        return taken

    def _take(self, record: Record, other: "Records") -> None:
        for source, target in ((other.file(record), self.file(record)), (other.saved(record), self.saved(record))):
            if source.exists() and not target.exists():
                os.link(source, target)
        if not self.has(record.id):  # as it is if a process ended in the middle of this
            known = record.key is not None and self.by_key(record.owner, record.key) is not None
            self.add(replace(record, key=None) if known else record)
        other.remove(record)

    def sweep(self) -> None:
        """Drop files that no record knows, left by a process that ended between two writes."""
        records = self._read("")
        known = {self.saved(record) if record.status in UNFINISHED else self.file(record) for record in records}
        for path in self.files.iterdir():
            if path not in known:
                path.unlink()

    def close(self) -> None:
        """Nothing is written any more."""
        with self._lock:
            self._database.close()

    def _write(self, statement: str, *values: object) -> None:
        with self._lock, self._database:
            self._database.execute(statement, values)

    def _read(self, where: str, *values: object) -> list[Record]:
        with self._lock:
            rows = self._database.execute(f"SELECT {', '.join(_COLUMNS)} FROM jobs {where}", values).fetchall()
        return [_record(row) for row in rows]


def _row(record: Record) -> list[object]:
    values = {name: getattr(record, name) for name in _COLUMNS}
    return [json.dumps(value) if name in _JSON else value for name, value in values.items()]


def _record(row: tuple[object, ...]) -> Record:
    values = dict(zip(_COLUMNS, row, strict=True))
    return Record(**{name: json.loads(str(v)) if name in _JSON else v for name, v in values.items()})  # type: ignore
