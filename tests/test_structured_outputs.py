"""Structured outputs: what a model with random weights writes has the form that was asked for, in every way to ask."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("llguidance")
pytest.importorskip("fastapi")

import jsonschema

from support.serving import MODEL, ask, events_of, save_model, service_of
from torch_infini import LLM, AsyncLLM, SamplingParams, StructuredOutputsParams
from torch_infini.engine import Engine
from torch_infini.models import Llama
from torch_infini.serve import Service

pytestmark = pytest.mark.usefixtures("one_thread")

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(folder, progress=False, max_num_seqs=16)


def asking(seed: int = 0, **form: Any) -> SamplingParams:
    more = {name: form.pop(name) for name in ("n", "logprobs", "max_tokens") if name in form}
    return SamplingParams(seed=seed, structured_outputs=StructuredOutputsParams(**form), **{"max_tokens": 300, **more})


def test_other_forms(llm: LLM) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"regex": r"[a-c]{3}-\d{2,4}"}, r"[a-c]{3}-\d{2,4}"),
        ({"choice": ["yes", 'no"', "ma\\ybe\n"]}, r'yes|no"|ma\\ybe\n'),
        ({"grammar": 'start: "<" NAME ">"\nNAME: /[a-z]{1,5}/'}, r"<[a-z]{1,5}>"),
        ({"grammar": 'start: "call " %json {"type": "boolean"}'}, r"call (true|false)"),
    ]
    params = [asking(seed, **form) for form, _ in cases for seed in range(3)]
    outputs = llm.generate([[5, 6]] * len(params), params, use_tqdm=False)
    patterns = [pattern for _, pattern in cases for _ in range(3)]
    for output, pattern in zip(outputs, patterns, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        assert re.fullmatch(pattern, output.outputs[0].text), output.outputs[0].text
    text = llm.generate([[5]], asking(1, json_object=True, max_tokens=400), use_tqdm=False)[0].outputs[0]
    assert text.text.startswith("{") and (text.finish_reason == "length" or isinstance(json.loads(text.text), dict))
    compact = (
        llm.generate([[5]], asking(1, json=PERSON, disable_any_whitespace=True), use_tqdm=False)[0].outputs[0].text
    )
    assert compact == json.dumps(json.loads(compact), separators=(",", ":"), ensure_ascii=False)


def tokens_of(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[list[int]]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [[list(one.token_ids) for one in output.outputs] for output in outputs]


def test_tokens_do_not_depend_on_the_batch(folder: Path, llm: LLM) -> None:
    """Alone, among requests without a form, with several samples, on a cache that preempts, with reused prefixes."""
    prompt = list(range(1, 40))
    params: list[SamplingParams] = []
    for seed in range(12):
        form = {"json": PERSON} if seed % 3 == 0 else {"regex": "[ab]{1,90}c"}
        params.append(
            SamplingParams(seed=seed, max_tokens=60) if seed % 3 == 1 else asking(seed, n=1 + seed % 2, **form)
        )
    alone = [tokens_of(llm, [prompt], [one])[0] for one in params]
    assert tokens_of(llm, [prompt] * len(params), params) == alone
    small = LLM(folder, progress=False, max_num_seqs=8, cache_blocks=26, block_size=8)
    assert tokens_of(small, [prompt] * len(params), params) == alone
    assert small.engine.metrics().preemptions > 0
    eager = LLM(folder, progress=False, enforce_eager=True, enable_prefix_caching=False)
    assert tokens_of(eager, [prompt] * len(params), params) == alone


def test_log_probabilities_are_of_what_may_follow(llm: LLM) -> None:
    output = llm.generate([[1, 2]], asking(3, choice=["a", "b"], logprobs=3), use_tqdm=False)[0].outputs[0]
    assert output.text in ("a", "b") and output.token_logprobs is not None
    first = output.token_logprobs[0]
    assert sum(torch.tensor([logprob for _, logprob in first.top]).exp()).item() == pytest.approx(1, abs=1e-5)


def test_an_interrupted_step_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence that is restarted from its tokens is again where it was in its grammar."""
    llm = LLM(folder, progress=False)
    expected = tokens_of(llm, [[1, 2, 3]], [asking(7, json=PERSON)])[0]
    engine = llm.engine
    id = engine.add([1, 2, 3], asking(7, json=PERSON))
    for _ in range(4):
        engine.step()
    run = engine._runner.run
    monkeypatch.setattr(engine._runner, "run", lambda *args: (run(*args), (_ for _ in ()).throw(KeyboardInterrupt))[0])
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.undo()
    outputs = {}
    while engine.has(id):
        outputs.update({output.request_id: output for output in engine.step()})
    assert [list(one.token_ids) for one in outputs[id].outputs] == expected


