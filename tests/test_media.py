"""Pixels, frame rate and metadata go to a file and come back, and a bad file says so in one line."""

import json
import os
import struct
import subprocess
import sys
import zlib
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from loopwright import media
from loopwright.errors import MediaError

LONG = {"prompt": "一只猫在弹钢琴,ünïcödé 🦊 " * 600, "seed": 7, "nested": {"a": [1, 2.5, None, True]}}


def film(count: int = 9, height: int = 48, width: int = 64) -> np.ndarray:
    """A ramp with a soft red ball that moves: honest work for a codec, with no edge that 4:2:0 colour must blur."""
    y, x = np.mgrid[:height, :width]
    frames = []
    for t in range(count):
        ball = np.exp(-((x - 8 - 4 * t) ** 2 + (y - height / 2) ** 2) / 100)
        frames.append(np.stack([60 + 170 * ball, x * 255 // width, y * 255 // height], -1))
    return np.array(frames, np.uint8)


def psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / max(np.mean((a.astype(float) - b) ** 2), 1e-9)))


def fails(match: str, call, *args, **kwargs) -> str:
    with pytest.raises(MediaError, match=match) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Videos


def test_mp4_comes_back_near_the_original_in_an_independent_decoder(tmp_path: Path):
    frames = film()
    media.write(tmp_path / "a.mp4", frames, fps=16, metadata={})
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        decoded = np.stack([np.asarray(frame.to_image()) for frame in container.decode(stream)])
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert stream.average_rate == 16
    assert decoded.shape == frames.shape
    assert psnr(decoded, frames) > 36
    read, fps = media.read_video(tmp_path / "a.mp4")
    assert fps == 16
    assert read.dtype == np.uint8 and psnr(read, frames) > 36


def test_mp4_keeps_flat_colours_and_tells_players_the_matrix(tmp_path: Path):
    colours = np.array([[200, 30, 60], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0]], np.uint8)
    frames = np.broadcast_to(colours[:, None, None], (5, 32, 32, 3)).copy()
    media.write(tmp_path / "a.mp4", frames, fps=8, metadata={})
    read, _ = media.read_video(tmp_path / "a.mp4")
    assert np.abs(read.astype(int) - frames).max() <= 3
    with av.open(str(tmp_path / "a.mp4")) as container:
        frame = next(container.decode(video=0))
        assert (frame.colorspace, frame.color_primaries, frame.color_trc) == (1, 1, 1)


def test_mp4_starts_with_its_index_so_that_browsers_play_before_the_end(tmp_path: Path):
    media.write(tmp_path / "a.mp4", film(), fps=16, metadata={})
    data = (tmp_path / "a.mp4").read_bytes()
    assert data.index(b"moov") < data.index(b"mdat")


def test_an_odd_sized_mp4_gains_one_repeated_row_and_column(tmp_path: Path):
    frames = film(3, 47, 63)
    media.write(tmp_path / "a.mp4", frames, fps=16, metadata={})
    read, _ = media.read_video(tmp_path / "a.mp4")
    assert read.shape == (3, 48, 64, 3)
    assert psnr(read[:, :47, :63], frames) > 36
    assert np.abs(read[:, 47].astype(int) - read[:, 46]).mean() < 4


@pytest.mark.parametrize(
    ("suffix", "fps"),
    [(".mp4", 24000 / 1001), (".mp4", 12.5), (".mp4", 7), (".gif", 10), (".gif", 16), (".webp", 24), (".webp", 16)],
)
def test_frame_rate_and_count_survive(tmp_path: Path, suffix: str, fps: float):
    media.write(tmp_path / f"a{suffix}", film(10), fps=fps, metadata={})
    read, found = media.read_video(tmp_path / f"a{suffix}")
    assert len(read) == 10
    assert found == pytest.approx(fps, rel=1e-9)


@pytest.mark.parametrize("suffix", [".gif", ".webp"])
def test_equal_frames_that_the_format_merges_come_back_apart(tmp_path: Path, suffix: str):
    frames = film(6)[[0, 0, 1, 2, 2, 2, 3, 4, 5]]
    media.write(tmp_path / f"a{suffix}", frames, fps=16, metadata={})
    read, fps = media.read_video(tmp_path / f"a{suffix}")
    assert fps == 16 and len(read) == 9
    assert psnr(read, frames) > 25


