"""The page of a server that wants keys and has several models, and the page's parts over plain HTTP."""

import re
from importlib.resources import files

import httpx
import pytest
from browsing import SUBMIT, chromium, fill, looking
from live import served
from PIL import Image

from loopwright.serving.keys import new_key


@pytest.fixture(scope="module")
def locked(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("locked")
    key = new_key(folder / "keys", "alice")
    sources = [checkpoint(kind) for kind in ("t2v", "i2v")]
    with served(*sources, folder=folder / "serving", keys=folder / "keys", key=key) as running:
        yield running, key


def test_every_part_of_the_page_is_open_typed_and_under_a_strict_policy(locked):
    server, _ = locked
    index = httpx.get(f"{server.url}/")
    names = {part.name for part in files("loopwright.serving").joinpath("page").iterdir()}
    parts = {name: httpx.get(f"{server.url}/page/{name}") for name in names}
    for part in (index, *parts.values()):
        policy = dict(rule.split(" ", 1) for rule in part.headers["content-security-policy"].split("; "))
        assert part.status_code == 200 and part.headers["x-content-type-options"] == "nosniff"
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert not {"'unsafe-inline'", "'unsafe-eval'"} & set(part.headers["content-security-policy"].split())
    used = {
        name for part in (index, *parts.values()) for name in re.findall(r"""["'](?:/page|\.)/([^"']+)""", part.text)
    }
    assert used == names - {"index.html"}
    assert all("innerHTML" not in part.text and "http://" not in part.text.replace("http://www.w3.org/2000/svg", "")
               for part in parts.values())  # fmt: skip


@pytest.mark.parametrize("name", ["none.js", "..%2Fgate.py", "%2e%2e/gate.py", "__init__.py"])
def test_no_other_file_is_a_part_of_the_page(locked, name):
    answer = httpx.get(f"{locked[0].url}/page/{name}")
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "not_found"


def test_a_key_is_asked_for_kept_in_the_tab_alone_and_opens_everything(locked, tmp_path):
    server, key = locked
    with chromium() as browser, looking(browser, server.url, locked=True) as page:
        for given in ("wrong", key):
            page.fill("dialog input", given)
            page.keyboard.press("Enter")
            if given == "wrong":
                page.locator("dialog .refused").wait_for()
        page.locator("#field-model").wait_for()
        assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        names = page.locator("#field-model option").all_text_contents()
        assert names == list(server.service.models.named) and len(names) == 2
        picture = next(name for name in names if name.startswith("i2v"))
        page.select_option("#field-model", picture)
        Image.new("RGB", (40, 40), "red").save(tmp_path / "red.png")
        page.set_input_files("#field-file", tmp_path / "red.png")
        fill(page, "a fox", width=32, height=32, num_frames=5, num_inference_steps=2)
        page.click(SUBMIT)
        page.locator("#viewer video").wait_for()
        page.click("text=Same seed again")
        page.locator("#gallery li").nth(1).wait_for()
        again, first = server.http.get("/v1/videos").json()["data"]
        assert again["model"] == picture and again["parameters"] == first["parameters"]
        assert again["parameters"]["image"] is not None
