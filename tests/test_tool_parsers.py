"""Parsers of tool calls and reasoning: each form, however its text is cut; what is no valid call is content."""

from __future__ import annotations

import json
import random
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from support.tool_forms import ARGUMENTS, HARMONY, TEMPLATES, Answer, answer_of, parser_of, read, rendered
from torch_infini.serve.parsers import (
    CallBegin,
    CallDelta,
    CallEnd,
    Content,
    OutputParser,
    Reasoning,
    all_forms,
    all_thinkings,
    form_of,
    thinking_of,
)
from torch_infini.serve.parsers import form as form_module
from torch_infini.serve.parsers.parameters import converted, types_of


def read_all(text: str, name: str, **more: Any) -> Answer:
    """Read a text whole, and check that cutting it anywhere, or everywhere, gives the same."""
    whole = read([text], name, **more)
    assert read(list(text), name, **more) == whole
    for at in range(1, len(text)):
        assert read([text[:at], text[at:]], name, **more) == whole, at
    cuts = random.Random(len(text))
    for _ in range(5):
        ends = sorted(cuts.sample(range(len(text)), min(len(text), 8)))
        pieces = [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]
        assert read(pieces, name, **more) == whole
    return whole


def check_round_trip(template: str, calls: list[tuple[str, dict[str, Any]]], content: str, think: str) -> None:
    name = template.split()[0]
    content = "" if name == "llama3_json" else content
    thinking = {"glm45": "think", "harmony": "harmony"}.get(name)
    text = rendered(template, calls, content, think).removesuffix("<|start_header_id|>")
    got = read_all(text, name, thinking=thinking)
    assert got.content == content
    assert got.reasoning == (think if thinking else "")
    assert [(called, json.loads(arguments)) for called, arguments in got.calls] == calls


@pytest.mark.parametrize("template", TEMPLATES)
def test_what_a_chat_template_writes_is_read_back(template: str) -> None:
    """Each sample alone, then several calls of several tools, with content and reasoning before them."""
    for arguments in ARGUMENTS:
        check_round_trip(template, [("get_weather", arguments)], "", "")
    several = [("get_weather", ARGUMENTS[1]), ("now", {}), ("function", {"n": 5}), ("get_weather", ARGUMENTS[0])]
    check_round_trip(template, several, "I look: {a} <b>", "Let me\nsee <x>.")


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_text_that_ends_anywhere_is_kept(template: str) -> None:
    """Of a text that was cut by length, what is no call is content, and arguments are those of the whole so far."""
    name = template.split()[0]
    text = rendered(template, [("get_weather", ARGUMENTS[1]), ("now", {})], "look").removesuffix("<|start_header_id|>")
    thinking = {"glm45": "think", "harmony": "harmony"}.get(name)
    whole = read([text], name, thinking=thinking)
    for end in range(len(text)):
        got = read([text[:end]], name, thinking=thinking)
        for (called, arguments), (wanted, all_arguments) in zip(got.calls, whole.calls, strict=False):
            # A string written as XML has the beginning of its end marker, if the text ends there.
            so_far = (
                arguments.rpartition("<")[0].removesuffix("\\n").rstrip("\n")
                if name in ("qwen3_coder", "glm45")
                else arguments
            )
            assert called == wanted and all_arguments.startswith(so_far)
        assert len(got.calls) <= len(whole.calls)
        if not got.calls and name not in ("glm45", "harmony"):
            assert got.content == text[:end]


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


