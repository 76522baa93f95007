"""to_lark: grammars of llama.cpp (GBNF) in Lark's syntax, as llguidance reads it.

Rules without recursion become terminals, which are matched as regular expressions; the others stay rules. A terminal
matches as much as it can: of an ambiguous grammar, some texts may be forbidden, and none is added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from .structured_outputs import MAX_DEPTH, NAME

_SPACE = r"(?:[ \t]|#[^\r\n]*)+"
_FIRST = re.compile(r"(?:\s|#[^\r\n]*[\r\n])*[A-Za-z0-9_-]+[ \t]*::=")
_TOKEN = re.compile(
    rf"""(?P<space>{_SPACE})|(?P<newline>\r\n?|\n)|(?P<define>::=)|(?P<name>[A-Za-z0-9_-]+)
    |(?P<literal>"(?:[^"\\]|\\.)*")|(?P<characters>\[(?:[^]\\]|\\.)*\])
    |(?P<repeat>[*+?]|\{{\s*\d{{1,4}}\s*(?:,\s*(?:\d{{1,4}}\s*)?)?\}})|(?P<mark>[()|.])""".replace("\n    ", ""),
    re.DOTALL,
)
_CHARACTER = re.compile(
    r"\\x([0-9A-Fa-f]{2})|\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\([]nrt\\\"[])|([^\\])", re.DOTALL
)
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t"}


class Token(NamedTuple):
    kind: str
    text: str
    at: int


class Rule(NamedTuple):
    """A rule: its body in Lark's syntax, with references as tokens, and the names in these."""

    body: list[str | Token]
    references: set[str]


def is_gbnf(text: str) -> bool:
    """Return whether a grammar begins as one of llama.cpp: NAME ::= ..."""
    return _FIRST.match(text) is not None


def to_lark(text: str) -> str:
    """Convert a grammar; ValueError, with the line, for one that llama.cpp would not take."""
    rules = _Parser(text).rules()
    waiting = {name: set(rule.references) for name, rule in rules.items()}
    users: dict[str, list[str]] = {name: [] for name in rules}
    for name, rule in rules.items():
        for other in rule.references:
            users[other].append(name)
    terminals = {name for name, others in waiting.items() if not others and name != "root"}
    ready = list(terminals)
    while ready:
        done = ready.pop()
        for user in users[done]:
            waiting[user].discard(done)
            if not waiting[user] and user != "root":
                terminals.add(user)
                ready.append(user)
    names = {name: f"{'T' if name in terminals else 'r'}{number}" for number, name in enumerate(rules)}
    names["root"] = "start"  # a rule, whatever it refers to
    lines = []
    for name, rule in rules.items():
        body = " ".join(part if isinstance(part, str) else names[part.text] for part in rule.body)
        lines.append(f"{names[name]}: {body}")
    return "\n".join(lines)


