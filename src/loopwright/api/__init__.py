"""The Python API: load a model, generate, stream.

    model = loopwright.load("loopwright/tiny-wan")
    result = model.generate("a fox moving left on a blue background", seed=7)
    result.save("fox.mp4")

One seed gives the noise that diffusers draws with a CPU generator of that seed. Several threads may generate at once.
Files are read and written through `media`, imported when first needed: workers that only compute need no codecs.
"""

from .loading import load
from .model import Model
from .result import Result, read_record

__all__ = ["Model", "Result", "load", "read_record"]
