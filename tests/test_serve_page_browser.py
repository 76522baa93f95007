"""The page of torch_infini.serve in Chromium: a chat by mouse and by keyboard, what fails, who can read it.

`make pictures` has it write the pictures of docs/server.md, to the folder INFINI_TEST_PICTURES.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")
pytest.importorskip("playwright", reason="Playwright is not installed (pip install playwright)")

from playwright.sync_api import Browser, BrowserContext, Locator, Page, Route, expect
from starlette.applications import Starlette
from starlette.routing import Mount

from support.browser import chromium, faults_of
from support.scripted_llm import Say, sayer, scripted_llm
from support.serving import MODEL, service_of, serving, slow_down, wait_until
from torch_infini import AsyncLLM
from torch_infini.serve import Service, create_app

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
LARGEST = 150_000  # bytes of a picture
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
THINKS = PLAIN + "{# </think> reasoning_effort enable_thinking #}"
HTML = "<img src=x onerror=\"document.title='bad'\"><script>document.title='bad'</script><b>bold</b>"
TALK = """<think>The user wants a short example.</think>A list comprehension is **one line** instead of a loop:

```python
squares = [n * n for n in range(10)]
```

1. `for n in range(10)` gives the numbers,
2. `n * n` is what becomes of each.
"""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AsyncLLM]:
    torch.set_num_threads(1)
    with scripted_llm(tmp_path_factory.mktemp("model"), PLAIN) as made:
        yield made


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    with serving(service) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as started:
        yield started


@pytest.fixture
def say(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Say:
    return sayer(llm, monkeypatch)


@pytest.fixture
def slow(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(llm, monkeypatch)


@pytest.fixture
def gate(llm: AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine stops after 20 steps, until this is set: so an answer is incomplete for as long as a test needs."""
    opened = threading.Event()
    run = llm.engine._runner.run
    steps = iter(range(20))

    def run_gated(*args: Any) -> Any:
        if next(steps, None) is None:
            assert opened.wait(60)
        return run(*args)

    monkeypatch.setattr(llm.engine._runner, "run", run_gated)
    yield opened
    opened.set()


Open = Callable[..., Page]


@pytest.fixture
def context(browser: Browser) -> Iterator[BrowserContext]:
    made = browser.new_context(viewport={"width": 1000, "height": 720}, color_scheme="light", accept_downloads=True)
    made.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    yield made
    made.close()


@pytest.fixture
def open_page(context: BrowserContext, url: str) -> Iterator[Open]:
    """Opens the page; at the end no script has failed and nothing was against the page's policy."""
    faults: list[str] = []

    def opened(address: str = url) -> Page:
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if is_fault(message) else None)
        page.goto(address)
        return page

    yield opened
    assert not faults


def is_fault(message: Any) -> bool:
    """Whether a line of the console is an error, other than that of a request that a test has fail."""
    return message.type in ("error", "warning") and not message.text.startswith("Failed to load resource")


@pytest.fixture
def page(open_page: Open) -> Page:
    return open_page()


@pytest.fixture
def picture(tmp_path: Path) -> Callable[[Page, str], None]:
    folder = Path(os.environ.get("INFINI_TEST_PICTURES", tmp_path))

    def taken(page: Page, name: str) -> None:
        page.screenshot(path=folder / name, animations="disabled", caret="hide")
        assert (folder / name).stat().st_size < LARGEST

    return taken


def field(page: Page) -> Locator:
    return page.get_by_label("Message", exact=True)


def send(page: Page, text: str) -> None:
    field(page).fill(text)
    page.get_by_role("button", name="Send", exact=True).click()


def answers(page: Page) -> Locator:
    return page.get_by_role("article", name="Answer")


def ended(page: Page) -> Locator:
    """The last answer, when it has ended."""
    last = answers(page).last
    expect(last).to_have_attribute("aria-busy", "false")
    return last


def stored(page: Page) -> list[Any]:
    """The chats that the browser stores."""
    items = page.evaluate("Object.entries(localStorage)")
    return [json.loads(text) for name, text in items if ":chat:" in name]


