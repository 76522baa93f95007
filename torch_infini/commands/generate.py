"""generate: continues a prompt, or answers it, and streams the text; then prints the speed."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import CommandError
from .model import add_model_arguments, load
from .sampling import add_sampling_arguments, sampling_of

if TYPE_CHECKING:
    from ..engine import LLM
    from ..engine.prompts import Prompt

HELP = "continue a prompt with our own model and engine, and print the speed"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--prompt", default="A class definition", help="the text to continue, or to answer with --chat")
    parser.add_argument("--chat", action="store_true", help="put the prompt through the tokenizer's chat template")
    parser.add_argument(
        "--image",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="an image before the prompt's text (with --chat), or for a mark of the model in it; may be given again",
    )
    add_sampling_arguments(parser, max_new_tokens=128, temperature=0.0)


def prompt_of(llm: LLM, arguments: argparse.Namespace) -> Prompt:
    """Return the prompt that the arguments ask for, with their images."""
    text, files = arguments.prompt, [path.read_bytes() for path in arguments.image]
    if not arguments.chat:
        return {"prompt": text, "multi_modal_data": {"image": files}} if files else text
    parts = [{"type": "image", "image": file} for file in files]
    return llm.chat_prompt([{"role": "user", "content": [*parts, {"type": "text", "text": text}] if parts else text}])


def run(arguments: argparse.Namespace) -> int:
    from .._core.bandwidth import read_bandwidth

    params = sampling_of(arguments)
    try:
        llm = load(arguments, max_num_seqs=1)
        tp_group = llm.engine.model.tp_group
        if tp_group is not None and tp_group.rank > 0:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # only rank 0 prints
        text = arguments.prompt
        stream = llm.stream(prompt_of(llm, arguments), params)
        if not arguments.chat:
            print(text, end="", flush=True)
        output = None
        for output in stream:
            print(output.outputs[0].new_text, end="", flush=True)
    except (OSError, ValueError) as error:
        raise CommandError(str(error)) from error
    print(flush=True)
    assert output is not None
    completion = output.outputs[0]
    if completion.error is not None:
        print(f"torch_infini generate: {completion.error}", file=sys.stderr)
        return 1
    assert output.metrics.time is not None and output.metrics.time_to_first_token is not None
    # The prompt's pass is not a step of one token: its time is printed separately.
    rest, seconds = len(completion.token_ids) - 1, output.metrics.time - output.metrics.time_to_first_token
    if rest < 1:
        print(f"{len(completion.token_ids)} tokens, the first after {1e3 * output.metrics.time_to_first_token:.0f} ms")
        return 0
    engine = llm.engine
    length = len(output.prompt_token_ids) + len(completion.token_ids) / 2
    step_bytes = engine.model.bytes_per_step + length * engine.bytes_per_token
    share = rest * step_bytes / seconds / (read_bandwidth() if arguments.device == "cpu" else float("nan"))
    cached = " (from the cache)" if share > 1 else ""
    limit = f", {share:.1%} of the bandwidth limit{cached}" if share == share else ""
    print(
        f"{len(completion.token_ids)} tokens, {rest / seconds:.1f} tok/s{limit} "
        f"(the first after {1e3 * output.metrics.time_to_first_token:.0f} ms; a step reads {step_bytes / 1e6:.0f} MB)"
    )
    return 0
