"""An encoder worker that ends its process at one prompt, the first time."""

import os
import signal
from pathlib import Path

from loopwright.data.fleet import Actor
from loopwright.data.wants import Want


class Deadly(Actor):
    """Dies of the prompt "deadly once FILE" unless the file is there, which it then is."""

    def make(self, want: str) -> str:
        word, _, mark = Want.loads(want).prompt.rpartition(" ")
        if word == "deadly once" and not Path(mark).exists():
            Path(mark).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(want)
