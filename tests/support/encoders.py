"""Small encoders of transformers with random weights, as folders of sentence-transformers, for the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AutoConfig, AutoModel

from torch_infini.testing.checkpoints import save_tokenizer

VOCABULARY, CLS, SEP = 320, 318, 319
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 130,
    "pad_token_id": 1,
}
# Types, with the entries of their configs besides BERT's.
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0},
    "roberta": {"type_vocab_size": 1},
    "xlm-roberta": {"type_vocab_size": 1},
    "distilbert": {"dim": 48, "hidden_dim": 80, "n_layers": 2, "n_heads": 4},
    "mpnet": {},
    "modernbert": {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": CLS, "sep_token_id": SEP},
}


def save_encoder(folder: Path, family: str = "bert", head: str = "", **more: Any) -> Path:
    """Save an encoder and a byte-level tokenizer that puts a text between CLS and SEP.

    Args:
        folder: Created if missing.
        family: Its type.
        head: The end of its class, such as "ForSequenceClassification"; empty: it has no head.
        **more: Entries of its config.
    """
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**BERT, **FAMILIES.get(family, {}), **more})
    kind = getattr(transformers, f"AutoModel{head}")
    model = kind.from_config(config).float()
    for name, parameter in model.named_parameters():
        if "norm" not in name.lower():
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    save_tokenizer(folder, VOCABULARY)
    stored = json.loads((folder / "tokenizer.json").read_text())
    vocab = stored["model"]["vocab"]
    names = {id: name for name, id in vocab.items()}
    vocab.update({"[CLS]": vocab.pop(names[CLS]), "[SEP]": vocab.pop(names[SEP])})
    stored["added_tokens"] = [
        {"id": id, "content": text, "special": True}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for id, text in ((CLS, "[CLS]"), (SEP, "[SEP]"))
    ]
    first, last = ({"SpecialToken": {"id": text, "type_id": 0}} for text in ("[CLS]", "[SEP]"))
    text, other = ({"Sequence": {"id": id, "type_id": kind}} for id, kind in (("A", 0), ("B", 1)))
    end = {"SpecialToken": {"id": "[SEP]", "type_id": 1}}
    stored["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [first, text, last],
        "pair": [first, text, last, other, end],
        "special_tokens": {
            text: {"id": text, "ids": [id], "tokens": [text]} for id, text in ((CLS, "[CLS]"), (SEP, "[SEP]"))
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    settings |= {"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[SEP]"}
    types = ["token_type_ids"] if family == "bert" else []
    settings["model_input_names"] = ["input_ids", *types, "attention_mask"]
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def save_modules(folder: Path, pooling: dict[str, Any], *more: str, **files: Any) -> None:
    """Write the files of sentence-transformers: modules.json with Transformer, Pooling and `more`, and others.

    Args:
        folder: The model's.
        pooling: The Pooling's config.
        *more: Names of further modules.
        **files: Contents of NAME.json.
    """
    names = ["Transformer", "Pooling", *more]
    paths = ["", *(f"{i}_{name}" for i, name in enumerate(names[1:], 1))]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(zip(names, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@torch.no_grad()
def reference(folder: Path, tokens: list[int], pooling: str, normalize: bool = True) -> Tensor:
    """Pool transformers' last_hidden_state of one text, in float64."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    states = model(input_ids=torch.tensor([tokens])).last_hidden_state[0].double()
    vector = {
        "last": states[-1],
        "mean": states.mean(0),
        "cls": states[0],
        "max": states.amax(0),
        "mean_sqrt_len": states.sum(0) / len(tokens) ** 0.5,
    }[pooling]
    return vector / vector.norm() if normalize else vector
