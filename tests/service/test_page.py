"""The page in a real browser against a real server."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 390, "height": 844}, "device_scale_factor": 2, "has_touch": True, "is_mobile": True}


class Page:
    """A page that is up, with what it asked for and complained about."""

    def __init__(self, browser: Any, address: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.on(
            "console", lambda message: self.complaints.append(message.text) if message.type == "error" else None
        )
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.goto(address)

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def settle(self) -> None:
        """Until the answer is about what is shown."""
        self.page.wait_for_selector("#samples [aria-checked]", state="attached")
        self.page.wait_for_selector("#cards[aria-busy=false]")

    def label(self) -> str:
        return str(self.page.get_attribute("#patch", "aria-label"))

    def overload(self, route: str) -> None:
        """From now on this address answers that it has too much to do."""
        busy = '{"error": {"code": "overloaded", "message": "too much is waiting already", "request_id": "x"}}'
        self.page.route(route, lambda r: r.fulfill(status=503, headers={"retry-after": "1"}, body=busy))


@pytest.fixture
def open_page(browser: Any, tiny_server: Any) -> Iterator[Any]:
    opened: list[Page] = []

    def make(**options: Any) -> Page:
        opened.append(Page(browser, tiny_server.address + "/", **options))
        return opened[-1]

    yield make
    for page in opened:
        assert page.complaints == []
        page.context.close()


def picture_file(folder: Path, name: str = "own.png") -> Path:
    pixels = np.random.default_rng(3).integers(0, 256, (300, 400, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / name)
    return folder / name


def test_a_printed_patch_fools_the_undefended_model_and_not_the_defended_one(open_page: Any) -> None:
    page = open_page()
    page.settle()
    assert (page.text("#undefended"), page.text("#defended")) == ("bird", "frog")
    assert page.text("#case").startswith("Case II")
    assert page.page.locator("#grid .cell").count() == 36
    assert page.page.locator("#grid .cell.decides").count() == 1
    assert page.page.locator("#shown-masks span").count() == 1, "the suspected window is drawn"
    assert page.page.locator("#rows .row.decides").count() == 1
    assert "Nothing is proved about a picture that is handed in" in page.text("#promise")


def test_nothing_is_asked_of_any_other_server(open_page: Any, tiny_server: Any) -> None:
    page = open_page()
    page.settle()
    assert len(page.requests) > 30
    assert all(url.startswith((tiny_server.address, "blob:", "data:")) for url in page.requests)


def test_the_patch_follows_the_mouse_and_the_answers_follow_the_patch(open_page: Any) -> None:
    page = open_page()
    page.settle()
    box = page.page.locator("#patch").bounding_box()
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    before = page.label()
    page.page.mouse.move(x, y)
    page.page.mouse.down()
    page.page.mouse.move(x + 150, y + 150, steps=8)
    page.page.mouse.up()
    page.settle()
    assert page.label() != before
    row, column = (int(v) for v in re.findall(r"row (\d+), column (\d+)", page.label())[0])
    assert row > 9
    assert column > 8


def test_resizing_beyond_the_threat_takes_the_promise_back(open_page: Any) -> None:
    page = open_page()
    page.settle()
    grip = page.page.locator("#grip").bounding_box()
    page.page.mouse.move(grip["x"] + 9, grip["y"] + 9)
    page.page.mouse.down()
    page.page.mouse.move(grip["x"] + 69, grip["y"] + 69, steps=5)
    page.page.mouse.up()
    page.settle()
    assert "larger than the threat" in page.text("#size-out")
    assert "nothing is promised here" in page.text("#promise")


def test_the_keyboard_moves_and_resizes_the_patch(open_page: Any) -> None:
    page = open_page()
    page.settle()
    page.page.focus("#patch")
    assert page.label() == "Patch of 5 by 5 pixels at row 9, column 8"
    page.page.keyboard.press("ArrowDown")
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("Shift+ArrowRight")
    page.page.keyboard.press("-")
    assert page.label() == "Patch of 4 by 4 pixels at row 10, column 13"
    page.settle()
    assert page.page.evaluate("() => document.activeElement.id") == "patch", "answers must not take the focus away"


def test_samples_and_masks_can_be_chosen_with_the_keyboard(open_page: Any) -> None:
    page = open_page()
    page.settle()
    page.page.focus("#samples [aria-checked=true]")
    page.page.keyboard.press("ArrowRight")
    page.settle()
    assert page.page.locator("#samples [aria-checked=true] img").get_attribute("alt") == "horse"
    assert "horse" in page.text("#picture-note")
    page.page.focus("#masks")
    page.page.keyboard.press("ArrowLeft")
    page.settle()
    page.page.wait_for_selector("#grid .cell:nth-child(25)")
    assert page.page.locator("#grid .cell").count() == 25
    assert page.text("#masks-out") == "5×5, 25 classifications an answer"


def test_a_clean_sample_is_agreed_on(open_page: Any) -> None:
    page = open_page()
    page.settle()
    page.page.check("input[value=none]", force=True)
    page.settle()
    page.page.wait_for_selector("#case:has-text('Case I: all agree')")
    assert page.text("#undefended") == page.text("#defended") == "frog"
    assert page.page.locator("#grid .differ").count() == 0
    assert "Not needed" in page.text("#round-two-words")
    assert not page.page.is_visible("#patch")


def test_a_certified_sample_promises_what_then_holds(open_page: Any) -> None:
    page = open_page()
    page.settle()
    page.page.click("#certify")
    page.page.wait_for_selector("#certificate:not([hidden])")
    assert page.text("#certificate-title") == "certified"
    assert page.page.get_attribute("#map", "aria-label") == "Map of patch positions: 784 of 784 proved harmless"
    page.settle()
    assert "no patch of up to 5×5 px can change its answer" in page.text("#promise")
    page.page.click("#compare")
    page.page.wait_for_selector("#costs tr:nth-child(6) .bar", timeout=60_000)
    assert page.page.locator("#costs .bar").all_inner_texts()[-1] == "100%"


def test_the_attacker_finds_a_place(open_page: Any) -> None:
    page = open_page()
    page.settle()
    page.page.locator("#samples button").nth(8).click()
    page.page.wait_for_selector("#picture-note:has-text('ship')")
    page.settle()
    page.page.click("#attack")
    page.page.wait_for_selector("#attack:not([disabled])", timeout=60_000)
    page.settle()
    assert page.text("#undefended") != "ship"
    assert page.text("#defended") == "ship"


def test_an_upload_is_certified_only_if_the_user_vouches_for_it(open_page: Any, tmp_path: Path) -> None:
    page = open_page()
    page.settle()
    assert not page.page.is_visible("#vouch"), "the label of a sample is known"
    page.page.set_input_files("#upload-file", picture_file(tmp_path))
    page.page.wait_for_selector("#picture-note:has-text('your picture')")
    page.settle()
    assert page.page.get_attribute("#picture", "width") == "256"
    assert page.text("#picture-note") == f"your picture {picture_file(tmp_path).name}, at 192×256 px"
    answer = page.text("#undefended")
    assert "A certificate holds only if the picture is clean and the label is true" in page.text("#vouch")
    page.page.select_option("#label", label=answer)
    assert page.page.is_disabled("#certify"), "a label alone is no word"
    page.page.check("#vouched")
    page.page.select_option("#label", index=1)
    assert not page.page.is_checked("#vouched"), "who vouched did so for the other label"
    page.page.select_option("#label", label=answer)
    page.page.check("#vouched")
    page.page.click("#certify")
    page.page.wait_for_selector("#certificate:not([hidden])", timeout=60_000)
    assert page.text("#certificate-title") == "not certified"
    assert "This answer is about the picture as it is shown here (192×256 px)" in page.text("#certificate-words")
    assert "The certificate" not in page.text("#certificate-words")
    assert "for which you vouch" in page.text("#certificate-words")
    page.settle()
    page.page.uncheck("#vouched")
    assert page.page.is_disabled("#certify")
    assert not page.page.is_visible("#certificate"), "a certificate without the user's word is void"


def test_of_a_certified_upload_the_page_says_what_the_certificate_is_about(
    open_page: Any, tiny_server: Any, tmp_path: Path
) -> None:
    page = open_page()
    page.settle()
    sample = page.page.request.get(f"{tiny_server.address}/v1/samples/6").body()
    (tmp_path / "frog.png").write_bytes(sample)
    page.page.set_input_files("#upload-file", tmp_path / "frog.png")
    page.page.wait_for_selector("#vouch:not([hidden])")
    page.page.select_option("#label", label="frog")
    page.page.check("#vouched")
    page.page.click("#certify")
    page.page.wait_for_selector("#certificate:not([hidden])", timeout=60_000)
    assert page.text("#certificate-title") == "certified"
    assert "The certificate is about the picture as it is shown here (32×32 px)" in page.text("#certificate-words")


def test_a_certificate_that_comes_after_the_label_changed_is_dropped(open_page: Any, tmp_path: Path) -> None:
    page = open_page()
    page.settle()
    page.page.set_input_files("#upload-file", picture_file(tmp_path))
    page.page.wait_for_selector("#vouch:not([hidden])")
    page.page.select_option("#label", "0")
    page.page.check("#vouched")
    held: list[Any] = []
    page.page.route("**/v1/certify", lambda route: held.append(route))
    page.page.click("#certify")
    page.page.wait_for_selector("#certify-note:has-text('Computing')")
    page.page.select_option("#label", "1")
    with page.page.expect_response("**/v1/certify", timeout=60_000):
        held[0].continue_()
    page.settle()
    assert not page.page.is_visible("#certificate")


@pytest.mark.parametrize("screen", [PHONE, {"viewport": {"width": 1280, "height": 800}}])
def test_the_api_page_fits_the_screen_and_asks_nobody_else(
    browser: Any, tiny_server: Any, screen: dict[str, Any]
) -> None:
    page = Page(browser, tiny_server.address + "/docs", **screen)
    assert page.page.evaluate("document.documentElement.scrollWidth") == screen["viewport"]["width"]
    assert all(url.startswith(tiny_server.address) for url in page.requests)
    assert page.complaints == []
    page.page.click("text=Try it: v1/masks")
    assert '"covered":true' in page.text("body")
    page.context.close()


def test_a_small_picture_does_not_change_the_masks_of_the_next_ones(open_page: Any, tmp_path: Path) -> None:
    page = open_page()
    page.settle()
    Image.new("RGB", (1, 1), "red").save(tmp_path / "small.png")
    page.page.set_input_files("#upload-file", tmp_path / "small.png")
    page.page.wait_for_selector("#masks-out:has-text('2×2')")
    page.page.click("#samples button")
    page.page.wait_for_selector("#masks-out:has-text('6×6, 36 classifications an answer')")
    page.settle()
    assert page.page.locator("#grid .cell").count() == 36


def test_what_nobody_tries_again_is_not_said_to_be_tried_again(open_page: Any) -> None:
    page = open_page()
    page.settle()
    page.overload("**/v1/certify")
    page.page.click("#certify")
    page.page.wait_for_selector("#trouble:has-text('too much is waiting already')")
    assert "Trying again" not in page.text("#trouble")
    page.complaints.clear()  # the browser itself reports failed requests


def test_of_two_pictures_chosen_quickly_the_last_one_stays(open_page: Any) -> None:
    page = open_page()
    page.settle()
    held: list[Any] = []
    page.page.route("**/v1/samples/1", lambda route: held.append(route))
    page.page.locator("#samples button").nth(1).click()
    page.page.locator("#samples button").nth(2).click()
    page.page.wait_for_selector("#picture-note:has-text('bird')")
    held[0].continue_()
    page.page.wait_for_timeout(500)
    assert page.text("#picture-note") == "a clean sample: bird"


def test_a_picture_can_be_the_patch(open_page: Any, tmp_path: Path) -> None:
    page = open_page()
    page.settle()
    with page.page.expect_file_chooser() as chooser:
        page.page.click("input[value=picture]")
    chooser.value.set_files(picture_file(tmp_path))
    page.page.wait_for_selector("#kind-note:has-text('Any picture')")
    page.settle()
    assert page.label().startswith("Patch of 4 by 5 pixels"), "it keeps its proportions"


def test_a_file_that_is_no_picture_is_said(open_page: Any, tmp_path: Path) -> None:
    page = open_page()
    page.settle()
    (tmp_path / "x.png").write_bytes(b"no picture")
    page.page.set_input_files("#upload-file", tmp_path / "x.png")
    page.page.wait_for_selector("#trouble:not([hidden])")
    assert page.text("#trouble") == "x.png is no picture that the browser can open."


def test_a_server_that_is_gone_or_busy_is_said_and_tried_again(open_page: Any) -> None:
    page = open_page()
    page.settle()
    page.overload("**/v1/predict")
    page.page.focus("#patch")
    page.page.keyboard.press("ArrowDown")
    page.page.wait_for_selector("#trouble:has-text('Trying again in 1 s')")
    page.page.unroute("**/v1/predict")
    page.page.wait_for_selector("#trouble", state="hidden")
    page.page.route("**/v1/predict", lambda r: r.abort())
    page.page.keyboard.press("ArrowDown")
    page.page.wait_for_selector("#trouble:has-text('cannot be reached')")
    page.page.unroute("**/v1/predict")
    page.page.wait_for_selector("#trouble", state="hidden")
    page.complaints.clear()  # the browser itself reports failed requests


def test_a_key_is_asked_for_and_used(browser: Any, kit: Any, tmp_path: Path) -> None:
    key = "a key of many letters"
    with kit.start(tmp_path / "log", PATCHCLEANSER_API_KEY=key) as server:
        page = Page(browser, server.address + "/")
        page.page.fill("#key", key)
        page.page.click("#key-form button")
        page.settle()
        assert page.text("#defended") == "frog"
        page.context.close()
        assert server.stop() == 0


def test_the_page_shows_the_coarse_masks_where_they_answered(browser: Any, kit: Any, tmp_path: Path) -> None:
    options = ("--defense", "challenger-masking", "--coarse", "3")
    with kit.start(tmp_path / "log", *options) as server:
        page = Page(browser, server.address + "/")
        page.settle()
        page.page.check("input[value=none]", force=True)
        page.settle()
        page.page.wait_for_selector("#case:has-text('Coarse round: all agree')")
        assert "9 classifications with 9 masks" in page.text("#defended-note").replace("10 class", "9 class")
        assert page.page.locator("#grid .cell").count() == 9
        assert page.text("#round-two-words") == "Not needed: the large masks agree."
        assert page.complaints == []
        page.context.close()
        assert server.stop() == 0


def test_a_detecting_defense_is_not_said_to_recover(browser: Any, kit: Any, tmp_path: Path) -> None:
    with kit.start(tmp_path / "log", "--defense", "minority-reports", "--grid", "input") as server:
        page = Page(browser, server.address + "/")
        page.settle()
        page.page.wait_for_selector("#case:has-text('Alert')")
        page.page.click("#certify")
        page.page.wait_for_selector("#certificate:not([hidden])")
        page.settle()
        assert page.text("#certificate-title") == "certified for detection"
        assert "never wrong unnoticed" in page.text("#promise")
        assert "depends on how the picture is resized" in page.text("#promise")
        assert page.complaints == []
        page.context.close()
        assert server.stop() == 0


def test_it_works_by_touch_on_a_phone(open_page: Any) -> None:
    page = open_page(**PHONE)
    page.settle()
    assert page.page.evaluate("() => document.documentElement.scrollWidth") == 390, "nothing sticks out"
    before = page.label()
    box = page.page.locator("#patch").bounding_box()
    session = page.context.new_cdp_session(page.page)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for kind, at in (("touchStart", 0), ("touchMove", 20), ("touchMove", 60), ("touchEnd", 60)):
        points = [] if kind == "touchEnd" else [{"x": x + at, "y": y + at}]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})
    page.settle()
    assert page.label() != before
    small = page.page.evaluate(
        "() => [...document.querySelectorAll('button.button, .segments label')]"
        ".filter(e => e.offsetParent && e.getBoundingClientRect().height < 34).length"
    )
    assert small == 0, "fingers need room"


def test_every_control_has_a_name(open_page: Any) -> None:
    page = open_page()
    page.settle()
    nameless = page.page.evaluate(
        "() => [...document.querySelectorAll('button, input, canvas[role=img], img')].filter(e => !("
        "e.getAttribute('aria-label') || e.getAttribute('alt') || e.innerText?.trim() || e.title || e.labels?.length"
        ")).map(e => e.outerHTML)"
    )
    assert nameless == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_schemes(open_page: Any, scheme: str) -> None:
    page = open_page(color_scheme=scheme)
    page.settle()
    for selector in ("body", ".note", "#case", "#undefended", "#defended", ".segments input:checked + span"):
        assert contrast(page, selector) >= 4.5, selector
    shot = Image.open(io.BytesIO(page.page.screenshot()))
    assert (np.asarray(shot.convert("L")).mean() < 100) == (scheme == "dark")


def contrast(page: Page, selector: str) -> float:
    """WCAG's ratio of a text to what is behind it."""
    ink, paper = page.page.evaluate(
        "selector => { const e = document.querySelector(selector); let b = e; const see = x => getComputedStyle(x);"
        "while (see(b).backgroundColor === 'rgba(0, 0, 0, 0)') b = b.parentElement;"
        "return [see(e).color, see(b).backgroundColor]; }",
        selector,
    )
    light, dark = sorted((luminance(colour) for colour in (ink, paper)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [int(v) / 255 for v in re.findall(r"\d+", colour)[:3]]
    linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
