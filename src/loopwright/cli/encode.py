"""Encode a data set ahead of training: latents of its media, embeddings of its prompts, first frames, each once.

    loopwright encode clips/rows.jsonl --encoder-checkpoint loopwright/tiny-wan --cache encoded
    loopwright encode clips --encoder-checkpoint MODEL --cache encoded --bucket 480x832x81 --bucket 832x480x81
    loopwright encode clips --encoder-checkpoint I2V_MODEL --cache encoded --first-frame --workers 8
    loopwright encode clips --encoder-checkpoint MODEL --cache encoded --verify

What the cache holds already is read and checked, not made again, so a run that broke off goes on where it stopped, and
several may fill one cache. Without a geometry it is the checkpoint's own. Data sets are described by loopwright data.

The exit status is 0 if all is encoded, 1 if --verify finds entries that are missing or wrong, 2 if rows cannot be
encoded or the input is wrong, and 130 when interrupted.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..errors import RequestError
from . import flags
from .chatter import quiet
from .counting import counting
from .flags import Flag
from .geometry import TRAINING, buckets_of
from .table import table

if TYPE_CHECKING:
    from ..data.cache import Cache
    from ..data.encodings import Encodings
    from ..data.filling import Filled
    from ..data.geometry import Geometry
    from ..data.row import Row

NAME, HELP = "encode", "encode a data set ahead of training"
FAILED = 1
FLAGS = (
    Flag("encoder_checkpoint", "whose encoders: a shipped id, a Diffusers folder or a hub name", metavar="MODEL"),
    Flag("cache", "the folder to keep encodings in", metavar="DIR"),
    Flag("revision", "branch, tag or commit of a hub name"),
    Flag("device", "auto (the fastest here), cpu, cuda, cuda:1 ..."),
    Flag("workers", "processes that encode, spread over the GPUs; more than one need Ray", int, metavar="N"),
    Flag("dedicated", "a GPU for each worker, the machine's last ones, instead of sharing all", bool),
    *TRAINING,
    Flag(
        "first_frame",
        "give the model each video's first frame, as image-to-video is trained; rows may name another",
        bool,
    ),
    Flag("verify", "only check every entry of the cache, and that none is missing", bool, "upkeep"),
    Flag("prune", "only list the entries that no row of this data set needs in this geometry", bool, "upkeep"),
    Flag("yes", "with --prune: delete them", bool, "upkeep"),
    Flag("quiet", "no progress bar", bool, group="output"),
    Flag("json", "print a line of JSON", bool, group="output"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("dataset", metavar="DATASET", help="a .jsonl, a .csv or a folder")
    flags.add_arguments(parser, FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Encode, verify or prune. The status is 1 if entries are missing or wrong, 2 if rows cannot be encoded."""
    _check(arguments)
    with quiet():
        from ..data.cache import Cache
        from ..data.dataset import read

        cache, shapes = Cache(arguments.cache), buckets_of(arguments)
        rows = read(arguments.dataset)
        with _encodings(arguments, cache, shapes) as encodings:
            if arguments.verify:
                return _verify(arguments, encodings, rows)
            return _prune(arguments, encodings, rows) if arguments.prune else _encode(arguments, encodings, rows)


def _check(arguments: argparse.Namespace) -> None:
    for name in ("encoder_checkpoint", "cache"):
        if not getattr(arguments, name):
            raise RequestError(f"no {name.replace('_', ' ')}", remedy=f"give --{name.replace('_', '-')}")
    if arguments.verify and arguments.prune:
        raise RequestError("two kinds of upkeep at once", choices=("--verify", "--prune"))
    if arguments.yes and not arguments.prune:
        raise RequestError("--yes is about --prune", remedy="leave it out")


def _encodings(arguments: argparse.Namespace, cache: "Cache", shapes: "Sequence[Geometry]") -> "Encodings":
    from ..data.encodings import Encodings

    return Encodings(
        cache,
        arguments.encoder_checkpoint,
        shapes,
        revision=arguments.revision,
        first_frame=bool(arguments.first_frame),
        device=arguments.device or "auto",
        workers=1 if arguments.workers is None else arguments.workers,
        dedicated=bool(arguments.dedicated),
        say=_say,
    )