def test_animated_webp_is_exact_and_gif_is_close(tmp_path: Path):
    frames = film()
    media.write(tmp_path / "a.webp", frames, fps=16, metadata={})
    media.write(tmp_path / "a.gif", frames, fps=16, metadata={})
    assert np.array_equal(media.read_video(tmp_path / "a.webp")[0], frames)
    assert psnr(media.read_video(tmp_path / "a.gif")[0], frames) > 25


def test_a_gif_is_recognised_by_content_whatever_its_name(tmp_path: Path):
    media.write(tmp_path / "a.gif", film(), fps=10, metadata={"seed": 1})
    os.rename(tmp_path / "a.gif", tmp_path / "a.mp4")
    assert len(media.read_video(tmp_path / "a.mp4")[0]) == 9
    assert media.read_metadata(tmp_path / "a.mp4") == {"seed": 1}


def encode(path: Path, frames: np.ndarray, rotation: float | None = None, hflip: bool = False, cover: bool = False):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=Fraction(10), options={"crf": "8"})
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        if rotation is not None:
            stream.set_display_rotation(rotation, hflip=hflip)
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


@pytest.mark.parametrize(("degrees", "turns"), [(0, 0), (90, 1), (180, 2), (-90, 3)])
def test_a_turned_video_comes_back_as_players_show_it(tmp_path: Path, degrees: int, turns: int):
    frames = film(2)
    encode(tmp_path / "a.mp4", frames, degrees)
    upright = np.rot90(frames, turns, axes=(1, 2))
    read, _ = media.read_video(tmp_path / "a.mp4")
    assert read.shape == upright.shape
    assert psnr(read, upright) > 30


def test_a_phone_portrait_clip_stands_upright(tmp_path: Path):
    # A phone held upright stores landscape and says "turn it a quarter clockwise" (ffprobe: rotation of -90).
    upright = film(2, 64, 48)
    encode(tmp_path / "a.mp4", np.ascontiguousarray(np.rot90(upright, 1, axes=(1, 2))), -90)
    assert psnr(media.read_video(tmp_path / "a.mp4")[0], upright) > 30


def test_a_mirrored_video_comes_back_mirrored(tmp_path: Path):
    frames = film(2)
    encode(tmp_path / "a.mp4", frames, 0, hflip=True)
    assert psnr(media.read_video(tmp_path / "a.mp4")[0], frames[:, :, ::-1]) > 30


