"""Scripts of tests/infinilm_scripts, as callers of InfiniLM write them, under `run`: their tokens are transformers'.

The model is the demo's in float32, where greedy tokens are exact. `make test-transformers4` takes transformers 4.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch

from support.script_runs import ROOT, Done, python_path, run_here, run_process
from torch_infini.demo import MODEL

TRANSFORMERS = int(metadata.version("transformers").partition(".")[0])

SCRIPTS = ROOT / "tests" / "infinilm_scripts"
PROMPTS = ["def main(args):", "import sys", "class Model(object):"]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)
NEW = 16
pytestmark = pytest.mark.usefixtures("one_thread")


class Reference:
    """transformers' model and tokenizer, and what they make of a prompt."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self.folder = str(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert self.model.dtype == torch.float32
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.eos = self.model.config.eos_token_id
        self.model.generation_config.eos_token_id = None

    def ids(self, prompt: str) -> list[int]:
        return list(self.tokenizer(prompt)["input_ids"])

    def chat_text(self, prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return str(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))

    def chat_ids(self, prompt: str) -> list[int]:
        """Without a second <s>: the template's text is all that the model gets."""
        return list(self.tokenizer(self.chat_text(prompt), add_special_tokens=False)["input_ids"])

    @torch.inference_mode()
    def greedy(self, prompt: list[int], new: int = NEW) -> list[int]:
        """By generate, which here stops at no token."""
        ids = torch.tensor([prompt])
        made = self.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=new)
        tokens = made[0, len(prompt) :].tolist()
        assert len(tokens) == new
        assert len(set(tokens)) > 2, "a model that repeats itself tests little"
        return tokens

    def until_end(self, tokens: list[int]) -> list[int]:
        return tokens[: tokens.index(self.eos) + 1] if self.eos in tokens else tokens

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("model") / "demo"
    AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(MODEL) / name, folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": TEMPLATE}))
    return Reference(folder)


def shown(done: Done) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    return done.shown()


def run(name: str, *arguments: object, **how: Any) -> dict[str, Any]:
    return shown(run_here(SCRIPTS / name, *map(str, arguments), **how))


def joined(*rows: list[int]) -> str:
    return ";".join(",".join(map(str, row)) for row in rows)


def test_static(reference: Reference) -> None:
    """A batch of equally long rows, twice on one engine."""
    ids = [reference.ids(prompt)[:4] for prompt in PROMPTS]
    s = run("static.py", "--model_path", reference.folder, "--prompt", joined(*ids), "--max_new_tokens", NEW)
    assert s["attempt 0"] == s["attempt 1"] == [reference.greedy(row) for row in ids]
    assert s["engine"] == "<InferEngine: DistConfig(tp_device_ids=[0])>" and s["ranks"] == 1
    assert s["q_proj"] == [8 * 32, 256]


def test_static_newer_names(reference: Reference) -> None:
    ids = reference.ids(PROMPTS[0])
    s = run("static_newer.py", reference.folder, joined(ids), NEW)
    expected = reference.greedy(ids)
    assert s["ids"] == expected and s["in pieces"] == expected[:1] and s["cache"] == [1, 128]


def test_paged(reference: Reference) -> None:
    ids = [reference.ids(prompt) for prompt in PROMPTS]
    s = run("paged.py", "--model_path", reference.folder, "--prompt", joined(*ids), "--max_new_tokens", NEW)
    assert s["ids"] == [reference.greedy(row) for row in ids]


def test_paged_newer_names(reference: Reference) -> None:
    ids = [reference.ids(prompt) for prompt in PROMPTS]
    s = run("paged_newer.py", reference.folder, joined(*ids), NEW)
    assert s["ids"] == [reference.greedy(row) for row in ids]
    assert s["paged"] is True and s["blocks"] == [64, 16]


