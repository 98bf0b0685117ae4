"""What huggingface_hub's cache holds: models by name, their commits and sizes; and how they leave it.

    [model.name for model in cached()]
    remove("org/model", revision="v1.0")       # bytes that gives back

The cache is huggingface_hub's own (HF_HOME), which other programs use too: what they have fetched is listed as well.
"""

from dataclasses import dataclass
from pathlib import Path

from ..errors import WeightsError


@dataclass(frozen=True, slots=True)
class Commit:
    """One state of a model: its hash, the branches and tags that were asked for, its folder."""

    hash: str
    refs: tuple[str, ...]
    folder: Path

    def called(self, revision: str) -> bool:
        """Whether that is one of its names."""
        return revision in self.refs or revision == self.hash


@dataclass(frozen=True, slots=True)
class Cached:
    """A model of the hub as far as it is here: all its bytes, and when it was last read, in seconds since 1970."""

    name: str
    bytes: int
    used: float
    commits: tuple[Commit, ...]


def cached() -> list[Cached]:
    """Every model in the cache, by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = [repo for repo in scan_cache_dir().repos if repo.repo_type == "model"]
    except CacheNotFound:
        return []
    return [
        Cached(
            repo.repo_id,
            repo.size_on_disk,
            repo.last_accessed,
            tuple(
                Commit(commit.commit_hash, tuple(sorted(commit.refs)), commit.snapshot_path)
                for commit in sorted(repo.revisions, key=lambda commit: commit.last_modified)
            ),
        )
        for repo in sorted(repositories, key=lambda repo: repo.repo_id)
    ]


def remove(name: str, *, revision: str | None = None) -> int:
    """Take a model out of the cache, or only that revision of it; the bytes that gives back. Raises WeightsError."""
    from huggingface_hub import scan_cache_dir

    models = {model.name: model for model in cached()}
    if name not in models:
        raise WeightsError("no such model in the cache", value=name, choices=models)
    commits = [commit for commit in models[name].commits if revision is None or commit.called(revision)]
    if not commits:
        names = [called for commit in models[name].commits for called in commit.refs or (commit.hash,)]
        raise WeightsError(f"no such revision of {name} in the cache", value=revision, choices=names)
    leaving = scan_cache_dir().delete_revisions(*(commit.hash for commit in commits))
    leaving.execute()
    return int(leaving.expected_freed_size)
