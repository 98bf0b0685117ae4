"""An entry is what was written or an error, whatever happened to its file."""

import os
import random

import pytest
import torch

from loopwright.data import cache as caches
from loopwright.data.cache import Cache, CacheError, EntryError, check
from loopwright.data.keys import Key
from loopwright.data.upkeep import unneeded, verify

KEY, OTHER = Key("latent", '{"media": "ä"}'), Key("latent", '{"media": "b"}')
VALUE = torch.arange(24, dtype=torch.float32).view(2, 3, 2, 2).half()


@pytest.fixture
def cache(tmp_path) -> Cache:
    made = Cache(tmp_path / "cache")
    made.write(KEY, VALUE)
    return made


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_what_was_written_is_read(dtype, cache):
    cache.write(OTHER, VALUE.to(dtype))
    found = cache.read(OTHER)
    assert found.dtype == dtype and torch.equal(found, VALUE.to(dtype))
    check(cache.path(OTHER))


def test_nothing_is_read_where_nothing_was_written(tmp_path):
    assert Cache(tmp_path / "none").read(KEY) is None
    assert not (tmp_path / "none").exists()


def test_equal_entries_are_equal_files(cache, tmp_path):
    again = Cache(tmp_path / "again")
    again.write(KEY, VALUE)
    assert again.path(KEY).read_bytes() == cache.path(KEY).read_bytes()


def test_the_same_value_under_another_key_is_another_entry(cache):
    cache.write(OTHER, VALUE)
    cache.path(KEY).write_bytes(cache.path(OTHER).read_bytes())
    with pytest.raises(EntryError, match="entry of another key"):
        cache.read(KEY)
    with pytest.raises(EntryError, match="entry of another key"):
        check(cache.path(KEY))


@pytest.mark.parametrize("length", [0, 4, 8, 60, -40, -1])
def test_a_truncated_entry_is_an_error(length, cache):
    path = cache.path(KEY)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(EntryError, match=path.name):
        cache.read(KEY)


def test_any_bits_that_differ_are_an_error_or_make_no_difference(cache):
    path, chance = cache.path(KEY), random.Random(0)
    whole = path.read_bytes()
    harmless = 0
    for _ in range(600):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 30))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data)
        try:
            found = cache.read(KEY)
        except EntryError:
            continue
        assert found.dtype == VALUE.dtype and torch.equal(found, VALUE)
        harmless += 1
    assert harmless < 20, "bytes that happened to be the same, blanks of the header"


@pytest.mark.parametrize(
    "data", [b"\xff" * 500, b"{}", b"\2" + bytes(7) + b"{}", b"\2" + bytes(7) + b"[]", b"\x80\4K\1."]
)
def test_foreign_files_are_errors(data, cache):
    cache.path(KEY).write_bytes(data)
    with pytest.raises(EntryError, match="is not an entry"):
        cache.read(KEY)


def test_a_folder_in_place_of_an_entry_is_told(cache):
    cache.path(KEY).unlink()
    cache.path(KEY).mkdir()
    with pytest.raises(EntryError, match="cannot be read"):
        cache.read(KEY)
    with pytest.raises(CacheError, match="cannot write"):
        cache.write(KEY, VALUE)
    assert not any(path.name.startswith(".") for path in cache.path(KEY).parent.iterdir())


def test_a_cache_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CacheError, match="not a folder"):
        Cache(tmp_path / "file")


def test_verifying_reads_every_entry_and_changes_nothing(cache):
    cache.write(OTHER, VALUE)
    absent = cache.path(Key("cond", "{}"))
    cache.path(OTHER).write_bytes(b"")
    found = verify(cache, {cache.path(KEY), absent})
    assert (found.right, found.missing, len(found.wrong)) == (1, [absent], 1)
    assert cache.path(OTHER).read_bytes() == b""


def test_only_entries_and_abandoned_files_can_be_unneeded(cache, monkeypatch):
    cache.write(OTHER, VALUE)
    folder = cache.path(OTHER).parent
    (folder / "notes.txt").write_text("mine")
    written = folder / f".loopwright-{'0' * 32}.safetensors"
    written.write_bytes(b"half")
    assert unneeded(cache, {cache.path(KEY)}) == [cache.path(OTHER)], "somebody may be writing that file"
    old = written.stat().st_mtime - 2 * caches.ABANDONED
    os.utime(written, (old, old))
    assert unneeded(cache, {cache.path(KEY)}) == [cache.path(OTHER), written]
