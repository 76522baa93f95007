"""The demo command: generates from one prompt with a LLaMA, unpatched and patched, and prints texts and speeds.

The share of the memory-bandwidth limit is the bytes of weights that each token must read, divided by the bandwidth.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from .._core.bandwidth import read_bandwidth
from .._core.library import cpu_capability
from ..demo import MODEL
from ..engine.loading import has_code
from ..patch import patch_model
from ..patch import patched as patched_for_a_while
from .errors import CommandError

NEVER_RUN = (
    "--model must be a folder that classes of transformers itself can read, for code of a model folder (auto_map) is "
    "never run, got {}"
)


@dataclass
class Runs:
    """The tokens that one form of the model generated, and the seconds of each timed run."""

    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    seconds: list[float] = field(default_factory=list)

    @property
    def per_second(self) -> float:
        return self.tokens.numel() / statistics.median(self.seconds)


def load(folder: Path, dtype: torch.dtype) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Load the model and tokenizer of a local folder; CommandError if it is not a LLaMA."""
    if not folder.is_dir():
        raise CommandError(f"--model must be a folder, got {folder}, which does not exist")
    if not (folder / "config.json").is_file():
        raise CommandError(f"--model must be a Hugging Face model folder, got {folder}, which has no config.json")
    try:  # without trust_remote_code=False transformers may ask on stdin whether to run the folder's code
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if has_code(folder):
            raise CommandError(NEVER_RUN.format(folder)) from error
        raise CommandError(f"--model must have a readable config.json, got {folder}: {first_line(error)}") from error
    if config.model_type != "llama":
        raise CommandError(f"--model must be of the llama family, got {config.model_type} in {folder}")
    try:
        model = LlamaForCausalLM.from_pretrained(folder, local_files_only=True, trust_remote_code=False, dtype=dtype)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except ImportError as error:
        raise CommandError(
            f"--model must be what transformers loads without further packages, got {folder}: {first_line(error)} "
            "(generate, serve and torch_infini.load read it without them)"
        ) from error
    except (OSError, ValueError) as error:
        if has_code(folder):
            raise CommandError(NEVER_RUN.format(folder)) from error
        raise CommandError(f"--model must hold weights and a tokenizer, got {folder}: {first_line(error)}") from error
    return model.eval(), tokenizer


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def generate(model: Any, ids: Tensor, count: int) -> Tensor:
    """Generate exactly `count` new tokens, greedily, so that every run does the same work."""
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        min_new_tokens=count,
        max_new_tokens=count,
        pad_token_id=0,
    )
    return out[0, ids.shape[1] :]


def time_in_turns(
    model: LlamaForCausalLM, quantized: LlamaForCausalLM | None, ids: Tensor, count: int, runs: int
) -> tuple[Runs, Runs]:
    """Measure (unpatched, patched) in turns, so that other load slows both equally; the model is left unpatched.

    A quantized model is a separate one, because quantizing cannot be undone.
    """
    plain, patched = Runs(), Runs()
    for turn in range(runs + 1):  # the first turn warms up
        for form in (plain, patched):
            subject = quantized if form is patched and quantized is not None else model
            with patched_for_a_while(model) if form is patched and subject is model else nullcontext():
                start = time.perf_counter()
                form.tokens = generate(subject, ids, count)
                if turn > 0:
                    form.seconds.append(time.perf_counter() - start)
    return plain, patched


def bytes_per_token(model: PreTrainedModel) -> int:
    """Return the bytes of weights that one token reads: all but the embedding table, of which it reads one row."""
    table = model.get_input_embeddings().weight
    assert isinstance(table, Tensor)
    tied = model.get_output_embeddings()._parameters.get("weight") is table
    every = sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))
    return every - (0 if tied else table.numel() * table.element_size())


def divergence(model: LlamaForCausalLM, ids: Tensor, plain: Tensor, patched: Tensor) -> str:
    """Describe where two continuations diverge, and how close the model's two best logits are there."""
    at = int((plain != patched).nonzero()[0])
    with torch.no_grad():
        logits = model(torch.cat([ids[0], plain[:at]])[None], logits_to_keep=1).logits[0, -1].float()
    best = logits.topk(2).values
    return f"no: they part at token {at + 1}, where the two best logits are {best[0] - best[1]:.4f} apart"


def run_demo(arguments: argparse.Namespace) -> int:
    """Print the comparison; return 0 if the tokens are equal or the weights quantized, else 1."""
    count = arguments.max_new_tokens
    if not arguments.prompt.strip():
        raise CommandError("--prompt must not be empty")
    for name, value in (("--max-new-tokens", count), ("--runs", arguments.runs)):
        if value < 1:
            raise CommandError(f"{name} must be at least 1, got {value}")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    folder = Path(arguments.model or MODEL)
    model, tokenizer = load(folder, getattr(torch, arguments.dtype))
    ids = tokenizer(arguments.prompt, return_tensors="pt").input_ids
    room = model.config.max_position_embeddings - ids.shape[1]
    if count > room:
        raise CommandError(
            f"--max-new-tokens must be at most {room} (the model has {model.config.max_position_embeddings} positions, "
            f"the prompt takes {ids.shape[1]}), got {count}"
        )
    quantized = None
    if arguments.quantization:
        quantized, _ = load(folder, model.dtype)
        report = patch_model(quantized, weights=arguments.quantization, verify=True)
    else:
        with patched_for_a_while(model, verify=True) as report:
            pass
    plain, patched = time_in_turns(model, quantized, ids, count, arguments.runs)

    size = sum(p.numel() for p in model.parameters())
    print(f"model      {'the small LLaMA of this package' if arguments.model is None else folder}")
    print(f"           {size / 1e6:.1f} M parameters, {arguments.dtype}, batch 1, greedy, {count} tokens")
    print(f"machine    {cpu_capability()} kernels, {torch.get_num_threads()} threads, torch {torch.__version__}")
    print(report)
    for name, form in (("unpatched", plain), ("patched", patched)):
        print(f"\n--- {name} ---\n{arguments.prompt}{tokenizer.decode(form.tokens)}")
    equal = torch.equal(plain.tokens, patched.tokens)
    print(f"\ntokens equal   {'yes' if equal else divergence(model, ids, plain.tokens, patched.tokens)}")
    bandwidth = read_bandwidth()
    weights = {"unpatched": bytes_per_token(model), "patched": bytes_per_token(quantized or model)}
    for name, form in (("unpatched", plain), ("patched", patched)):
        share = form.per_second * weights[name] / bandwidth
        cached = " (from the cache)" if share > 1 else ""
        print(f"{name:14} {form.per_second:8.1f} tokens/s, {share:6.1%} of the memory-bandwidth limit{cached}")
    print(f"ratio          {patched.per_second / plain.per_second:8.2f}")
    reads = f"{weights['unpatched'] / 1e6:.1f} MB of weights" + (
        f" ({weights['patched'] / 1e6:.1f} MB with {arguments.quantization})" if quantized else ""
    )
    print(
        f"(medians of {arguments.runs} runs in turns; each token reads {reads}, this machine reads "
        f"{bandwidth / 1e9:.1f} GB/s: at most {bandwidth / weights['patched']:.0f} tokens/s from memory)"
    )
    # Integer weights differ from the original ones, so their tokens may differ.
    return 0 if equal or quantized else 1