def song_with_cover(path: Path, video: np.ndarray | None) -> None:
    """A picture beside the streams, as shops sell songs and films."""
    with av.open(str(path), "w", format="mp4") as container:
        cover = container.add_stream("mjpeg", rate=Fraction(1))
        cover.width, cover.height, cover.pix_fmt = 16, 16, "yuvj420p"
        cover.disposition = av.stream.Disposition.attached_pic
        sound = container.add_stream("aac", rate=44100)
        film_stream = container.add_stream("libx264", rate=Fraction(10)) if video is not None else None
        if film_stream is not None:
            film_stream.height, film_stream.width = video.shape[1:3]
            film_stream.pix_fmt = "yuv420p"
        picture = av.VideoFrame.from_ndarray(np.full((16, 16, 3), 255, np.uint8), format="rgb24")
        container.mux(cover.encode(picture.reformat(format="yuvj420p")))
        container.mux(cover.encode(None))
        silence = av.AudioFrame.from_ndarray(np.zeros((2, 1024), np.float32), format="fltp", layout="stereo")
        silence.sample_rate = 44100
        container.mux(sound.encode(silence))
        container.mux(sound.encode(None))
        for frame in () if video is None else video:
            container.mux(film_stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        if film_stream is not None:
            container.mux(film_stream.encode(None))


def test_cover_art_is_not_the_video(tmp_path: Path):
    song_with_cover(tmp_path / "a.mp4", film(4))
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert len(container.streams.video) == 2, "the file has no cover, so this test proves nothing"
    assert media.read_video(tmp_path / "a.mp4")[0].shape == (4, 48, 64, 3)


def test_a_song_with_a_cover_has_no_video(tmp_path: Path):
    song_with_cover(tmp_path / "a.m4a", None)
    fails("no video in the file", media.read_video, tmp_path / "a.m4a")


@pytest.mark.parametrize("kept", [0.5, 0.9, 0.99, 0.2])
def test_a_truncated_mp4_is_refused_however_much_is_left(tmp_path: Path, kept: float):
    media.write(tmp_path / "a.mp4", film(30), fps=16, metadata={})
    data = (tmp_path / "a.mp4").read_bytes()
    (tmp_path / "a.mp4").write_bytes(data[: int(len(data) * kept)])
    assert "a.mp4" in fails("truncated", media.read_video, tmp_path / "a.mp4")


def test_a_video_cut_cleanly_between_two_frames_is_refused_too(tmp_path: Path):
    media.write(tmp_path / "a.mp4", film(30), fps=16, metadata={})
    with av.open(str(tmp_path / "a.mp4")) as container:
        ends = sorted(entry.pos + entry.size for entry in container.streams.video[0].index_entries)
    data = (tmp_path / "a.mp4").read_bytes()
    for end in (ends[10], ends[-2]):
        (tmp_path / "a.mp4").write_bytes(data[:end])
        fails("truncated", media.read_video, tmp_path / "a.mp4")


def test_missing_and_foreign_files_are_named(tmp_path: Path):
    (tmp_path / "notes.mp4").write_text("these are not pixels, only words")
    for read in (media.read_video, media.read_image, media.read_metadata):
        assert "absent.mp4" in fails("no such file", read, tmp_path / "absent.mp4")
        assert "notes.mp4" in fails("cannot read", read, tmp_path / "notes.mp4")
        fails("cannot read", read, tmp_path)


# Images


def test_png_and_webp_are_exact_and_jpeg_is_close(tmp_path: Path):
    image = film(1)[0]
    for name in ("a.png", "a.webp", "a.jpg", "A.JPEG"):
        media.write(tmp_path / name, image, fps=1, metadata={})
        read = media.read_image(tmp_path / name)
        assert read.shape == image.shape and read.flags.writeable
        assert np.array_equal(read, image) if name in ("a.png", "a.webp") else psnr(read, image) > 35


def test_a_photo_is_turned_as_its_exif_asks(tmp_path: Path):
    image = film(1)[0]
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: show it a quarter clockwise
    Image.fromarray(image).save(tmp_path / "a.png", exif=exif)
    assert np.array_equal(media.read_image(tmp_path / "a.png"), np.rot90(image, -1))


def test_transparency_is_laid_on_white(tmp_path: Path):
    pixels = np.zeros((2, 3, 4), np.uint8)
    pixels[:, 0] = (255, 0, 0, 255)
    pixels[:, 1] = (0, 0, 255, 0)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    read = media.read_image(tmp_path / "a.png")
    assert read[0, 0].tolist() == [255, 0, 0] and read[0, 1].tolist() == [255, 255, 255]


def test_grey_images_of_8_and_16_bits_are_read(tmp_path: Path):
    grey = np.arange(0, 65536, 4096, dtype=np.uint16).reshape(4, 4)
    Image.fromarray(grey).save(tmp_path / "deep.png")
    Image.fromarray((grey >> 8).astype(np.uint8)).save(tmp_path / "flat.png")
    deep, flat = media.read_image(tmp_path / "deep.png"), media.read_image(tmp_path / "flat.png")
    assert np.array_equal(deep, flat) and np.array_equal(deep[..., 0], grey >> 8)


def test_a_truncated_image_is_refused(tmp_path: Path):
    for suffix in (".png", ".jpg", ".webp"):
        file = tmp_path / f"a{suffix}"
        media.write(file, np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8), fps=1, metadata={})
        file.write_bytes(file.read_bytes()[:2000])
        assert file.name in fails("cannot read", media.read_image, file)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [10_000, 40_000])
def test_a_decompression_bomb_is_refused_before_it_opens(tmp_path: Path, side: int):
    Image.new("L", (1, 1)).save(tmp_path / "bomb.png")
    data = bytearray((tmp_path / "bomb.png").read_bytes())
    data[16:24] = struct.pack(">II", side, side)  # the header claims a size that the pixels need not have
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "bomb.png").write_bytes(data)
    assert "bomb.png" in fails("pixels", media.read_image, tmp_path / "bomb.png")


# Metadata