def test_a_row_that_cannot_go_on_ends_alone(llm: LLM) -> None:
    letters = llm.engine.prompts.encode("z")
    stuck = SamplingParams(
        allowed_token_ids=letters, max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["a"])
    )
    outputs = llm.generate([[1], [1]], [stuck, asking(0, choice=["b"])], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason == "error" and "must" in (outputs[0].outputs[0].error or "")
    assert outputs[1].outputs[0].text == "b"


def test_a_form_that_is_too_complex_ends_alone(llm: LLM) -> None:
    """It may only be found while the text is written."""
    vast = asking(0, regex="(((a|b|ab){1,1000}){1,1000}){1,1000}c", max_tokens=64)
    outputs = llm.generate([[1], [1]], [vast, asking(0, choice=["b"])], use_tqdm=False)
    assert outputs[0].outputs[0].finish_reason in ("error", "length", "stop")
    assert outputs[1].outputs[0].text == "b"


BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "one of json, regex, choice, grammar, json_object must be given, got none of them"),
    ({"json": {}, "regex": "a"}, "must be given, got json and regex"),
    ({"json": "{"}, r"json must be a JSON schema, an object in JSON, got '\{'"),
    ({"json": [1]}, r"json must be a JSON schema, an object, got \[1\]"),
    ({"json": {"a": {1, 2}}}, "json must have values that JSON can hold"),
    ({"json": json.loads("[" * 70 + "]" * 70)}, "json must be a JSON schema, an object"),
    ({"json": {"x": json.loads("[" * 70 + "]" * 70)}}, "json must be nested at most 64 deep, got more"),
    ({"json": {"enum": ["a" * 300_000]}}, "json must have at most 262144 bytes"),
    ({"regex": ""}, "regex must be a string that is not empty, got ''"),
    ({"regex": "\ud800"}, "regex must be text that UTF-8 can encode"),
    ({"choice": "ab"}, "choice must be texts, at least one, got 'ab'"),
    ({"choice": ["a", ""]}, "choice must be texts, at least one"),
    ({"choice": []}, r"choice must be texts, at least one, got \[\]"),
    ({"json_object": 3}, "json_object must be True or False, got 3"),
    (
        {"regex": "a", "whitespace_pattern": " "},
        "whitespace_pattern must be None where there is no JSON with white space",
    ),
]
COMPILED: list[tuple[dict[str, Any], str]] = [
    ({"json": {"type": "strin"}}, "json must be a form that texts can have, got an error: .*strin"),
    ({"json": {"type": "object", "allOf": [{"type": "string"}, {"type": "integer"}]}}, "json must be a form .* got"),
    ({"json": {"$ref": "#/$defs/none"}}, "json must be a form that texts can have, got"),
    ({"regex": "(("}, "regex must be a form that texts can have, got an error"),
    ({"regex": r"(?=a)b"}, "regex must be a form that texts can have, got an error"),
    ({"grammar": "start: x"}, "grammar must be a form that texts can have, got an error: .*x"),
]