class _Parser:
    def __init__(self, text: str) -> None:
        self._text = text
        self._tokens = list(self._split())
        self._next = 0

    def rules(self) -> dict[str, Rule]:
        found: dict[str, Rule] = {}
        self._skip_newlines()
        while self._kind != "end":
            name = self._take("name", "the name of a rule")
            self._take("define", "::=")
            self._skip_newlines()
            body: list[str | Token] = []
            self._alternatives(body, 0)
            if self._kind not in ("newline", "end"):
                raise self._error("a line break at the end of a rule")
            self._skip_newlines()
            if name.text in found:
                raise self._error("one definition of each rule", name)
            found[name.text] = Rule(body, {part.text for part in body if isinstance(part, Token)})
        for rule in found.values():
            for part in rule.body:
                if isinstance(part, Token) and part.text not in found:
                    raise self._error("names of rules that it defines", part)
        if "root" not in found:
            raise ValueError(f"{NAME}: grammar must define the rule root, got none")
        return found

    def _alternatives(self, body: list[str | Token], depth: int) -> None:
        """Parse alternatives; line breaks are spaces within parentheses."""
        if depth > MAX_DEPTH:
            raise self._error(f"groups nested at most {MAX_DEPTH} deep")
        while True:
            begin = len(body)
            self._sequence(body, depth)
            if len(body) == begin:
                body.append('""')
            if not (self._kind == "mark" and self._token.text == "|"):
                return
            body.append("|")
            self._next += 1
            self._skip_newlines()

    def _sequence(self, body: list[str | Token], depth: int) -> None:
        while True:
            if depth:
                self._skip_newlines()
            token = self._token
            if token.kind == "literal":
                body.append(json.dumps("".join(one for one, _ in self._characters(token)), ensure_ascii=False))
            elif token.kind == "characters":
                body.append(self._class(token))
            elif token.kind == "name":
                body.append(token)
            elif token.text == ".":
                body.append("/(?s:.)/")
            elif token.text == "(":
                self._next += 1
                body.append("(")
                self._skip_newlines()
                self._alternatives(body, depth + 1)
                if self._token.text != ")":
                    raise self._error("a ) for each (")
                body.append(")")
            else:
                return
            self._next += 1
            if self._kind == "repeat":
                body.append("".join(self._token.text.split()))
                self._next += 1
            if self._kind == "repeat":
                raise self._error("one repetition of each part")

    def _class(self, token: Token) -> str:
        """Return the regular expression of [...]."""
        inner = token.text[1:-1]
        negated = inner.startswith("^")
        given = Token(token.kind, f"[{inner[negated:]}]", token.at)
        parts, found = [], list(self._characters(given))
        at = 0
        while at < len(found):
            (first, _), last = found[at], found[at][0]
            if at + 2 < len(found) and found[at + 1] == ("-", False):
                last = found[at + 2][0]
                at += 2
            if last < first:
                raise self._error("ranges from the lower character to the higher", token)
            parts.append(f"\\x{{{ord(first):X}}}" + ("" if first == last else f"-\\x{{{ord(last):X}}}"))
            at += 1
        if not parts:
            if negated:
                return "/(?s:.)/"
            raise self._error("at least one character in [...]", token)
        return f"/[{'^' if negated else ''}{''.join(parts)}]/"

    def _characters(self, token: Token) -> Iterator[tuple[str, bool]]:
        """Yield the characters between a token's quotes, and whether each was escaped."""
        text, at = token.text[1:-1], 0
        while at < len(text):
            match = _CHARACTER.match(text, at)
            code = None if match is None else next(filter(None, match.groups()[:3]), None)
            if match is None or (code is not None and not is_scalar(int(code, 16))):
                raise self._error(r"the escapes \n \r \t \\ \" \[ \] \xNN \uNNNN \UNNNNNNNN", token)
            one = chr(int(code, 16)) if code else _ESCAPES.get(match[4] or "", match[4]) or match[5]
            yield one, match[5] is None
            at = match.end()

    def _split(self) -> Iterator[Token]:
        at = 0
        while at < len(self._text):
            match = _TOKEN.match(self._text, at)
            if match is None or match.lastgroup is None:
                raise self._error("rules of llama.cpp's form", Token("", self._text[at], at))
            if match.lastgroup != "space":
                yield Token(match.lastgroup, match[0], at)
            at = match.end()
        yield Token("end", "", at)

    @property
    def _token(self) -> Token:
        return self._tokens[self._next]

    @property
    def _kind(self) -> str:
        return self._token.kind

    def _take(self, kind: str, rule: str) -> Token:
        token = self._token
        if token.kind != kind:
            raise self._error(rule)
        self._next += 1
        return token

    def _skip_newlines(self) -> None:
        while self._kind == "newline":
            self._next += 1

    def _error(self, rule: str, token: Token | None = None) -> ValueError:
        token = self._token if token is None else token
        line = self._text.count("\n", 0, token.at) + 1
        came = repr(token.text[:40]) if token.text else "the end"
        return ValueError(f"{NAME}: grammar must have {rule}, got {came} in line {line}")


def is_scalar(code: int) -> bool:
    """Return whether a code point is one that UTF-8 can encode."""
    return code < 0xD800 or 0xE000 <= code <= 0x10FFFF
