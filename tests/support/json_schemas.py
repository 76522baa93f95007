"""random_schemas: JSON schemas with the keywords that clients send; NOT_BUILT: schemas that no grammar can express.

Each follows from its seed. Most describe texts that end soon, so that a model with random weights completes them.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

Schema = dict[str, Any]
NAMES = ["a", "b c", "ü", 'q"', "long_name", "0", "$ref", "\\n", "type"]
VALUES: list[Any] = ["x", "", 'é"\\', 1, -2.5, None, True, False, [1, "a"], {"k": None}]
PATTERNS = ["^[a-f]{2,4}$", "^\\d{3}-\\d{4}$", "^(yes|no|\\u00e9t\\u00e9)$", '^"?[\\w.]{1,5}\\\\?$']
FORMATS = ["date", "date-time", "time", "uuid", "ipv4", "ipv6", "duration", "hostname"]
# Keywords that no grammar of llguidance has; each is status 400, never ignored.
NOT_BUILT: list[Schema] = [
    {"not": {"type": "string"}},
    {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True, "maxItems": 3},
    {"type": "array", "contains": {"const": 1}, "maxItems": 3},
    {"type": "object", "propertyNames": {"maxLength": 3}},
    {"type": "object", "properties": {"a": {"const": 1}}, "dependentRequired": {"a": ["b"]}},
    {"if": {"const": 1}, "then": {"const": 1}},
    {"type": "object", "unevaluatedProperties": False},
    {"type": "string", "format": "of-our-own"},
    {"type": "string", "pattern": "^(?=a)b"},
    {"oneOf": [{"type": "integer", "maximum": 5}, {"type": "integer", "minimum": 3}]},
    {"type": "integer", "minimum": 4, "maximum": 2},
    {"type": "string", "minLength": 4, "maxLength": 2},
    {"type": "object", "properties": {"a": {"type": "strin"}}, "required": ["a"]},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/none"}}, "required": ["a"]},
    {"$ref": "https://example.org/schema.json"},
]


def random_schemas(count: int, seed: int) -> Iterator[Schema]:
    """Yield schemas, about one in five of them with references."""
    for number in range(count):
        rng = random.Random(f"{seed} {number}")
        yield with_references(rng) if rng.random() < 0.2 else random_schema(rng)


def with_references(rng: random.Random) -> Schema:
    """Return an object that refers to its $defs, one of which may refer to itself."""
    where = rng.choice(["$defs", "definitions"])
    link = {"value": random_schema(rng, 2), "next": {"anyOf": [{"type": "null"}, {"$ref": f"#/{where}/link"}]}}
    definitions = {
        "one": random_schema(rng, 2),
        "two": {"type": "array", "items": {"$ref": f"#/{where}/one"}, "maxItems": 2},
        "link": {"type": "object", "properties": link, "required": ["next"], "additionalProperties": False},
    }
    used = rng.sample(["one", "two", "link"], rng.randint(1, 3))
    properties = {f"p{at}": {"$ref": f"#/{where}/{name}"} for at, name in enumerate(used)}
    head = {"$schema": "http://json-schema.org/draft-07/schema#"} if where == "definitions" else {}
    root = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {**head, **root, where: definitions}


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """Return a schema without references, nested at most three deep."""
    leaves: list[Callable[[random.Random], Schema]] = [integer, number, string, string, enum, const, plain]
    inner: list[Callable[[random.Random, int], Schema]] = [object_, object_, array, tuple_, any_of, one_of]
    if depth < 2 and rng.random() < (0.9 if depth == 0 else 0.5):
        made = rng.choice(inner)(rng, depth + 1)
    else:
        made = rng.choice(leaves)(rng)
    kind = made.get("type")
    if isinstance(kind, str) and kind != "null" and rng.random() < 0.15:
        made["type"] = [kind, "null"]
    if rng.random() < 0.15:
        made |= {"title": "T", "description": 'what "it" is', "examples": [1], "x-of-our-own": {}}
    return made


def integer(rng: random.Random) -> Schema:
    least = rng.randint(-50, 50)
    bounds: list[Schema] = [
        {"minimum": least, "maximum": least + rng.randint(0, 1000)},
        {"exclusiveMinimum": least, "exclusiveMaximum": least + rng.randint(2, 9)},
        {"minimum": 0, "maximum": 400, "multipleOf": rng.choice([2, 5, 7, 60])},
        {"minimum": -(10**12), "maximum": 10**12},
    ]
    return {"type": "integer", **rng.choice(bounds)}


def number(rng: random.Random) -> Schema:
    bounds: list[Schema] = [
        {"minimum": -1, "maximum": 1},
        {"exclusiveMinimum": -0.5, "maximum": 1e3},
        {"minimum": 0, "maximum": 9, "multipleOf": rng.choice([0.25, 0.5, 1.5])},
    ]
    return {"type": "number", **rng.choice(bounds)}


def string(rng: random.Random) -> Schema:
    least = rng.randint(0, 4)
    forms: list[Schema] = [
        {"minLength": least, "maxLength": least + rng.randint(0, 6)},
        {"pattern": rng.choice(PATTERNS)},
        {"pattern": "^[a-z]+$", "minLength": 2, "maxLength": 5},
        {"format": rng.choice(FORMATS)},
    ]
    return {"type": "string", **rng.choice(forms)}


def enum(rng: random.Random) -> Schema:
    return {"enum": copy.deepcopy(rng.sample(VALUES, rng.randint(1, 5)))}


def const(rng: random.Random) -> Schema:
    return {"const": copy.deepcopy(rng.choice(VALUES))}


def plain(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def object_(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(0, 3))
    properties = {name: random_schema(rng, depth) for name in names}
    made: Schema = {"type": "object", "properties": properties}
    made["required"] = [name for name in names if rng.random() < 0.7]
    open_to = rng.random()
    if open_to < 0.75:
        made["additionalProperties"] = False
    elif open_to < 0.9:
        made["additionalProperties"] = random_schema(rng, 2)
    if rng.random() < 0.1:
        made["patternProperties"] = {"^z[0-9]$": random_schema(rng, 2)}
    return made


def array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    return {"type": "array", "items": random_schema(rng, depth), "minItems": least, "maxItems": rng.randint(least, 3)}


def tuple_(rng: random.Random, depth: int) -> Schema:
    first = [random_schema(rng, depth) for _ in range(rng.randint(1, 2))]
    return {"type": "array", "prefixItems": first, "items": False, "minItems": rng.randint(0, len(first))}


def any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [random_schema(rng, depth) for _ in range(rng.randint(1, 3))]}


def one_of(rng: random.Random, depth: int) -> Schema:
    """Return alternatives of which no value can have two, as a grammar needs them."""
    kinds: list[Schema] = [integer(rng), string(rng), {"type": "boolean"}, {"type": "null"}]
    return {"oneOf": rng.sample(kinds, rng.randint(1, 3))}
