"""Hold a model to the parity its card claims, a line a claim as it is measured. Exit status 1 if one fails."""

import argparse
import json
import math
from typing import TYPE_CHECKING

from ..errors import RequestError
from .chatter import quiet

if TYPE_CHECKING:
    from ..parity import Finding

NAME, HELP = "verify", "check the parity a model's card claims"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's flags."""
    parser.add_argument("model", metavar="MODEL", help="a shipped id, a Diffusers folder or a hub name")
    parser.add_argument("--against", metavar="REFERENCE", help="only claims against this reference, such as diffusers")
    parser.add_argument("--task", help="only claims for this task")
    parser.add_argument("--device", default="auto", help="auto (the fastest here), cpu, cuda, cuda:1 ...")
    parser.add_argument("--dtype", help="precision of the generator")
    parser.add_argument("--revision", help="branch, tag or commit of a hub name")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")


def run(arguments: argparse.Namespace) -> int:
    """Run the claims."""
    with quiet():
        from ..parity import verify

        found = []
        for finding in verify(
            arguments.model,
            against=arguments.against,
            task=arguments.task,
            device=arguments.device,
            dtype=arguments.dtype,
            revision=arguments.revision,
        ):
            print(_json(finding) if arguments.json else _line(finding), flush=True)
            found.append(finding.holds)
    if not found:
        raise RequestError("the card makes no such claim, so nothing was verified", value=arguments.model)
    return 0 if all(found) else 1


def _line(finding: "Finding") -> str:
    claim = finding.claim
    sign = ">=" if claim.metric == "psnr" else "<="
    verdict = "holds" if finding.holds else "FAILS"
    line = (
        f"{claim.level:<10}  {claim.reference:<9}  {claim.task:<14}  {claim.metric:<8}  {finding.measured:<10.4g}  "
        f"{sign} {claim.bound:<7g}  {verdict}"
    )
    return f"{line}  {finding.detail}".rstrip()


def _json(finding: "Finding") -> str:
    claim = finding.claim
    named = {name: getattr(claim, name) for name in ("level", "reference", "task", "metric", "bound", "precision")}
    figure = finding.measured if math.isfinite(finding.measured) else str(finding.measured)  # JSON has no infinity
    measured = {"measured": figure, "holds": finding.holds, "detail": finding.detail}
    return json.dumps({**named, **measured})