@pytest.mark.parametrize(("form", "rule"), BAD)
def test_forms_that_are_none(form: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^torch_infini.StructuredOutputsParams: .*{rule}"):
        StructuredOutputsParams(**form)


@pytest.mark.parametrize(("form", "rule"), COMPILED)
def test_forms_that_no_text_can_have(llm: LLM, form: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=f"^torch_infini.StructuredOutputsParams: {rule}"):
        llm.generate([[1]], asking(**form), use_tqdm=False)


def test_settings_that_contradict_a_form(folder: Path) -> None:
    with pytest.raises(ValueError, match="ignore_eos must be False with structured_outputs, which end by themselves"):
        SamplingParams(ignore_eos=True, structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ValueError, match="structured_outputs must be StructuredOutputsParams or None, got dict"):
        SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    bare = Engine(Llama.from_pretrained(folder, progress=False))
    with pytest.raises(ValueError, match="structured_outputs must be None where there is no tokenizer"):
        bare.add([1], asking(regex="a"))


def test_without_llguidance(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    fresh = LLM(folder, progress=False)
    with pytest.raises(ImportError, match=r"need llguidance: pip install 'torch_infini\[structured\]'"):
        fresh.generate([[1]], asking(regex="a"), use_tqdm=False)
    assert fresh.generate([[1]], SamplingParams(max_tokens=2), use_tqdm=False)[0].outputs[0].token_ids


# ---- the server ----


@pytest.fixture(scope="module")
def service(folder: Path) -> Iterator[Service]:
    llm = AsyncLLM(folder, progress=False)
    yield service_of(llm)
    llm.close()


MESSAGES = [{"role": "user", "content": "hi"}]
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def test_response_format(service: Service) -> None:
    named = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    body = {"model": MODEL, "seed": 3, "max_tokens": 200, "response_format": named}
    for path, more in ((CHAT, {"messages": MESSAGES}), (COMPLETION, {"prompt": "x"})):
        answer = ask(service, "POST", path, json={**body, **more})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] if path == CHAT else choice["text"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(text), PERSON)
        events = events_of(ask(service, "POST", path, json={**body, **more, "stream": True}).text)
        parts = [event["choices"][0] for event in events if event["choices"]]
        streamed = "".join(part["delta"].get("content") or "" if path == CHAT else part["text"] for part in parts)
        assert streamed == text
    for form in ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "any"}}):
        answer = ask(service, "POST", CHAT, json={**body, "messages": MESSAGES, "response_format": form})
        assert answer.status_code == 200
    for form, texts in (({"choice": ["one", "two"]}, "one|two"), ({"regex": "[xy]{2}"}, "[xy]{2}")):
        more = {"response_format": None, "structured_outputs": form, "n": 2}
        answer = ask(service, "POST", CHAT, json={**body, "messages": MESSAGES, **more})
        assert all(re.fullmatch(texts, choice["message"]["content"]) for choice in answer.json()["choices"])


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "xml"}}, "response_format.type", "must be"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "must be given, got none"),
    (
        {"response_format": {"type": "text", "json_schema": {"name": "a"}}},
        "response_format.json_schema",
        "must be null where type is text",
    ),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}}, "json_schema.name", "must match"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "strin"}}}},
        "response_format.json_schema.schema",
        "must be a form that texts can have",
    ),
    ({"structured_outputs": {}}, "structured_outputs", "must be given, got none of them"),
    ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex", "must be a form that texts can have"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "got regex and choice"),
    ({"structured_outputs": {"other": 1}}, "structured_outputs.other", "must be a field of this request"),
    (
        {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
        "structured_outputs",
        "must be null where response_format asks for a form",
    ),
]


