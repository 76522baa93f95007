"""Generates with vLLM in a process of its own, for tests/test_vllm.py, which sets TORCH_INFINI_VLLM for it.

python -m support.vllm_worker JOBS: a JSON list of Job's fields; the last line of the output is a JSON list of Result's.
"""

from __future__ import annotations

import gc
import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass
class Job:
    """Greedy generation from token ids: all prompts in one call, or each alone."""

    model: str
    dtype: str
    prompts: list[list[int]]
    max_tokens: int = 8
    eager: bool = True
    alone: bool = False
    batched_tokens: int | None = None  # of a step, at most
    ranks: int = 1


@dataclass
class Result:
    """Tokens of each prompt; for each token how far its logarithm of probability is above the next best one's."""

    tokens: list[list[int]]
    margins: list[list[float]]
    replaced: list[str] = field(default_factory=list)  # by the plugin, in this process
    left: dict[str, str] = field(default_factory=dict)


def run(job: Job) -> Result:
    from vllm import LLM, SamplingParams

    engine = LLM(
        job.model,
        dtype=job.dtype,
        max_model_len=256,
        skip_tokenizer_init=True,
        enforce_eager=job.eager,
        max_num_seqs=64,
        enable_prefix_caching=False,
        max_num_batched_tokens=job.batched_tokens,
        tensor_parallel_size=job.ranks,
    )
    params = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=job.max_tokens, logprobs=2)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in job.prompts]
    calls = [[prompt] for prompt in prompts] if job.alone else [prompts]
    outputs = [output.outputs[0] for call in calls for output in engine.generate(call, params, use_tqdm=False)]

    def margin(of_token: dict[int, Any]) -> float:
        values = sorted(entry.logprob for entry in of_token.values())
        return float(values[-1] - values[-2])

    result = Result([list(o.token_ids) for o in outputs], [[margin(x) for x in o.logprobs] for o in outputs])
    if "torch_infini.integrations.vllm" in sys.modules:
        from torch_infini.integrations.vllm import activate

        result.replaced, result.left = activate(()).replaced, activate(()).left
    del engine
    gc.collect()
    return result


def main() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    results = []
    for fields in json.loads(sys.argv[1]):
        results.append(asdict(run(Job(**fields))))
        cleanup_dist_env_and_memory()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