@pytest.mark.full
def test_tensor_parallel(reference: Reference) -> None:
    """Two ranks through the command line, whose workers must not run the script again."""
    ids = [reference.ids(prompt)[:4] for prompt in PROMPTS[:2]]
    arguments = ["--model_path", reference.folder, "--prompt", joined(*ids), "--max_new_tokens", "8", "--tp", "2"]
    s = shown(run_process(SCRIPTS / "static.py", *arguments))
    assert s["attempt 0"] == s["attempt 1"] == [reference.greedy(row, 8) for row in ids]
    assert s["engine"] == "<InferEngine: DistConfig(tp_device_ids=[0, 1])>" and s["ranks"] == 2
    assert s["q_proj"] == [8 * 32 // 2, 256]


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_generate(reference: Reference, cache: str) -> None:
    """Text in, text out; batch_encode_plus is transformers 4's."""
    flags = ["--enable_paged_attn"] if cache == "paged" else []
    s = run("generate.py", "--model_path", reference.folder, "--max_new_tokens", NEW, *flags, "--prompts", *PROMPTS)
    ids = [list(reference.tokenizer(reference.chat_text(prompt))["input_ids"]) for prompt in PROMPTS]
    assert s["prompt ids"] == ids
    shortest = min(map(len, ids))
    expected = [reference.greedy(row[:shortest]) for row in ids]
    assert not any(reference.eos in row for row in expected)
    assert s["ids"] == expected
    assert s["texts"] == [reference.text(row) for row in expected] and s["took time"]
    # What `run` provides for scripts ends with them.
    assert hasattr(reference.tokenizer, "batch_encode_plus") is (TRANSFORMERS < 5)


@pytest.mark.parametrize("flags", [[], ["--enable-paged-attn"]], ids=["static", "paged"])
def test_benchmark(reference: Reference, flags: list[str]) -> None:
    s = run("bench.py", "--model", reference.folder, *flags)
    expected = reference.greedy([(7 * i + 3) % 2048 for i in range(8)], 8)
    assert s["batch 1"] == [expected] and s["batch 2"] == [expected] * 2 and s["tokens/s of batch 2"]


def test_benchmark_without_weights(reference: Reference, tmp_path: Path) -> None:
    """No file of weights is there at all: one warning."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(reference.folder) / name, tmp_path)
    with pytest.warns(UserWarning, match="weight") as caught:
        s = run("bench.py", "--model", tmp_path, "--skip-load")
    assert len([w for w in caught if "weight" in str(w.message)]) == 1
    assert [len(row) for row in s["batch 2"]] == [8, 8] and s["batch 2"][0] == s["batch 2"][1]
    assert all(0 <= token < 2048 for token in s["batch 1"][0])


def test_pure_python(reference: Reference) -> None:
    """A model of the caller's own on infinicore.nn."""
    ids = reference.ids(PROMPTS[0])
    s = run("pure_python.py", reference.folder, joined(ids), NEW)
    assert s["ids"] == reference.greedy(ids)


def test_generation_mixin(reference: Reference) -> None:
    """That model with generate of infinilm's mixin."""
    ids = reference.ids(PROMPTS[1])
    expected = reference.greedy(ids)
    end = expected[4]
    s = run("mixin.py", reference.folder, joined(ids), NEW, end)
    assert s["ids"] == expected and s["text"] == reference.text(expected) and s["by a cache"] == expected[:3]
    until = expected[: expected.index(end) + 1]
    assert s["until end"] == until
    assert s["seen"] == [n for steps in (NEW, len(until), 3) for n in [len(ids)] + [1] * (steps - 1)]


def test_hooks(reference: Reference) -> None:
    """What they see is what transformers' layers give, and watching changes no token."""
    ids = reference.ids(PROMPTS[2])
    s = run("hooks.py", reference.folder, joined(ids), NEW)
    assert s["watched"] == s["plain"] == s["best"] == reference.greedy(ids)
    with torch.inference_mode():
        *states, last = reference.model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    layers = reference.model.config.num_hidden_layers
    assert s["calls"] == {"layer": layers * NEW, "norm": NEW, "lm_head": NEW} and len(states) == layers
    expected = {f"layer {i}": state for i, state in enumerate(states[1:])} | {"norm -1": last}
    for name, state in expected.items():
        torch.testing.assert_close(torch.tensor(s["lengths"][name]), state[0].norm(dim=-1), rtol=1e-4, atol=0)


BAD = {
    "type": "model_type must be one of llama, mistral, qwen2, qwen3, got 'mamba'",
    "missing": "must be those of its config.json, got missing: model.norm.weight",
    "surplus": "must be those of its config.json, got surplus: extra",
    "rows": "input_ids must have 1 to 2 rows (max_batch_size), none of them empty, got [3, 4]",
    "row's length": "total_sequence_lengths must be at most max_cache_len, 32, got 132",
    "lengths": "total_sequence_lengths must leave each row at most 4 new tokens, the columns of input_ids, got 5",
    "block beyond": "block_tables must name blocks from 0 to 3, got 4",
    "block below": "block_tables must name blocks from 0 to 3, got -1",
    "offsets": "total_sequence_lengths must leave as many new tokens as input_offsets, got 4",
    "slots": "slot_mapping must be where block_tables have each new token, got 40",
    "hook": "mlp 0",
    "no token": "data must not be empty, got shape (1, 0)",
    "token": "input_ids[0] must be token ids from 0 to 2047, got 1048576",
    "too long": "prompt must be shorter than 256 tokens, the lesser of max_model_len and the cache's size, got 256",
    "setting": "top_p must be a number from 0 to 1, got -1.0",
}


def test_bad_input(reference: Reference, tmp_path: Path) -> None:
    """A sentence each, and the engines serve on."""
    ids = reference.ids(PROMPTS[0])[:4]
    s = run("bad_input.py", reference.folder, joined(ids), tmp_path)
    assert {name.partition(":")[0] for name in s["said"]} == set(BAD)
    for name, (kind, sentence) in s["said"].items():
        assert kind == ("Stop" if name == "hook" else "ValueError") and BAD[name.partition(":")[0]] in sentence, name
        assert "\n" not in sentence
    expected = reference.greedy(ids, 4)
    assert s["after"] == {"forward": expected[:1], "generate": expected, "llm": expected}


def test_comparison(reference: Reference) -> None:
    """A script that compares with transformers itself, in the names of transformers 4."""
    s = run("compare.py", "--model_path", reference.folder, "--prompt", PROMPTS[1])
    assert s["config"] == ["torch.float32", 10000.0]
    expected = reference.until_end(reference.greedy(reference.ids(PROMPTS[1])))
    assert s["transformers"] == s["infinilm"] == expected and s["same"] is True
    assert hasattr(reference.model.config, "rope_theta") is (TRANSFORMERS < 5)


def test_llm(reference: Reference) -> None:
    s = run("llm.py", "--model_path", reference.folder, "--max_new_tokens", NEW, "--prompts", *PROMPTS)
    expected = [reference.until_end(reference.greedy(reference.ids(prompt))) for prompt in PROMPTS]
    assert s["prompts"] == PROMPTS and s["ids"] == expected
    assert s["texts"] == [reference.text(row) for row in expected]
    assert s["finished"] == s["reasons"] == [True] * 3
    assert s["single"] == expected[0] and s["lengths"] == [3, 5]
    assert s["answer"] == reference.greedy(reference.chat_ids(PROMPTS[0]))[:3]


def test_async_engine(reference: Reference) -> None:
    s = run("async_engine.py", reference.folder, NEW, *PROMPTS)
    assert s["running"] and s["stopped"] and s["finished"] == [True] * 3 and s["aborted after"] == 3
    assert s["ids of requests"] == [f"request-{i}" for i in range(3)]
    for prompt, stream in zip(PROMPTS, s["streams"]):
        expected = reference.until_end(reference.greedy(reference.ids(prompt)))
        assert stream == {"ids": expected, "text": reference.text(expected), "reason": True}
    assert s["by ids"] == reference.until_end(reference.greedy([5, 6, 7, 8]))
    assert s["chat"] == reference.until_end(reference.greedy(reference.chat_ids(PROMPTS[0])))


@pytest.fixture
def port(reference: Reference) -> Iterator[int]:
    """Of a server in a process of its own."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number = int(free.getsockname()[1])
    arguments = ["--model_path", reference.folder, "--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
    arguments += ["--port", str(number), "--max_batch_size", "4", "--num_blocks", "64", "--block_size", "16"]
    line = [sys.executable, "-m", "torch_infini", "run", "-m", "infinilm.server.inference_server", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    server = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and server.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", number)) == 0:
                    break
            time.sleep(0.1)
        assert server.poll() is None, server.communicate()[0]
        yield number
        server.send_signal(signal.SIGTERM)
        said = server.communicate(timeout=60)[0]
        assert server.returncode in (0, -signal.SIGTERM) and "Traceback" not in said, said
    finally:
        server.kill()
        server.wait()


@pytest.mark.full
def test_server(reference: Reference, port: int) -> None:
    """A streaming client in plain Python; then SIGTERM ends the server."""
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "client.py"), str(port), PROMPTS[0], str(NEW)], capture_output=True, text=True
    )
    s = shown(Done(done.stdout, done.stderr, done.returncode))
    assert s["health"][0] == 200 and s["models"] == [200, "list", 1]
    tokens = reference.greedy(reference.chat_ids(PROMPTS[0]))
    assert reference.eos not in tokens
    for path in ("/chat/completions", "/v1/chat/completions"):
        assert s[f"status of {path}"] == 200
        assert s[f"answer of {path}"] == [reference.text(tokens), "length"]
        assert s[f"type of {path}"].startswith("text/event-stream")
        assert s[f"stream of {path}"] == [reference.text(tokens), ["length"], True]
    assert s["pieces of many tokens"] > 3  # how many tokens come together is the machine's load
    assert s["bad"][0] in (400, 422) and s["bad"][1]