def test_an_answer_arrives_piece_by_piece(say: Say, gate: threading.Event, page: Page, service: Service) -> None:
    expect(page.locator("#facts")).to_contain_text(f"{MODEL} · ")
    expect(page.locator("#facts")).to_contain_text("threads" if torch.get_num_threads() > 1 else "1 thread")
    say("x" * 300)
    send(page, "Hello")
    last = answers(page).last
    expect(last).to_have_attribute("aria-busy", "true")
    expect(last).to_contain_text("xxxxx")
    early = last.locator(".body").last.inner_text()
    assert 0 < len(early) < 300
    expect(page.get_by_role("status")).to_have_text("The model is answering.")
    expect(last.locator(".line")).to_contain_text(re.compile(r"^about \d+ tokens"))
    gate.set()
    expect(ended(page)).to_contain_text("x" * 300)
    line = last.locator(".line").inner_text()
    assert re.fullmatch(r"301 tokens · \d+\.\d+ tokens/s · first token after \d+\.\d\d s", line), line
    expect(page.get_by_role("status")).to_have_text("Answer: " + "x" * 300)
    assert field(page).input_value() == "" and service.in_flight == 0
    (chat,) = stored(page)
    assert [message["role"] for message in chat["messages"]] == ["user", "assistant"]


@pytest.mark.parametrize("by", ["button", "Escape"])
def test_stop(by: str, say: Say, gate: threading.Event, page: Page, service: Service) -> None:
    """The request ends in the engine, the text stays, what was typed meanwhile too, and the chat goes on."""
    say("y" * 1500)
    send(page, "Hello")
    expect(answers(page).last).to_contain_text("yyy")
    field(page).fill("next")
    page.keyboard.press("Enter")
    expect(page.get_by_role("status")).to_have_text("The answer is still arriving. Escape stops it.")
    assert field(page).input_value() == "next" and answers(page).count() == 1
    if by == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    expect(ended(page).locator(".line")).to_have_text(re.compile("^about .* · stopped$"))
    gate.set()
    wait_until(lambda: service.in_flight == 0)
    text = answers(page).last.locator(".body").last.inner_text()
    assert 3 <= len(text) <= 20
    say("fine")
    field(page).press("Enter")
    expect(ended(page)).to_contain_text("fine")
    assert page.get_by_role("article").count() == 4


def test_regenerate_and_edit(say: Say, page: Page) -> None:
    say("first")
    send(page, "Hello")
    expect(ended(page)).to_contain_text("first")
    say("second")
    page.get_by_role("button", name="Regenerate").click()
    expect(ended(page)).to_contain_text("second")
    expect(answers(page).locator(".body").last).to_have_text("second")
    # Where the new answer does not come, the old one stays.
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Regenerate").click()
    expect(answers(page)).to_contain_text("The server does not answer")
    expect(answers(page)).to_contain_text("second")
    page.unroute("**/v1/chat/completions")
    say("third")
    page.get_by_role("button", name="Try again").click()
    expect(ended(page)).to_contain_text("third")
    expect(answers(page)).not_to_contain_text("does not answer")
    send(page, "More")
    expect(ended(page)).to_contain_text("third")
    edit = page.get_by_role("button", name="Edit")
    assert edit.count() == 2
    edit.first.click()
    page.get_by_label("New text of the message").press("Escape")
    expect(edit.first).to_be_focused()
    edit.first.click()
    assert faults_of(page) == []
    page.get_by_label("New text of the message").fill("Changed")
    send(page, "not lost")
    expect(page.get_by_role("alert")).to_have_text("Send or cancel the edited message first.")
    assert field(page).input_value() == "not lost"
    page.get_by_label("New text of the message").press("Enter")
    expect(ended(page)).to_contain_text("third")
    assert page.get_by_role("article").count() == 2 and field(page).input_value() == "not lost"
    expect(page.get_by_role("article", name="You")).to_contain_text("Changed")


