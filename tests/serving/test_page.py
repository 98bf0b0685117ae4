"""The page in a real browser, on the shipped model: what people do with it, by mouse, by keyboard, on a phone."""

import re

import pytest
from browsing import PHONE, PROMPT, SUBMIT, chromium, fill, looking, tab_to
from live import served

FEW = {"num_inference_steps": 4, "num_frames": 5}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with served("loopwright/tiny-wan", folder=tmp_path_factory.mktemp("page")) as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    with chromium() as opened:
        yield opened


@pytest.fixture
def page(browser, server):
    with looking(browser, server.url) as opened:
        yield opened


def listed(server) -> list[dict]:
    return server.http.get("/v1/videos").json()["data"]


def content(server, record: dict) -> bytes:
    return server.http.get(f"/v1/videos/{record['id']}/content").content


def made(page) -> None:
    page.locator(".pane[data-status=completed] :is(video, img)").first.wait_for()


def test_a_prompt_becomes_a_video_with_progress_and_the_same_again(page, server):
    fill(page, **FEW)
    page.click(SUBMIT)
    page.locator("#viewer .doing").wait_for()
    look = "[document.querySelector('#viewer .doing')?.textContent, document.querySelector('#viewer progress')?.value]"
    seen = []
    while (now := page.evaluate(look))[0] is not None:
        seen += [now] if now not in seen else []
        page.wait_for_timeout(20)
    assert sum("Denoising · step" in text for text, _ in seen) >= 2 and len({value for _, value in seen}) >= 3
    made(page)
    video = page.locator("#viewer video")
    assert (
        video.evaluate("v => new Promise(done => { v.ontimeupdate = () => v.currentTime && done(v.videoWidth) })") == 64
    )
    with page.expect_download() as saved:
        page.click("#viewer >> text=Download")
    first = listed(server)[0]
    assert saved.value.suggested_filename == f"{first['id']}.mp4"
    assert saved.value.path().read_bytes() == content(server, first)
    page.click("text=Same seed again")
    page.locator("#gallery li").nth(1).wait_for()
    again = listed(server)[0]
    assert again["id"] != first["id"] and again["seed"] == first["seed"]
    assert content(server, again) == content(server, first)


def test_what_it_will_be_is_shown_and_cancelling_ends_the_job(page, server):
    fill(page, num_inference_steps=200)
    page.click(SUBMIT)
    page.locator("#viewer .doing", has_text=re.compile("step [1-9]")).wait_for()
    preview = page.locator("#viewer .room img:not([hidden])")
    preview.wait_for()
    assert preview.evaluate("image => image.decode().then(() => image.naturalWidth)") == 64
    page.click("#queue >> text=Cancel")
    page.locator(".pane[data-status=cancelled]").wait_for()
    assert listed(server)[0]["status"] == "cancelled" and len(server.service.driver.scheduler) == 0
    page.locator("#queue").wait_for(state="hidden")


def test_the_queue_says_what_runs_what_waits_and_until_when(page, server):
    asked = {"prompt": PROMPT, "num_frames": 1, "num_inference_steps": 40, "seed": 1}
    server.openai.videos.create_and_poll(prompt=PROMPT, extra_body={**asked, "seed": 0}, poll_interval_ms=30)
    videos = [server.post("/v1/videos", **asked) for _ in range(2)]
    page.reload()
    rows = page.locator("#queue li")
    rows.nth(1).locator("text=/Waiting .* left|step/").wait_for()
    second, first = (record["eta"] for record in listed(server)[:2])
    assert second > first > 0 and rows.count() == 2
    for video in videos:
        server.http.delete(f"/v1/videos/{video['id']}")
    page.locator("#queue").wait_for(state="hidden")


