"""Offline inference with infinilm.LLM: a batch of prompts, settings of one and of each, a conversation.

python llm.py --model_path FOLDER --prompts "..." "..."
"""

import argparse
import json

from infinilm import LLM, RequestOutput, SamplingParams
from infinilm.llm import FinishReason

parser = argparse.ArgumentParser()
parser.add_argument("--model_path", required=True)
parser.add_argument("--prompts", nargs="+", required=True)
parser.add_argument("--max_new_tokens", type=int, default=16)
parser.add_argument("--tp", type=int, default=1)
args = parser.parse_args()


def show(name, value):
    print(json.dumps({"name": name, "value": value}))


def main():
    llm = LLM(
        model_path=args.model_path,
        device="cpu",
        dtype="float32",
        tensor_parallel_size=args.tp,
        max_batch_size=4,
        max_tokens=args.max_new_tokens,
        num_blocks=64,
        block_size=16,
        temperature=1.0,
        top_k=1,
        top_p=0.8,
    )
    outputs = llm.generate(args.prompts, SamplingParams(1.0, 0.8, 1, max_tokens=args.max_new_tokens))
    assert all(isinstance(output, RequestOutput) for output in outputs)
    show("prompts", [output.prompt for output in outputs])
    show("ids", [list(output.outputs[0].token_ids) for output in outputs])
    show("texts", [output.outputs[0].text for output in outputs])
    show("finished", [output.finished for output in outputs])
    reasons = [output.outputs[0].finish_reason for output in outputs]
    show("reasons", [reason in (FinishReason.LENGTH, FinishReason.EOS_TOKEN) for reason in reasons])

    # One prompt as a string; the engine's own settings.
    (single,) = llm.generate(args.prompts[0], use_tqdm=False)
    show("single", list(single.outputs[0].token_ids))

    # Settings of each request; a copy of one with a change.
    short = SamplingParams(temperature=1.0, top_p=0.8, top_k=1, max_tokens=3)
    longer = short.clone()
    longer.max_tokens = 5
    outputs = llm.generate(args.prompts[:2], [short, longer], use_tqdm=False)
    show("lengths", [len(output.outputs[0].token_ids) for output in outputs])

    (answer,) = llm.chat([[{"role": "user", "content": args.prompts[0]}]], short)
    show("answer", list(answer.outputs[0].token_ids))


if __name__ == "__main__":
    main()