def test_history(say: Say, open_page: Open) -> None:
    """Chats are there after a reload; they are renamed, exported, deleted, and another tab shows them."""
    page = open_page()
    say("one")
    send(page, "First chat")
    expect(ended(page)).to_contain_text("one")
    page.get_by_role("button", name="New chat").click()
    expect(field(page)).to_be_focused()
    assert page.get_by_role("article").count() == 0
    field(page).fill("a draft")
    page.reload()
    assert field(page).input_value() == "a draft"
    say("two")
    send(page, "Second chat")
    expect(ended(page)).to_contain_text("two")
    chats = page.get_by_role("navigation", name="Chats").get_by_role("link")
    expect(chats).to_have_text(["Second chat", "First chat"])
    page.reload()
    expect(answers(page)).to_contain_text("two")
    expect(page).to_have_title("Second chat – torch_infini")
    chats.filter(has_text="First").click()
    expect(answers(page)).to_contain_text("one")
    expect(chats.filter(has_text="First")).to_have_attribute("aria-current", "page")
    page.get_by_role("button", name="Rename").click()
    page.get_by_label("Name", exact=True).fill("Mine")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Mine")).to_be_visible()
    with page.expect_download() as download:
        page.get_by_role("button", name="Export").click()
    exported = json.loads(Path(download.value.path()).read_text())
    assert exported["title"] == "Mine" and [m["content"] for m in exported["messages"]] == ["First chat", "one"]
    assert download.value.suggested_filename == f"chat-{exported['id']}.json"
    other = open_page()
    expect(other.get_by_role("link", name="Mine")).to_be_visible()
    page.get_by_role("button", name="Delete").click()
    page.keyboard.press("Escape")
    assert chats.count() == 2
    page.get_by_role("button", name="Delete").click()
    page.get_by_role("dialog").get_by_role("button", name="Delete").click()
    expect(chats).to_have_text(["Second chat"])
    assert len(stored(page)) == 1
    expect(other.get_by_role("link", name="Mine")).to_have_count(0)


def test_an_answer_goes_on_while_another_chat_is_shown(say: Say, gate: threading.Event, page: Page) -> None:
    say("z" * 100)
    send(page, "Hello")
    expect(answers(page)).to_contain_text("zz")
    page.get_by_role("button", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)
    expect(page.get_by_role("button", name="Stop")).to_be_hidden()
    gate.set()
    page.get_by_role("link", name="Hello").click()
    expect(ended(page)).to_contain_text("z" * 100)


def test_keyboard(say: Say, page: Page) -> None:
    """All is reached with Tab, in the order in which it stands, and what has the focus is outlined."""
    say("yes")
    expect(page.locator("#model")).to_have_value(MODEL)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the message")).to_be_focused()
    page.keyboard.press("Enter")
    expect(field(page)).to_be_focused()
    page.keyboard.type("One")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("Two")
    page.keyboard.press("Enter")
    expect(ended(page)).to_contain_text("yes")
    assert stored(page)[0]["messages"][0]["content"] == "One\nTwo"
    expect(field(page)).to_be_focused()
    page.reload()
    expect(page.locator("#model")).to_have_value(MODEL)
    found = []
    focused = """() => {
        const node = document.activeElement;
        const style = getComputedStyle(node);
        return [node.id || node.textContent, style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
    }"""
    for _ in range(15):
        page.keyboard.press("Tab")
        name, outlined = page.evaluate(focused)
        assert outlined, name
        found.append(name)
    wanted = ["skip", "model", "theme", "show-settings", "new", "One", "rename", "export", "delete"]
    assert found == [*wanted, "Copy", "Edit", "Copy", "Regenerate", "prompt", "send"]
    page.locator("#show-settings").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("System prompt")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(page.locator("#show-settings")).to_be_focused()


