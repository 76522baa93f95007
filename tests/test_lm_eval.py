"""lm-evaluation-harness: its model "infini", and its local-completions on our server, against transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("lm_eval")

import lm_eval
from lm_eval.tasks import TaskManager

import torch_infini_autoload
from support.serving import save_model, service_of, serving
from torch_infini import AsyncLLM, SamplingParams
from torch_infini.integrations.lm_eval import InfiniLM, register
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parent.parent
TOLERANCE = 1e-3  # of the sum of a text's log-probabilities in float32
LENGTH = 64  # the most tokens of a prompt and its output in the tests of windows

DOCUMENTS = [
    {"question": "The colour of the sky is", "choices": [" blue", " a fish", " 7"], "answer": 0, "text": "One day."},
    {"question": "naïve café ☕:", "choices": [" yes", " no", " perhaps"], "answer": 2, "text": "A longer text, é."},
    {"question": "x", "choices": ["y", "zz", "w"], "answer": 1, "text": "abc " * 20},
]
TASKS = {
    "tiny_choice": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "tiny_text": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "byte_perplexity"}],
    },
    "tiny_answer": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["w1", "\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has a token at the end of texts."""
    path = save_model(tmp_path_factory.mktemp("model"))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer["added_tokens"] = [{"id": 319, "content": "<end>", **special}]
    tokenizer["model"]["vocab"] = {text: id for text, id in tokenizer["model"]["vocab"].items() if id != 319}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps({**settings, "eos_token": "<end>"}))
    return path


