"""What runs on rollouts leave behind, and how one is stopped."""

from pathlib import Path

from safetensors.torch import load_file

from loopwright.training import session
from loopwright.training.run import Run
from loopwright.training.session import Outcome, train
from loopwright.training.sinks import table

WEIGHTS = "diffusion_pytorch_model.safetensors"
# the parameters of a rollout by a tiny Wan
WAN = {"height": 32, "width": 32, "num_frames": 1, "num_inference_steps": 2, "max_sequence_length": 32,
       "guidance_scale": 1.0}  # fmt: skip


def metrics(run: Run):
    return table(Path(run.output) / "metrics.csv")


def weights(run: Run):
    """Those after the whole of it, or after the rest of it."""
    assert train(run).finished
    name = "model/transformer/" + WEIGHTS if run.lora is None else "lora/transformer.safetensors"
    return load_file(Path(run.output) / name)


def stopped(run: Run, monkeypatch, after: int) -> Outcome:
    """The run, asked to stop after so many steps."""
    answers = iter([*[False] * (after - 1), True])

    class Stop:
        def __enter__(self):
            return lambda: next(answers, True)

        def __exit__(self, *error):
            return None

    with monkeypatch.context() as patch:
        patch.setattr(session, "asked", Stop)
        return train(run)
