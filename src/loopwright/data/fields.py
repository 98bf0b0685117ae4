"""What one declared row says, checked: the row, or everything that is wrong with it.

Two forms, paths relative to the declaring file's folder:

    {"prompt": "a red fox", "video": "fox.mp4"}
    {"text": "a red fox", "conditions": [{"type": "image", "uri": "first.png", "role": "first_frame"}],
     "target": {"visual": "fox.mp4"}}

In the short form `text` may stand for `prompt`, and `image` or `file_name` (whose suffix tells the kind) for `video`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..errors import DataError
from .row import Condition, Kind, Row

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff")
VIDEOS = (".mp4", ".mov", ".m4v", ".mkv", ".webm", ".avi", ".gif")
CAPTIONS = ("prompt", "text")
MEDIA = ("video", "image", "file_name")
_GENERAL = ("text", "conditions", "target")


def parse(values: Mapping[str, object], file: Path, line: int) -> Iterator[Row | DataError]:
    """The row that line `line` of `file` declares, or one DataError for each thing that is wrong with it."""
    entry = _Entry(file, line)
    row = entry.general(values) if "target" in values else entry.short(values)
    yield from entry.problems
    if row is not None and not entry.problems:
        yield row


def kind_of(path: Path) -> Kind | None:
    """What a file's suffix says it is; None for a suffix that says neither."""
    suffix = path.suffix.lower()
    return "image" if suffix in IMAGES else "video" if suffix in VIDEOS else None


@dataclass(slots=True)
class _Entry:
    """Reads one row and collects what is wrong with it, so that all of it can be told at once."""

    file: Path
    line: int
    problems: list[DataError] = field(default_factory=list)

    def short(self, values: Mapping[str, object]) -> Row | None:
        self._known(values, (*CAPTIONS, *MEDIA))
        prompt = self._prompt(self._one(values, CAPTIONS, "caption"))
        name, value = self._one(values, MEDIA, "media file")
        path = self._path(name, value) if name else None
        return self._row(prompt, path, name)

    def general(self, values: Mapping[str, object]) -> Row | None:
        self._known(values, _GENERAL)
        prompt = self._prompt(self._one(values, ("text",), "caption"))
        target = self._mapping("target", values["target"])
        self._known(target, ("visual", "audio"), of="target")
        if target.get("audio") is not None:
            self._wrong("sound cannot be trained on", value=target["audio"], remedy="leave out target.audio")
        path = self._path("target.visual", target.get("visual"))
        return self._row(prompt, path, "target.visual", self._conditions(values.get("conditions")))

    def _row(self, prompt: str, path: Path | None, name: str, conditions: tuple[Condition, ...] = ()) -> Row | None:
        kind = None if path is None else self._kind(name, path)
        return None if path is None or kind is None else Row(prompt, path, kind, self.file, self.line, conditions)

    def _conditions(self, value: object) -> tuple[Condition, ...]:
        if value is None:
            return ()
        if not isinstance(value, list):
            self._wrong("conditions must be a list", value=value)
            return ()
        found = (self._condition(f"conditions[{index}]", item) for index, item in enumerate(value))
        return tuple(condition for condition in found if condition is not None)

    def _condition(self, name: str, value: object) -> Condition | None:
        given = self._mapping(name, value)
        self._known(given, ("type", "uri", "role"), of=name)
        kind, role = given.get("type"), given.get("role")
        if kind not in ("image", "video"):
            self._wrong(f"unknown {name}.type", value=kind, choices=("image", "video"))
        if not isinstance(role, str) or not role.strip():
            self._wrong(f"{name}.role must be text", value=role, remedy='name its part, such as "first_frame"')
        path = self._path(f"{name}.uri", given.get("uri"))
        return Condition(kind, path, role) if path and isinstance(role, str) and kind in ("image", "video") else None

    def _known(self, values: Mapping[str, object], known: tuple[str, ...], of: str = "") -> None:
        for name in values:
            if name not in known:
                self._wrong(f"unknown key{of and f' of {of}'}", value=name, choices=known)

    def _one(self, values: Mapping[str, object], names: tuple[str, ...], what: str) -> tuple[str, object]:
        """The name and value of the one that is given of these names; no name if none or several are."""
        given = [name for name in names if values.get(name) is not None]
        if len(given) > 1:
            self._wrong(f"more than one {what}", value=" and ".join(given), remedy="keep one")
        elif not given:
            self._wrong(f"no {what}", choices=names)
        return (given[0], values[given[0]]) if len(given) == 1 else ("", None)

    def _prompt(self, given: tuple[str, object]) -> str:
        name, value = given
        if not name:
            return ""
        if not isinstance(value, str):
            self._wrong(f"{name} must be text", value=value)
        elif not value.strip():
            self._wrong(f"empty {name}", remedy="write what is seen, or take the row out")
        elif not _is_text(value):
            self._wrong("a caption is not text in UTF-8", value=value)
        else:
            return value
        return ""

    def _path(self, name: str, value: object) -> Path | None:
        if not isinstance(value, str) or not value.strip() or not _is_text(value) or "\0" in value:
            self._wrong(f"{name} must be the path of a file", value=value)
        elif "://" in value:
            self._wrong(f"{name} is not on this machine", value=value, remedy="download it and give its path")
        elif not (path := self.file.parent / value).is_file():
            self._wrong("no such file", value=str(path), remedy=f"paths are relative to {self.file.parent}")
        else:
            return path
        return None

    def _kind(self, name: str, path: Path) -> Kind | None:
        kind: Kind | None = "video" if name == "video" else "image" if name == "image" else kind_of(path)
        if kind is None:
            self._wrong("cannot tell an image from a video", value=str(path), choices=(*IMAGES, *VIDEOS))
        return kind

    def _mapping(self, name: str, value: object) -> Mapping[str, object]:
        if isinstance(value, Mapping):
            return value
        self._wrong(f"{name} must be an object", value=value)
        return {}

    def _wrong(self, message: str, *, value: object = None, choices: tuple[str, ...] = (), remedy: str = "") -> None:
        where = f"{self.file}:{self.line}"
        self.problems.append(DataError(where, message, value=value, choices=choices, remedy=remedy))


def _is_text(value: str) -> bool:
    """Whether it has no half of a surrogate pair, which JSON can escape and no file can hold."""
    return not any("\ud800" <= character <= "\udfff" for character in value)
