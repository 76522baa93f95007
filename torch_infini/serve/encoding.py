"""JSON bodies and server-sent events as bytes; NaN and infinity raise here, because JSON cannot represent them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
PING = b": ping\n\n"  # a comment, which clients ignore


def to_json(value: object) -> bytes:
    return _ENCODER.encode(value).encode()


def to_event(value: object) -> bytes:
    return b"data: " + to_json(value) + b"\n\n"


def json_response(value: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    more: dict[str, Any] = dict(headers or {})
    return Response(to_json(value), status, more, media_type="application/json")
