"""The errors a user can meet, each one line: what is wrong, the value, the choices, the remedy.

    raise RequestError("unknown output", value="gif", choices=("video", "latents"))

A `LoopwrightError` means the *input* (a request, a card, a file) cannot be served; the command line prints it without
a traceback and exits with status 2. A bug in Loopwright itself stays an ordinary exception.
"""

from collections.abc import Iterable


class LoopwrightError(ValueError):
    """One line for the user. `value` is what was given, `choices` what would do, `remedy` how to go on."""

    def __init__(self, message: str, *, value: object = None, choices: Iterable[object] = (), remedy: str = "") -> None:
        parts = [message if value is None else f"{message}: {value!r}"]
        listed = ", ".join(str(choice) for choice in choices)
        if listed:
            parts.append(f"choices: {listed}")
        if remedy:
            parts.append(remedy)
        super().__init__(" ".join("; ".join(parts).split()))


class RequestError(LoopwrightError):
    """A request names something its card does not offer, or a value outside what the card can make."""


class CardError(LoopwrightError):
    """A card contradicts itself or what its weights assume. Raised before any weight is read."""


class WeightsError(LoopwrightError):
    """A checkpoint is missing, incomplete or damaged."""


class MediaError(LoopwrightError):
    """An image or video file cannot be read or written."""


class DataError(LoopwrightError):
    """A data set declares something that cannot be trained on; `where` is the file and the line that do."""

    def __init__(
        self, where: str, message: str, *, value: object = None, choices: Iterable[object] = (), remedy: str = ""
    ) -> None:
        super().__init__(f"{where}: {message}", value=value, choices=choices, remedy=remedy)
        self.where = where

    @property
    def problem(self) -> str:
        """The line without its place."""
        return str(self).removeprefix(f"{self.where}: ")


class ModelError(LoopwrightError):
    """The model itself produced something unusable, such as NaN; names the step."""


class BackendError(LoopwrightError):
    """This machine cannot do what is asked of it, such as reproducible rows in a batch."""


class CapacityError(LoopwrightError):
    """This machine has too little memory for a request; says what it needs and what there is."""


class StateError(LoopwrightError):
    """A saved request cannot be continued: another card, another version, a damaged file."""


class StaleError(LoopwrightError):
    """What a request remembers was computed by weights that have changed since."""
