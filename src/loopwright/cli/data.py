"""Work with data sets.

    loopwright data check clips/rows.jsonl
    loopwright data check clips --bucket 480x832x81 --bucket 832x480x81

A data set is a .jsonl file (a line: {"prompt": "a red fox", "video": "fox.mp4"}, or "image"), a metadata.csv
(columns file_name and text), or a folder of media, each with its caption in a .txt of the same name. A line that names
the first frame of its video: {"text": "a red fox", "target": {"visual": "fox.mp4"},
"conditions": [{"type": "image", "uri": "first.png", "role": "first_frame"}]}.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

from . import flags
from .counting import counting
from .flags import Flag
from .geometry import TRAINING, buckets_of
from .table import table

if TYPE_CHECKING:
    from ..data.check import Report
    from ..data.geometry import Geometry

NAME, HELP = "data", "check a data set before training on it"
_CHECK = """Tell everything that is wrong with a data set, each with file and line, and what is in it.

Files that are missing, broken, empty of words or there twice, unknown keys and columns. With a geometry each row is
decoded as training would, and those too short are told. The exit status is 2 if anything is wrong.
"""
FLAGS = (
    *TRAINING,
    Flag("quiet", "no progress bar", bool, group="output"),
    Flag("json", "a line of JSON for each problem, then one for the summary", bool, group="output"),
)
_SHOWN = 8  # sizes and lengths in the table; --json has all
T = TypeVar("T")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own commands and their flags."""
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    check = commands.add_parser(
        "check",
        help="tell everything that is wrong with a data set",
        description=_CHECK,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.add_argument("path", metavar="PATH", help="a .jsonl, a .csv or a folder")
    flags.add_arguments(check, FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Check, and print what was found."""
    from ..data.check import check
    from . import INVALID

    allowed = buckets_of(arguments)
    with counting("checking", quiet=bool(arguments.quiet)) as tell:
        report = check(arguments.path, allowed, tell=tell)
    print(_as_json(report) if arguments.json else _as_text(report))
    return INVALID if report.problems else 0


def _as_json(report: "Report") -> str:
    problems = ({"where": problem.where, "problem": problem.problem} for problem in report.problems)
    summary = {
        "rows": report.kinds.total(),
        "images": report.kinds["image"],
        "videos": report.kinds["video"],
        "problems": len(report.problems),
        "sizes": _named(report.sizes, _size),
        "lengths": _named(report.lengths, str),
        "buckets": _named(report.buckets, _shape),
    }
    return "\n".join(json.dumps(line) for line in (*problems, summary))


def _as_text(report: "Report") -> str:
    rows = [("what", "rows"), ("readable", str(report.kinds.total()))]
    rows += [(f"{kind}s", str(count)) for kind, count in sorted(report.kinds.items())]
    rows += _most(_named(report.sizes, _size), "size ")
    rows += _most(_named(report.lengths, str), "frames ")
    rows += [(f"bucket {name}", str(count)) for name, count in _named(report.buckets, _shape).items()]
    count = len(report.problems)
    verdict = f"{count} problem{'s' * (count != 1)}" if count else "nothing wrong"
    return "\n".join([*map(str, report.problems), *([""] if count else []), table(rows), "", verdict])


def _named(counts: Counter[T], name: Callable[[T], str]) -> dict[str, int]:
    """By falling count; equal ones in the order of their values, so that the report does not depend on the rows'."""
    return {name(key): count for key, count in sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))}


def _most(counts: dict[str, int], prefix: str) -> Iterator[tuple[str, str]]:
    shown = dict(list(counts.items())[:_SHOWN])
    for name, count in shown.items():
        yield prefix + name, str(count)
    if len(counts) > len(shown):
        yield f"{prefix}({len(counts) - len(shown)} more)", str(sum(counts.values()) - sum(shown.values()))


def _size(size: tuple[int, int]) -> str:
    return "x".join(map(str, size))


def _shape(shape: "Geometry") -> str:
    return f"{shape.height}x{shape.width}x{shape.num_frames}"
