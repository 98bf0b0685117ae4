"""A real browser for the tests of the page: Debian's Chromium, driven by Playwright, and what is done with it."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
DESKTOP, PHONE = (1280, 900), (360, 740)
PROMPT = "a fox moving left on a blue background"
SUBMIT = "#form button[type=submit]"
WAIT = 30_000  # milliseconds; other work may have the cores


@contextmanager
def chromium() -> Iterator[object]:
    """The browser. Skips where there is none."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no Chromium is installed: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, headless=True, args=list(FLAGS))
        yield browser
        browser.close()


@contextmanager
def looking(
    browser, url: str, size: tuple[int, int] = DESKTOP, scheme: str = "light", *, locked: bool = False
) -> Iterator[object]:
    """The page, open. Fails if it asked any other origin for anything, or if a script of its failed."""
    context = browser.new_context(viewport=dict(zip(("width", "height"), size, strict=True)), color_scheme=scheme)
    context.set_default_timeout(WAIT)
    page = context.new_page()
    asked, errors = [], []
    context.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(url)
    page.locator("dialog" if locked else "#serving:not(:empty)").wait_for()
    yield page
    context.close()
    assert [address for address in asked if not address.startswith((f"{url}/", f"blob:{url}/"))] == []
    assert errors == []


def fill(page, prompt: str = PROMPT, **values: object) -> None:
    page.fill("#field-prompt", prompt)
    for name, value in values.items():
        page.fill(f"#field-{name}", str(value))


def tab_to(page, selector: str, most: int = 60) -> None:
    """Press Tab until the focus is there, and is to be seen."""
    for _ in range(most):
        page.keyboard.press("Tab")
        focused = page.locator("*:focus")
        if focused.count() and focused.evaluate("(element, selector) => element.matches(selector)", selector):
            assert focused.evaluate("element => getComputedStyle(element).outlineStyle") != "none"
            return
    raise AssertionError(f"no way to {selector} by Tab")
