"""Loopwright serves and post-trains diffusion, video and omni models with one engine.

    import loopwright
    model = loopwright.load("loopwright/tiny-wan")
    model.generate("a fox moving left on a blue background").save("fox.mp4")

Importing this package imports no torch; `load` does.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import Model, Result, load

__version__ = "0.1.0"
__all__ = ["Model", "Result", "__version__", "load"]


def __getattr__(name: str) -> object:
    if name in ("load", "Model", "Result"):
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