def test_themes_and_pictures(say: Say, slow: None, page: Page, picture: Callable[[Page, str], None]) -> None:
    """The system's theme or the chosen one, which a reload keeps; the contrast of both."""
    say(TALK, THINKS)
    page.reload()
    send(page, "What is a list comprehension?")
    expect(ended(page)).to_contain_text("becomes of each")
    back = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(back)
    assert faults_of(page) == []
    picture(page, "page-light.png")
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(back)
    assert light != dark and faults_of(page) == []
    picture(page, "page-dark.png")
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 320, "height": 640})
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")
    picture(page, "page-narrow.png")
    page.set_viewport_size({"width": 1000, "height": 720})
    page.emulate_media(color_scheme="dark")
    theme = page.get_by_role("button", name="Theme")
    for name, color in (("light", light), ("dark", dark), ("system", dark), ("light", light)):
        theme.click()
        expect(theme).to_have_text(f"Theme: {name}")
        assert page.evaluate(back) == color
    page.reload()
    expect(theme).to_have_text("Theme: light")
    assert page.evaluate(back) == light
    for _ in ("light", "dark"):
        page.get_by_role("button", name="Settings").click()
        assert faults_of(page) == []
        page.keyboard.press("Escape")
        theme.click()


def test_reasoning_is_folded(say: Say, page: Page) -> None:
    say(TALK, THINKS)
    send(page, "Hello")
    details = ended(page).locator("details")
    reasoning = details.get_by_text("The user wants a short example.")
    expect(reasoning).to_be_hidden()
    details.get_by_text("Reasoning").click()
    expect(reasoning).to_be_visible()
    assert "</think>" not in answers(page).inner_text()
    sent = stored(page)[0]["messages"][1]
    assert sent["reasoning"].strip() == "The user wants a short example." and "short example" not in sent["content"]
    assert answers(page).get_by_role("listitem").count() == 2
    expect(answers(page).locator("strong")).to_have_text("one line")


def test_a_text_stays_text(say: Say, page: Page, context: BrowserContext, url: str) -> None:
    """HTML of the model and of the user, in every place where a text is formed."""
    say(f"{HTML}\n\n# {HTML}\n\n- {HTML}\n\n> {HTML}\n\n**{HTML}**\n\n```{HTML}\n{HTML}\n```\n[a](javascript:alert(1))")
    send(page, HTML)
    last = ended(page)
    assert last.inner_text().count(HTML) == 6
    expect(page.get_by_role("article", name="You")).to_contain_text(HTML)
    page.reload()
    expect(last.locator("pre")).to_contain_text(HTML)
    assert page.evaluate("document.querySelectorAll('img, main script, main b, main a').length") == 0
    expect(page).to_have_title(re.compile("^<img src=x"))
    # What the policy forbids fails, wherever it came from.
    other = context.new_page()
    other.goto(url)
    code = "(() => { try { document.body.innerHTML = '<p>'; } catch (error) { return error.name; } })()"
    assert other.evaluate(code) == "TypeError"


