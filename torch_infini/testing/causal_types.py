"""Small models of every causal type of transformers, and what patch_model and the engine make of each.

python -m torch_infini.testing.causal_types [TYPE ...] [--write docs/families.csv]
"""

from __future__ import annotations

import argparse
import csv
import logging
import multiprocessing
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .new_model import draw_weights

LAYERS, VOCABULARY = 4, 128
LIMIT = 60  # seconds for a type
MOST = 20_000_000  # parameters
# Sizes by the names that configs have for them. A mixture sends each token to all experts: one that a rounding sends
# elsewhere would be off by more than all roundings.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "lru_width"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "expert_ffn_hidden_size"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim", "attention_head_dim"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"), 256),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_moe_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts"), 4),
    **dict.fromkeys(("n_group", "topk_group", "num_expert_group"), 1),
    **dict.fromkeys(("sliding_window", "local_attention"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "ssm_num_heads"), 8),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 128,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "n_groups": 1,
    "mamba_chunk_size": 16,
    "mamba_dt_rank": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "qk_head_dim": 24,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "dropout": 0.0,
    "tie_word_embeddings": False,
}
# Sizes that are set also where a config has None, which stands for another entry.
FILLED = {"head_dim", "num_key_value_heads", "num_experts_per_tok", "n_routed_experts", "n_group", "topk_group"}
# What the names do not say, by type.
MORE: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "gptj": {"rotary_dim": 8},
    "laguna": {"num_attention_heads_per_layer": [4] * LAYERS},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}


@dataclass
class Row:
    """What was found for one type.

    Attributes:
        type: Of transformers.
        patched: "fully", "partly", "left", or "not built" (from a small config).
        modules: Replaced and left, "12 / 3".
        reasons: Why modules were left, the commonest first.
        difference: Of the patched model's logits in float32, relative (root mean square).
        engine: "served", "recorded" (decode steps too), "differs", or "refused".
        why: Why not served or recorded.
    """

    type: str
    patched: str = "not built"
    modules: str = ""
    reasons: str = ""
    difference: str = ""
    engine: str = ""
    why: str = ""


def causal_types() -> list[str]:
    """Every type for which transformers has a causal language model."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def shrunk(kind: str, config: Any) -> dict[str, Any]:
    """Return a config's entries with small sizes."""
    values = {key: value for key, value in config.to_dict().items() if key not in ("model_type", "architectures")}
    layers = next((values[key] for key in ("num_hidden_layers", "n_layer", "num_layers") if key in values), None)
    for key, value in list(values.items()):
        inner = getattr(config, key, None)
        if hasattr(inner, "to_dict"):
            values[key] = shrunk("", inner)
        elif key == "mlp_only_layers":
            values[key] = []
        elif isinstance(value, list) and len(value) in (layers, layers and layers + 1) and len(value) > LAYERS:
            kinds = list(dict.fromkeys(map(str, value)))  # of each kind one, in their order
            first = [next(one for one in value if str(one) == name) for name in kinds]
            values[key] = (first * LAYERS)[: LAYERS + len(value) - layers]
        elif key == "per_layer_config" and isinstance(value, dict):
            values[key] = {layer: one for layer, one in value.items() if int(layer) < LAYERS}
        elif key in SIZES and (value is not None or key in FILLED or key.endswith("_token_id")):
            values[key] = SIZES[key]
        elif isinstance(value, dict) and "mrope_section" in value:
            values[key] = {**value, "mrope_section": [2, 3, 3]}
    if values.get("kv_lora_rank") is not None:
        values["num_key_value_heads"] = values["num_attention_heads"]
        if "head_dim" in values:
            values["head_dim"] = values["qk_rope_head_dim"]
    if "is_decoder" in values:
        values["is_decoder"] = True
    return values | MORE.get(kind, {})


def build(kind: str, seed: int = 0) -> Any:
    """A small model of a type, with random weights; the same at every call."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config_class = CONFIG_MAPPING[kind]
    config = config_class(**shrunk(kind, config_class()))
    with suppress(TypeError), torch.device("meta"):  # some make tensors by numpy
        shape = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        if (count := sum(p.numel() for p in shape.parameters())) > MOST:
            raise ValueError(f"its small config has {count} parameters")
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    draw_weights(model)
    return model


def tokens_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def logits_of(model: Any, ids: Sequence[int]) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    return logits


def examine(kind: str) -> Row:
    """Build a model of a type, patch it, serve it, and compare each with the model as it was."""
    from .. import LLM, SamplingParams, patch_model

    row = Row(kind)
    try:
        model = build(kind)
        (ids,) = tokens_of(40)
        before = logits_of(model, ids)
    except Exception as error:
        row.reasons = shortened(error)
        return row
    report = patch_model(model)
    left = [one.reason for one in report.left]
    row.patched = "left" if report.reason or not report.replaced else "partly" if left else "fully"
    row.modules = f"{len(report.replaced)} / {len(left)}"
    reasons = [report.reason] if report.reason else sorted(set(left), key=lambda reason: -left.count(reason))
    row.reasons = "; ".join(reasons)
    size = float(before.square().mean().sqrt())
    row.difference = f"{float((logits_of(model, ids) - before).square().mean().sqrt()) / size:.1e}"
    prompts = tokens_of(3, 33, 18)
    try:
        llm = LLM(model, block_size=4, chunk_size=8, cache_blocks=26)
    except ValueError as error:
        row.engine, row.why = "refused", shortened(error)
        return row
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    row.engine = "recorded" if (recordable := llm.engine.model.is_recordable) else "served"
    row.why = "" if recordable else "decode steps run op by op"
    for prompt, output in zip(prompts, outputs, strict=True):
        logits = logits_of(model, prompt + output.tokens)[len(prompt) - 1 : -1]
        behind = logits.amax(-1) - logits[torch.arange(len(output.tokens)), output.tokens]
        if len(output.tokens) != 12 or float(behind.max()) > 1e-3 * size:
            row.engine, row.why = "differs", f"a token is behind the likeliest by {float(behind.max()):.2g}"
    return row


def shortened(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return re.sub(r"^torch_infini\.LLM: \w+ cannot be served: ", "", text)[:200]


def examine_quietly(kind: str) -> Row:
    """As examine, without warnings, within LIMIT seconds; what fails is a row too."""
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    signal.alarm(LIMIT)
    try:
        return examine(kind)
    except Exception as error:  # the table has a row for every type
        return Row(kind, "failed", reasons=f"{type(error).__name__}: {shortened(error)}")
    finally:
        signal.alarm(0)


def _too_long(*signal: object) -> None:
    raise TimeoutError(f"not done after {LIMIT} s")


def examine_all(kinds: Sequence[str], processes: int = 2) -> Iterator[Row]:
    """Examine types, several at a time, each batch of them in a process of its own; in the order of `kinds`."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=24) as pool:
        yield from pool.imap(examine_quietly, kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m torch_infini.testing.causal_types", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all of transformers'")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    given = parser.parse_args(arguments)
    rows = []
    for row in examine_all(given.types or causal_types(), given.processes):
        rows.append(row)
        print(
            f"{row.type:24} {row.patched:9} {row.modules:9} {row.difference:8} {row.engine:9} {row.why or row.reasons}"
        )
    if given.write is not None:
        with given.write.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([one.name for one in fields(Row)])
            writer.writerows(map(astuple, rows))
    for column in ("patched", "engine"):
        values = [getattr(row, column) for row in rows if getattr(row, column)]
        print(f"{column}: " + ", ".join(f"{values.count(value)} {value}" for value in dict.fromkeys(values)))
    return int(any(row.engine == "differs" or row.patched == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
