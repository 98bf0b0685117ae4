"""Turns a model's name into a folder: a local one as it is, a hub repository through huggingface_hub's cache.

    card_only = fetch("org/model", revision="v1.0", weights=False)     # configs and tokenizers, a few megabytes
    snapshot = fetch("org/model", revision=card_only.commit, weights=True)

The settings are huggingface_hub's own: HF_TOKEN, HF_ENDPOINT, HF_HOME, HF_HUB_OFFLINE, HF_HUB_DISABLE_XET. A download
that broke off goes on where it stopped, in the same run and in the next (huggingface_hub itself starts a file over
when the run ended; so does its Xet transfer, which moves most large files of the public hub). Deliberately absent:
pickles (.bin, .pt, .ckpt), which run code when read; uploads; a cache of our own.
"""

import errno
import glob
import hashlib
import importlib.util
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ..errors import WeightsError

_SMALL = ("*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
_SHARD = re.compile(r"-\d{5}-of-\d{5}(?=\.)")
_VARIANT = re.compile(r"(.+)\.[a-z]\w*\.safetensors")
_DISK = (errno.ENOSPC, errno.EDQUOT)  # the only ones that name no file
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A checkpoint's folder, and the hash of its commit; empty for a local folder, which has no history."""

    folder: Path
    commit: str


def is_local(name: str) -> bool:
    """Whether `name` means a folder here: it exists, or it cannot be a hub name (`./x`, `/x`, `a/b/c`)."""
    return Path(name).expanduser().exists() or not _HUB_NAME.fullmatch(name)


def fetch(name: str, *, revision: str | None = None, subfolder: str = "", weights: bool) -> Snapshot:
    """The folder of `name`, downloaded where it is not cached.

    revision: a branch, a tag or a commit hash; `main` by default.
    subfolder: fetch and return this part alone, such as `vae`.
    weights: False fetches configs and tokenizers only, so that a card can be checked before its weights are read.
        True adds the safetensors that a Diffusers folder needs (`needed`).

    Raises WeightsError, in one line, for an unknown name or revision, missing permission, and a dead network.
    """
    subfolder = subfolder.strip("/")
    if is_local(name):
        return Snapshot(_local_part(name, revision, subfolder), "")
    with _one_line(name, revision or "main"):
        folder = _download(name, revision, [_within(subfolder, pattern) for pattern in _SMALL])
        files = _listing(name, folder)
        if weights:
            _fetch_weights(name, folder, _named(name, files, subfolder), subfolder)
    if not (folder / subfolder).is_dir():
        folders = sorted({file.split("/")[0] for file in files if "/" in file})
        remedy = "leave the subfolder out for the whole repository" if subfolder else "the repository is empty"
        raise WeightsError(f"no such folder in {name}", value=subfolder or "/", choices=folders, remedy=remedy)
    return Snapshot(folder / subfolder, folder.name)


def needed(files: Iterable[str]) -> list[str]:
    """The weight files worth reading among a repository's `files`, paths relative to its root.

    Left out: variants whose plain file exists too (`model.fp16.safetensors` beside `model.safetensors`), and, where
    `model_index.json` says the parts are folders, single-file copies of the whole model at the root.
    """
    files = list(files)
    tensors = sorted(file for file in files if file.endswith(".safetensors"))
    if "model_index.json" in files:
        tensors = [file for file in tensors if "/" in file]
    whole = {_SHARD.sub("", file) for file in tensors}
    return [file for file in tensors if not _doubles(_SHARD.sub("", file), whole)]


def _doubles(file: str, whole: set[str]) -> bool:
    variant = _VARIANT.fullmatch(file)
    return variant is not None and f"{variant[1]}.safetensors" in whole


def _local_part(name: str, revision: str | None, subfolder: str) -> Path:
    if revision is not None:
        remedy = f"{name} is a folder here, which has none; leave the revision out"
        raise WeightsError("only hub repositories have revisions", value=revision, remedy=remedy)
    folder = Path(name).expanduser() / subfolder
    if not folder.is_dir():
        raise WeightsError("no such folder", value=str(folder), remedy="check the path; a hub model is named org/name")
    return folder


def _within(subfolder: str, pattern: str) -> str:
    return f"{glob.escape(subfolder)}/{pattern}" if subfolder else pattern


def _named(name: str, files: list[str], subfolder: str) -> list[str]:
    """The weight files under `subfolder`. Raises if there are only pickles."""
    scope = [file for file in files if not subfolder or file.startswith(f"{subfolder}/")]
    found = needed(scope)
    pickles = [file for file in scope if file.endswith(_PICKLES)]
    if pickles and not found:
        remedy = "Loopwright reads safetensors only, since pickles run code; choose a revision or a copy that has them"
        raise WeightsError(f"{name} has no safetensors", value=pickles[0], remedy=remedy)
    return found


def _download(name: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns, library_name="loopwright"))


