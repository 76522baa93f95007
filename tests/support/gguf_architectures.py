"""Writes GGUF files of each architecture from small random models, as llama.cpp's converter does: by the package's own
names of tensors and fields.

Nothing here calls torch_infini.checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from support.checkpoint_writers import gguf_blocks
from torch_infini.testing.causal_types import shrunk
from torch_infini.testing.new_model import draw_weights

LAYERS = 4
# Matrices that files have in full precision.
UNQUANTIZED = ("_bias", "gate.weight", "gate.wg.weight", "router.weight", "conv.conv.weight")


class Case(NamedTuple):
    """An architecture.

    Attributes:
        kind: The model_type of transformers.
        fields: Fields beside those of all decoders, from the config, by name without the architecture.
        changes: Entries of the model's config.
        permutes: Whether q's and k's rows are interleaved in the file.
        adds_one: Whether norms have 1 added there.
    """

    kind: str
    fields: Callable[[Any], dict[str, Any]] = lambda c: {}
    changes: dict[str, Any] = {}
    permutes: bool = False
    adds_one: bool = False


def _window(c: Any) -> dict[str, Any]:
    return {"attention.sliding_window": c.sliding_window}


def _experts(c: Any) -> dict[str, Any]:
    inner = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    return {
        "expert_count": getattr(c, "num_experts", None) or c.num_local_experts,
        "expert_used_count": c.num_experts_per_tok,
        "expert_feed_forward_length": inner,
    }


def _yarn(c: Any) -> dict[str, Any]:
    rope = c.rope_parameters
    return {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": rope["factor"],
        "rope.scaling.original_context_length": rope["original_max_position_embeddings"],
        "rope.scaling.yarn_beta_fast": rope["beta_fast"],
        "rope.scaling.yarn_beta_slow": rope["beta_slow"],
    }


def _partial(c: Any) -> dict[str, Any]:
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return {"rope.dimension_count": int(head * c.rope_parameters["partial_rotary_factor"])}


def _caps(c: Any) -> dict[str, Any]:
    return _window(c) | {
        "attn_logit_softcapping": c.attn_logit_softcapping,
        "final_logit_softcapping": c.final_logit_softcapping,
    }


_TIED = {"tie_word_embeddings": True}
_CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}
_YARN = {"factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "long_factor": [1.0 + 0.5 * i for i in range(4)],
    "short_factor": [1.0 + 0.1 * i for i in range(4)],
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 64,
}
_SCALES = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
}

_PLAIN = {"rope_parameters": {"rope_type": "default", "rope_theta": 11158840.0}}

CASES: dict[str, Case] = {
    "gemma": Case("gemma", changes=_TIED, adds_one=True),
    "gemma2": Case("gemma2", _caps, {"query_pre_attn_scalar": 16, **_CAPS, **_TIED}, adds_one=True),
    "gemma3": Case("gemma3_text", _window, {"query_pre_attn_scalar": 16, "num_hidden_layers": 7}, adds_one=True),
    "phi3": Case("phi3", lambda c: _partial(c) | _window(c) | {"rope.scaling.original_context_length": 4096}),
    "phi3-long": Case(
        "phi3",
        lambda c: _partial(c) | {"rope.scaling.original_context_length": 64},
        {"rope_parameters": _LONG, "original_max_position_embeddings": 64, "sliding_window": None},
    ),
    "qwen2moe": Case(
        "qwen2_moe",
        lambda c: _experts(c) | {"expert_shared_feed_forward_length": c.shared_expert_intermediate_size},
        {"norm_topk_prob": False},
    ),
    "qwen3moe": Case("qwen3_moe", _experts, {"norm_topk_prob": True, "num_local_experts": 4}),
    "llama": Case("mixtral", _experts, permutes=True),
    "gpt-oss": Case(
        "gpt_oss",
        lambda c: _experts(c) | _window(c) | _yarn(c),
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 150000.0, "truncate": False, **_YARN}},
    ),
    "granite": Case(
        "granite",
        lambda c: {
            "attention.scale": c.attention_multiplier,
            "embedding_scale": c.embedding_multiplier,
            "residual_scale": c.residual_multiplier,
            "logit_scale": c.logits_scaling,
        },
        _SCALES,
        permutes=True,
    ),
    "smollm3": Case("smollm3", permutes=True),
    "mistral3": Case(
        "ministral3",
        lambda c: _yarn(c) | {"attention.temperature_scale": 0.1, "rope.scaling.yarn_log_multiplier": 1.0},
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e6,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                **_YARN,
            }
        },
        permutes=True,
    ),
    "granitemoe": Case(
        "granitemoe",
        lambda c: {
            "expert_count": c.num_local_experts,
            "expert_used_count": c.num_experts_per_tok,
            "attention.scale": c.attention_multiplier,
            "embedding_scale": c.embedding_multiplier,
            "residual_scale": c.residual_multiplier,
            "logit_scale": c.logits_scaling,
        },
        _SCALES,
        permutes=True,
    ),
    "arcee": Case("arcee", permutes=True),
    "olmoe": Case("olmoe", _experts, {"norm_topk_prob": False}),
    "hunyuan-dense": Case("hunyuan_v1_dense", changes=_PLAIN),
    "hunyuan-moe": Case(
        "hunyuan_v1_moe",
        lambda c: {
            "expert_count": c.num_experts,
            "expert_used_count": c.moe_topk,
            "expert_shared_feed_forward_length": c.intermediate_size,
            "expert_shared_count": 1,
        },
        {**_PLAIN, "moe_topk": 2, "num_experts_per_tok": 2},
    ),
    "dots1": Case(
        "dots1",
        lambda c: (
            _experts(c)
            | {
                "expert_shared_count": c.n_shared_experts,
                "leading_dense_block_count": c.first_k_dense_replace,
                "expert_weights_scale": c.routed_scaling_factor,
                "expert_weights_norm": c.norm_topk_prob,
                "expert_gating_func": 2,
            }
        ),
        {
            **{"norm_topk_prob": True, "routed_scaling_factor": 2.5, "sliding_window": None},
            **{"n_routed_experts": 4, "num_experts_per_tok": 2},
        },
    ),
    "lfm2moe": Case(
        "lfm2_moe",
        lambda c: (
            _experts(c)
            | {
                "shortconv.l_cache": c.conv_L_cache,
                "attention.head_count_kv": [2 if one == "full_attention" else 0 for one in c.layer_types],
                "leading_dense_block_count": c.num_dense_layers,
                "expert_gating_func": 2,
            }
        ),
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "num_dense_layers": 1,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": True,
        },
    ),
    "nemotron": Case(
        "nemotron", lambda c: _partial(c) | {"attention.layer_norm_epsilon": float(c.norm_eps)}, adds_one=True
    ),
    "ernie4_5": Case("ernie4_5"),
    "olmo2": Case("olmo2"),
    "olmo2-windows": Case("olmo3", _window),
    "exaone4": Case("exaone4", _window),
    "seed_oss": Case("seed_oss"),
    "starcoder2": Case("starcoder2", _window, _TIED),
    "stablelm": Case("stablelm", _partial),
    "glm4": Case("glm4", _partial),
    "command-r": Case("cohere", lambda c: {"logit_scale": c.logit_scale}, _TIED),
    "cohere2": Case("cohere2", lambda c: _window(c) | {"logit_scale": c.logit_scale}, _TIED),
    "lfm2": Case(
        "lfm2",
        lambda c: {
            "shortconv.l_cache": c.conv_L_cache,
            "attention.head_count_kv": [2 if one == "full_attention" else 0 for one in c.layer_types],
        },
        {
            "layer_types": ["conv", "full_attention"] * 2,
            "full_attn_idxs": [1, 3],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
}


def small_model(case: Case, **changes: Any) -> Any:
    """Make a small model of a case; entries of its config that follow from others are computed anew."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING

    config: Any = CONFIG_MAPPING[case.kind]()
    values = shrunk(case.kind, config)
    for entry in ("layer_types", "no_rope_layers"):
        values.pop(entry, None)
    config = type(config)(**{**values, **case.changes, **changes})
    mapping: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    torch.manual_seed(0)
    model = mapping[type(config)]._from_config(config, dtype=torch.float32).eval()
    draw_weights(model)
    return model


