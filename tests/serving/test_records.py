"""What is promised lies on disk, a row at a time."""

from dataclasses import replace

import pytest

from loopwright.errors import StateError
from loopwright.serving.records import COMPLETED, IN_PROGRESS, QUEUED, Record, Records, new_id


def record(owner: str = "alice", **changes: object) -> Record:
    given = {"status": QUEUED, "created": 1.0, "echo": {"seed": 1, "parameters": {"fps": 8}}, "suffix": ".mp4"}
    return Record(**{"id": new_id("video"), "owner": owner, "model": "m", **given, **changes})


@pytest.fixture
def records(tmp_path):
    opened = Records(tmp_path)
    yield opened
    opened.close()


def test_a_record_comes_back_as_it_was_after_a_restart(tmp_path):
    first, kept = Records(tmp_path), record(key="k", fingerprint="f", deadline=9.5, priority="high")
    first.add(kept)
    first.change(kept.id, status=IN_PROGRESS, error={"code": "x"})
    first.close()
    second = Records(tmp_path)
    assert second.unfinished() == [replace(kept, status=IN_PROGRESS, error={"code": "x"})]
    assert second.by_key("alice", "k").id == kept.id and second.by_key("bob", "k") is None
    second.close()


def test_pages_follow_each_other_without_gap_or_repetition(records):
    made = [record(created=float(i // 2)) for i in range(7)]
    for one in made:
        records.add(one)
    records.add(record("bob"))
    records.add(record(kind="image", id=new_id("image")))
    for ascending in (False, True):
        seen, after = [], None
        while page := records.page("alice", after=after, limit=3, ascending=ascending):
            seen += [one.id for one in page]
            after = seen[-1]
        ordered = sorted(made, key=lambda one: (one.created, one.id), reverse=not ascending)
        assert seen == [one.id for one in ordered]


def test_results_expire_by_age_and_by_what_they_take(records):
    ended = [record(status=COMPLETED, ended=float(i), bytes=10) for i in range(5)]
    for one in (*ended, record(created=0.0)):
        records.add(one)
    gone = lambda **limits: sorted(one.ended for one in records.expired(now=10.0, **limits))  # noqa: E731
    assert gone(seconds=7.5, most=1000) == [0.0, 1.0, 2.0]
    assert gone(seconds=100, most=25) == [0.0, 1.0, 2.0]
    assert gone(seconds=100, most=50) == []
    records.file(ended[0]).write_bytes(b"x")
    records.remove(ended[0])
    assert records.get("alice", ended[0].id) is None and not records.file(ended[0]).exists()


def test_files_that_nobody_knows_are_swept(records):
    kept = record()
    records.add(kept)
    records.saved(kept).write_bytes(b"job")
    for name in ("video_1.mp4", ".loopwright-1.job", f"{new_id('image')}.png"):
        (records.files / name).write_bytes(b"x")
    records.sweep()
    assert [path.name for path in records.files.iterdir()] == [f"{kept.id}.job"]


def test_a_folder_of_another_version_is_refused(tmp_path):
    opened = Records(tmp_path)
    opened._database.execute("PRAGMA user_version=99")
    opened.close()
    with pytest.raises(StateError, match="another version: 99; choices: 1"):
        Records(tmp_path)


def test_what_another_server_has_left_is_taken_over_whole(records, tmp_path):
    other, left = (
        Records(tmp_path / "other"),
        [record(key="k"), record("bob", status=COMPLETED, created=2.0, ended=2.0)],
    )
    records.add(record(key="k"))
    for one in left:
        other.add(one)
    other.saved(left[0]).write_bytes(b"a job")
    other.file(left[1]).write_bytes(b"a result")
    with pytest.raises(StateError, match="is another server's"):
        records.inherit(tmp_path / "other")
    other.close()
    assert records.inherit(tmp_path / "other") == left and not (tmp_path / "other").exists()
    assert records.saved(left[0]).read_bytes() == b"a job" and records.file(left[1]).read_bytes() == b"a result"
    assert records.get("bob", left[1].id) == left[1]
    assert records.get("alice", left[0].id) == replace(left[0], key=None)  # its name is another's here


def test_taking_over_goes_on_where_it_was_broken_off(records, tmp_path, monkeypatch):
    other, left = Records(tmp_path / "other"), [record(), record()]
    for one in left:
        other.add(one)
        other.saved(one).write_bytes(one.id.encode())
    other.close()

    def broken(self, one):
        raise OSError("no more")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no more"):
        patch.setattr(Records, "remove", broken)
        records.inherit(tmp_path / "other")
    records.sweep()
    records.inherit(tmp_path / "other")
    assert sorted(one.id for one in records.unfinished()) == sorted(one.id for one in left)
    assert all(records.saved(one).read_bytes() == one.id.encode() for one in left)