def _listing(name: str, folder: Path) -> list[str]:
    """Every file of the commit. `snapshot_download` keeps the list; caches older than that hold just what they hold."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return [entry.path for entry in get_cached_repo_tree(name, revision=folder.name)]
    except CachedRepoTreeNotFoundError:
        return [file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file()]


def _fetch_weights(name: str, folder: Path, files: list[str], subfolder: str) -> None:
    """One after another: a run that breaks off leaves one partial file to go on from, not eight."""
    for file in files:
        if not (folder / file).exists():
            _resume(name, folder, file)
    small = [_within(subfolder, pattern) for pattern in _SMALL]
    _download(name, folder.name, [*small, *(glob.escape(file) for file in files)])


def _resume(name: str, folder: Path, file: str) -> None:
    """Put one file among the cache's blobs, going on from what an earlier run left; `_download` then links it.

    Left to huggingface_hub: files that Xet transfers, and those without a SHA-256 to tell whether the parts fit.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import WeakFileLock

    url = hf_hub_url(name, file, revision=folder.name)
    remote = get_hf_file_metadata(url, library_name="loopwright", retry_on_errors=True)
    if (remote.xet_file_data and _has_xet()) or not _SHA256.fullmatch(remote.etag or ""):
        return
    repository = folder.parent.parent
    blob = repository / "blobs" / remote.etag
    lock = repository.parent / ".locks" / repository.name / f"{remote.etag}.lock"  # the one huggingface_hub takes
    for place in (blob, lock):
        place.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(lock):
        if not blob.exists():
            _append(url, remote.location, remote.size, blob, file)


def _has_xet() -> bool:
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET and importlib.util.find_spec("hf_xet") is not None


def _append(url: str, location: str, size: int | None, blob: Path, file: str) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(library_name="loopwright")
    if urlsplit(location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the token is for the hub, not for the store it points to
    partial = blob.with_name(f"{blob.name}.partial")
    with partial.open("ab") as stream:
        if size is not None and stream.tell() > size:  # two runs wrote at once, on a file system without locks
            stream.truncate(0)
        options = {"headers": headers, "expected_size": size, "displayed_filename": file}
        http_get(location, stream, resume_size=stream.seek(0, os.SEEK_END), **options)
    if _sha256(partial) != blob.name:
        partial.unlink()
        raise WeightsError("damaged on its way", value=file, remedy="run again to download it anew")
    os.replace(partial, blob)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@contextmanager
def _one_line(name: str, revision: str) -> Iterator[None]:
    """Say what huggingface_hub's errors mean to a user; anything else is a bug and keeps its traceback."""
    from huggingface_hub.errors import HFValidationError, HTTPError  # HTTPError is its HTTP client's, of any version

    try:
        yield
    except WeightsError:
        raise
    except HFValidationError as error:
        raise WeightsError("not a hub name", value=name, remedy="a hub model is named org/name") from error
    except (HTTPError, OSError) as error:
        raise _explained(error, name, revision) from error


def _explained(error: Exception, name: str, revision: str) -> WeightsError:
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        remedy = f"accept its terms at {hub}/{name}, then set HF_TOKEN to a token that may read it"
        return WeightsError("the model is gated", value=name, remedy=remedy)
    if isinstance(error, errors.RepositoryNotFoundError):
        remedy = "check the spelling; if it is private, set HF_TOKEN to a token that may read it"
        return WeightsError(f"{hub} knows no such model, or keeps it private", value=name, remedy=remedy)
    if isinstance(error, errors.RevisionNotFoundError):
        remedy = "use a branch, a tag or a full commit hash"
        return WeightsError(f"{name} has no such revision", value=revision, remedy=remedy)
    return _hindered(error, name, revision)


def _hindered(error: Exception, name: str, revision: str) -> WeightsError:
    """The model may well exist, but something stands between: offline mode, a refusal, a full disk, the network."""
    from huggingface_hub import constants, errors

    hub, causes = constants.ENDPOINT, list(_causes(error))
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        remedy = "HF_HUB_OFFLINE is set; unset it once to download"
        return WeightsError("not complete in the cache", value=f"{name}@{revision}", remedy=remedy)
    status = next((c.response.status_code for c in causes if isinstance(c, errors.HfHubHTTPError)), None)
    if status is not None:
        remedy = "HF_TOKEN must be a token that may read it" if status in (401, 403) else "try again later"
        return WeightsError(f"{hub} refused {name} with HTTP status", value=status, remedy=remedy)
    if isinstance(error, OSError) and (error.filename is not None or error.errno in _DISK):
        remedy = "HF_HOME names another place for the cache"
        return WeightsError(f"cannot store {name} ({error.strerror})", remedy=remedy)
    remedy = "check the network and HF_ENDPOINT, then run again: what has arrived is kept"
    return WeightsError(f"cannot fetch {name} from {hub} ({_brief(causes[-1])})", remedy=remedy)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _brief(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
