"""GET / of torch_infini.serve: the files of the page, their headers, who gets them; its modules under Node.

tests/test_serve_page_browser.py uses the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx2")

from starlette.applications import Starlette
from starlette.routing import Mount

from support.serving import ask, ask_app, send_raw, service_of, serving
from torch_infini import AsyncLLM
from torch_infini.__main__ import main
from torch_infini.serve import ServeSettings, Service, create_app
from torch_infini.serve.routes import page

pytest_plugins = ["support.serving_fixtures"]
pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "page"
NODE = 18  # the release of Node that has its test runner


@pytest.fixture(scope="module")
def service(llm: AsyncLLM) -> Service:
    return service_of(llm)


class Elements(HTMLParser):
    """The elements of a page, and the texts of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.inline = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] in ("script", "style"):
            self.inline += data.strip()


def test_files(service: Service) -> None:
    """All that the page names is there, as what it is."""
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    assert set(page.files()) == {"/"} | {f"/page/{path.name}" for path in page.FOLDER.iterdir()} - {"/page/index.html"}
    for path, file in page.files().items():
        answer = ask(service, "GET", path)
        assert answer.status_code == 200 and answer.content == file.content
        assert answer.headers["content-type"].split(";")[0] == kinds["html" if path == "/" else path.split(".")[-1]]
        assert answer.headers["x-content-type-options"] == "nosniff" and "x-request-id" in answer.headers
        text = answer.text
        imported = re.findall(r'from "\./([\w.]+)"', text) if path.endswith(".js") else []
        named = re.findall(r'(?:src|href)="(page/[^"]+)"', text) if path == "/" else []
        assert {f"/page/{name}" for name in imported} | {f"/{name}" for name in named} <= page.files().keys()
    elements = Elements(ask(service, "GET", "/").text)
    ids = [attributes["id"] for _, attributes in elements.found if "id" in attributes]
    assert len(ids) == len(set(ids))
    scripts = "".join(file.content.decode() for path, file in page.files().items() if path.endswith(".js"))
    assert set(re.findall(r'element\("([\w-]+)"\)', scripts)) <= set(ids)


