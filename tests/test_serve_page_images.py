"""Images in the page of torch_infini.serve, in Chromium: chosen, dropped, removed, sent, stored, edited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("transformers")
pytest.importorskip("PIL")
pytest.importorskip("playwright", reason="Playwright is not installed (pip install playwright)")

from playwright.sync_api import Browser, Page, expect

from support.browser import chromium, faults_of
from support.image_models import QWEN2_5_VL
from support.serving import save_model, service_of, serving
from test_image_models import image, png
from torch_infini import AsyncLLM

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]
LIMIT = 60_000  # ms


def serve(folder: Path) -> Iterator[str]:
    torch.set_num_threads(1)
    llm = AsyncLLM(folder, max_num_seqs=4)
    with serving(service_of(llm, sampling={"max_tokens": 8})) as address:
        yield address
    llm.close()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("model")
    QWEN2_5_VL.save(folder)
    yield from serve(folder)


@pytest.fixture(scope="module")
def url_of_text(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    yield from serve(save_model(tmp_path_factory.mktemp("text")))


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The page; at the end no script has failed and nothing was against the page's policy."""
    context = browser.new_context(viewport={"width": 1000, "height": 720})
    context.set_default_timeout(LIMIT)
    expect.set_options(timeout=LIMIT)
    faults: list[str] = []
    opened = context.new_page()
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda line: faults.append(line.text) if line.type in ("error", "warning") else None)
    opened.goto(url)
    yield opened
    context.close()
    assert not faults


def file(name: str, width: int = 60, height: int = 90) -> Any:
    return {"name": name, "mimeType": "image/png", "buffer": png(image(0, width, height))}


def attach(page: Page, *files: Any) -> None:
    expect(page.get_by_role("button", name="Images", exact=True)).to_be_visible()
    page.locator("#files").set_input_files(list(files))


def previews(page: Page) -> Any:
    return page.locator("#attached img")


def asked(page: Page, text: str) -> list[Any]:
    """Send a text, wait for the answer, and return the messages of the request."""
    with page.expect_request("**/v1/chat/completions") as found:
        page.get_by_label("Message", exact=True).fill(text)
        page.get_by_role("button", name="Send", exact=True).click()
    expect(page.get_by_role("article", name="Answer").last).to_have_attribute("aria-busy", "false")
    expect(page.locator(".error:visible")).to_have_count(0)
    return list(json.loads(found.value.post_data or "")["messages"])


def test_an_image_is_sent_and_stays(page: Page) -> None:
    attach(page, file("a.png"), file("b.png", 2000, 500))
    expect(previews(page)).to_have_count(2)
    assert faults_of(page) == []
    page.get_by_role("button", name="Remove image 1").click()
    expect(previews(page)).to_have_count(1)
    [message] = asked(page, "What is it?")
    picture, text = message["content"]
    assert text == {"type": "text", "text": "What is it?"}
    assert picture["image_url"]["url"].startswith("data:image/jpeg;base64,")
    expect(previews(page)).to_have_count(0)
    shown = page.get_by_role("article", name="You").get_by_role("img")
    expect(shown).to_have_attribute("alt", "Image 1 of your message")
    assert shown.evaluate("image => [image.naturalWidth, image.naturalHeight]") == [1280, 320]
    assert faults_of(page) == []
    page.reload()
    expect(page.get_by_role("article", name="You").get_by_role("img")).to_be_visible()
    messages = asked(page, "And now?")
    assert [len(message["content"]) for message in messages if message["role"] == "user"] == [2, len("And now?")]


def test_an_image_alone_and_an_edit(page: Page) -> None:
    attach(page, file("a.png"))
    expect(previews(page)).to_have_count(1)
    [message] = asked(page, "")
    assert [part["type"] for part in message["content"]] == ["image_url"]
    expect(page.get_by_role("heading", name="Image", exact=True)).to_be_visible()
    page.get_by_role("button", name="Edit").click()
    with page.expect_request("**/v1/chat/completions") as found:
        page.get_by_label("New text of the message").fill("What?")
        page.get_by_role("button", name="Send again").click()
    [message] = json.loads(found.value.post_data or "")["messages"]
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    expect(page.get_by_role("article", name="Answer").last).to_have_attribute("aria-busy", "false")


def test_a_file_that_is_dropped_and_one_that_is_none(page: Page) -> None:
    expect(page.get_by_role("button", name="Images", exact=True)).to_be_visible()
    drop = """([bytes, type, name]) => {
        const transfer = new DataTransfer();
        transfer.items.add(new File([new Uint8Array(bytes)], name, { type }));
        document.getElementById("composer").dispatchEvent(
            new DragEvent("drop", { dataTransfer: transfer, bubbles: true, cancelable: true }));
    }"""
    page.evaluate(drop, [list(png(image(0))), "image/png", "a.png"])
    expect(previews(page)).to_have_count(1)
    page.evaluate(drop, [[1, 2, 3], "image/png", "bad.png"])
    expect(page.locator("#notice")).to_have_text("This browser reads no image from “bad.png”.")
    expect(previews(page)).to_have_count(1)


def test_a_model_of_text_takes_none(browser: Browser, url_of_text: str) -> None:
    page = browser.new_page()
    page.goto(url_of_text)
    expect(page.locator("#facts")).to_contain_text("·")
    expect(page.locator("#attach")).to_be_hidden()
    page.close()
