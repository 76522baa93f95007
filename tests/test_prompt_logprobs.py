"""Log-probabilities of prompts: those of transformers, in the engine and in /v1/completions (echo, prompt_logprobs)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from support.engines import finish, small_engine
from torch_infini import AsyncLLM, SamplingParams
from torch_infini.engine import Engine, RequestOutput
from torch_infini.testing.checkpoints import SMALL, random_model

pytestmark = pytest.mark.usefixtures("one_thread")
TOLERANCE = 1e-4  # of a log-probability in float32


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(SMALL["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


@torch.no_grad()
def expected(prompt: list[int]) -> Tensor:
    """[tokens - 1, vocabulary]: transformers' log-probabilities of what follows each token but the last."""
    model: Any = random_model("llama")
    logits: Tensor = model(torch.tensor([prompt])).logits[0, :-1]
    return logits.double().log_softmax(-1)


def check(output: RequestOutput, prompt: list[int], top: int = 2) -> None:
    """Compare an output's prompt_logprobs with transformers'."""
    entries = output.prompt_token_logprobs
    assert entries is not None and [one.token for one in entries] == prompt[1:]
    for one, want in zip(entries, expected(prompt), strict=True):
        assert abs(one.logprob - float(want[one.token])) < TOLERANCE
        assert len(one.top) == top and one.top == sorted(one.top, key=lambda entry: -entry[1])
        assert all(abs(logprob - float(want[token])) < TOLERANCE for token, logprob in one.top)
        # Of two that differ by less than the tolerance either may be first.
        assert abs(one.rank - 1 - int((want > want[one.token]).sum())) <= int(
            ((want - want[one.token]).abs() < TOLERANCE).sum() - 1
        )


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"chunk_size": 8, "max_num_batched_tokens": 16},
        {"chunk_size": 8, "block_size": 8, "cache_blocks": 26},
        {"max_num_seqs": 1, "enforce_eager": True},
    ],
    ids=["default", "small chunks", "few blocks", "one at a time"],
)
def test_of_chunks_preempted_sequences_and_several_samples(settings: dict[str, Any], tmp_path: Path) -> None:
    engine = small_engine(tmp_path, max_model_len=200, **settings)
    rows = prompts(60, 1, 2, 33, 64, 90)
    rows.append(rows[-1][:64] + rows[0])  # begins as another does
    params = [
        SamplingParams(max_tokens=40, prompt_logprobs=2, seed=i, n=1 + (i % 3 == 0), logprobs=i % 2 or None)
        for i in range(len(rows))
    ]
    ids = [engine.add(row, one) for row, one in zip(rows, params, strict=True)]
    other = engine.add(rows[-1], SamplingParams(max_tokens=40, seed=9))
    outputs = finish(engine)
    for id, row, one in zip(ids, rows, params, strict=True):
        check(outputs[id], row)
        assert len(outputs[id].outputs) == one.n and outputs[id].num_cached_tokens == 0
    assert outputs[other].prompt_logprobs is None
    metrics = engine.metrics()
    assert metrics.free_blocks == metrics.blocks
    assert (metrics.preemptions > 0) == ("cache_blocks" in settings)
    # The same tokens as without: what is computed for the prompt changes no draw.
    again = Engine(engine.model, config=engine.config)
    plain = [again.add(row, SamplingParams(max_tokens=40, seed=i, n=1 + (i % 3 == 0))) for i, row in enumerate(rows)]
    tokens = finish(again)
    for id, same in zip(ids, plain, strict=True):
        assert [one.token_ids for one in outputs[id].outputs] == [one.token_ids for one in tokens[same].outputs]


