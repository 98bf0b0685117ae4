"""Pixels of a row: the right frames, the right way up, at the right size."""

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from footage import film, grey, number, photo
from loopwright import media
from loopwright.data.decode import fitted, measure, pixels
from loopwright.data.geometry import Geometry
from loopwright.data.row import Kind, Row
from loopwright.errors import DataError


def row(path: Path, kind: Kind = "video") -> Row:
    return Row("a fox", path, kind, path.parent / "rows.jsonl", 4)


def sides(height: int = 32, width: int = 64) -> np.ndarray:
    """Black on the left, white on the right."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, width // 2 :] = 255
    return image


@pytest.mark.parametrize(
    ("had", "frames", "stride", "expected"),
    [(9, 9, 1, range(9)), (9, 1, 1, [4]), (10, 5, 1, range(2, 7)), (11, 4, 3, [0, 3, 6, 9]), (20, 3, 5, [4, 9, 14])],
)
def test_the_window_lies_in_the_middle(tmp_path: Path, had: int, frames: int, stride: int, expected: list[int]):
    found = pixels(row(film(tmp_path / "a.mp4", grey(had))), Geometry(32, 48, frames, stride))
    assert found.shape == (3, frames, 32, 48) and found.dtype == torch.float32
    assert number(found) == list(expected)


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".webp"])
def test_a_window_is_bit_for_bit_part_of_the_whole(tmp_path: Path, suffix: str):
    file = tmp_path / f"a{suffix}"
    media.write(file, np.random.default_rng(0).integers(0, 256, (14, 16, 16, 3), np.uint8), fps=10, metadata={})
    whole, _ = media.read_video(file)
    assert np.array_equal(np.stack(list(media.read_window(file, 4, 3))), whole[2:12:3])
    assert measure(row(file)) == (16, 16, 14)


def test_too_short_names_file_frames_had_and_frames_needed(tmp_path: Path):
    for name in ("a.mp4", "a.gif"):
        media.write(tmp_path / name, grey(8), fps=10, metadata={})
        with pytest.raises(DataError, match=rf"rows\.jsonl:4: .*{name} is too short: '8 frames'; 9 are needed"):
            pixels(row(tmp_path / name), Geometry(32, 48, 3, frame_stride=4))


def test_an_image_is_one_frame_whatever_the_geometry_asks(tmp_path: Path):
    media.write(tmp_path / "a.png", sides(), fps=1, metadata={})
    found = pixels(row(tmp_path / "a.png", "image"), Geometry(32, 64, 9, 2))
    assert found.shape == (3, 1, 32, 64)
    assert torch.equal(found[:, 0], torch.from_numpy(sides()).permute(2, 0, 1).float() / 127.5 - 1)
    assert (found.min(), found.max()) == (-1, 1)


def test_media_are_measured_once_until_they_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looked, real = [], media.measure_video
    monkeypatch.setattr(media, "measure_video", lambda path: looked.append(path) or real(path))
    file = tmp_path / "a.mp4"
    for frames in (3, 5):
        media.write(file, np.zeros((frames, 16, 16, 3), np.uint8), fps=8, metadata={})
        assert [measure(row(file)).frames for _ in range(3)] == [frames] * 3
    assert looked == [file, file]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_undone_and_measured(tmp_path: Path, orientation: int):
    file = photo(tmp_path / "a.png", sides(), orientation)
    upright = media.read_image(file)
    assert measure(row(file, "image")) == (*upright.shape[:2], 1)
    found = pixels(row(file, "image"), Geometry(*upright.shape[:2], 1))
    assert torch.equal(found[:, 0], torch.from_numpy(upright).permute(2, 0, 1).float() / 127.5 - 1)


def test_rotation_is_undone_and_a_cover_is_no_video(tmp_path: Path):
    frames = np.repeat(sides()[None], 3, 0)
    file = row(film(tmp_path / "a.mp4", frames, rotation=-90, cover=True))  # a quarter clockwise: black above
    assert measure(file) == (64, 32, 3)
    found = pixels(file, Geometry(64, 32, 3))
    assert found[:, :, :28].max() < -0.9 and found[:, :, 36:].min() > 0.9


def test_resizing_covers_and_cuts_both_sides_the_same():
    image = np.zeros((20, 100, 3), np.uint8)
    image[:, 40:60] = 255
    found = fitted(image, Geometry(10, 10, 1))
    assert found.shape == (3, 10, 10)
    assert found[:, :, 1:-1].min() > 0.99, "the middle fifth is the square that stays"
    stretched = fitted(image, Geometry(10, 10, 1, crop="none"))
    assert stretched[:, :, :3].max() < -0.99 and stretched[:, :, 4:6].min() > 0.7


def test_shrinking_is_antialiased():
    checks = ((np.indices((64, 64)).sum(0) % 2) * 255).astype(np.uint8)[..., None].repeat(3, -1)
    assert fitted(checks, Geometry(16, 16, 1)).abs().max() < 0.05, "without, a grid of black or white remains"


def test_any_size_gives_the_size_asked_for():
    for height, width in ((7, 333), (480, 853), (1, 1), (33, 32)):
        assert fitted(np.zeros((height, width, 3), np.uint8), Geometry(32, 48, 1)).shape == (3, 32, 48)


@pytest.mark.parametrize("kind", ["image", "video"])
def test_broken_media_is_named_with_the_row(tmp_path: Path, kind: Kind):
    (tmp_path / "notes.mp4").write_text("these are not pixels, only words")
    for look in (measure, lambda one: pixels(one, Geometry(8, 8, 1))):
        with pytest.raises(DataError, match=r"rows\.jsonl:4: cannot read .*notes\.mp4"):
            look(row(tmp_path / "notes.mp4", kind))


def test_a_video_cut_in_the_middle_of_its_window_is_refused(tmp_path: Path):
    file = film(tmp_path / "a.mp4", np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8))
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(DataError, match=r"a\.mp4"):
        pixels(row(file), Geometry(32, 32, 9))


@pytest.mark.parametrize(("codec", "hidden"), [("libvpx", 1), ("libvpx", 0), ("libvpx-vp9", 0), ("mpeg4", 0)])
def test_frames_are_counted_as_a_decoder_shows_them(tmp_path: Path, codec: str, hidden: int):
    frames = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
    file = tmp_path / "a.mkv"
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.height = stream.width = 32
        stream.pix_fmt = "yuv420p"
        for frame in (*frames, None):
            for packet in stream.encode(frame if frame is None else av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(unseen(packet) if hidden and packet.pts == 5 * packet.duration else packet)
    assert measure(row(file)).frames == len(media.read_video(file)[0]) == 12 - hidden


def unseen(packet: av.Packet) -> av.Packet:
    """The same VP8 frame, marked as one to refer to and not to show."""
    data = bytearray(bytes(packet))
    data[0] &= ~0x10
    changed = av.Packet(bytes(data))
    changed.pts, changed.dts, changed.time_base, changed.stream = (
        packet.pts,
        packet.dts,
        packet.time_base,
        packet.stream,
    )
    return changed


def test_images_with_alpha_or_one_channel_become_rgb(tmp_path: Path):
    Image.new("L", (8, 8), 255).save(tmp_path / "grey.png")
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "clear.png")
    for name in ("grey.png", "clear.png"):
        assert torch.equal(pixels(row(tmp_path / name, "image"), Geometry(8, 8, 1)), torch.ones(3, 1, 8, 8))
