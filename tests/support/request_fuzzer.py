"""Fuzzer: random requests for every route of the server, most of them wrong somewhere; fault_of judges the answers.

Valid bodies of each route are changed: a field of the route's schema gets a value of another type, a part is deleted,
moved or nested, the text is cut or its bytes are flipped.
"""

from __future__ import annotations

import copy
import json
import random
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from .json_schemas import random_schema

MESSAGES = [{"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "d", "parameters": PARAMETERS}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
HISTORY = [
    *MESSAGES,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "warm"},
]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "it", "schema": PARAMETERS, "strict": True}}
FEW: dict[str, Any] = {"max_tokens": 4, "temperature": 0.5, "seed": 1}
# A model of text refuses images with status 400, once they are read.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR42mNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
URL = f"data:image/png;base64,{PIXEL}"
SEEN = [{"type": "image_url", "image_url": {"url": URL}}, {"type": "text", "text": "hi"}]
SOURCE = {"type": "base64", "media_type": "image/png", "data": PIXEL}
AGENT_TOOL = {"name": "weather", "input_schema": PARAMETERS}
BLOCKS = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Rome"}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "warm"}]},
]
ITEMS = [
    {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "warm"},
]
# (route, a valid body): several for the routes with many fields.
# Routes of classifiers: a model that generates answers them with status 400.
SCORES = ("/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank", "/classify", "/v1/classify")
VALID: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": MESSAGES, **FEW, "logprobs": True, "top_logprobs": 2, "n": 2}),
    ("/v1/chat/completions", {"messages": HISTORY, **FEW, "stream": True, "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"messages": MESSAGES, **FEW, "response_format": SCHEMA}),
    ("/v1/chat/completions", {"messages": MESSAGES, **FEW, "tools": TOOLS, "tool_choice": "auto"}),
    ("/v1/chat/completions", {"messages": MESSAGES, **FEW, "structured_outputs": {"regex": "[ab]{3}"}}),
    ("/v1/completions", {"prompt": ["a", "b c"], **FEW, "logprobs": 1, "echo": True, "stop": ["x"]}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], **FEW, "stream": True, "logit_bias": {"5": 1}, "top_k": 3}),
    ("/v1/completions", {"prompt": "a", **FEW, "grammar": 'root ::= "a" | "b"', "min_tokens": 1}),
    (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 16, "instructions": "i", "text": {"format": {"type": "text"}}},
    ),
    ("/v1/responses", {"input": ITEMS, "max_output_tokens": 16, "stream": True, "store": False}),
    ("/v1/embeddings", {"input": ["a", "b"], "encoding_format": "base64"}),
    ("/pooling", {"input": [[1, 2, 3]], "pooling": "mean", "normalize": True}),
    *((path, {"text_1": "a", "text_2": ["b", "c"]}) for path in ("/score", "/v1/score")),
    *((path, {"input": ["a", "b"]}) for path in ("/classify", "/v1/classify")),
    *((path, {"query": "a", "documents": ["b", {"text": "c"}]}) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
    (
        "/v1/messages",
        {
            "model": "small",
            "messages": BLOCKS[:1],
            "max_tokens": 4,
            "system": [{"type": "text", "text": "s"}],
            "top_k": 2,
        },
    ),
    (
        "/v1/messages",
        {"model": "small", "messages": BLOCKS[:1], "max_tokens": 4, "stream": True, "stop_sequences": ["x"]},
    ),
    ("/v1/messages/count_tokens", {"model": "small", "messages": BLOCKS, "tools": [AGENT_TOOL]}),
    ("/tokenize", {"prompt": "hello", "add_special_tokens": False}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [1, 2, 3]}),
    (
        "/api/chat",
        {
            "model": "small",
            "messages": MESSAGES[:1],
            "options": {"num_predict": 4, "temperature": 0.1},
            "format": PARAMETERS,
        },
    ),
    (
        "/api/generate",
        {"model": "small", "prompt": "a", "stream": False, "raw": True, "options": {"num_predict": 4, "stop": ["x"]}},
    ),
    ("/api/show", {"model": "small"}),
    ("/api/embed", {"model": "small", "input": ["a", "b c"], "truncate": True, "options": {"num_ctx": 64}}),
    ("/api/embeddings", {"model": "small", "prompt": "a"}),
]
LOOK = {"role": "user", "content": SEEN}
ITEM = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": "a"}]
BLOCK = [{"type": "image", "source": SOURCE}, {"type": "text", "text": "a"}]
# Bodies with images, for a model that reads some.
IMAGES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [LOOK], **FEW}),
    ("/v1/chat/completions", {"messages": [LOOK, {"role": "assistant", "content": "x"}, LOOK], **FEW, "stream": True}),
    ("/v1/responses", {"input": [{"role": "user", "content": ITEM}], "max_output_tokens": 4}),
    ("/v1/messages", {"model": "small", "max_tokens": 4, "messages": [{"role": "user", "content": BLOCK}]}),
    (
        "/api/chat",
        {
            "model": "small",
            "messages": [{"role": "user", "content": "a", "images": [PIXEL]}],
            "options": {"num_predict": 4},
        },
    ),
    ("/api/generate", {"model": "small", "prompt": "a", "images": [PIXEL], "options": {"num_predict": 4}}),
    ("/tokenize", {"messages": [LOOK]}),
]
READ = ["/health", "/version", "/load", "/metrics", "/props", "/slots", "/v1/models", "/openapi.json", "/"]
READ += ["/api/version", "/api/tags", "/api/ps", "/slots?fail_on_no_slot=1", "/v1/models/small", "/page/page.js"]
NAMED = ["/v1/models/", "/v1/responses/", "/page/", "/api/", "/"]
VALUES: list[Any] = [None, True, False, 0, 1, -1, 3, 0.5, 2**31, 2**63, -(2**63), 10**25, 1e308, 5e-324]
VALUES += [float("nan"), float("inf"), -0.0, "", "a", "\x00", "\ud800", "é☕𝄞", "1", "true", "small", "auto", "json"]
VALUES += [SEEN, URL, SOURCE, {"type": "image", "source": SOURCE}, {"type": "input_image", "image_url": URL}]
VALUES += [
    [],
    {},
    [[]],
    [None],
    [1],
    ["a"],
    [{}],
    {"": 1},
    {"a": None},
    {"type": "text"},
    {"type": "function"},
    [[1], "a"],
]
VALUES += ["a" * 5000, [1] * 600, {"$ref": "#"}, {"type": "object", "properties": {}}, {"$defs": {}, "anyOf": [{}, {}]}]
NAMES = ["", "x", "\ud800", "__class__", "n" * 300, "messages", "stream", "tools", "response_format", "metadata"]
# A request whose failure the server promises.
EXPECTED = frozenset({400, 401, 404, 405, 408, 413, 415, 422, 429})
LEAKS = re.compile(r"Traceback|File \\?\"|\.py\b|torch_infini\.serve|/site-packages/")


