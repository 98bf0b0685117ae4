"""The command `loopwright`: generate, serve, train, data, encode, models, backends, verify.

    loopwright generate loopwright/tiny-wan --prompt "a fox moving left on a blue background" --seed 7

Results go to stdout, everything else to stderr. Exit status: 0, 1 where `verify` found a claim that fails, 2 for input
that cannot be served, in one line, and for a data set with problems, and 130 when interrupted. With LOOPWRIGHT_DEBUG=1
errors say where they come from, and libraries what they like. Importing this package imports no torch, and asking for
help neither: a command's libraries are imported when it runs.
"""

import argparse
import difflib
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

from .. import __version__
from ..errors import LoopwrightError, RequestError
from . import backends, data, encode, generate, models, serve, train, verify

INVALID, INTERRUPTED, CUT_OFF = 2, 130, 141
_COMMANDS = (generate, serve, train, data, encode, models, backends, verify)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, as every other error; argparse would print the whole usage first."""

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuses unknown flags here, where the command that does not know them is known."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            near = difflib.get_close_matches(unknown[0], self._option_string_actions)
            hint = f" (did you mean {near[0]}?)" if near else ""
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        raise RequestError(message, remedy=f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; gives the exit status. Raises SystemExit for --help and --version, as argparse does."""
    # Threads that spin while they wait for each other stall 20-fold as soon as anything else wants a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        arguments = parser().parse_args(argv)
        status = int(arguments.run(arguments))
        sys.stdout.flush()
        return status
    except LoopwrightError as error:
        if os.environ.get("LOOPWRIGHT_DEBUG"):
            traceback.print_exc()
        print(f"loopwright: error: {error}", file=sys.stderr)
        return INVALID
    except KeyboardInterrupt:
        print("loopwright: cancelled", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the output has had enough, as in `loopwright models | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CUT_OFF


def parser() -> argparse.ArgumentParser:
    """The parser of all commands; the parsed arguments hold `run`, the command's function."""
    top = _Parser(
        prog="loopwright", description="Serve and post-train diffusion, video and omni models.", allow_abbrev=False
    )
    top.add_argument("--version", action="version", version=f"loopwright {__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for command in _COMMANDS:
        sub = commands.add_parser(
            command.NAME,
            help=command.HELP,
            description=command.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return top