CALL = '{"name": "now", "arguments": {}}'
# (form, text): none of these has a call; all of the text is content.
MALFORMED = [
    ("hermes", hermes("")),
    ("hermes", hermes("now")),
    ("hermes", hermes('{"name": "unknown", "arguments": {"a": 1}}')),
    ("hermes", hermes('{"name": 5, "arguments": {}}')),
    ("hermes", hermes('{"arguments": {"a": 1}}')),
    ("hermes", hermes('{"name": "now", "arguments": [1]}')),
    ("hermes", hermes('{"name": "now", "arguments": "no object"}')),
    ("hermes", hermes('{"name": "now", "arguments": {bad}}')),
    ("hermes", hermes('{"name": "now", "arguments": "{\\"a\\": \\"\\ud800\\"}"}')),
    ("hermes", hermes("{'name': 'now', 'arguments': {}}")),
    ("hermes", hermes('["name", "now"]')),
    ("hermes", '<tool_call>\n{"name": "now", "argu'),
    ("hermes", "a < b <tool_ca"),
    ("hermes", "<tool_call><tool_call>"),
    ("hermes", '{"name": "now", "arguments": {}}'),
    ("qwen3_coder", "<tool_call>\n<function=unknown>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now>text</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now"),
    ("qwen3_coder", hermes(CALL)),
    ("llama3_json", '{"name": "unknown", "parameters": {}}'),
    ("llama3_json", '{"city": "Rome"}'),
    ("llama3_json", '<|python_tag|>brave_search.call(query="x")'),
    ("llama3_json", f"See: {CALL}"),
    ("llama3_json", "{"),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", '[TOOL_CALLS][{"name": "unknown", "arguments": {}}]'),
    ("mistral", "[TOOL_CALLS][]"),
    ("mistral", "[TOOL_CALLS]unknown[ARGS]{}"),
    ("mistral", "[TOOL_CALLS]now[ARGS]5"),
    ("mistral", "[TOOL_CALLS now"),
    ("deepseek", "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>unknown<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n5\n```"),
    ("glm45", "<tool_call>unknown\n</tool_call>"),
    ("glm45", "<tool_call>now"),
    ("glm45", "<tool_call>"),
    ("harmony", "plain text"),
    ("harmony", "<|channel|>commentary to=functions.unknown <|constrain|>json<|message|>{}"),
    ("harmony", "<|channel|>analysis"),
]


@pytest.mark.parametrize("form, text", MALFORMED)
def test_what_is_no_call_is_content(form: str, text: str) -> None:
    assert read_all(text, form) == Answer(text, "", [])


@pytest.mark.parametrize(
    "form, text, want",
    [
        # From the character on that is not JSON, the text is content; the calls after it are read.
        (
            "hermes",
            hermes('{"name": "now", "arguments": {"a": 1,}}') + hermes(CALL),
            Answer("}}\n</tool_call>", "", [("now", '{"a": 1,'), ("now", "{}")]),
        ),
        (
            "hermes",
            hermes('{"name": "now", "arguments": {"a": 01}}'),
            Answer("01}}\n</tool_call>", "", [("now", '{"a": ')]),
        ),
        (
            "hermes",
            hermes('{"name": "now", "arguments": {"a": "b'),
            Answer("", "", [("now", '{"a": "b\\n</tool_call>')]),
        ),
        # What small models get wrong: a brace that is missing, arguments in a string, line breaks in strings.
        ("hermes", hermes('{"name": "now", "arguments": {"a": 1}'), Answer("", "", [("now", '{"a": 1}')])),
        ("hermes", hermes('{"name": "now", "arguments": "{\\"a\\": 1}"}'), Answer("", "", [("now", '{"a": 1}')])),
        (
            "hermes",
            hermes('{"name": "now", "arguments": {"a": "b\n\tc"}}'),
            Answer("", "", [("now", '{"a": "b\\n\\tc"}')]),
        ),
        ("hermes", hermes('{"name": "now"}'), Answer("", "", [("now", "{}")])),
        ("hermes", hermes('{"name": "now", "arguments": null}'), Answer("", "", [("now", "{}")])),
        ("hermes", hermes('{"arguments": {"a": 1}, "name": "now"}'), Answer("", "", [("now", '{"a": 1}')])),
        ("hermes", hermes('{"id": 5, "name": "now", "arguments": {}, "x": []}'), Answer("", "", [("now", "{}")])),
        ("hermes", hermes("no") + f"\n{hermes(CALL)}\n", Answer(hermes("no"), "", [("now", "{}")])),
        ("hermes", f"before\n\n{hermes(CALL)}\n after ", Answer("before\n\nafter ", "", [("now", "{}")])),
        ("hermes", "  spaces are kept \n", Answer("  spaces are kept \n", "", [])),
        ("llama3_json", '{"type": "function", "name": "now", "parameters": {}}', Answer("", "", [("now", "{}")])),
        ("llama3_json", f" {CALL}\n{CALL}; x", Answer("; x", "", [("now", "{}")] * 2)),
        ("llama3_json", f"text <|python_tag|>{CALL}", Answer("text", "", [("now", "{}")])),
        ("mistral", f'[TOOL_CALLS] [{CALL}, {{"name": "x"}}]', Answer(', {"name": "x"}]', "", [("now", "{}")])),
        ("mistral", f"[TOOL_CALLS]{CALL}", Answer("", "", [("now", "{}")])),
        ("mistral", 'a[TOOL_CALLS]now{"a": 1}', Answer("a", "", [("now", '{"a": 1}')])),
        (
            "qwen3_coder",
            "<function=get_weather><parameter=days>\n5\n</parameter><parameter=city>a</parameter></function>",
            Answer("", "", [("get_weather", '{"days": 5, "city": "a"}')]),
        ),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=exact>True</parameter>x</function></tool_call>",
            Answer("x</function></tool_call>", "", [("get_weather", '{"exact": true')]),
        ),
        ("glm45", "<tool_call>now</tool_call>", Answer("", "", [("now", "{}")])),
        (
            "glm45",
            "<tool_call>now <arg_key>a</arg_key> <arg_value>[1]</arg_value> </tool_call>",
            Answer("", "", [("now", '{"a": [1]}')]),
        ),
        ("harmony", HARMONY.format(name="now", arguments="{}"), Answer("", "", [("now", "{}")])),
        (
            "harmony",
            " to=functions.now<|channel|>commentary json<|message|>{}",
            Answer("", "", [("now", "{}")]),
        ),
        (
            "harmony",
            "<|channel|>final<|message|>yes <|x|><|return|>",
            Answer("yes <|x|>", "", []),
        ),
    ],
)
def test_calls_that_are_not_as_they_should_be(form: str, text: str, want: Answer) -> None:
    assert read_all(text, form) == want