class Sent(NamedTuple):
    """A request."""

    method: str
    path: str
    content: bytes
    content_type: str | None


class Fuzzer:
    """Draws requests.

    Args:
        seed: All requests follow from it.
        openapi: The server's /openapi.json, for the names of the fields.
        bodies: (route, a valid body) that requests are made of.
    """

    def __init__(
        self, seed: int, openapi: dict[str, Any], bodies: Sequence[tuple[str, dict[str, Any]]] = VALID
    ) -> None:
        self._bodies = bodies
        self._rng = random.Random(seed)
        schemas = openapi["components"]["schemas"]
        self._fields: dict[str, list[str]] = {}
        for path, methods in openapi["paths"].items():
            if "post" in methods:
                body = methods["post"]["requestBody"]["content"]["application/json"]["schema"]
                self._fields[path] = sorted(schemas[body["$ref"].rpartition("/")[2]]["properties"])
        missing = self._fields.keys() - {path for path, _ in VALID}
        assert not missing, f"VALID needs bodies of {missing}"

    def request(self) -> Sent:
        """Return the next request."""
        rng = self._rng
        if rng.random() < 0.1:
            return Sent(rng.choice(["GET", "GET", "HEAD", "DELETE", "PUT", "OPTIONS"]), self._path(), b"", None)
        path, valid = rng.choice(self._bodies)
        body: Any = copy.deepcopy(valid)
        for _ in range(rng.choice([0, 1, 1, 2, 3])):
            body = self._changed(body, self._fields[path])
        try:
            content = json.dumps(body).encode()
        except RecursionError:  # two of the deepest values, one in the other: more than the encoder takes
            return self.request()
        if rng.random() < 0.12:
            content = self._spoiled(content)
        kinds = [None, "text/plain", "application/json; charset=utf-16", "multipart/form-data", ""]
        return Sent("POST", path, content, rng.choice(kinds) if rng.random() < 0.04 else "application/json")

    def _path(self) -> str:
        rng = self._rng
        if rng.random() < 0.6:
            return rng.choice(READ)
        name = "".join(rng.choice(["a", "..", "/", "%00", "%2e", "%ff", "?x=1", ";", "é", "resp_"]) for _ in range(3))
        return "/" + (rng.choice(NAMED) + name).lstrip("/")

    def _value(self) -> Any:
        rng = self._rng
        kind = rng.random()
        if kind < 0.7:
            return copy.deepcopy(rng.choice(VALUES))
        if kind < 0.8:
            return random_schema(rng)
        if kind < 0.85:
            deep: Any = 1
            for _ in range(rng.choice([10, 70, 500])):
                deep = [deep] if rng.random() < 0.5 else {"a": deep}
            return deep
        return copy.deepcopy(rng.choice(list(rng.choice(self._bodies)[1].values())))

    def _changed(self, body: Any, fields: list[str]) -> Any:
        """Return the body with a change at its top or within."""
        rng = self._rng
        if not isinstance(body, dict) or rng.random() < 0.02:
            return self._value()
        if rng.random() < 0.5:
            body[rng.choice(fields) if rng.random() < 0.9 else rng.choice(NAMES)] = self._value()
            return body
        places = list(places_in(body))
        if not places:
            return body
        inside, key = rng.choice(places)
        change = rng.random()
        if change < 0.5:
            inside[key] = self._value()
        elif change < 0.65:
            del inside[key]
        elif change < 0.8:
            inside[key] = rng.choice([[inside[key]], {"text": inside[key]}, json.dumps(inside[key])])
        elif isinstance(inside, list):
            inside.extend([inside[key]] * rng.choice([1, 3, 200]))
        else:
            inside[rng.choice(NAMES)] = inside[key]
        return body

    def _spoiled(self, content: bytes) -> bytes:
        """Return what may be no JSON any more."""
        rng = self._rng
        at = rng.randrange(len(content))
        other = [
            content[:at],
            content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :],
            content[:at] + content[at:] * 2,
            b"",
            b"[" * 20_000,
            b"\xef\xbb\xbf" + content,
            content.decode().encode("utf-16"),
            b'{"prompt": ' + b"9" * 5000 + b"}",
        ]
        return rng.choice(other)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) within a value."""
    found = []
    left = [value]
    while left:
        one = left.pop()
        keys: list[Any] = list(one) if isinstance(one, dict) else list(range(len(one))) if isinstance(one, list) else []
        found += [(one, key) for key in keys]
        left += [one[key] for key in keys]
    return found


def fault_of(sent: Sent, status: int, content_type: str, text: str) -> str | None:
    """Return what is wrong with an answer; None: nothing.

    Args:
        sent: The request.
        status: The answer's.
        content_type: The answer's.
        text: The answer's body.
    """
    if status < 400:
        streamed = ("data: {", "event: error", '{"error"')
        lines = text.splitlines() if "stream" in content_type or "ndjson" in content_type else []
        errors = [line for line in lines if line.startswith(streamed) and '"error": {' in line[:20]]
        errors += [line for line in lines if line.startswith(("event: error", 'data: {"error"', '{"error"'))]
        return f"an error in a stream: {errors[0]}" if errors else None
    if status not in EXPECTED and not (status == 503 and sent.path.startswith("/slots?")):  # all slots are busy
        return f"status {status}"
    if LEAKS.search(text) and not sent.path.startswith(("/page", "/v1/models/", "/v1/responses/")):
        return "the answer has a path or a traceback"
    if sent.method == "HEAD":
        return None
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError, TypeError):
        return "the answer is no error object"
    message = error if isinstance(error, str) else error["message"]
    return None if isinstance(message, str) and message and len(message) < 2000 else "the error has no sentence"
