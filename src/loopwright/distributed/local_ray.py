"""Ray on this machine, for who places work in processes: the one that is there, or one of our own.

ours = local_ray.begin(cpus=2, gpus=0)      # True: nobody had begun one, and it is ours to end
ray.remote(Actor).options(num_cpus=1, runtime_env=local_ray.all_gpus())
"""

import logging
import os

STORE = 10**8  # bytes set aside for objects under way; what does not fit goes to disk


def begin(*, cpus: int, gpus: int | None, logs: bool = False) -> bool:
    """Whether one of our own was begun, of so many CPUs and GPUs (None: all there are).

    `logs` shows here what its processes print.
    """
    import ray

    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what runs here is nobody's business
    ray.init(
        address="local",
        num_cpus=cpus,
        num_gpus=gpus,
        object_store_memory=STORE,
        include_dashboard=False,
        log_to_driver=logs,
        logging_level=logging.ERROR,
    )
    return True


def all_gpus() -> dict[str, dict[str, str]]:
    """The environment of a process that has its GPU by name: Ray would show it one alone, and fill the first first."""
    return {"env_vars": {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}}
