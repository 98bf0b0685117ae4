"""An epoch is sampled while the one before is learnt from: samples are of weights one update old.

    with closing(Ahead(rollouts, policy, behaviour, group, epochs=100)) as ahead:
        ahead.epoch(0)          # of the weights before any update; epoch 1 is being sampled of the same
        ...                     # the update of epoch 0
        ahead.epoch(1)          # waits for what is left; epoch 2 is being sampled of the weights as they are now

Epoch n is sampled of the weights before update n - 1, in a thread of its own. On one device both share its queue, so
what is gained is what either waits for: scoring, and the host. A run is continued with the weights that were to sample,
which its checkpoint has, so with the very same samples. Deliberately absent: more than one epoch ahead.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from time import perf_counter

import torch

from ..distributed.group import Group
from .behaviour import Behaviour
from .methods.policy import Policy
from .rollouts import Drawn, Rollouts, Sampled


class Ahead:
    """The epochs of a run, in order, one at a time."""

    def __init__(self, rollouts: Rollouts, policy: Policy, behaviour: Behaviour, group: Group, *, epochs: int) -> None:
        self._rollouts, self._policy, self._behaviour, self._epochs = rollouts, policy, behaviour, epochs
        self._thread = ThreadPoolExecutor(1, "rollout", _on, (group.device,))
        self._next: Future[Sampled] | None = None

    def epoch(self, epoch: int) -> Drawn:
        """What was sampled meanwhile, and have the next one sampled from now on. A collective.

        Raises whatever ended the sampling.
        """
        begun = perf_counter()
        if self._next is None:
            if epoch == 0:
                self._follow(0)
            self._next = self._begun(epoch)
        sampled, waited = self._next.result(), perf_counter() - begun
        told = {"staleness": float(epoch - self._behaviour.version), "seconds/rollout_waited": waited}
        self._follow(epoch)
        if epoch + 1 < self._epochs:
            self._next = self._begun(epoch + 1)
        drawn = self._rollouts.drawn(sampled)
        return replace(drawn, metrics={**drawn.metrics, **told})

    def close(self) -> None:
        """End the sampling. What it failed at, if it did, is asked for again when the run is continued."""
        self._rollouts.stop()
        self._thread.shutdown()

    def _follow(self, epoch: int) -> None:
        """Have the weights sample that would do so now."""
        with self._policy.sampling():
            self._behaviour.follow(epoch)

    def _begun(self, epoch: int) -> Future[Sampled]:
        return self._thread.submit(self._rollouts.sample, epoch, self._behaviour.serving)


def _on(device: torch.device) -> None:
    """Threads have a device of their own that they mean by "cuda"."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