@pytest.mark.parametrize("suffix", media.SUFFIXES)
@pytest.mark.parametrize("metadata", [{}, {"prompt": 'a "fox"\n\0', "seed": 1}, LONG, {"prompt": "bad \udce9 byte"}])
def test_metadata_survives_in_every_format(tmp_path: Path, suffix: str, metadata: dict):
    frames = film(1 if suffix in (".png", ".jpg", ".jpeg") else 3)
    media.write(tmp_path / f"a{suffix}", frames, fps=8, metadata=metadata)
    assert media.read_metadata(tmp_path / f"a{suffix}") == metadata


def test_long_means_at_least_20_kilobytes():
    assert len(json.dumps(LONG, ensure_ascii=False).encode()) > 20_000


def test_a_still_webp_and_a_still_gif_keep_metadata(tmp_path: Path):
    for name in ("a.webp", "a.gif"):
        media.write(tmp_path / name, film(1), fps=8, metadata=LONG)
        assert media.read_metadata(tmp_path / name) == LONG
        assert media.read_video(tmp_path / name)[0].shape == (1, 48, 64, 3)


def test_other_tools_find_the_text_where_the_format_keeps_comments(tmp_path: Path):
    for name in ("a.mp4", "a.gif", "a.png"):
        media.write(tmp_path / name, film(1), fps=8, metadata={"prompt": "狐狸"})
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert "狐狸" in container.metadata["comment"]
    assert "狐狸" in Image.open(tmp_path / "a.gif").info["comment"].decode()
    assert "狐狸" in Image.open(tmp_path / "a.png").info["loopwright"]


def test_a_file_without_our_metadata_says_so(tmp_path: Path):
    encode(tmp_path / "a.mp4", film(1))
    Image.fromarray(film(1)[0]).save(tmp_path / "a.png")
    Image.fromarray(film(1)[0]).save(tmp_path / "a.gif", comment=b'{"somebody": "else"}')
    Image.fromarray(film(1)[0]).save(tmp_path / "a.jpg", comment=b"[1]")
    for name in ("a.mp4", "a.png", "a.gif", "a.jpg"):
        message = fails("no Loopwright metadata", media.read_metadata, tmp_path / name)
        assert name in message and "only files that Loopwright wrote" in message


def test_too_much_metadata_for_a_jpeg_names_png(tmp_path: Path):
    fails(r"too much metadata.*\.png", media.write, tmp_path / "a.jpg", film(1), fps=1, metadata={"p": "x" * 70_000})
    assert not list(tmp_path.iterdir())


# Writing


class Interrupted(np.ndarray):
    def __iter__(self):
        yield from np.asarray(self)[:2]
        raise RuntimeError("the lights went out")


@pytest.mark.parametrize("suffix", [".mp4", ".gif", ".webp"])
def test_a_write_that_fails_midway_leaves_the_old_file_and_nothing_else(tmp_path: Path, suffix: str):
    file = tmp_path / f"a{suffix}"
    file.write_bytes(b"precious")
    with pytest.raises(RuntimeError, match="lights"):
        media.write(file, film().view(Interrupted), fps=8, metadata={})
    assert [f.name for f in tmp_path.iterdir()] == [file.name]
    assert file.read_bytes() == b"precious"


def test_an_encoder_error_is_one_line_and_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    file = tmp_path / "a.mp4"
    file.write_bytes(b"precious")
    monkeypatch.setattr(os, "replace", full)
    assert "a.mp4" in fails("No space left", media.write, file, film(), fps=8, metadata={})
    assert [f.name for f in tmp_path.iterdir()] == ["a.mp4"] and file.read_bytes() == b"precious"


def test_parents_are_made_and_old_files_replaced(tmp_path: Path):
    file = tmp_path / "new" / "deep" / "a.png"
    for value in (0, 255):
        media.write(file, np.full((4, 4, 3), value, np.uint8), fps=1, metadata={})
        assert media.read_image(file).max() == value
    assert [f.name for f in file.parent.iterdir()] == ["a.png"]


