"""Ranks of torchrun that follow rank 0, to which requests come: tokens of one rank, and ranks that end."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from support.ranks import Ranks
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.testing.checkpoints import random_model

pytestmark = pytest.mark.usefixtures("one_thread")
# The last prompts are more bytes than the first message of a call has.
PROMPTS = [[3, 1, 4], list(range(10, 300)), [*range(200)] * 2, *([7 + i] * 40 for i in range(5))]
PARAMS = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_model("llama").save_pretrained(folder)
    return folder


def shared(folder: str) -> LLM:
    return LLM(folder, tensor_parallel_size=2, progress=False, max_num_batched_tokens=4096, chunk_size=1024)


async def answers(llm: LLM) -> list[list[int]]:
    async with AsyncLLM(llm) as served:
        outputs = await asyncio.gather(*(served.generate(prompt, PARAMS) for prompt in PROMPTS))
        await asyncio.sleep(0.2)  # the others wait meanwhile
        outputs += [await served.generate(PROMPTS[0], PARAMS)]
    with pytest.raises(RuntimeError, match="must be open"):
        await served.generate([1], PARAMS)
    return [output.outputs[0].token_ids for output in outputs]


def serve_or_follow(folder: str) -> list[list[int]] | None:
    llm = shared(folder)
    if llm.engine.model.tp_group is not None and llm.engine.model.tp_group.rank == 0:
        with pytest.raises(ValueError, match="LLM.follow: the rank must be one of torchrun's above 0, got rank 0"):
            llm.follow()
        return asyncio.run(answers(llm))
    with pytest.raises(ValueError, match=r"AsyncLLM: the rank must be 0, to which requests come .*, got 1"):
        AsyncLLM(llm)
    llm.follow()
    return None


def test_requests_come_to_rank_0(folder: Path) -> None:
    wanted = LLM(folder, progress=False).generate(PROMPTS, PARAMS, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in wanted]
    with Ranks(2) as ranks:
        assert ranks.run(serve_or_follow, str(folder)) == [[*tokens, tokens[0]], None]


async def failed_answer(llm: LLM) -> str:
    served = AsyncLLM(llm)
    assert served.is_running
    completion = (await served.generate(PROMPTS[0], PARAMS)).outputs[0]
    again = (await served.generate(PROMPTS[0], PARAMS)).outputs[0]
    assert (completion.finish_reason, again.finish_reason, served.is_running) == ("error", "error", False)
    served.close()
    return completion.error or ""


def end_or_wait(folder: str, which: int) -> str:
    """End a rank in the middle of a request, and return the other one's error."""
    llm = shared(folder)
    assert llm.engine.model.tp_group is not None
    rank = llm.engine.model.tp_group.rank
    if rank == which:
        run = llm.engine._runner.run

        def run_and_end(*arguments: Any) -> Any:
            if len(arguments[0][0].tokens) == 1:  # a step after the prompt's
                os._exit(1)
            return run(*arguments)

        llm.engine._runner.run = run_and_end  # type: ignore[method-assign]
    began = time.monotonic()
    try:
        if rank == 0:
            return asyncio.run(failed_answer(llm))
        llm.follow()
    except RuntimeError as error:
        return str(error)
    finally:
        assert time.monotonic() - began < 60
    return ""


@pytest.mark.parametrize("which", [0, 1])
def test_a_rank_that_ends(which: int, folder: Path) -> None:
    """It ends what the other one waits for, long before any limit."""
    other = 1 - which
    with Ranks(2) as ranks:
        ranks.begin(end_or_wait, str(folder), which)
        [said] = ranks.answers([other], seconds=90)
    assert said
