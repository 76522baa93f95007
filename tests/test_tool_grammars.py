"""Grammars of tool calls: they take what chat templates write, and what they generate is read back as valid calls."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("llguidance")

import llguidance

from support.tool_forms import ARGUMENTS, HARMONY, TEMPLATES, TOOLS, read, rendered
from torch_infini.engine import StructuredOutputsParams
from torch_infini.serve.parsers import all_forms, all_thinkings
from torch_infini.serve.reading import Reading

MARKERS = {name: form.tokens for name, form in all_forms().items()}
MARKERS["qwen3_coder"] = ("<tool_call>", "</tool_call>")
KINDS = ("special", "added", "text")  # what markers are for the tokenizer


@cache
def tokenizer_of(name: str, kind: str) -> tuple[Any, Any]:
    """A tokenizer of bytes and a form's markers, and llguidance's."""
    from llguidance.hf import from_tokenizer
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    texts = [*MARKERS[name], "<think>", "</think>"] if kind != "text" else []
    tokenizer.add_tokens([AddedToken(text, special=kind == "special", normalized=False) for text in texts])
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    return made, from_tokenizer(made)


def grammar_of(template: str, kind: str, tools: Any = TOOLS, parallel: bool = True, **more: Any) -> str:
    name = template.split()[0]
    tokenizer, of_grammars = tokenizer_of(name, kind)
    added = {str(entry.content): token for token, entry in tokenizer.added_tokens_decoder.items()}
    text = all_forms()[name](TEMPLATES[template]).grammar(tools, parallel, added, **more)
    assert llguidance.LLMatcher.validate_grammar(text, of_grammars) == ""
    return text


def is_accepted(template: str, kind: str, grammar: str, text: str) -> bool:
    tokenizer, of_grammars = tokenizer_of(template.split()[0], kind)
    matcher = llguidance.LLMatcher(of_grammars, grammar)
    tokens = tokenizer.encode(text, add_special_tokens=False)
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


def written(template: str, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the template writes of calls, without what a model need not write."""
    if template == "harmony":
        ((name, arguments),) = calls
        return HARMONY.format(name=name, arguments=json.dumps(arguments, ensure_ascii=False))
    text = rendered(template, calls).replace(', "id": "abcdefghi"', "").replace("[CALL_ID]abcdefghi", "")
    for extra in ("<|python_tag|>", "<|start_header_id|>", "\n<think></think>\n"):
        text = text.replace(extra, "")
    return text.strip()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_templates_write_is_accepted(template: str, kind: str) -> None:
    grammar = grammar_of(template, kind)
    for arguments in ARGUMENTS[:3]:  # those in the order of the schema's members, which the grammar asks for
        call = written(template, [("get_weather", arguments)])
        assert is_accepted(template, kind, grammar, call), call
    assert not is_accepted(template, kind, grammar, "text")
    assert not is_accepted(template, kind, grammar, written(template, [("unknown", {})]))
    assert not is_accepted(template, kind, grammar, written(template, [("get_weather", {"days": 5})]))
    if template != "harmony":
        two = written(template, [("get_weather", {"city": "a"}), ("get_weather", {"city": "b"})])
        assert is_accepted(template, kind, grammar, two)
        assert not is_accepted(template, kind, grammar_of(template, kind, parallel=False), two)


@pytest.mark.parametrize("kind", KINDS)
def test_reasoning_comes_before_the_calls(kind: str) -> None:
    call = written("hermes", [("get_weather", {"city": "a"})])
    think = all_thinkings()["think"]
    grammar = grammar_of("hermes", kind, thinking=think)
    for text in (call, f"<think>\n so <b>\n</think>\n\n{call}"):
        assert is_accepted("hermes", kind, grammar, text), text
    assert not is_accepted("hermes", kind, grammar, f"so</think>{call}")
    begun = grammar_of("hermes", kind, thinking=think, is_thinking=True)
    assert is_accepted("hermes", kind, begun, f"so\n</think>\n\n{call}")
    assert not is_accepted("hermes", kind, begun, call)
    call = written("harmony", [("get_weather", {"city": "a"})])
    text = f"<|channel|>analysis<|message|>so<|end|><|start|>assistant{call}"
    assert is_accepted("harmony", kind, grammar_of("harmony", kind), text)