@pytest.fixture(scope="module")
def lm(folder: Path) -> InfiniLM:
    torch.set_num_threads(1)
    return InfiniLM(str(folder), max_length=LENGTH)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, and of their data."""
    path = tmp_path_factory.mktemp("tasks")
    (path / "data.json").write_text("\n".join(map(json.dumps, DOCUMENTS)))
    data = {"data_files": {"test": str(path / "data.json")}, "cache_dir": str(path / "cache")}
    for name, fields in TASKS.items():
        whole = {"task": name, "dataset_path": "json", "dataset_kwargs": data, "test_split": "test", **fields}
        (path / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return path


def requests(*arguments: Sequence[Any]) -> list[Any]:
    return [SimpleNamespace(args=tuple(one), task_name="test") for one in arguments]


@torch.no_grad()
def logprobs(tokens: list[int]) -> Tensor:
    """[tokens - 1, vocabulary]: transformers' log-probabilities of what follows each token but the last."""
    model: Any = random_model("llama")
    logits: Tensor = model(torch.tensor([tokens])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def score(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether it is the likeliest."""
    rows = logprobs(context + continuation)[len(context) - 1 :]
    likeliest = rows.argmax(-1).tolist() == continuation
    return sum(float(row[token]) for row, token in zip(rows, continuation, strict=True)), likeliest


def test_loglikelihoods_are_those_of_transformers(lm: InfiniLM) -> None:
    encode = lm.tok_encode
    (greedy,) = lm.llm.generate(["The sky"], SamplingParams.greedy(max_tokens=3, detokenize=False))
    likely = lm.tokenizer.decode(greedy.token_ids)
    cases = [("The sky", " is"), ("", "alone"), ("ends in spaces  ", "word"), ("naïve ☕", " é"), ("The sky", likely)]
    found = lm.loglikelihood(requests(*cases))
    wanted = [
        (encode("The sky"), encode(" is")),
        ([319], encode("alone")),  # the prefix token is that at the end of texts
        (encode("ends in spaces"), encode("  word")),
        (encode("naïve ☕"), encode(" é")),
        (encode("The sky"), encode(likely)),
    ]
    for (logprob, is_greedy), pair in zip(found, wanted, strict=True):
        want, wants_greedy = score(*pair)
        assert logprob == pytest.approx(want, abs=TOLERANCE) and is_greedy == wants_greedy


def test_likeliest_continuations_are_found(lm: InfiniLM) -> None:
    prompt = [70, 80, 90]
    (greedy,) = lm.llm.generate([prompt], SamplingParams.greedy(max_tokens=5))
    last = greedy.token_ids[:-1] + [(greedy.token_ids[-1] + 1) % 320]
    found = lm._loglikelihood_tokens([(None, prompt, greedy.token_ids), (None, prompt, last)])
    assert [is_greedy for _, is_greedy in found] == [True, False]
    assert found[0][0] == pytest.approx(score(prompt, greedy.token_ids)[0], abs=TOLERANCE)


def test_long_contexts_are_cut_at_their_beginning(lm: InfiniLM, caplog: pytest.LogCaptureFixture) -> None:
    context, continuation = [int(t) for t in torch.arange(200) % 250], [5, 6, 7]
    (result,) = lm._loglikelihood_tokens([(None, context, continuation)])
    assert "1 texts have more than 63 tokens" in caplog.text
    assert result[0] == pytest.approx(score((context + continuation)[-63:-3], continuation)[0], abs=TOLERANCE)
    # A continuation that is too long itself: what is scored of it has the token before it as context.
    (result,) = lm._loglikelihood_tokens([(None, [1], context)])
    assert result[0] == pytest.approx(score(context[-63:-62], context[-62:])[0], abs=TOLERANCE)


@pytest.mark.parametrize("length", [0, 1, 61, 62, 63, 150])
def test_rolling_windows_score_every_token_once(length: int, lm: InfiniLM) -> None:
    """Windows have as much context as the model takes."""
    text = "".join(chr(97 + at * 7 % 26) for at in range(length))
    tokens = lm.tok_encode(text)
    assert len(tokens) == length
    want, size = 0.0, LENGTH - 2
    for end in [*range(size, length, size), length] if length else []:
        begin = (end - 1) // size * size
        whole = [319, *tokens]
        context = whole[max(end - size, 0) : begin + 1]
        want += score(context, tokens[begin:end])[0]
    found = lm.loglikelihood_rolling(requests(["ab"], [text], ["c"]))
    assert found[1] == pytest.approx(want, abs=TOLERANCE)
    assert found[0] == pytest.approx(score([319], lm.tok_encode("ab"))[0], abs=TOLERANCE)


def test_answers(lm: InfiniLM, caplog: pytest.LogCaptureFixture) -> None:
    context = "The sky is"
    (plain,) = lm.llm.generate([context], SamplingParams.greedy(max_tokens=20))
    stop = plain.text[5:7]
    many = {"do_sample": True, "temperature": 1.0, "max_gen_toks": 8, "seed": 3}
    found = lm.generate_until(
        requests(
            (context, {"until": [stop], "max_gen_toks": 20}),
            (context, {"until": "", "max_new_tokens": 20}),
            (context, {"do_sample": False, "temperature": 0.9, "max_tokens": 20}),
            (context, many),
            (context, many),
        )
    )
    assert found[0] == plain.text.partition(stop)[0] != plain.text
    assert found[1] == found[2] == plain.text
    assert found[3] == found[4] != plain.text[: len(found[3])]
    caplog.clear()
    (cut,) = lm.generate_until(requests(("abc" * 50, {"max_gen_toks": 10})))
    assert "a context of 150 tokens is cut to its last 54" in caplog.text
    (want,) = lm.llm.generate([("abc" * 50)[-54:]], SamplingParams.greedy(max_tokens=10))
    assert cut == want.text
    (whole,) = lm.generate_until(requests(("abc", {"max_gen_toks": 1000})))
    assert len(whole) > 0
    for bad in ({"beams": 4}, {"top_p": 2}, {"max_gen_toks": 0}):
        with pytest.raises(ValueError, match="generation_kwargs must be those of SamplingParams"):
            lm.generate_until(requests((context, bad)))
    assert lm.generate_until([]) == [] and lm.loglikelihood([]) == []


def test_answers_after_reasoning(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop strings within the reasoning do not end an answer."""
    lm = InfiniLM(str(folder), think_end_token="</think>")
    seen: list[SamplingParams] = []

    def outputs(prompts: Any, params: list[SamplingParams], *more: Any) -> Iterator[Any]:
        seen.extend(params)
        yield SimpleNamespace(text="one\n\ntwo</think>\nthree\n\nfour")

    monkeypatch.setattr(lm, "_outputs", outputs)
    assert lm.generate_until(requests(("x", {"until": ["\n\n"]}))) == ["three"]
    assert seen[0].stop == () and seen[0].max_tokens == 256


def test_conversations_and_caches(lm: InfiniLM, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    assert lm.apply_chat_template(messages) == "user: Hi\nassistant:"
    assert lm.tokenizer_name and lm.chat_template(True) == lm.tokenizer.chat_template
    kept: list[tuple[str, Any, Any]] = []
    hook = SimpleNamespace(add_partial=lambda *entry: kept.append(entry))
    monkeypatch.setattr(lm, "cache_hook", hook)
    results = lm.loglikelihood(requests(("a", "b"))), lm.loglikelihood_rolling(requests(["text"]))
    answer = lm.generate_until(requests(("a", {"max_gen_toks": 2})))
    assert kept == [
        ("loglikelihood", ("a", "b"), results[0][0]),
        ("loglikelihood_rolling", ("text",), results[1][0]),
        ("generate_until", ("a", {"max_gen_toks": 2}), answer[0]),
    ]


def test_what_a_model_must_have(folder: Path, tmp_path: Path, lm: InfiniLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="max_length and max_model_len must be equal, got 8 and 9"):
        InfiniLM(str(folder), max_length=8, max_model_len=9)
    with pytest.raises(ValueError, match="max_gen_toks must be an integer of at least 1, got 0"):
        InfiniLM(str(folder), max_gen_toks=0)
    with pytest.raises(ValueError, match="arguments must be LLM's"):
        InfiniLM(str(folder), colour="blue")
    random_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="pretrained must have a tokenizer"):
        InfiniLM(str(tmp_path))
    bare = InfiniLM(str(save_model(tmp_path / "bare")))
    with pytest.raises(ValueError, match="prefix_token_id must be given"):
        bare.loglikelihood(requests(("", "text")))
    assert InfiniLM(str(tmp_path / "bare"), prefix_token_id=7).prefix_token_id == 7
    run = lm.llm.engine._runner.run
    monkeypatch.setattr(lm.llm.engine._runner, "run", lambda *_: run("no chunks"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="infini: torch_infini.Engine: the step failed"):
        lm.loglikelihood(requests(("a", "b")))


def evaluate(tasks: Path, model: str, arguments: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the responses to every document of every task."""
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    results = lm_eval.simple_evaluate(
        model=model, model_args=arguments, tasks=list(TASKS), task_manager=manager, device="cpu", bootstrap_iters=0
    )
    assert set(results["results"]) == set(TASKS)
    return {
        name: [sample["resps"] for sample in sorted(results["samples"][name], key=lambda sample: sample["doc_id"])]
        for name in TASKS
    }


def check_same(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    assert len(wanted["tiny_choice"]) == len(DOCUMENTS)
    for mine, theirs in zip(found["tiny_choice"], wanted["tiny_choice"], strict=True):
        assert len(mine) == len(theirs) == 3
        for ((logprob, is_greedy),), ((want, wants_greedy),) in zip(mine, theirs, strict=True):
            assert logprob == pytest.approx(want, abs=TOLERANCE) and is_greedy == wants_greedy
    flat = lambda value: flat(value[0]) if isinstance(value, (list, tuple)) else value
    assert list(map(flat, found["tiny_text"])) == pytest.approx(list(map(flat, wanted["tiny_text"])), abs=TOLERANCE)
    assert found["tiny_answer"] == wanted["tiny_answer"]


def test_tasks_have_the_responses_of_the_harness_own_model(folder: Path, tasks: Path) -> None:
    """As a model of the harness, and over HTTP, as its model "hf" with transformers."""
    pytest.importorskip("accelerate")
    wanted = evaluate(tasks, "hf", {"pretrained": str(folder), "dtype": "float32"})
    assert all(text for ((text,),) in wanted["tiny_answer"])
    register()
    check_same(evaluate(tasks, "infini", {"pretrained": str(folder)}), wanted)
    pytest.importorskip("tenacity")
    with closing(AsyncLLM(folder)) as llm, serving(service_of(llm)) as url:
        server = {"base_url": f"{url}/v1/completions", "model": "small", "tokenizer": str(folder), "num_concurrent": 3}
        more = {"tokenizer_backend": "huggingface", "max_length": 512}
        check_same(evaluate(tasks, "local-completions", {**server, **more}), wanted)
        whole = evaluate(tasks, "local-completions", {**server, **more, "num_concurrent": 1, "batch_size": 4})
        check_same(whole, wanted)


@pytest.mark.full
@pytest.mark.parametrize("module", ["lm_eval", "torch_infini.integrations.lm_eval"])
def test_command_line(module: str, folder: Path, tasks: Path, tmp_path: Path) -> None:
    """lm_eval finds the model by its name; where torch_infini is not installed, with the command of ours."""
    installed = {entry.value for entry in entry_points(group="torch.backends")}
    if module == "lm_eval" and "torch_infini_autoload:autoload" not in installed:
        pytest.skip("torch_infini is not installed: torch finds no entry point")
    model = ["--model", "infini", "--model_args", f"pretrained={folder},max_num_seqs=2"]
    what = ["--tasks", "tiny_choice", "--include_path", str(tasks), "--output_path", str(tmp_path / "results.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", module, *model, *what]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.rglob("results*.json")
    results = json.loads(written.read_text())
    assert 0 <= results["results"]["tiny_choice"]["acc,none"] <= 1 and results["config"]["model"] == "infini"


def test_import_of_torch_survives_another_lm_eval(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = ModuleType("lm_eval.api.registry")
    monkeypatch.setitem(sys.modules, other.__name__, other)
    torch_infini_autoload.autoload()  # without a registry
    other.model_registry = {}  # type: ignore[attr-defined]  # with one that cannot register
    torch_infini_autoload.autoload()
    assert "torch_infini: lm_eval has no model infini: AttributeError" in capsys.readouterr().err


def test_without_the_harness() -> None:
    code = "import sys; sys.modules['lm_eval'] = None\nimport torch_infini.integrations.lm_eval"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT)
    assert "must be installed (pip install 'torch_infini[eval]')" in done.stderr.splitlines()[-1]