def test_no_code_in_the_page_and_nothing_from_elsewhere(service: Service) -> None:
    """What its Content-Security-Policy forbids is not tried, and no file is of another server."""
    answer = ask(service, "GET", "/")
    policy = dict(part.strip().split(" ", 1) for part in answer.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    elements = Elements(answer.text)
    assert len(elements.found) > 50 and not elements.inline
    for _, attributes in elements.found:
        assert not [name for name in attributes if name == "style" or name.startswith("on")]
    for path, file in page.files().items():
        text = file.content.decode()
        assert set(re.findall(r"\w+://[^\s\"]+", text)) <= {"http://www.w3.org/2000/svg"}, path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Function\(", text), path


def test_files_say_what_they_are_for() -> None:
    openings = {".css": "/* ", ".html": "<!doctype html>\n<!-- ", ".js": "// ", ".svg": "<!-- "}
    for path in [*page.FOLDER.iterdir(), *TESTS.iterdir()]:
        assert path.read_text().startswith(openings[path.suffix]), path.name


def test_caches_ask_again(service: Service) -> None:
    for path in ("/", "/page/main.js"):
        etag = ask(service, "GET", path).headers["etag"]
        for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
            answer = ask(service, "GET", path, headers={"if-none-match": known})
            assert answer.status_code == 304 and not answer.content and answer.headers["etag"] == etag
            assert answer.headers["cache-control"] == "no-cache"
        assert ask(service, "GET", path, headers={"if-none-match": '"other"'}).status_code == 200


def test_other_methods_and_paths(service: Service) -> None:
    """HEAD has the headers alone; there is nothing but the files, neither below nor beside them."""
    with serving(service) as url:
        for path in ("/", "/page/page.css"):
            with send_raw(url, path, {}) as connection:
                assert connection.recv(100).startswith(b"HTTP/1.1 405 ")
        for path in ("/page/../settings.py", "/page/%2e%2e/settings.py", "/page/..%2fsettings.py", "/page//etc/passwd"):
            assert raw_status(url, "GET", path)[0] == 404
        for path, file in page.files().items():
            status, head, body = raw_status(url, "HEAD", path)
            assert status == 200 and not body and f"content-length: {len(file.content)}" in head.lower()
    for path in ("/page", "/page/", "/page/index.html", "/page/none.js", "/page/main.js/x", "/index.html"):
        answer = ask(service, "GET", path)
        assert answer.status_code in (307, 404), path
        assert answer.status_code == 307 or answer.json()["error"]["message"].startswith("there is no GET ")
    paths = ask(service, "GET", "/openapi.json").json()["paths"]
    assert not [path for path in paths if path == "/" or path.startswith("/page")]


def raw_status(url: str, method: str, path: str) -> tuple[int, str, str]:
    """Send a path as it stands, which clients would normalize; return the status, head and body of the answer."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nHost: server\r\nConnection: close\r\n\r\n".encode())
        data = b""
        while part := connection.recv(1 << 16):
            data += part
    head, _, body = data.decode().partition("\r\n\r\n")
    return int(head.split()[1]), head, body


def test_files_need_no_key(llm: AsyncLLM) -> None:
    service = service_of(llm, api_key="secret")
    for path in page.files():
        assert ask(service, "GET", path).status_code == ask(service, "HEAD", path).status_code == 200
    for path in ("/page/none.js", "/page/index.html", "/v1/models", "/props", "/page/main.js/../../v1/models"):
        assert ask(service, "GET", path).status_code == 401, path
    answer = ask(service, "GET", "/v1/models", headers={"authorization": "Bearer secret"})
    assert answer.status_code == 200


def test_switched_off(llm: AsyncLLM) -> None:
    for path in page.files():
        assert ask(service_of(llm, page=False), "GET", path).status_code == 404
        assert ask(service_of(llm, page=False, api_key="secret"), "GET", path).status_code == 401
    with pytest.raises(ValueError, match="^torch_infini.serve.ServeSettings: page must be True or False, got 1$"):
        ServeSettings(("a",), page=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("arguments", [[], ["--no-page"]], ids=str)
def test_the_command_switches_it_off(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr("torch_infini.commands.serve.load_async", lambda *given, **more: None)
    monkeypatch.setattr("torch_infini.serve.run_server", lambda llm, settings, *more: found.append(settings.page))
    assert main(["serve", "--port", "0", *arguments]) == 0
    assert found == [not arguments]


def test_below_a_prefix(llm: AsyncLLM) -> None:
    """In another application, with a key: the page's addresses are relative, and what is public is so there too."""
    app = Starlette(routes=[Mount("/llm", create_app(service_of(llm, api_key="secret")))])
    text = ask_app(app, "GET", "/llm/").text
    assert text == page.files()["/"].content.decode()
    for _, attributes in Elements(text).found:
        address = attributes.get("src") or attributes.get("href") or ""
        assert not address.startswith("/"), address
        if address.startswith("page/"):
            assert ask_app(app, "GET", f"/llm/{address}").status_code == 200
    assert ask_app(app, "GET", "/llm/health").status_code == 200
    assert ask_app(app, "GET", "/llm/v1/models").status_code == 401
    assert ask_app(app, "GET", "/llm/v1/models", headers={"x-api-key": "secret"}).status_code == 200


def test_packages_have_the_files(tmp_path: Path) -> None:
    """What a wheel is made of; the libraries are left out here."""
    command = [sys.executable, "-W", "ignore", "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    command += ["build_py", "--build-lib", str(tmp_path / "lib")]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "INFINI_BUILD": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    packed = tmp_path / "lib" / "torch_infini" / "serve" / "page"
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == {
        path.name: path.read_bytes() for path in page.FOLDER.iterdir()
    }


@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.glob("*.test.js")))
def test_modules(name: str, tmp_path: Path) -> None:
    """tests/page/, in a copy: Node takes .js for modules where a package.json says so."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("Node is not installed")
    release = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout
    if int(release.removeprefix("v").split(".")[0]) < NODE:
        pytest.skip(f"Node must be at least {NODE} for its test runner, got {release.strip()}")
    shutil.copytree(page.FOLDER, tmp_path / "torch_infini" / "serve" / "page")
    shutil.copytree(TESTS, tmp_path / "tests" / "page")
    (tmp_path / "package.json").write_text(json.dumps({"type": "module"}))
    done = subprocess.run([node, "--test", f"tests/page/{name}"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"^\S+ pass (\d+)$", done.stdout, re.M)
    assert passed and int(passed[1]) > 1, done.stdout
