"""LLM and AsyncLLM: texts in and out, streams, conversations, cancellation, and what happens when callers misbehave."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from support.rounding import greedy_tokens
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.__main__ import main
from torch_infini.testing.checkpoints import random_model, save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")
GREEDY = SamplingParams.greedy(max_tokens=24)
PROMPTS = ["hello world", "naïve café ☕", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model = random_model("llama")
    model.save_pretrained(path)
    save_tokenizer(path, model.config.vocab_size)
    return path


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[str]:
    """What transformers continues each prompt with."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        out = greedy_tokens(model, ids, attention_mask=torch.ones_like(ids), max_new_tokens=24)
        texts.append(tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))
    assert len(set(texts)) == len(texts)
    return texts


def test_generate(folder: Path, alone: list[str]) -> None:
    llm = LLM(folder)
    outputs = llm.generate(PROMPTS, GREEDY)
    assert [output.text for output in outputs] == alone
    assert [output.prompt for output in outputs] == PROMPTS
    assert llm.generate(PROMPTS[1], GREEDY)[0].text == alone[1]
    tokens = outputs[0].prompt_token_ids
    assert llm.generate([torch.tensor(tokens)], GREEDY)[0].text == alone[0]
    assert llm.generate(tokens, GREEDY)[0].text == alone[0]
    assert (
        llm.generate([tokens, tokens], [GREEDY, SamplingParams.greedy(max_tokens=2)])[1].token_ids
        == outputs[0].token_ids[:2]
    )
    assert llm.generate([]) == []
    assert all(0 < output.metrics.time_to_first_token <= output.metrics.time for output in outputs)
    assert llm.metrics().free_blocks == llm.metrics().blocks


def test_stream(folder: Path, alone: list[str]) -> None:
    """Every step tells what is new; two streams in turns do not disturb each other, nor does a call in between."""
    llm = LLM(folder)
    first, second = llm.stream(PROMPTS[0], GREEDY), llm.stream(PROMPTS[1], GREEDY)
    texts, tokens = ["", ""], [[], []]
    for round, pair in enumerate(zip(first, second, strict=True)):
        for i, output in enumerate(pair):
            completion = output.outputs[0]
            texts[i] += completion.new_text
            tokens[i] += completion.new_token_ids
            assert (completion.text, completion.token_ids) == (texts[i], tokens[i])
        if round == 3:
            assert llm.generate(PROMPTS[2], GREEDY)[0].text == alone[2]
    assert texts == alone[:2]
    assert len(tokens[0]) == 24


def test_a_stream_that_is_left(folder: Path) -> None:
    llm = LLM(folder)
    for output in llm.stream(PROMPTS[0], SamplingParams.greedy(max_tokens=400)):
        if len(output.token_ids) == 3:
            break
    del output
    gc.collect()
    llm.generate(PROMPTS[1], GREEDY)
    metrics = llm.metrics()
    assert metrics.requests["abort"] == 1
    assert metrics.free_blocks == metrics.blocks
    assert llm.engine.is_idle


def test_threads(folder: Path, alone: list[str]) -> None:
    """Calls of several threads share the engine."""
    llm = LLM(folder)
    texts: dict[int, str] = {}

    def call(i: int) -> None:
        texts[i] = llm.generate(PROMPTS[i % 3], GREEDY)[0].text

    threads = [threading.Thread(target=call, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[i] for i in range(6)] == alone * 2


def test_chat(folder: Path) -> None:
    llm = LLM(folder)
    message = [{"role": "user", "content": "hi"}]
    (answer,) = llm.chat(message, GREEDY)
    assert llm.engine.tokenizer.decode(answer.prompt_token_ids) == "user: hi\nassistant:"
    assert answer.token_ids == llm.generate("user: hi\nassistant:", GREEDY)[0].token_ids
    assert [output.token_ids for output in llm.chat([message, message], GREEDY)] == [answer.token_ids] * 2
    llm.engine.tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"the model's tokenizer must have a chat template \(use generate\)"):
        llm.chat(message)