def test_written_files_have_ordinary_permissions(tmp_path: Path):
    (tmp_path / "plain").write_text("")
    for name in ("a.mp4", "a.png"):
        media.write(tmp_path / name, film(1), fps=1, metadata={})
        assert (tmp_path / name).stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_several_frames_into_one_image_name_the_formats_that_hold_them(tmp_path: Path):
    for name in ("a.png", "a.jpg"):
        message = fails("holds one frame", media.write, tmp_path / name, film(), fps=8, metadata={})
        assert ".mp4" in message and ".gif" in message
    assert not list(tmp_path.iterdir())


def test_unusable_pixels_and_rates_are_refused(tmp_path: Path):
    for bad in (film().astype(np.float32), film()[..., :1], film()[:0], film()[0, 0]):
        fails("cannot use these pixels", media.write, tmp_path / "a.mp4", bad, fps=8, metadata={})
    for fps in (0, -1, float("nan"), float("inf")):
        for name in ("a.mp4", "a.gif", "a.webp"):
            fails("frames per second", media.write, tmp_path / name, film(), fps=fps, metadata={})
    fails(r"too fast for a GIF.*\.mp4", media.write, tmp_path / "a.gif", film(), fps=60, metadata={})
    assert not list(tmp_path.iterdir())


def test_check_writable_accepts_what_write_would_create_and_leaves_nothing(tmp_path: Path):
    (tmp_path / "old.mp4").write_bytes(b"precious")
    for name in ("a.mp4", "old.mp4", "not/there/yet/a.GIF", "名字.webp"):
        media.check_writable(tmp_path / name)
    assert [f.name for f in tmp_path.iterdir()] == ["old.mp4"]
    assert (tmp_path / "old.mp4").read_bytes() == b"precious"


def test_check_writable_refuses_what_write_could_not_create(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder.mp4").mkdir()
    assert ".webp" in fails("suffix", media.check_writable, tmp_path / "a.xyz")
    fails("suffix", media.check_writable, tmp_path / "a")
    fails("suffix", media.check_writable, "")
    fails("a folder is in the place", media.check_writable, tmp_path / "folder.mp4")
    for bad in (
        tmp_path / "file" / "a.mp4",
        tmp_path / "file" / "b" / "a.mp4",
        tmp_path / f"{'x' * 300}.mp4",
        "\0.mp4",
    ):
        fails("cannot write", media.check_writable, bad)
        fails("cannot write", media.write, bad, film(), fps=8, metadata={})
    if Path("/proc/version").exists():
        fails("cannot write", media.check_writable, "/proc/a.mp4")


# Contact sheets


def test_a_contact_sheet_shows_tiny_frames_in_order_and_large_enough():
    frames = np.stack([np.full((8, 8, 3), value, np.uint8) for value in (10, 20, 30, 40)])
    sheet = media.contact_sheet(frames)
    height, width, _ = sheet.shape
    assert 600 <= width < 640 and height == width
    for (row, column), value in {(0, 0): 10, (0, 1): 20, (1, 0): 30, (1, 1): 40}.items():
        assert (sheet[height // 4 + row * height // 2, width // 4 + column * width // 2] == value).all()


def test_a_contact_sheet_is_exact_where_told_how():
    frames = film(3, 4, 5)
    sheet = media.contact_sheet(frames, columns=3, gap=1, scale=2)
    assert sheet.shape == (1 + 8 + 1, 1 + 3 * 11, 3)
    assert np.array_equal(sheet[1:9:2, 12:22:2], frames[1])
    assert (sheet[0] == 255).all() and (sheet[:, 11] == 255).all()


def test_a_long_video_is_sampled_evenly_with_both_ends():
    frames = np.arange(81, dtype=np.uint8)[:, None, None, None].repeat(3, -1)
    sheet = media.contact_sheet(frames, columns=16, gap=0, scale=1)
    assert sheet.shape == (1, 16, 3)
    assert sheet[0, [0, -1], 0].tolist() == [0, 80] and set(np.diff(sheet[0, :, 0].astype(int))) <= {5, 6}


def test_a_contact_sheet_takes_one_image_and_does_not_shrink_large_frames():
    assert media.contact_sheet(film(1, 720, 1280)[0]).shape == (724, 1284, 3)
    fails("contact sheet", media.contact_sheet, film(), columns=0)


def test_media_needs_no_torch():
    code = "import sys, loopwright.media; sys.exit('torch' in sys.modules)"
    path = os.pathsep.join([str(Path(media.__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True)
