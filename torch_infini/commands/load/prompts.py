"""Prompts of a load: lines of a file, or random words or tokens of a given number."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from ..errors import CommandError

# Each is one token, with the space before it, in the vocabularies of most models.
WORDS = """\
time year people way day man thing woman life child world school state family student group country problem hand
part place case week company system program question work government number night point home water room mother area
money story fact month lot right study book eye job word business issue side kind head house service friend father
power hour game line end member law car city name team minute idea body back parent face others level office door
health person art war history party result change morning reason research girl guy moment air teacher force
education"""


@dataclass(frozen=True)
class Prompt:
    """A request's input.

    Attributes:
        content: Text, token ids, or messages {"role", "content"}.
        output_tokens: The most tokens of the output.
    """

    content: str | list[int] | list[dict[str, Any]]
    output_tokens: int

    def body(self, endpoint: str) -> dict[str, Any]:
        """Return the fields of a request for an endpoint, chat or completions."""
        if endpoint == "completions":
            return {"prompt": self.content, "max_tokens": self.output_tokens}
        content = self.content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        return {"messages": messages, "max_tokens": self.output_tokens}


def random_prompts(
    count: int, input_tokens: int, output_tokens: int, seed: int, vocabulary: int | None = None
) -> list[Prompt]:
    """Make prompts that have no prefix in common.

    Args:
        count: How many.
        input_tokens: Tokens of each, or words, which are about as many tokens.
        output_tokens: The most tokens of each output.
        seed: The same seed gives the same prompts.
        vocabulary: Prompts are token ids below it; None: words.
    """
    chance = random.Random(seed)
    if vocabulary is not None:
        ids = [[chance.randrange(vocabulary) for _ in range(input_tokens)] for _ in range(count)]
        return [Prompt(one, output_tokens) for one in ids]
    return [Prompt(" ".join(chance.choices(WORDS.split(), k=input_tokens)), output_tokens) for _ in range(count)]


def read_prompts(path: str, endpoint: str, output_tokens: int) -> list[Prompt]:
    """Read a file of prompts: of lines of JSON if its name ends in .jsonl, else of texts, one a line.

    Args:
        path: A line of JSON is a text, or an object with `prompt` (a text or token ids) or `messages`, and where it
            likes with `output_tokens`.
        endpoint: chat or completions.
        output_tokens: The most tokens of the outputs of lines that do not say.

    Raises:
        CommandError: For a file that cannot be read or has no prompt, or a line that is none.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CommandError(f"--prompts must be a file of UTF-8 text, got {path}: {error}") from error
    is_json = path.endswith(".jsonl")
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise CommandError(f"--prompts must have a prompt in a line, got {path}, which has none")
    found = []
    for number, line in lines:
        try:
            value = json.loads(line) if is_json else line.rstrip("\r")
            found.append(prompt_of(value, endpoint, output_tokens))
        except ValueError as error:
            raise CommandError(f"--prompts, line {number} of {path}: {error}") from error
    return found


def prompt_of(value: Any, endpoint: str, output_tokens: int) -> Prompt:
    """Return the prompt of a line; ValueError if it is none."""
    if isinstance(value, str):
        return Prompt(value, output_tokens)
    name = "messages" if endpoint == "chat" else "prompt"
    if not isinstance(value, dict):
        raise ValueError(f"a line must be a text or an object with {name}, got {json.dumps(value)[:80]}")
    most = value.get("output_tokens", output_tokens)
    if type(most) is not int or most < 1:
        raise ValueError(f"output_tokens must be an integer of at least 1, got {most!r}")
    prompt, messages = value.get("prompt"), value.get("messages")
    if isinstance(prompt, str):
        return Prompt(prompt, most)
    if endpoint == "completions" and is_ids(prompt):
        return Prompt(prompt, most)
    if endpoint == "chat" and isinstance(messages, list) and messages and all(isinstance(m, dict) for m in messages):
        return Prompt(messages, most)
    forms = "prompt, a text, or messages" if endpoint == "chat" else "prompt, a text or token ids"
    raise ValueError(f"a line for --endpoint {endpoint} must have {forms}, got {json.dumps(value)[:80]}")


def is_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and bool(value) and all(type(one) is int and one >= 0 for one in value)


def repeated(prompts: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return so many prompts, from the beginning again where there are fewer."""
    return [prompts[at % len(prompts)] for at in range(count)]