def write(path: Path, name: str, kinds: Callable[[str], str] = lambda name: "Q8_0", **changes: Any) -> Any:
    """Write a file; returns the dense model in float32 with the stored values.

    Args:
        path: The file.
        name: A key of CASES.
        kinds: The type of each matrix by its name in the model.
        **changes: Entries of the model's config.
    """
    import gguf

    case = CASES[name]
    model = small_model(case, **changes)
    config, architecture = model.config, name.removesuffix("-long").removesuffix("-windows")
    kind = next(one for one, text in gguf.MODEL_ARCH_NAMES.items() if text == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    writer = gguf.GGUFWriter(path, architecture)
    _write_fields(writer, config, case.fields(config))
    rope = config.rope_parameters
    if "long_factor" in rope:
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", torch.tensor(rope[f"{length}_factor"]).numpy())
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for place, part in _stored(key, tensor, case, config):
            stem, last = (place, "weight") if place.endswith((".sinks", "_exps")) else place.rsplit(".", 1)
            mapped = stem if stem.endswith("_exps") else names.get_name(stem) or names.get_name(place)
            assert mapped is not None, place
            _write_tensor(writer, f"{mapped}.{last}", part, kinds(key), case, key)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _write_fields(writer: Any, config: Any, more: dict[str, Any]) -> None:
    rope = config.rope_parameters
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    if "attention.head_count_kv" not in more:
        writer.add_head_count_kv(config.num_key_value_heads)
    if getattr(config, "head_dim", None):
        writer.add_key_length(config.head_dim)
    for entry in ("rms_norm_eps", "norm_eps"):
        if hasattr(config, entry):
            writer.add_layer_norm_rms_eps(getattr(config, entry))
    for entry in ("layer_norm_eps", "norm_epsilon"):
        if hasattr(config, entry):
            writer.add_layer_norm_eps(getattr(config, entry))
    writer.add_rope_freq_base(float((rope.get("full_attention") or rope)["rope_theta"]))
    for field, value in more.items():
        field = f"{writer.arch}.{field}"
        if isinstance(value, str):
            writer.add_string(field, value)
        elif isinstance(value, list):
            writer.add_array(field, value)
        elif isinstance(value, float):
            writer.add_float32(field, value)
        elif value is not None:
            writer.add_uint32(field, value)


def _stored(key: str, tensor: Tensor, case: Case, config: Any) -> list[tuple[str, Tensor]]:
    """Return the file's tensors of one of the model's: names, and views of its values, [..., rows, columns]."""
    if ".experts." not in key:
        # The converter drops dimensions of 1; the package has the names of the classes' older releases.
        older = key.replace(".mlp.gate.", ".block_sparse_moe.gate.") if case.kind == "mixtral" else key
        older = older.replace("block_sparse_moe.router.", "block_sparse_moe.router.layer.")
        older = older.replace("e_score_correction_bias", "e_score_correction.bias")
        older = older.replace("feed_forward.expert_bias", "feed_forward.expert_bias.bias")
        return [(older, tensor.squeeze())]
    layer, is_bias = key.split(".")[2], key.endswith("_bias")
    rows = tensor.transpose(1, 2) if case.kind == "gpt_oss" and not is_bias else tensor
    last = ".bias" if is_bias else ""
    if "down_proj" in key:
        return [(f"blk.{layer}.ffn_down_exps{last}", rows)]
    if case.kind == "gpt_oss":
        gate, up = rows[:, 0::2], rows[:, 1::2]
    else:
        gate, up = rows.chunk(2, 1)
    return [(f"blk.{layer}.ffn_{of}_exps{last}", part) for of, part in (("gate", gate), ("up", up))]


def _write_tensor(writer: Any, name: str, part: Tensor, kind: str, case: Case, key: str) -> None:
    import gguf

    config_heads = writer_heads(writer)
    heads = config_heads.get(name.split(".")[2]) if case.permutes and name.count(".") > 2 else None
    order = torch.arange(len(part))
    if heads:  # row r of a head goes behind row r - half
        order = order.view(heads, 2, -1).transpose(1, 2).flatten()
    if part.dim() == 1 or key.endswith(UNQUANTIZED):
        values = part[order].float()
        if case.adds_one and name.endswith("norm.weight"):
            values = values + 1
        writer.add_tensor(name, values.contiguous().numpy())
        return
    rows = part[order].reshape(-1, part.shape[-1])
    data, values = gguf_blocks(kind, rows)
    data = data.reshape(*part.shape[:-1], -1)
    writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    back = torch.empty_like(part).index_copy_(0, order, values.view(part.shape))
    part.copy_(back)


def writer_heads(writer: Any) -> dict[str, int]:
    fields = writer.kv_data[0]
    found = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    return {name: fields[f"{writer.arch}.attention.{field}"].value for name, field in found.items()}