def test_bad_calls(folder: Path, tmp_path: Path) -> None:
    llm = LLM(folder)
    with pytest.raises(ValueError, match=r"prompt must have at least one token, got none \(prompt 1\)"):
        llm.generate(["fine", ""], GREEDY)
    with pytest.raises(ValueError, match=r"params must be one for all or one for each of 2 prompts, got 1"):
        llm.generate(["a", "b"], [GREEDY])
    for call, rule in (
        (lambda: llm.generate(None), "prompts must be a list of texts or token ids, got None"),
        (lambda: llm.generate([5.5]), "prompt must be text or token ids, got 5.5 (prompt 0)"),
        (lambda: llm.generate("x", "greedy"), "params must be SamplingParams or None, got 'greedy' (prompt 0)"),
        (lambda: llm.stream("x", {"n": 2}), "params must be SamplingParams or None, got {'n': 2}"),
    ):
        with pytest.raises(ValueError, match=re.escape(rule)):
            call()
    assert llm.generate("fine", GREEDY)[0].outputs[0].finish_reason == "length"
    assert llm.metrics().free_blocks == llm.metrics().blocks
    with pytest.raises(FileNotFoundError, match="the folder must exist, got .*nowhere"):
        LLM(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"got max_seqs=3 \(the nearest is max_num_seqs\)"):
        LLM(folder, max_seqs=3)