def test_two_settings_are_played_in_step(page, server):
    fill(page, **FEW)
    page.click("#compare summary")
    page.select_option("#field-setting", "guidance_scale")
    page.fill("#field-second", "1")
    page.click(SUBMIT)
    page.locator(".together").wait_for()
    page.click("text=Pause both")
    times = page.locator("#viewer video").evaluate_all("videos => videos.map(video => video.currentTime)")
    assert len(times) == 2 and times[0] == pytest.approx(times[1], abs=1e-3)
    page.locator(".together input").fill("0.5")
    page.locator("#viewer video").nth(1).evaluate(
        "v => new Promise(done => (v.seeking ? (v.onseeked = done) : done()))"
    )
    page.wait_for_timeout(100)
    times = page.locator("#viewer video").evaluate_all("videos => videos.map(video => video.currentTime)")
    assert times[0] == pytest.approx(times[1], abs=1e-3) and times[0] > 0.2
    second, first = (record["parameters"] for record in listed(server)[:2])
    assert {name for name in first if first[name] != second[name]} == {"guidance_scale"}
    assert page.locator("#viewer h3").all_text_contents() == ["Guidance: 3", "Guidance: 1"]


def test_a_prompt_is_text_whatever_it_looks_like(page):
    prompt = "<img src=x onerror=\"document.title='owned'\"><b>bold</b> & </p><script>document.title='owned'</script>"
    fill(page, prompt, num_frames=1, num_inference_steps=1)
    page.select_option("#field-kind", "picture")
    page.click(SUBMIT)
    made(page)
    card = page.locator("#gallery li .prompt").first
    card.wait_for()
    assert card.text_content() == page.locator("#viewer .prompt").text_content() == prompt
    assert page.locator("#results :is(b, script)").count() == 0 and page.title() == "Loopwright"


def test_what_the_server_refuses_stands_at_its_field_and_settings_come_back(page, server):
    record = server.openai.videos.create_and_poll(
        prompt=PROMPT, extra_body={"num_inference_steps": 1, "num_frames": 1, "seed": 2**53 + 1}, poll_interval_ms=30
    )
    page.reload()
    page.locator(f"li[data-id={record.id}] button").click()
    page.click("text=Use these settings")
    assert page.input_value("#field-seed") == str(2**53 + 1) and page.input_value("#field-kind") == "picture"
    page.select_option("#field-kind", "video")
    page.fill("#field-num_frames", "10")
    page.click(SUBMIT)
    field = page.locator("#field-num_frames[aria-invalid=true]")
    field.wait_for()
    answer = server.http.post("/v1/videos", json={"prompt": PROMPT, "num_frames": 10}).json()["error"]
    assert page.locator("#field-num_frames-note").text_content() == answer["message"]
    assert field.evaluate("input => document.activeElement === input")


def test_nothing_is_made_of_an_empty_prompt(page, server):
    before = len(listed(server))
    page.click(SUBMIT)
    page.locator("#field-prompt[aria-invalid=true]:focus").wait_for()
    assert page.locator("#field-prompt-note").text_content() and len(listed(server)) == before


def test_the_whole_way_by_keyboard(page, server):
    before = len(listed(server))
    tab_to(page, "#field-prompt")
    page.keyboard.type("a red circle")
    for name, value in (("num_frames", 5), ("num_inference_steps", 2)):
        tab_to(page, f"#field-{name}")
        page.keyboard.type(str(value))
    page.keyboard.press("Enter")
    made(page)
    status = page.locator("#announcer", has_text="completed: a red circle")
    status.wait_for(state="attached")
    tab_to(page, "#viewer button.danger")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.locator("dialog").wait_for(state="detached")
    page.locator("#viewer .empty").wait_for()
    assert len(listed(server)) == before
    assert page.locator("#results").evaluate("results => results === document.activeElement")


def test_nothing_is_wider_than_a_phone(browser, server):
    with looking(browser, server.url, PHONE, "dark") as page:
        width = "document.documentElement.scrollWidth"
        page.click("#more summary")
        page.click("#compare summary")
        assert page.evaluate(width) == PHONE[0]
        fill(page, "unbroken" * 60, num_frames=5, num_inference_steps=1)
        page.fill("#field-second", "2")
        page.click(SUBMIT)
        page.locator("#queue li").first.wait_for()
        assert page.evaluate(width) == PHONE[0]
        page.locator(".together").wait_for()
        assert page.evaluate(width) == PHONE[0]
        light = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.emulate_media(color_scheme="light")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
