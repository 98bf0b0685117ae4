"""The pictures of the page that docs/serving.md shows: python tests/serving/screenshots.py docs/page"""

import sys
import tempfile
from pathlib import Path

from browsing import DESKTOP, PHONE, PROMPT, SUBMIT, chromium, fill, looking
from live import served
from PIL import Image

GALLERY = (
    "a bee moving up on a green background",
    "a rocket moving up on a black background",
    "a strawberry moving right on a yellow background",
    "a frog moving down on a white background",
)


def take(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as store, served("loopwright/tiny-wan", folder=Path(store)) as server:
        for seed, prompt in enumerate(GALLERY):
            server.openai.videos.create_and_poll(prompt=prompt, extra_body={"seed": seed}, poll_interval_ms=50)
        with chromium() as browser:
            with looking(browser, server.url, DESKTOP) as page:
                _progress(page, folder)
                _compared(page, folder)
            with looking(browser, server.url, PHONE, "dark") as page:
                page.locator("#gallery li button").first.click()
                page.locator("#viewer video").wait_for()
                page.wait_for_timeout(800)
                page.screenshot(path=folder / "phone.png")
    for path in folder.glob("*.png"):
        Image.open(path).convert("RGB").quantize(96).save(path, optimize=True)


def _progress(page, folder: Path) -> None:
    for prompt in (PROMPT, "a panda moving down on a red background"):
        fill(page, prompt, seed=7)
        page.click(SUBMIT)
    page.locator("#queue button.link").first.click()
    page.locator("#viewer .room img:not([hidden])").wait_for()
    page.locator("#viewer .doing", has_text="step 16").wait_for()
    page.screenshot(path=folder / "progress.png")
    page.locator("#queue").wait_for(state="hidden")


def _compared(page, folder: Path) -> None:
    fill(page, PROMPT, seed=7)
    page.click("#compare summary")
    page.fill("#field-second", "6")
    page.click(SUBMIT)
    page.locator(".together").wait_for()
    page.locator(".together input").fill("0.3")
    page.wait_for_timeout(500)
    page.screenshot(path=folder / "compare.png")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    take(target)
