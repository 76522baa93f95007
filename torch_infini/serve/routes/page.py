"""GET /: a chat in the browser. Its files, below /page/, are those of torch_infini/serve/page/, read once."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from ..service import Service

router = APIRouter()
FOLDER = Path(__file__).resolve().parent.parent / "page"
INDEX, BELOW = "index.html", "/page/"
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# Scripts, styles and requests of this server alone; images of messages are data URLs. Trusted types: no script can make
# HTML of a text.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",  # browsers ask with If-None-Match, so that the files are those of one release
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class File(NamedTuple):
    """A file of the page: what its response has."""

    content: bytes
    media_type: str
    etag: str


@cache
def files() -> dict[str, File]:
    """Return the page's files by path: / and /page/NAME."""
    found = {}
    for path in FOLDER.iterdir():
        if (media_type := MEDIA_TYPES.get(path.suffix)) is not None:
            content = path.read_bytes()
            etag = f'"{hashlib.sha256(content).hexdigest()[:32]}"'
            found["/" if path.name == INDEX else BELOW + path.name] = File(content, media_type, etag)
    return found


@router.api_route("/", methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
async def index(request: Request) -> Response:
    """Answer the page."""
    return respond(request, "/")


@router.api_route("/page/{name}", methods=["GET", "HEAD"], response_model=None, include_in_schema=False)
async def file(name: str, request: Request) -> Response:
    """Answer a file of the page."""
    return respond(request, BELOW + name)


def respond(request: Request, path: str) -> Response:
    service: Service = request.app.state.service
    found = files().get(path) if service.settings.page else None
    if found is None:
        raise HTTPException(404)
    headers = {**HEADERS, "ETag": found.etag}
    known = [etag.strip().removeprefix("W/") for etag in request.headers.get("if-none-match", "").split(",")]
    if found.etag in known or "*" in known:
        return Response(status_code=304, headers=headers)
    return Response(found.content, headers=headers, media_type=found.media_type)
