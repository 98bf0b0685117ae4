"""Train a model, as a run's file says; continue a run that is in its output folder.

    loopwright train runs/fox.yaml
    loopwright train runs/fox.yaml --set optimiser.lr=3e-4 --set lora.rank=32 --processes 2
    loopwright train runs/fox.yaml --dry-run

A run is a YAML file, or Python that leaves a `Run` in the variable `run`. Everything is checked before weights are read
or files written. Ctrl-C ends the run after its step, with a checkpoint; the same command continues it. For several
machines start this under torchrun.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import RequestError
from . import flags
from .chatter import quiet
from .flags import Flag
from .geometry import TRAINING, buckets_of

if TYPE_CHECKING:
    from ..training.run import Run

NAME, HELP = "train", "post-train a model"
FLAGS = (
    Flag("set", "a setting of the run to replace; may be given again", metavar="NAME=VALUE", many=True),
    Flag("output", "the run's folder, instead of the file's", metavar="DIR"),
    Flag("processes", "so many on this machine, which share the work", int, metavar="N"),
    Flag("dry_run", "check everything and print the run with all its settings", bool),
    *TRAINING,
    Flag("quiet", "no progress", bool, group="output"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("file", metavar="RUN", help="a .yaml, .json or .py file")
    flags.add_arguments(parser, FLAGS)


def run(arguments: argparse.Namespace) -> int:
    """Train. The status is 130 where the run was interrupted, and can be continued."""
    from ..distributed.group import size

    processes: int = 1 if arguments.processes is None else arguments.processes
    if processes < 1:
        raise RequestError("processes must be at least 1", value=processes)
    if processes > 1 and size() > 1:
        raise RequestError("processes are started already", value=f"--processes {processes}", remedy="leave it out")
    with quiet():
        settings = _settings(arguments)
        if arguments.dry_run:
            return _shown(settings, arguments.processes)
        return _work(settings, bool(arguments.quiet)) if processes == 1 else _spread(arguments, settings, processes)


def resume_command(argv: Sequence[str] | None = None) -> str:
    """The command as it was given, to be given again."""
    return shlex.join(["loopwright", *(sys.argv[1:] if argv is None else argv)])


def _settings(arguments: argparse.Namespace) -> "Run":
    """The run's file, with what the command line replaces."""
    from ..training.run import read

    overrides = list(arguments.set or ())
    if arguments.output:
        overrides.append(f"output={_quoted(arguments.output)}")
    if shapes := buckets_of(arguments):
        listed = ", ".join(f"{shape.height}x{shape.width}x{shape.num_frames}" for shape in shapes)
        overrides += [f"data.geometry=[{listed}]", f"data.crop={shapes[0].crop}"]
        overrides.append(f"data.frame_stride={shapes[0].frame_stride}")
    return read(arguments.file, overrides)


def _quoted(text: str) -> str:
    """A text that YAML reads as that text."""
    return "'" + text.replace("'", "''") + "'"


def _shown(settings: "Run", processes: int | None) -> int:
    from ..training.plan import make
    from ..training.run import text

    plan = make(settings, processes)
    print(text(plan.run), end="")
    held = f", {len(plan.held_rows)} held out" if plan.held_rows else ""
    what = "of drawn rows" if plan.order is None else f"{plan.epochs} epochs of {len(plan.rows)} rows{held}"
    if plan.run.rollout is not None:
        what = f"{plan.epochs} epochs of {plan.run.rollout.samples} samples, {len(plan.prompts)} prompts"
    print(f"# {plan.steps} steps, {what}; trains {', '.join(plan.roles)}", file=sys.stderr)
    return 0


def _spread(arguments: argparse.Namespace, settings: "Run", processes: int) -> int:
    """Checked here first, so that what is wrong is told once."""
    from ..distributed.launch import launch
    from ..training.plan import make

    make(settings, processes)
    return launch(processes, work, (settings, bool(arguments.quiet), sys.argv[1:]))


def work(settings: "Run", is_quiet: bool, argv: Sequence[str]) -> int:
    """What each of several processes does."""
    from ..distributed.launch import first_to_say
    from ..errors import LoopwrightError
    from . import INVALID

    with quiet():
        try:
            return _work(settings, is_quiet, argv)
        except LoopwrightError as error:
            if first_to_say(str(error)):
                print(f"loopwright: error: {error}", file=sys.stderr, flush=True)
            return INVALID


def _work(settings: "Run", is_quiet: bool, argv: Sequence[str] | None = None) -> int:
    from ..training.session import train
    from . import INTERRUPTED
    from .training import display

    with display(quiet=is_quiet) as shown:
        outcome = train(settings, shown)
        if outcome.finished:
            print_result(str(outcome.result))
            return 0
        shown.say(f"interrupted after step {outcome.step}; to continue: {resume_command(argv)}")
        return INTERRUPTED


def print_result(path: str) -> None:
    """Where the result is, once."""
    from ..distributed.group import leads

    if leads():
        print(path)
