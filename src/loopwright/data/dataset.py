"""Reads what a data set declares: rows in a `.jsonl`, in a `metadata.csv`, or media with captions beside them.

    rows = read("clips/rows.jsonl")        # a caption and a path a line; see `fields` for the keys
    rows = read("clips/metadata.csv")      # columns file_name (or video, image) and text (or prompt)
    rows = read("clips")                   # its metadata.csv or .jsonl, else fox.mp4 with fox.txt, subfolders included

A row that is wrong is an error that names file and line, never a row less. Deliberately absent: looking into media,
which is `decode`'s, and the network.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ..errors import DataError
from .fields import CAPTIONS, IMAGES, MEDIA, VIDEOS, kind_of, parse
from .row import Row

METADATA = ("metadata.csv", "metadata.jsonl")
FORMS = ("a .jsonl file", "a .csv file", "a folder of media with captions")
Entries = Iterator[Row | DataError]


def read(path: str | Path) -> Sequence[Row]:
    """Every row, in the order declared. Raises DataError for the first that is wrong and says how many more are."""
    rows: list[Row] = []
    wrong: list[DataError] = []
    for entry in entries(path):
        (wrong if isinstance(entry, DataError) else rows).append(entry)  # type: ignore[arg-type]
    if len(wrong) > 1:
        remedy = f"and {len(wrong) - 1} more; loopwright data check {path} lists them all"
        raise DataError(wrong[0].where, wrong[0].problem, remedy=remedy) from wrong[0]
    if wrong:
        raise wrong[0]
    return rows


def entries(path: str | Path) -> Entries:
    """Every row and everything that is wrong, in the order declared."""
    place = Path(path)
    if not place.exists():
        yield DataError(str(place), "no such data set", choices=FORMS, remedy="check the path")
        return
    declared = _declared(place)
    empty = True
    for entry in declared:
        empty = False
        yield entry
    if empty:
        yield DataError(str(place), "no rows", choices=FORMS)


def _declared(place: Path) -> Entries:
    if place.is_dir():
        return _folder(place)
    if place.suffix.lower() in (".jsonl", ".ndjson"):
        return _jsonl(place)
    if place.suffix.lower() == ".csv":
        return _csv(place)
    return iter([DataError(str(place), "not a data set", choices=FORMS)])


def _jsonl(file: Path) -> Entries:
    for line, text in _lines(file):
        if isinstance(text, DataError):
            yield text
        elif text.strip():
            yield from _object(file, line, text)


def _object(file: Path, line: int, text: str) -> Entries:
    try:
        values = json.loads(text)
    except ValueError as error:
        yield DataError(f"{file}:{line}", f"not JSON ({error})", remedy="write one object a line")
        return
    if isinstance(values, Mapping):
        yield from parse(values, file, line)
    else:
        yield DataError(f"{file}:{line}", "not an object", value=values, remedy='write {"prompt": ..., "video": ...}')


def _csv(file: Path) -> Entries:
    lines = list(_lines(file))
    unread = [text for _, text in lines if isinstance(text, DataError)]
    if unread:
        yield from unread
        return
    table = csv.reader((f"{text}\n" for _, text in lines if isinstance(text, str)), strict=True)
    line = 1
    try:
        heads = next(table, [])
        wrong = list(_columns(file, heads))
        yield from wrong
        line = table.line_num + 1
        for cells in () if wrong else table:
            yield from _record(file, line, heads, cells)
            line = table.line_num + 1
    except csv.Error as error:
        yield DataError(f"{file}:{line}", f"not CSV ({error})", remedy="put quotes around cells with commas")


def _record(file: Path, line: int, heads: list[str], cells: list[str]) -> Entries:
    if len(cells) > len(heads):
        remedy = "put quotes around a caption with commas"
        yield DataError(f"{file}:{line}", "more cells than columns", value=len(cells), choices=heads, remedy=remedy)
    elif cells:
        yield from parse(_given(heads, cells), file, line)


def _given(heads: list[str], cells: list[str]) -> dict[str, str]:
    """The cells that are not empty, and the first of those alike that all are, so that it is named."""
    given = {head: cell for head, cell in zip(heads, cells, strict=False) if cell}
    for names in (MEDIA, CAPTIONS):
        alike = [head for head in heads if head in names]
        if not set(alike) & set(given):
            given |= dict.fromkeys(alike[:1], "")
    return given


def _columns(file: Path, heads: list[str]) -> Iterator[DataError]:
    """What is wrong with the heads, said once and not for each row."""
    where = f"{file}:1"
    for head in heads:
        if head not in (*CAPTIONS, *MEDIA):
            yield DataError(where, "unknown column", value=head, choices=(*MEDIA, *CAPTIONS))
    for names, what in ((MEDIA, "media file"), (CAPTIONS, "caption")):
        if not set(names) & set(heads):
            yield DataError(where, f"no column with the {what}", value=",".join(heads), choices=names)
    if len(set(heads)) < len(heads):
        yield DataError(where, "a column is given twice", value=",".join(heads))


def _folder(folder: Path) -> Entries:
    metadata = [folder / name for name in METADATA if (folder / name).is_file()]
    if len(metadata) > 1:
        return iter([DataError(str(folder), "two declarations", value=", ".join(METADATA), remedy="name one of them")])
    return _declared(metadata[0]) if metadata else _captioned(folder)


def _captioned(folder: Path) -> Entries:
    """Media and captions by the path without its suffix, in the order of their names whatever the file system."""
    files = sorted(file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(folder)))
    captions = {file.with_suffix(""): file for file in files if file.suffix.lower() == ".txt"}
    told = set()
    for file in files:
        caption = captions.get(file.with_suffix(""))
        if caption is not None and file != caption:
            told.add(caption)
            yield from _with_caption(file, caption)
        elif file.suffix.lower() != ".txt" and kind_of(file):
            yield DataError(str(file), "no caption", remedy=f"write {file.with_suffix('.txt').name} beside it")
    for caption in sorted(set(captions.values()) - told):
        yield DataError(str(caption), "a caption without its media", choices=(*VIDEOS, *IMAGES))


def _with_caption(file: Path, caption: Path) -> Entries:
    texts = list(_lines(caption))
    unread = [text for _, text in texts if isinstance(text, DataError)]
    prompt = "\n".join(text for _, text in texts if isinstance(text, str)).strip()
    if unread:
        yield from unread
    else:
        yield from parse({"text": prompt, "file_name": file.name}, caption, 1)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _lines(file: Path) -> Iterator[tuple[int, str | DataError]]:
    """Each line with its number from 1, without its end; what is not text in UTF-8 is an error in its place."""
    try:
        data = file.read_bytes().removeprefix(b"\xef\xbb\xbf")
    except OSError as error:
        yield 1, DataError(str(file), f"cannot be read ({error.strerror or error})", remedy="check the file")
        return
    for number, line in enumerate(data.split(b"\n"), 1):
        try:
            yield number, line.decode().removesuffix("\r")
        except UnicodeDecodeError as error:
            yield (
                number,
                DataError(f"{file}:{number}", f"not text in UTF-8 ({error.reason})", remedy="save it as UTF-8"),
            )