def test_copy(say: Say, page: Page, context: BrowserContext) -> None:
    context.grant_permissions(["clipboard-read", "clipboard-write"])
    say(TALK, THINKS)
    send(page, "Hello")
    ended(page).get_by_role("button", name="Copy code").click()
    expect(answers(page).get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "squares = [n * n for n in range(10)]"
    page.evaluate("navigator.clipboard.writeText = undefined")  # as outside of HTTPS and localhost
    answers(page).get_by_role("button", name="Copy", exact=True).click()
    expect(answers(page).get_by_role("button", name="Copied")).to_have_count(2)
    assert page.evaluate("navigator.clipboard.readText()").strip() == TALK.partition("</think>")[2].strip()


def test_key(llm: AsyncLLM, say: Say, open_page: Open) -> None:
    """Asked for when the page opens, and again when the server refuses it; nothing that was typed is lost."""
    say("hello")
    with serving(service_of(llm, api_key="sécret")) as address:
        page = open_page(address)
        dialog = page.get_by_role("dialog", name="API key")
        expect(dialog).to_contain_text("This server answers only with a key.")
        assert faults_of(page) == []
        page.keyboard.press("Escape")
        expect(page.locator("#facts")).to_contain_text("Authorization must be")
        send(page, "A question")
        expect(dialog).to_be_visible()
        dialog.get_by_label("Key").fill("wrong")
        page.keyboard.press("Enter")
        expect(dialog).to_contain_text("The server refused this key.")
        page.keyboard.press("Escape")
        expect(ended(page)).to_contain_text("Authorization must be")
        page.get_by_role("button", name="Try again").click()
        dialog.get_by_label("Key").fill("sécret")
        dialog.get_by_role("button", name="Use").click()
        expect(ended(page)).to_contain_text("hello")
        expect(page.locator("#facts")).to_contain_text(f"{MODEL} · ")
        page.reload()
        expect(page.locator("#facts")).to_contain_text(f"{MODEL} · ")
        assert "cret" not in json.dumps(page.evaluate("Object.values(localStorage)"))
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("API key").fill("other")
        page.get_by_role("button", name="Save").click()
        expect(dialog).to_contain_text("The server refused this key.")


def test_settings(say: Say, page: Page, llm: AsyncLLM) -> None:
    """They are in the request; what is empty shows the server's value, and is not."""
    say("hm", THINKS)
    page.reload()
    expect(page.locator("#model")).to_have_value(MODEL)
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "1"
    assert page.get_by_label("Most tokens").get_attribute("placeholder") == "what 2048 leave"
    given = {"Temperature": "0.5", "Top p": "0.9", "Top k": "5", "Min p": "0.1", "Most tokens": "7", "Seed": "3"}
    for label, value in given.items():
        page.get_by_label(label).fill(value)
    page.get_by_label("Stop strings").fill("END\n\\n\\n")
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Reasoning effort").select_option("low")
    page.get_by_label("Thinking").select_option("off")
    page.get_by_label("Temperature").fill("3")
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_be_visible()  # the field says what is wrong
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Save").click()
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Hello")
    body = request.value.post_data_json
    assert body == {
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "model": MODEL,
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "max_tokens": 7, "seed": 3},
        "stop": ["END", "\n\n"],
        "reasoning_effort": "low",
        "chat_template_kwargs": {"enable_thinking": False},
    }
    expect(ended(page)).to_contain_text("hm")
    page.reload()
    expect(page.locator("#model")).to_have_value(MODEL)
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Seed").input_value() == "3"
    assert page.get_by_label("System prompt").input_value() == "Be brief."
    page.get_by_role("button", name="The server's defaults").click()
    page.get_by_role("button", name="Save").click()
    with page.expect_request("**/v1/chat/completions") as request:
        send(page, "Again")
    assert request.value.post_data_json.keys() == {"messages", "model", "stream", "stream_options"}
    expect(ended(page)).to_contain_text("hm")


