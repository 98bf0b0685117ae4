"""Whether a run continues what lies in its folder: the settings that it was begun with are those it goes on with.

    check(run)          # raises StateError where the folder holds a run that this one does not continue

Free are those that no step computed so far depends on: where results go, where and how things are computed, how long
the run is if its rates do not depend on that. Data and prompts may lie elsewhere: that they are the same is seen by
their content, when training is continued in the middle of them.
"""

from pathlib import Path

import yaml  # type: ignore[import-untyped]

from ..errors import RequestError, StateError
from .run import Run
from .settings import leaves, plain

RUN = "run.yaml"
_LENGTH = ("steps", "epochs")
_RESULT = ("output", "stored", "lora.layout", "sinks", "log_every", "checkpoints", "evaluation", "previews")
_DATA = ("data.dataset", "data.cache", "data.workers", "data.dedicated", "data.park")
_PROMPTS = ("rollout.prompts", "rollout.held_out")
_PLACE = ("rollout.graphs", "rollout.engines", "sleep", "device", "train_only")


def check(run: Run) -> None:
    """Raise StateError where the folder holds a run that this one does not continue, RequestError where it is none."""
    output = Path(run.output).expanduser()
    if output.exists() and not output.is_dir():
        raise RequestError("output is not a folder", value=run.output)
    try:
        before = yaml.safe_load((output / RUN).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise StateError(f"{output / RUN} cannot be read ({error})", remedy="choose another output") from error
    now, was = leaves(plain(run)), leaves(before)
    kind = was.get("schedule.kind")
    free = {*_RESULT, *_DATA, *_PROMPTS, *_PLACE, *(_LENGTH if kind == "constant" else ())}
    for name in dict.fromkeys((*now, *was)):
        if not {name, name.split(".")[0]} & free and now.get(name) != was.get(name):
            why = f"; its rates were of that length, as schedule.kind is {kind}" * (name in _LENGTH)
            remedy = f"it was {was.get(name)!r}: set it back to continue that run, or choose another output{why}"
            raise StateError(f"{output} holds a run with another {name}", value=now.get(name), remedy=remedy)
