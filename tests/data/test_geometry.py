"""Shapes from text, and the shape a row is trained at."""

from pathlib import Path

import pytest

from loopwright.data.buckets import choose, nearest
from loopwright.data.geometry import Geometry, parse
from loopwright.data.row import Kind, Row
from loopwright.errors import DataError, RequestError
from loopwright.media import Extent

WIDE, LONG, TALL = parse(["480x832x17", "480x832x81", "832x480x49"], frame_stride=2)


def row(kind: Kind = "video") -> Row:
    return Row("a fox", Path("fox"), kind, Path("rows.jsonl"), 3)


def test_the_span_counts_both_ends():
    assert [Geometry(8, 8, n, s).span for n, s in ((1, 5), (9, 1), (9, 2))] == [1, 9, 17]


@pytest.mark.parametrize("text", ["", "480x832", "480x832x81x1", "480*832*81", "axbxc", "-480x832x81"])
def test_text_that_is_no_bucket_is_refused(text: str):
    with pytest.raises(RequestError, match="HEIGHTxWIDTHxFRAMES"):
        parse([text])


def test_impossible_geometries_are_refused():
    for name in ("height", "width", "num_frames", "frame_stride"):
        with pytest.raises(RequestError, match=f"{name} must be at least 1: 0"):
            Geometry(**{"height": 8, "width": 8, "num_frames": 1, name: 0})
    with pytest.raises(RequestError, match="unknown crop: 'random'; choices: center, none"):
        Geometry(8, 8, 1, crop="random")


@pytest.mark.parametrize(
    ("extent", "expected"),
    [
        ((1080, 1920, 200), LONG),
        ((1080, 1920, 161), LONG),
        ((1080, 1920, 160), WIDE),
        ((1920, 1080, 97), TALL),
        ((100, 101, 33), WIDE),
        ((101, 100, 97), TALL),
    ],
)
def test_a_video_goes_to_the_nearest_aspect_then_the_longest_it_fills(extent: tuple, expected: Geometry):
    assert nearest(row(), Extent(*extent), (WIDE, LONG, TALL)) == expected
    assert nearest(row(), Extent(*extent), (TALL, LONG, WIDE)) == expected


def test_too_short_for_its_aspect_is_an_error_and_not_another_aspect():
    with pytest.raises(DataError, match=r"rows\.jsonl:3: fox is too short: '90 frames'; 97 are needed at least"):
        nearest(row(), Extent(1920, 1080, 90), (WIDE, LONG, TALL))


def test_an_image_takes_one_frame_of_the_nearest_aspect():
    for extent, shape in (((600, 800, 1), (480, 832)), ((800, 600, 1), (832, 480))):
        assert nearest(row("image"), Extent(*extent), (WIDE, LONG, TALL)) == Geometry(*shape, 1)


def test_a_photo_and_a_film_at_one_frame_share_their_shape():
    (still,) = parse(["480x832x1"], frame_stride=4)
    assert choose(row("video"), (still,)) == choose(row("image"), (still,)) == choose(row("image"), (LONG,))


def test_of_equal_shapes_the_largest_that_enlarges_nothing_wins():
    shapes = parse(["32x32x1", "64x64x1", "128x128x1"])
    sizes = {size: nearest(row("image"), Extent(size, size, 1), shapes).height for size in (16, 32, 100, 128, 500)}
    assert sizes == {16: 32, 32: 32, 100: 64, 128: 128, 500: 128}


def test_one_shape_decides_without_a_look_at_the_media():
    assert choose(row(), (LONG,)) == LONG
    assert choose(row("image"), (LONG,)) == Geometry(480, 832, 1)