def test_errors(say: Say, page: Page, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence where the answer would be; the message stays, and is sent again."""
    say("at last")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Most tokens").fill("100000")
    page.get_by_role("button", name="Save").click()
    send(page, "My long question")
    expect(ended(page)).to_contain_text("must be at most 2048 together, the context's length, got")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="The server's defaults").click()
    page.get_by_role("button", name="Save").click()
    monkeypatch.setattr(service, "is_draining", True)
    page.get_by_role("button", name="Try again").click()
    expect(ended(page)).to_contain_text("The server is shutting down.")
    expect(page.get_by_role("status")).to_have_text("The server is shutting down.")
    monkeypatch.setattr(service, "is_draining", False)
    event = 'data: {"error": {"message": "the engine could not compute the request"}}\n\ndata: [DONE]\n\n'
    for text, sentence in (
        (event, "The engine could not compute the request."),
        ("", "The connection ended before the answer did."),
        ("data: <html>\n\n", "The server sent an answer that is not JSON."),
    ):
        page.route("**/v1/chat/completions", answering(text))
        page.get_by_role("button", name="Try again").click()
        expect(ended(page).locator(".error")).to_have_text(sentence)
        page.unroute("**/v1/chat/completions")
    assert faults_of(page) == []
    page.get_by_role("button", name="Try again").click()
    expect(ended(page)).to_contain_text("at last")
    expect(answers(page).locator(".error")).to_be_hidden()
    expect(page.get_by_role("article", name="You")).to_contain_text("My long question")


def test_a_server_that_comes_later(say: Say, open_page: Open, context: BrowserContext, url: str) -> None:
    """The page says so, takes a message, and knows the server once it answers. Text stored by others is no chat."""
    say("here")
    context.route("**/v1/**", lambda route: route.abort())
    page = open_page()
    expect(page.locator("#facts")).to_contain_text("The server does not answer")
    send(page, "Anybody?")
    expect(ended(page)).to_contain_text("The server does not answer")
    context.unroute("**/v1/**")
    page.get_by_role("button", name="Try again").click()
    expect(ended(page)).to_contain_text("here")
    expect(page.locator("#facts")).to_contain_text(f"{MODEL} · ")
    page.evaluate('localStorage.setItem(\'torch_infini:/:chat:x\', \'{"id": "x", "messages": [1, {}]}\')')
    page.evaluate("localStorage.setItem('torch_infini:/:settings', '{')")
    page.reload()
    expect(page.get_by_role("navigation", name="Chats").get_by_role("link")).to_have_text(["Anybody?", "New chat"])
    page.get_by_role("link", name="New chat").click()
    expect(page.get_by_role("article")).to_have_count(0)


def answering(text: str) -> Callable[[Route], None]:
    return lambda route: route.fulfill(body=text)


@pytest.mark.parametrize(("width", "height"), [(320, 640), (640, 360), (320, 256)], ids=str)
def test_small_windows(width: int, height: int, say: Say, page: Page) -> None:
    """320 px, 200 % of 1280 by 720 and 400 % of 1280 by 1024: nothing is cut off or needs sideways scrolling."""
    page.set_viewport_size({"width": width, "height": height})
    long = "x" * 200  # a word that is broken
    say(TALK + long, THINKS)
    send(page, f"What is a list comprehension? {long}")
    expect(ended(page)).to_contain_text(f"becomes of each.{long}")
    assert faults_of(page) == []
    show = page.get_by_role("button", name="Chats")
    expect(show).to_have_attribute("aria-expanded", "false")
    expect(page.get_by_role("navigation")).to_be_hidden()
    show.click()
    expect(show).to_have_attribute("aria-expanded", "true")
    assert faults_of(page) == []
    page.get_by_role("link", name="What is").click()
    page.get_by_role("button", name="Settings").click()
    assert faults_of(page) == []
    page.get_by_role("button", name="Save").click()
    expect(page.get_by_role("dialog")).to_be_hidden()


def test_less_motion(say: Say, gate: threading.Event, page: Page) -> None:
    name = "getComputedStyle(document.querySelector('.answer h3'), '::after').animationName"
    say("w" * 400)
    send(page, "Hello")
    expect(answers(page)).to_contain_text("ww")
    assert page.evaluate(name) == "pulse"
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(name) == "none"
    page.keyboard.press("Escape")
    ended(page)


def test_below_a_prefix(llm: AsyncLLM, say: Say, open_page: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    say("from below")
    below = lambda service: Starlette(routes=[Mount("/llm", create_app(service))])
    monkeypatch.setattr("support.serving.create_app", below)
    with serving(service_of(llm)) as address:
        page = open_page(f"{address}/llm/")
        send(page, "Hello")
        expect(ended(page)).to_contain_text("from below")
        names = page.evaluate("Object.keys(localStorage)")
        assert names and all(name.startswith("torch_infini:/llm/:") for name in names)


def test_pictures_of_the_page_are_small() -> None:
    named = re.findall(r"\((pictures/[\w-]+\.png)\)", (ROOT / "docs" / "server.md").read_text())
    assert sorted(PICTURES.iterdir()) == sorted(ROOT / "docs" / name for name in named)
    assert named and all((ROOT / "docs" / name).stat().st_size < LARGEST for name in named)