def test_pieces_are_given_early() -> None:
    """Content, reasoning and arguments are not held back until their end, strings written as XML neither."""
    parser = parser_of("hermes", "think")
    assert parser.feed("<think>\nso") == [Reasoning("so")]
    assert parser.feed(" it is\n</th") == [Reasoning(" it is")]
    assert parser.feed("ink>\n\nYes <") == [Content("Yes")]
    assert parser.feed('b> <tool_call>{"name": "now", "arguments": {"a') == [
        Content(" <b>"),
        CallBegin(0, parser_ids(parser), "now"),
        CallDelta(0, '{"a'),
    ]
    assert parser.feed('bc": "x') == [CallDelta(0, 'bc": "x')]
    assert parser.feed('"}}') == [CallDelta(0, '"}'), CallEnd(0)]
    parser = parser_of("qwen3_coder")
    parser.feed("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    assert parser.feed('Zü"rich\n') == [CallDelta(0, 'Zü\\"rich')]
    assert parser.feed("</parameter>") == [CallDelta(0, '"')]


def parser_ids(parser: OutputParser) -> Any:
    class Any_:
        def __eq__(self, other: object) -> bool:
            return isinstance(other, str) and other.startswith("call_") and len(other) > 20

        __hash__ = None  # type: ignore[assignment]

    return Any_()


@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "harmony"])
def test_an_answer_that_is_calls_or_a_text_of_a_form(template: str) -> None:
    """A call within the text, such as in a string of JSON, is none: calls begin the answer."""
    name, more = template.split()[0], {"has_form": True, "thinking": "think"}
    calls = rendered(template, [("get_weather", {"city": "Bern"}), ("now", {})]).removesuffix("<|start_header_id|>")
    calls = calls.replace("<think></think>", "").strip()
    for begin in ("", "<think>so</think>\n\n"):
        reasoning = "so" if begin else ""
        answer = read_all(begin + calls, name, **more)
        assert (answer.content, answer.reasoning) == ("", reasoning)
        assert [called for called, _ in answer.calls] == ["get_weather", "now"]
        for text in (f'{{"a": "{calls}"}}', f"[{calls}]", f" yes{calls}", "<tool", "[TOOL", ""):
            assert read_all(begin + text, name, **more) == Answer(text.strip() if begin else text, reasoning, [])