def test_a_named_function_is_the_only_call() -> None:
    tokenizer, _ = tokenizer_of("hermes", "added")
    added = {str(entry.content): token for token, entry in tokenizer.added_tokens_decoder.items()}
    reading = Reading(all_forms()["hermes"](), TOOLS, all_thinkings()["think"])
    now, other = written("hermes", [("now", {})]), written("hermes", [("get_weather", {"city": "a"})])
    grammar = str(reading.form_of_call(("now",), added).grammar)
    assert is_accepted("hermes", "added", grammar, f"<think>so</think>\n\n{now}")
    assert not any(is_accepted("hermes", "added", grammar, text) for text in (other, f"{now}\n{now}"))
    grammar = str(reading.form_of_call("required", added).grammar)
    assert all(is_accepted("hermes", "added", grammar, text) for text in (now, other, f"{now}\n{other}"))
    grammar = str(reading._replace(parallel=False).form_of_call("required", added).grammar)
    assert is_accepted("hermes", "added", grammar, other)
    assert not is_accepted("hermes", "added", grammar, f"{now}\n{other}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", [name for name in TEMPLATES if name != "harmony"])
def test_calls_or_json(template: str, kind: str) -> None:
    """Either begins the answer, also where both are objects in JSON with the same first member."""
    tokenizer, of_grammars = tokenizer_of(template.split()[0], kind)
    added = {str(entry.content): token for token, entry in tokenizer.added_tokens_decoder.items()}
    reading = Reading(all_forms()[template.split()[0]](TEMPLATES[template]), TOOLS, all_thinkings()["think"])
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "size": {"type": "integer"}}}
    call = written(template, [("get_weather", {"city": "a"})])
    two = written(template, [("get_weather", {"city": "a"}), ("get_weather", {"city": "b"})])
    texts = ['{"name": "Ann", "size": 3}', '{"name": "get"}', '{ "size" : 3 }']
    for form in (StructuredOutputsParams(json=schema), StructuredOutputsParams(json_object=True)):
        alone, both = (
            reading._replace(parallel=parallel).with_form(form, added)[1].grammar for parallel in (False, True)
        )
        assert llguidance.LLMatcher.validate_grammar(str(both), of_grammars) == ""
        for begin in ("", "<think>so</think>\n\n"):
            for text in (call, *texts):
                assert is_accepted(template, kind, str(alone), begin + text), text
            assert is_accepted(template, kind, str(both), begin + two)
            assert not any(is_accepted(template, kind, str(alone), begin + text) for text in (two, "No.", call + "{}"))
    choice = reading.with_form(StructuredOutputsParams(choice=["yes", "no"]), added)[1].grammar
    assert all(is_accepted(template, kind, str(choice), text) for text in (call, "yes"))


SMALL: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"type": "string", "enum": ["a", "b c"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "text": {"type": "string"},
        "list": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
}


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("template", TEMPLATES)
def test_whatever_is_generated_is_read_back(template: str) -> None:
    """Tokens that are drawn at random of those that the grammar allows."""
    from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask

    name = template.split()[0]
    tokenizer, of_grammars = tokenizer_of(name, "added")
    tools = {"small": SMALL, "none": {"properties": {}, "additionalProperties": False}}
    grammar = grammar_of(template, "added", tools)
    rng = random.Random(0)
    mask = allocate_token_bitmask(1, of_grammars.vocab_size)
    ended = 0
    for _ in range(5):
        matcher = llguidance.LLMatcher(of_grammars, grammar)
        tokens: list[int] = []
        while len(tokens) < 300:
            fill_next_token_bitmask(matcher, mask)
            allowed = [token for token in range(of_grammars.vocab_size) if mask[0, token // 32] >> (token % 32) & 1]
            # Ends of strings and markers, so that texts end; letters of one byte, so that they are text.
            likely = [
                token for token in allowed if token > 255 or tokenizer.decode([token]) in '"}]' or rng.random() < 0.1
            ]
            plain = [token for token in likely or allowed if tokenizer.decode([token]).isascii()]
            tokens.append(rng.choice(plain or allowed))
            if tokens[-1] == tokenizer.eos_token_id:
                break
            assert matcher.consume_token(tokens[-1])
        else:
            continue
        ended += 1
        text = tokenizer.decode(tokens[:-1], clean_up_tokenization_spaces=False)
        got = read([text], name, tools=tools, thinking="harmony" if name == "harmony" else None)
        assert got.content == "" and got.calls, text
        for called, arguments in got.calls:
            check(json.loads(arguments), called)
    assert ended > 1


def check(arguments: dict[str, Any], name: str) -> None:
    if name == "none":
        assert arguments == {}
        return
    assert arguments["kind"] in ("a", "b c") and 0 <= arguments["size"] <= 99
    assert isinstance(arguments.get("text", ""), str)
    assert all(type(value) is bool for value in arguments.get("list", []))