def _encode(arguments: argparse.Namespace, encodings: "Encodings", rows: "Sequence[Row]") -> int:
    from . import INVALID

    begun = time.perf_counter()
    with counting("encoding", quiet=bool(arguments.quiet)) as tell:
        filled = encodings.fill(rows, tell)
    seconds, sizes = round(time.perf_counter() - begun, 3), _sizes(filled)
    count = len(filled.problems)
    verdict = f"{count} row{'s' * (count != 1)} could not be encoded" if count else "complete"
    text = f"{_counted(filled.kinds(), sizes)}\n\n{len(rows)} rows in {seconds:.1f} s: {verdict}"
    report = {"rows": len(rows), **sizes, "seconds": seconds}
    _print(arguments, report, text, [str(problem) for problem in filled.problems])
    return INVALID if filled.problems else 0


def _verify(arguments: argparse.Namespace, encodings: "Encodings", rows: "Sequence[Row]") -> int:
    from ..data.upkeep import total_bytes, verify

    needed = encodings.files(rows)
    with counting("verifying", quiet=bool(arguments.quiet)) as tell:
        found = verify(encodings.cache, needed, tell)
    problems = [*found.wrong, *(f"{path} is missing" for path in found.missing)]
    size = total_bytes(encodings.cache.files())
    report = {"right": found.right, "wrong": len(found.wrong), "missing": len(found.missing), "bytes": size}
    remedy = "; run without --verify to encode them anew" if problems else ""
    counts = f"{found.right} right, {len(found.wrong)} wrong, {len(found.missing)} missing"
    _print(arguments, report, f"{counts}; {_shown(size)}{remedy}", problems)
    return FAILED if problems else 0


def _prune(arguments: argparse.Namespace, encodings: "Encodings", rows: "Sequence[Row]") -> int:
    from ..data.upkeep import remove, total_bytes, unneeded

    files = unneeded(encodings.cache, encodings.files(rows))
    names, size = [str(path) for path in files], total_bytes(files)
    if arguments.yes:
        remove(files)
    deleted = "deleted" if arguments.yes else "would be deleted; add --yes to do it"
    text = f"{len(files)} files, {_shown(size)}: {deleted}" if files else "nothing to delete"
    listing = "" if arguments.yes else "".join(f"{name}\n" for name in names)
    _print(arguments, {"unneeded": len(files), "bytes": size, "deleted": bool(arguments.yes), "files": names},
           listing + text)  # fmt: skip
    return 0


def _sizes(filled: "Filled") -> dict[str, int]:
    """Entries and bytes by kind, and what was done for them."""
    from ..data.filling import OUTCOMES
    from ..data.upkeep import total_bytes

    counts, sizes = filled.count(), dict[str, int]()
    for kind in filled.kinds():
        sizes |= {f"{kind}_{outcome}": counts[kind, outcome] for outcome in OUTCOMES}
        sizes[f"{kind}_bytes"] = total_bytes(path for path, (of, _) in filled.files.items() if of == kind)
    return sizes


def _counted(kinds: "Sequence[str]", sizes: dict[str, int]) -> str:
    from ..data.filling import OUTCOMES

    names = {"latent": "latents", "cond": "prompts"}
    rows = [[names.get(kind, kind), *(str(sizes[f"{kind}_{outcome}"]) for outcome in OUTCOMES),
             _shown(sizes[f"{kind}_bytes"])] for kind in kinds]  # fmt: skip
    return table([("entries", *OUTCOMES, "size"), *rows])


def _print(
    arguments: argparse.Namespace, report: Mapping[str, object], text: str, problems: Sequence[str] = ()
) -> None:
    """The problems on stderr, a line each; the report on stdout."""
    for problem in problems:
        _say(problem)
    print(json.dumps({**report, "problems": problems}) if arguments.json else text)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _shown(count: int) -> str:
    """Bytes as people read them: 1.4 GB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("KB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} bytes"