@pytest.mark.parametrize("is_thinking", [False, True])
def test_reasoning(is_thinking: bool) -> None:
    """Begun by the model or by the prompt, never begun, and never ended."""
    begin = "" if is_thinking else "\n<think>\n"
    more: dict[str, Any] = {"thinking": "think", "is_thinking": is_thinking}
    assert read_all(f"{begin} a <b>\n\n</think>\n\nHi \n", "hermes", **more) == Answer("Hi \n", "a <b>", [])
    call = hermes(CALL)
    assert read_all(f"{begin}a{call}</think>{call}", "hermes", **more) == Answer("", f"a{call}", [("now", "{}")])
    assert read_all(f"{begin}a {call}", "hermes", **more) == Answer("", f"a {call}", [])
    assert read_all(f"{begin}</think>Hi", "hermes", **more) == Answer("Hi", "", [])
    assert read_all("<think>a</think>b", "hermes", is_thinking=False) == Answer("<think>a</think>b", "", [])
    if is_thinking:
        assert read_all("<think>a</think>b", "hermes", **more) == Answer("b", "a", [])
    else:
        assert read_all(" a <think>b</think>", "hermes", **more) == Answer(" a <think>b</think>", "", [])
    harmony = "<|channel|>analysis<|message|>a <|end|><|start|>assistant<|channel|>final<|message|>b"
    assert read_all(harmony, "harmony", thinking="harmony") == Answer("b", "a", [])
    assert read_all(harmony, "harmony") == Answer("a b", "", [])


def test_without_tools_only_reasoning_is_read() -> None:
    for text, want in (("<think>a</think>\n\nb c ", Answer("b c ", "a", [])), (" b <", Answer(" b <", "", []))):
        for pieces in ([text], list(text), [text[at : at + 2] for at in range(0, len(text), 2)]):
            parser = OutputParser(None, None, all_thinkings()["think"])
            events = [event for piece in pieces for event in parser.feed(piece)]
            assert answer_of([*events, *parser.finish()]) == want
    assert OutputParser().feed("a \n") == [Content("a \n")]  # nothing is held back
    parser = OutputParser(None, None, all_thinkings()["think"])
    assert parser.feed("<think>a</think>\nb ") == [Reasoning("a"), Content("b ")]
    assert parser.feed("c ") == [Content("c ")] and parser.finish() == []


@pytest.mark.parametrize("template", TEMPLATES)
def test_one_call_alone(template: str) -> None:
    """Without parallel calls the answer ends with the first one."""
    name = template.split()[0]
    text = rendered(template, [("get_weather", ARGUMENTS[1]), ("now", {})]) + "rest"
    got = read_all(text, name, parallel=False, thinking="harmony" if name == "harmony" else "think")
    assert [(called, json.loads(arguments)) for called, arguments in got.calls] == [("get_weather", ARGUMENTS[1])]
    assert got.content == ""


def test_forms_are_chosen_by_the_template() -> None:
    for name, template in TEMPLATES.items():
        form = form_of(template)
        assert form is not None and form.name == name.split()[0], name
    assert form_of("{{ messages }} <|im_start|>") is None
    for template, want in (
        ("x{% if '</think>' in content %}", "think"),
        ("[THINK]x[/THINK]", "mistral"),
        (TEMPLATES["harmony"], "harmony"),
        ("<|user|>x<|end|>", None),
    ):
        thinking = thinking_of(template)
        assert (thinking and thinking.name) == want