def test_a_folder_without_tokenizer(tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    llm = LLM(tmp_path)
    assert len(llm.generate([1, 2, 3], GREEDY)[0].token_ids) == 24
    for call in (lambda: llm.generate("text"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(ValueError, match=r"(folder has no tokenizer, got text|folder must have a tokenizer)"):
            call()
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="must hold a readable tokenizer, got: "):
        LLM(tmp_path)


def test_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle cancels what the call asked for."""
    llm = LLM(folder)
    step, steps = llm.engine.step, []

    def interrupt() -> Any:
        steps.append(1)
        if len(steps) == 5:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY)
    monkeypatch.undo()
    llm.generate(PROMPTS[0], GREEDY)
    assert llm.metrics().requests["abort"] == 3
    assert llm.metrics().free_blocks == llm.metrics().blocks


# ---- AsyncLLM ----


def test_async(folder: Path, alone: list[str]) -> None:
    async def run() -> None:
        async with AsyncLLM(folder) as llm:
            outputs = await asyncio.gather(*(llm.generate(prompt, GREEDY) for prompt in PROMPTS))
            assert [output.text for output in outputs] == alone
            text = ""
            async for output in llm.stream(PROMPTS[1], GREEDY):
                text += output.outputs[0].new_text
            assert text == alone[1]
            answer = await llm.chat([{"role": "user", "content": "hi"}], GREEDY)
            assert len(answer.token_ids) == 24
            for bad in ("", [10**6]):
                with pytest.raises(ValueError, match="prompt must"):
                    await llm.generate(bad)
            assert llm.metrics().free_blocks == llm.metrics().blocks

    asyncio.run(run())


def test_async_cancelled(folder: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(folder) as llm:
            endless = SamplingParams.greedy(max_tokens=None)
            tasks = [asyncio.create_task(llm.generate(prompt, endless)) for prompt in PROMPTS]
            async for _ in llm.stream(PROMPTS[0], endless):
                if llm.metrics().running == 4:
                    break
            for task in tasks:
                task.cancel()
            ends = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(end, asyncio.CancelledError) for end in ends)
            await llm.generate(PROMPTS[0], GREEDY)
            gc.collect()  # the stream that was left
            await asyncio.sleep(0)
            await llm.generate(PROMPTS[0], GREEDY)
            assert llm.metrics().requests["abort"] == 4
            assert llm.metrics().free_blocks == llm.metrics().blocks

    asyncio.run(run())


def test_async_outputs_come_while_the_next_step_computes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they wake then holds no step up; where a call waits, or nothing is left to compute, they come at once."""
    happened: list[str] = []
    with contextlib.closing(AsyncLLM(folder)) as llm:
        runner: Any = llm.engine._runner
        run, new_request = runner.run, llm.engine.new_request
        second, added = threading.Event(), threading.Event()

        def noted_run(*args: Any) -> Any:
            happened.append("begin")
            if happened.count("begin") == 2:  # during which the second request comes
                second.set()
                added.wait(20)
            result = run(*args)
            happened.append("end")
            return result

        def noted_request(*args: Any) -> Any:
            happened.append("request")
            return new_request(*args)

        monkeypatch.setattr(runner, "run", noted_run)
        monkeypatch.setattr(llm.engine, "new_request", noted_request)
        ends = [threading.Event(), threading.Event()]

        def deliver(i: int, output: Any) -> None:
            happened.append(f"{i}")
            if output.finished:
                ends[i].set()

        params = SamplingParams.greedy(max_tokens=4, ignore_eos=True)
        llm.add([5, 6, 7], params, partial(deliver, 0))
        assert second.wait(20)
        llm.add([8, 9], params, partial(deliver, 1))
        added.set()
        assert all(end.wait(20) for end in ends)
    text = " ".join(happened)
    # What the second step gave is delivered before the waiting request is made.
    assert text.startswith("request begin end begin 0 end 0 request begin end begin 0 1 end"), text
    assert text.endswith("end 1") and text.count("0") == text.count("1") == 4


def test_async_closed(folder: Path) -> None:
    """Waiting callers get an error, later ones too; a second close does nothing."""

    async def run() -> None:
        llm = AsyncLLM(folder)
        task = asyncio.create_task(llm.generate(PROMPTS[0], SamplingParams.greedy(max_tokens=None)))
        while llm.metrics().running == 0:
            await asyncio.sleep(0.001)
        llm.close()
        for wait in (task, llm.generate(PROMPTS[0])):
            with pytest.raises(RuntimeError, match="torch_infini.AsyncLLM: object must be open, got a closed one"):
                await wait
        llm.close()

    asyncio.run(run())


def test_async_dropped(folder: Path) -> None:
    """Its thread ends, and the model's memory is freed."""
    before = threading.active_count()
    llm = AsyncLLM(folder)
    model = weakref.ref(llm._llm.engine.model)
    assert threading.active_count() == before + 1
    del llm
    gc.collect()
    assert threading.active_count() == before
    assert model() is None


def test_async_failure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should the engine itself fail, everyone is told why."""

    def fail() -> Any:
        raise OSError("no more")

    async def run() -> None:
        llm = AsyncLLM(folder)
        monkeypatch.setattr(llm._llm.engine, "step", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="torch_infini.AsyncLLM: the engine failed: no more"):
                await llm.generate(PROMPTS[0])

    asyncio.run(run())


# ---- the commands ----


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    status = main(list(arguments))
    return status, *capsys.readouterr()


def test_generate_command(folder: Path, alone: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    common = ("generate", "--model", str(folder), "--max-new-tokens", "24")
    status, out, _ = run_command(capsys, *common, "--prompt", PROMPTS[1])
    assert status == 0
    text, closing = out[:-1].rsplit("\n", 1)
    assert text == PROMPTS[1] + alone[1]
    line = r"24 tokens, [\d.]+ tok/s, [\d.]+% of the bandwidth limit \(the first after \d+ ms; a step reads \d+ MB\)"
    assert re.fullmatch(line, closing)
    status, out, _ = run_command(capsys, *common, "--prompt", "hi", "--chat", "-q", "int8")
    assert status == 0
    assert not out.startswith("hi")
    assert "24 tokens, " in out
    status, out, _ = run_command(capsys, *common, "--prompt", PROMPTS[1], "--kv-cache-dtype", "int8")
    assert status == 0
    assert out.startswith(PROMPTS[1])
    with pytest.raises(SystemExit):
        run_command(capsys, *common, "--kv-cache-dtype", "fp8")


@pytest.mark.parametrize(
    "arguments, rule",
    [
        (["--prompt", ""], "prompt must have at least one token, got none"),
        (["--temperature", "-1"], "torch_infini.SamplingParams: temperature must be a finite number"),
        (["--max-new-tokens", "0"], "max_tokens must be an integer of at least 1"),
        (["--model", "nowhere"], "the folder must exist, got nowhere"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
    ],
)
def test_generate_command_refuses(
    arguments: list[str], rule: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run_command(capsys, "generate", "--model", str(folder), *arguments)
    assert status == 2
    assert out == ""
    assert rule in err
    assert err.count("\n") == 1


def test_bench_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--requests", "1,3", "--prompt-tokens", "20", "--output-tokens", "5", "--rounds", "1")
    status, out, _ = run_command(capsys, "bench", "--model", str(folder), *sizes)
    assert status == 0
    header, *lines = out.splitlines()
    rows = [dict(zip(header.split(","), line.split(","), strict=True)) for line in lines]
    assert [row["requests"] for row in rows] == ["1", "3"]
    for row in rows:
        assert float(row["output_tokens_per_second"]) == pytest.approx(
            5 * int(row["requests"]) / float(row["seconds"]), rel=1e-2
        )
        assert 0 < float(row["share_of_bandwidth"]) < 2
    status, out, _ = run_command(capsys, "bench", "--model", str(folder), *sizes, "--csv", str(tmp_path / "a.csv"))
    assert (tmp_path / "a.csv").read_text().splitlines()[0] == header
    for bad, rule in (
        (("--requests", "0"), "--requests must be positive integers with commas between, got '0'"),
        (("--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("--prompt-tokens", "600"), "--prompt-tokens and --output-tokens must be at most 512 together, got 664"),
    ):
        status, _, err = run_command(capsys, "bench", "--model", str(folder), *bad)
        assert status == 2
        assert rule in err


def test_generate_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    """The small model of this package."""
    status, out, _ = run_command(capsys, "generate", "--max-new-tokens", "8", "--threads", "1")
    assert status == 0
    assert out.startswith("A class definition")