def test_after_an_interrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request whose prompt was computed in part, and then again from its beginning."""
    engine = small_engine(tmp_path, chunk_size=16, max_num_batched_tokens=16)
    (row,) = prompts(70)
    id = engine.add(row, SamplingParams(max_tokens=4, prompt_logprobs=2))
    engine.step()
    engine.step()
    run = engine._runner.run

    def interrupt(*args: Any) -> Any:
        run(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.step()
    check(finish(engine)[id], row)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("fastapi")
    pytest.importorskip("httpx2")
    from support.serving import save_model, service_of

    torch.set_num_threads(1)
    llm = AsyncLLM(save_model(tmp_path_factory.mktemp("model")))
    yield service_of(llm)
    llm.close()


class TestServer:
    """echo and prompt_logprobs of /v1/completions."""

    @staticmethod
    def complete(service: Any, **body: Any) -> dict[str, Any]:
        from support.serving import ask

        answer = ask(service, "POST", "/v1/completions", json={"seed": 1, **body})
        assert answer.status_code == 200, answer.text
        whole: dict[str, Any] = answer.json()
        return whole

    def test_echo_is_the_prompt_and_then_the_continuation(self, service: Any) -> None:
        prompt = "naïve café ☕"
        ids = service.llm.engine.prompts.encode(prompt)
        plain = self.complete(service, prompt=prompt, max_tokens=6, logprobs=2)
        (choice,) = self.complete(service, prompt=prompt, max_tokens=6, logprobs=2, echo=True)["choices"]
        alone = plain["choices"][0]
        assert choice["text"] == prompt + alone["text"]
        assert choice["finish_reason"] == alone["finish_reason"] == "length"
        shown, behind = choice["logprobs"], alone["logprobs"]
        count = len(ids)
        assert [len(shown[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [
            count + 6
        ] * 4
        assert shown["token_logprobs"][0] is None and shown["top_logprobs"][0] is None
        for at, want in enumerate(expected(ids), 1):
            assert abs(shown["token_logprobs"][at] - float(want[ids[at]])) < TOLERANCE
            assert max(shown["top_logprobs"][at].values()) == pytest.approx(float(want.max()), abs=TOLERANCE)
        assert shown["tokens"][count:] == behind["tokens"]
        assert shown["token_logprobs"][count:] == pytest.approx(behind["token_logprobs"], abs=TOLERANCE)
        assert shown["text_offset"][count:] == [len(prompt) + at for at in behind["text_offset"]]
        # A token of one byte each: a character's other bytes begin behind it.
        starts = [at for at, letter in enumerate(prompt) for _ in letter.encode()]
        assert all(at in (start, start + 1) for at, start in zip(shown["text_offset"], starts, strict=False))
        assert [at for at, byte in zip(shown["text_offset"], prompt.encode(), strict=False) if byte & 0xC0 != 0x80] == [
            *range(len(prompt))
        ]

    def test_stream_has_what_the_whole_answer_has(self, service: Any) -> None:
        from support.serving import ask, events_of

        ids = [[70, 80], [5, 6, 7]]
        body = {"prompt": ids, "n": 2, "max_tokens": 5, "logprobs": 1, "echo": True, "seed": 4, "prompt_logprobs": 0}
        whole = self.complete(service, **body)["choices"]
        texts = [service.llm.engine.tokenizer.decode(one) for one in ids for _ in range(2)]
        assert all(choice["text"].startswith(text) for choice, text in zip(whole, texts, strict=True))
        answer = ask(service, "POST", "/v1/completions", json={**body, "stream": True})
        found: dict[int, dict[str, Any]] = {}
        for event in events_of(answer.text):
            (choice,) = event["choices"]
            had = found.setdefault(choice["index"], {**choice, "text": "", "logprobs": {}})
            had["text"] += choice["text"]
            had["finish_reason"] = choice["finish_reason"]
            for name, values in choice["logprobs"].items():
                had["logprobs"].setdefault(name, []).extend(values)
        assert [found[at] for at in range(4)] == whole

    @pytest.mark.parametrize("stream", [False, True])
    def test_of_a_prompt_alone(self, stream: bool, service: Any) -> None:
        """max_tokens 0: the prompt is computed, and nothing of the engine's token is in the answer."""
        from support.serving import ask, events_of

        body = {"prompt": ["one two", "three"], "n": 2, "max_tokens": 0, "logprobs": 1, "echo": True, "stream": stream}
        if stream:
            body["stream_options"] = {"include_usage": True}
        answer = ask(service, "POST", "/v1/completions", json=body)
        events = events_of(answer.text) if stream else [answer.json()]
        choices = [choice for event in events for choice in event["choices"]]
        assert [choice["text"] for choice in choices] == ["one two"] * 2 + ["three"] * 2
        for choice in choices:
            ids = service.llm.engine.prompts.encode(choice["text"])
            want = expected(ids)
            logprobs = choice["logprobs"]["token_logprobs"]
            assert logprobs[0] is None and choice["finish_reason"] == "length"
            assert logprobs[1:] == pytest.approx([float(row[id]) for row, id in zip(want, ids[1:])], abs=TOLERANCE)
            assert choice["logprobs"]["text_offset"] == [*range(len(choice["text"]))]
        usage = events[-1]["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (12, 0)
        assert service.in_flight == 0 and service.llm.engine.is_idle

    def test_prompt_logprobs_in_vllms_form(self, service: Any) -> None:
        ids = [7, 300, 21]
        body = {"prompt": ids, "max_tokens": 2, "prompt_logprobs": 2}
        (choice,) = self.complete(service, **body)["choices"]
        assert choice["logprobs"] is None and choice["prompt_logprobs"][0] is None
        for token, want, entries in zip(ids[1:], expected(ids), choice["prompt_logprobs"][1:], strict=True):
            own = entries[str(token)]
            assert own["logprob"] == pytest.approx(float(want[token]), abs=TOLERANCE)
            assert own["decoded_token"] == service.token_texts.text_of(token)
            likeliest = want.argsort(descending=True)[:2].tolist()
            assert set(entries) == {str(one) for one in [*likeliest, token]}
            assert [entries[str(one)]["rank"] for one in likeliest] == [1, 2]
        (other,) = self.complete(service, prompt=ids, max_tokens=2)["choices"]
        assert "prompt_logprobs" not in other and other["text"] == choice["text"]
        # Without echo, logprobs are those of the continuation.
        both = self.complete(service, **body, logprobs=0)["choices"][0]
        assert len(both["logprobs"]["tokens"]) == 2 and both["prompt_logprobs"] is not None

    def test_echo_without_logprobs_computes_no_prompt(self, service: Any) -> None:
        before = service.llm.metrics().steps
        answer = self.complete(service, prompt="hello", max_tokens=0, echo=True)
        assert answer["choices"][0]["text"] == "hello" and answer["choices"][0]["logprobs"] is None
        assert service.llm.metrics().steps == before
        assert self.complete(service, prompt="hello", max_tokens=0)["choices"][0]["text"] == ""

    def test_a_client_that_leaves(self, service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """While the prompt alone is computed."""
        from support.serving import send_raw, serving, slow_down, wait_until

        slow_down(service.llm, monkeypatch)
        with serving(service) as url:
            body = {"prompt": [[1] * 500] * 20, "max_tokens": 0, "logprobs": 1, "echo": True}
            connection = send_raw(url, "/v1/completions", body)
            wait_until(lambda: service.in_flight == 20)
            connection.close()
            wait_until(lambda: service.in_flight == 0 and service.llm.engine.is_idle)

    def test_offsets_of_texts_with_tokens_in_front(self) -> None:
        from types import SimpleNamespace

        from torch_infini.serve.prompt_logprobs import offsets_in

        pieces = {0: b"<s>", 1: b" caf", 2: b"\xc3", 3: b"\xa9", 4: b" x"}
        texts: Any = SimpleNamespace(bytes_of=pieces.__getitem__)
        assert offsets_in("café x", [0, 1, 2, 3, 4], texts) == [0, 0, 3, 4, 4]
        assert offsets_in(" café x", [1, 2, 3, 4], texts) == [0, 4, 5, 5]
        assert offsets_in("CAFÉ x", [1, 2, 3, 4], texts) == [0, 4, 5, 5]  # a tokenizer that changes letters
        assert offsets_in("", [0, 1], texts) == [0, 0]
        assert offsets_in("any", [0, 1], None) == [0, 0]


def test_json_has_no_infinity() -> None:
    pytest.importorskip("fastapi")
    from torch_infini.engine import CompletionOutput, TokenLogprobs
    from torch_infini.serve.answers import CompletionAnswer

    infinite = [TokenLogprobs(3, float("-inf"), 9, [(4, 0.0), (5, float("-inf"))])]
    done = CompletionOutput(0, "", [], "length", token_logprobs=[])
    output = RequestOutput("", None, [1, 3], [done], prompt_token_logprobs=infinite)
    answer = CompletionAnswer("m", None, echo=["ab"], prompt_logprobs=True).whole([output])
    (choice,) = json.loads(json.dumps(answer, allow_nan=False))["choices"]
    assert choice["logprobs"]["token_logprobs"] == [None, -9999.0]
    assert choice["prompt_logprobs"][1]["3"] == {"logprob": -9999.0, "rank": 9, "decoded_token": "token_id:3"}