def test_a_file_adds_a_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A form of one's own beside the others, and no other file that knows it."""
    (tmp_path / "shouted.py").write_text(
        "from torch_infini.serve.parsers import Form\n\n\n"
        "class Shouted(Form):\n"
        "    name, markers = 'shouted', ('CALL!',)\n\n"
        "    def parse(self, output):\n"
        "        while (yield from output.content_until('CALL!')):\n"
        "            if not (yield from output.json_call()):\n"
        "                output.reject()\n"
    )
    package = import_module("torch_infini.serve.parsers.forms")
    monkeypatch.setattr(package, "__path__", [*package.__path__, str(tmp_path)])
    for cached in (form_module.all_forms, form_module.all_thinkings):
        cached.cache_clear()
    try:
        form = form_of("{{ 'CALL!' }}")
        assert form is not None and form.name == "shouted"
        assert read_all(f"a CALL!{CALL}", "shouted") == Answer("a", "", [("now", "{}")])
    finally:
        for cached in (form_module.all_forms, form_module.all_thinkings):
            cached.cache_clear()
        sys.modules.pop("torch_infini.serve.parsers.forms.shouted", None)


def test_values_by_their_schema() -> None:
    root = {"$defs": {"n": {"type": "number"}, "self": {"anyOf": [{"$ref": "#/$defs/self"}, {"type": "null"}]}}}
    assert types_of({"$ref": "#/$defs/n"}, root) == {"number"}
    assert types_of({"anyOf": [{"type": "string"}, {"type": "null"}]}, root) == {"string", "null"}
    assert types_of({"enum": ["a", 1, None]}, root) == {"string", "integer", "null"}
    assert (
        types_of({"$ref": "#/$defs/self"}, root) == types_of({"$ref": "#/nothing"}, root) == types_of(5, root) == set()
    )
    for text, kinds, want in (
        ("5", {"integer"}, "5"),
        ("5", {"number"}, "5"),
        ("5", {"string", "null"}, '"5"'),
        ("null", {"string", "null"}, "null"),
        ("None", {"string", "null"}, "null"),
        ("True", {"boolean"}, "true"),
        ("five", {"integer"}, '"five"'),
        ("NaN", {"number"}, '"NaN"'),
        ("[1, 2]", set[str](), "[1, 2]"),
        ("so be it", set[str](), '"so be it"'),
        ('{"a": 1}', {"object", "null"}, '{"a": 1}'),
    ):
        assert converted(text, kinds) == want, text


@pytest.mark.full
def test_random_texts_are_cut_anywhere() -> None:
    """Texts of pieces of all forms, in any order: no error, nothing lost that is no call, and the same however cut."""
    parts = [
        *'{}[]":;,\\ \n<a',
        CALL,
        '"name"',
        "now",
        "get_weather",
        *(part for text in TEMPLATES.values() for part in text.split("{{")),
    ]
    parts += [
        "<tool_call>",
        "</tool_call>",
        "<function=now>",
        "<parameter=a>",
        "</function>",
        "[TOOL_CALLS]",
        "<think>",
    ]
    parts += [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<|channel|>",
        "<|message|>",
        "<|start|>",
        "to=functions.now",
    ]
    rng = random.Random(0)
    for _ in range(400):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(1, 12)))
        for name in all_forms():
            whole = read([text], name, thinking="think")
            assert read(list(text), name, thinking="think") == whole, (name, text)


# (form, text): repeated, each begins what never ends, or is rejected and read again.
ENDLESS = [
    ("hermes", "<tool_call>"),
    ("hermes", '<tool_call>{"a":['),
    ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1'),
    ("qwen3_coder", "<function="),
    ("qwen3_coder", "<tool_call><function=now><parameter="),
    ("llama3_json", "<|python_tag|>"),
    ("mistral", "[TOOL_CALLS]["),
    ("deepseek", "<｜tool▁call▁begin｜>"),
    ("glm45", "<tool_call>now<arg_key>"),
    ("harmony", "<|channel|>"),
]


@pytest.mark.full
@pytest.mark.parametrize("form, text", ENDLESS)
def test_time_grows_with_the_length_of_a_text(form: str, text: str) -> None:
    """100,000 characters in pieces of four, as tokens are, take 0.05 to 0.5 s; by its square it would be minutes."""
    whole = text * (100_000 // len(text))
    for end in ("", "1" * 50_000, " " * 50_000):
        start = time.process_time()
        read([whole[at : at + 4] for at in range(0, len(whole), 4)] + [*end], form)
        assert time.process_time() - start < 10