@pytest.mark.parametrize(("fields", "param", "rule"), WRONG)
def test_bodies_that_are_refused(service: Service, fields: dict[str, Any], param: str, rule: str) -> None:
    answer = ask(service, "POST", CHAT, json={"messages": MESSAGES, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and param in error["param"] and rule in error["message"], error


# A grammar of llama.cpp, and whether it takes texts.
JSON_GBNF = r"""# JSON, with a comment
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*   # more of them
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
GBNF = [
    (JSON_GBNF, ['{"a": [1, 2.5e3, "x\\n\\u00e9"], "b": {}}', "{}", '{"é": null }'], ["[1]", '{"a" 1}', '{"a": tru}']),
    (r'root ::= [a-z]+ "b"', ["ab", "abb"], ["b", "a", ""]),
    (r'root ::= "\u004142" .', ["A42\n", "A42x", "A42😀"], ["A42", "\u41422x"]),
    (r'root ::= "\U0001F600\x41\t\[\]"', ["😀A\t[]"], ["😀A"]),
    ('root ::= x "="  x ws "\\n"+\nx ::= [a-z]+ | "(" x ")"\nws ::= [ ]*', ["a=b\n", "((a))=b  \n\n"], ["=b\n"]),
    ('root ::= root "a" | "b"', ["b", "baaa"], ["a"]),
    ('root ::= a\na ::= b?\nb ::= "x"*', ["", "x", "xxx"], ["y"]),
    (r'root ::= [^] [\]b-] "z"', ["\n]z", "x-z", "xbz"], ["xaz"]),
    ('root ::= "/" [/] "\\"" [^/"]', ['//"x'], ['//"/']),
    ('root ::= "a"{2,3} "b"{ 2 } "c"{1,}', ["aabbc", "aaabbccc"], ["abbc"]),
    ('root ::= ( "a"\n | "b" )\n\r\n\nx ::= "😀"', ["a", "b"], ["c"]),
    ('root ::= r1 start\nr1 ::= "x"\nstart ::= "y" | "z" start\n# the end', ["xy", "xzzy"], ["x"]),
    ('a-b ::= "x" | "(" root ")"\nroot ::= a-b a-b', ["xx", "(xx)x"], ["x"]),
    ('root ::= "a" | "b" a | |\n"d"\na ::= root', ["a", "ba", "", "d"], ["c"]),
]


@pytest.mark.parametrize(("grammar", "taken", "refused"), GBNF, ids=range(len(GBNF)))
def test_grammars_of_llama_cpp(grammar: str, taken: list[str], refused: list[str], llm: LLM) -> None:
    engine = llm.engine
    tokenizer = engine.tokenizer
    assert tokenizer is not None

    def takes(text: str) -> bool:
        matcher = engine.compile_grammar(SamplingParams(structured_outputs=StructuredOutputsParams(grammar=grammar)))
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        inner = matcher._matcher
        return inner.try_consume_tokens(tokens) == len(tokens) and inner.is_accepting()

    assert [takes(text) for text in taken] == [True] * len(taken)
    assert [takes(text) for text in refused] == [False] * len(refused)


@pytest.mark.parametrize("seed", range(6))
def test_texts_of_a_grammar_of_llama_cpp(seed: int, llm: LLM) -> None:
    output = llm.generate(["a"], asking(seed, grammar=JSON_GBNF))[0].outputs[0]
    if output.finish_reason == "stop":
        assert isinstance(json.loads(output.text), dict)


BAD_GBNF = [
    ('start ::= "a"', "grammar must define the rule root, got none"),
    ("root ::= b", "grammar must have names of rules that it defines, got 'b' in line 1"),
    ('root ::= "a"\nroot ::= "b"', "grammar must have one definition of each rule, got 'root' in line 2"),
    ('root ::= "a', "grammar must have rules of llama.cpp's form, got '\"' in line 1"),
    ('root ::= "\\q"', r"grammar must have the escapes \n \r"),
    ('root ::= "\\ud800"', r"grammar must have the escapes \n \r"),
    ('root ::= "\\U00110000"', r"grammar must have the escapes \n \r"),
    ('root ::= "\\x4"', r"grammar must have the escapes \n \r"),
    ("root ::= [", "grammar must have rules of llama.cpp's form, got '['"),
    ("root ::= []", "grammar must have at least one character in [...]"),
    ("root ::= [z-a]", "grammar must have ranges from the lower character to the higher, got '[z-a]'"),
    ('root ::= ("a"', "grammar must have a ) for each (, got the end in line 1"),
    ('root ::= "a")', "grammar must have a line break at the end of a rule, got ')'"),
    ('root ::= "a" ::=', "grammar must have a line break at the end of a rule, got '::='"),
    ('root ::= "a"**', "grammar must have one repetition of each part, got '*'"),
    ('root ::= *"a"', "grammar must have a line break at the end of a rule, got '*'"),
    ('root ::= "a"{,3}', "grammar must have rules of llama.cpp's form, got '{'"),
    ('root ::= "a"{99999}', "grammar must have rules of llama.cpp's form, got '{'"),
    ("root ::= <think>", "grammar must have rules of llama.cpp's form, got '<'"),
    ('root ::= "a"\n"b"', "grammar must have the name of a rule, got '\"b\"' in line 2"),
    ("root ::= " + "(" * 100000, "grammar must have groups nested at most 64 deep"),
    ('root ::= "a"{1,' + " " * 200000 + "}}", "grammar must have"),
    ("#" * 200000 + "\nroot", "grammar must be a form that texts can have"),  # as Lark's
    ("root ::= root", "grammar must be a form that texts can have"),
]


@pytest.mark.parametrize(("grammar", "rule"), BAD_GBNF, ids=range(len(BAD_GBNF)))
def test_bad_grammars_of_llama_cpp(grammar: str, rule: str, service: Service) -> None:
    """As the field `grammar` of both routes: 400 with a sentence, soon."""
    began = time.monotonic()
    for path, body in both_bodies(grammar):
        answer = ask(service, "POST", path, json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "grammar") and error["message"].startswith(rule), error
    assert time.monotonic() - began < 20


def both_bodies(grammar: Any) -> list[tuple[str, dict[str, Any]]]:
    more = {"grammar": grammar, "max_tokens": 40, "seed": 1}
    message = {"role": "user", "content": "a"}
    return [("/v1/completions", {"prompt": "a", **more}), ("/v1/chat/completions", {"messages": [message], **more})]


@pytest.mark.parametrize("grammar", ['root ::= "yes" | "no"', 'start: "yes" | "no"'])
def test_the_field_grammar(grammar: str, service: Service) -> None:
    for path, body in both_bodies(grammar):
        choice = ask(service, "POST", path, json=body).json()["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text in ("yes", "no") and choice["finish_reason"] == "stop"
        assert ask(service, "POST", path, json={**body, "grammar": ""}).status_code == 200
        for field in ({"response_format": {"type": "json_object"}}, {"structured_outputs": {"regex": "a"}}):
            error = ask(service, "POST", path, json={**body, **field}).json()["error"]
            assert error["param"] == "grammar" and "grammar must be null where" in error["message"]
        for value in (5, ["a"], {}, "\ud800", "a" * 300_000):
            data = json.dumps({**body, "grammar": value})
            answer = ask(service, "POST", path, content=data, headers={"content-type": "application/json"})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "grammar")


CHAINS = {  # by form: a chain of so many rules or references, at most 256 KiB
    "grammar": lambda: "start: a0\n" + "\n".join(f"a{i}: a{i + 1}" for i in range(15000)) + '\na15000: "x"',
    "json": lambda: {
        "$ref": "#/$defs/0",
        "$defs": {**{f"{i}": {"$ref": f"#/$defs/{i + 1}"} for i in range(7000)}, "7000": {"const": 1}},
    },
}


@pytest.mark.full  # a process each
@pytest.mark.parametrize("form", CHAINS)
def test_long_chains_do_not_end_the_process(form: str, folder: Path) -> None:
    """In a process of its own: what fails here is its end."""
    code = f"""
from torch_infini import LLM, SamplingParams, StructuredOutputsParams
from tests.test_structured_outputs import CHAINS
form = StructuredOutputsParams({form}=CHAINS["{form}"]())
llm = LLM({str(folder)!r}, progress=False)
print("text", llm.generate(["a"], SamplingParams(max_tokens=4, structured_outputs=form))[0].text)
"""
    root = Path(__file__).resolve().parent.parent
    path = os.pathsep.join([str(root), str(root / "tests")])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.split() == ["text", {"grammar": "x", "json": "1"}[form]]
