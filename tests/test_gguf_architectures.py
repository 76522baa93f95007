"""GGUF files of each architecture: the config, logits and tokens of the model whose values they hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
pytest.importorskip("transformers")

import torch_infini
from support.checkpoint_writers import block_layout, gguf_blocks
from support.gguf_architectures import CASES, write
from torch_infini import LLM, SamplingParams
from torch_infini.checkpoints import Target, open_checkpoint
from torch_infini.checkpoints.architectures import ARCHITECTURES
from torch_infini.checkpoints.blocks import KINDS, Blocks
from torch_infini.checkpoints.order import Order, halves
from torch_infini.patch.layers.quantized_experts import QuantizedExperts
from torch_infini.testing.checkpoints import save_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

IDS = torch.randint(5, 120, (1, 23), generator=torch.Generator().manual_seed(0))
QUICK = ("gemma3", "phi3/long", "qwen2moe", "gpt-oss", "lfm2", "qwen35", "deepseek2", "gemma4")
# Entries that files lack: they follow from others, or inference does not read them.
UNREAD = (
    *(
        "architectures",
        "transformers_version",
        "dtype",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "_name_or_path",
    ),
    *("attention_dropout", "residual_dropout", "resid_pdrop", "embd_pdrop", "max_window_layers", "full_attn_idxs"),
    *("initializer_range", "sliding_window_pattern", "router_jitter_noise", "hidden_act", "intermediate_size"),
    *("mamba_chunk_size", "time_step_rank"),
)


def params(names: tuple[str, ...]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.full) for name in names]


def tolerance(name: str) -> float:
    """Of logits; transformers' own delta rule and ours round otherwise, by 1.4e-5 in docs/families.md."""
    return 5e-5 if name.startswith(("qwen35", "qwen3next")) else 1e-5


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits.float()


@pytest.mark.parametrize("name", params(tuple(CASES)))
def test_architecture(name: str, tmp_path: Path) -> None:
    """The config's values, the dense model's logits, and its tokens from the engine."""
    path = tmp_path / "model.gguf"
    dense = write(path, name)
    loaded = torch_infini.load(path, torch.float32)
    own, found = dense.config.to_dict(), loaded.config.to_dict()
    assert own["model_type"] == found["model_type"]
    for entry in own.keys() - set(UNREAD):
        value = own[entry]
        if isinstance(value, float):
            assert found[entry] == pytest.approx(value, rel=1e-6), entry
        elif entry == "rope_parameters":
            for key in ("full_attention", "sliding_attention"):
                if key in value:
                    assert found[entry][key].items() >= value[key].items()
        else:
            assert found[entry] == value or (not value and not found[entry]), entry
    expected = logits(dense)
    difference = float((logits(loaded) - expected).abs().max() / expected.abs().max())
    assert difference <= tolerance(name)
    stored = {name for name, buffer in loaded.named_buffers() if name.endswith("_integers") and buffer.numel()}
    if block_layout("Q8_0") != "dense":
        # Nemotron-H has attention, a Mamba-2 or an MLP in a layer, Mamba-2 two products.
        least = 2 if name.startswith(("nemotron_h", "mamba2")) else 4
        assert len(stored) >= least * dense.config.num_hidden_layers
        experts = [module for module in loaded.modules() if isinstance(module, QuantizedExperts)]
        assert len(experts) == sum(one.endswith("experts.down_proj") for one in dict(dense.named_parameters()))
    llm = LLM(path, dtype="float32", block_size=4, chunk_size=8, cache_blocks=40, progress=False)
    settings = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    (output,) = llm.generate([IDS[0].tolist()], settings)
    with torch.no_grad():
        scores = dense(input_ids=torch.tensor([IDS[0].tolist() + list(output.token_ids)]), use_cache=False).logits
    assert list(output.token_ids) == scores[0, 22:-1].argmax(-1).tolist()


@pytest.mark.parametrize(
    "name, kinds",
    [
        ("qwen3moe", {"down_proj": "Q6_K", "gate_up_proj": "Q4_K"}),  # as Q4_K_M
        ("gpt-oss", {"down_proj": "MXFP4", "gate_up_proj": "MXFP4"}),
        ("llama", {"down_proj": "F16", "gate_up_proj": "F16"}),
        pytest.param("gpt-oss", {"down_proj": "F32", "gate_up_proj": "BF16"}, marks=pytest.mark.full),
        pytest.param("qwen2moe", {"down_proj": "IQ4_NL", "gate_up_proj": "Q5_0"}, marks=pytest.mark.full),
        pytest.param("qwen2moe", {"down_proj": "Q3_K", "gate_up_proj": "Q2_K"}, marks=pytest.mark.full),
        pytest.param("qwen3moe", {"down_proj": "IQ4_XS", "gate_up_proj": "Q3_K"}, marks=pytest.mark.full),
    ],
)
def test_experts(name: str, kinds: dict[str, str], tmp_path: Path) -> None:
    """Experts of other types than their neighbours: in blocks of the file's kinds, dense, or dequantized."""
    path, wide = tmp_path / "model.gguf", 256
    sizes = {"hidden_size": wide, "moe_intermediate_size": wide, "shared_expert_intermediate_size": wide}
    if name != "qwen2moe" and name != "qwen3moe":
        sizes = {"hidden_size": wide, "intermediate_size": wide}
    of = lambda key: kinds.get(key.rpartition(".")[2], "Q8_0") if ".experts." in key else "Q8_0"
    dense = write(path, name, of, head_dim=64, **sizes)
    loaded = torch_infini.load(path, torch.float32)
    expected = logits(dense)
    assert float((logits(loaded) - expected).abs().max() / expected.abs().max()) <= 1e-5
    one = "model.layers.1.mlp.experts"
    found, own = loaded.get_submodule(one), dense.get_submodule(one)
    is_in_blocks = "F" not in kinds["down_proj"][0] and block_layout(kinds["down_proj"]) != "dense"
    assert isinstance(found, QuantizedExperts) == is_in_blocks
    for weight in ("gate_up_proj", "down_proj"):
        assert torch.equal(getattr(found, weight).float(), getattr(own, weight))
    if isinstance(found, QuantizedExperts):
        assert [found.plan.format_of(weight).name for weight in ("gate_up_proj", "down_proj")] == [
            kinds[weight].lower() for weight in ("gate_up_proj", "down_proj")
        ]


@pytest.mark.parametrize(
    "order", [halves(8), Order(2, 3, 4), Order(2, 2, 32, first=32), Order(4, 1, 8)], ids=["halves", "2", "first", "1"]
)
def test_order(order: Order) -> None:
    """The file's rows by the index are the model's; those that are not whole groups are an error."""
    n = order.first + 2 * order.outer * order.inner * order.size
    model = torch.arange(n)
    groups = model[order.first :].view(-1, order.outer, order.inner, order.size).transpose(1, 2)
    file = torch.cat((model[: order.first], groups.flatten()))
    assert torch.equal(file[order.index(n)], model)
    assert order.unit(n) == (n if order.first else n // 2)
    with pytest.raises(ValueError, match=rf"rows must be {order.first} and groups of \d+, got {n + 1}"):
        order.index(n + 1)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("piece", [32, 128])
def test_columns_in_another_order(kind: str, piece: int) -> None:
    """Blocks go with their columns where pieces are whole blocks, else x does; parts for ranks have the same values."""
    n, order = 8, Order(2, 2, piece)
    k = 512
    data, values = gguf_blocks(kind, torch.randn(n, k))
    stored, format = {"weight": torch.from_numpy(data.copy())}, Blocks(kind, None, order)
    expected = values[:, order.index(k)].double()
    assert torch.equal(format.dequantize(stored, n, k), expected)
    assert format.expected(n, k)["weight"].layout(stored["weight"].shape) is not None
    targets = [Target(torch.float32, blocks, blocks) for blocks in (True, False)]
    for target in [*targets, Target(torch.float32, True, False)]:
        weight = format.weight(stored, n, k, target)
        assert torch.equal(weight.dense(), expected)
        moves_x = weight.format != "dense" and (weight.format == "int4" or piece % KINDS[kind].elements != 0)
        assert (weight.columns is not None) == moves_x
        if weight.format == "int4":
            continue
        half = weight.cut(slice(2, 6), slice(k // 2, k))
        assert torch.equal(half.dense(), expected[2:6, k // 2 :])
    assert format.cut(stored, n, k, slice(None), slice(k // 2, k)) is None
    rows = format.cut(stored, n, k, slice(2, 6), slice(None))
    assert rows is not None and torch.equal(format.dequantize(rows, 4, k), expected[2:6])


def test_value_heads(tmp_path: Path) -> None:
    """Qwen 3.5's out_proj in blocks that hold columns of two heads; shared by two ranks, it is dense."""
    path = tmp_path / "model.gguf"
    of = lambda key: "Q4_K" if key.endswith("out_proj.weight") else "Q8_0"
    dense = write(path, "qwen35", of, hidden_size=256, linear_value_head_dim=128)
    loaded = torch_infini.load(path, torch.float32)
    expected = logits(dense)
    assert float((logits(loaded) - expected).abs().max() / expected.abs().max()) <= tolerance("qwen35")
    if block_layout("Q4_K") != "dense":
        assert loaded.get_submodule("model.layers.0.linear_attn.out_proj").weight_columns is not None
    settings = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    outputs = []
    for ranks in (1, 2):
        sizes = {"block_size": 4, "chunk_size": 8, "cache_blocks": 40}
        llm = LLM(path, dtype="float32", tensor_parallel_size=ranks, progress=False, **sizes)
        outputs.append(llm.generate([IDS[0].tolist()], settings)[0].token_ids)
    assert outputs[0] == outputs[1]


def test_gate_and_up_of_two_kinds(tmp_path: Path) -> None:
    """No kind of block holds them together: they are dequantized."""
    import gguf

    from torch_infini.checkpoints.architecture import Metadata
    from torch_infini.checkpoints.architectures.qwen import ARCHITECTURES as QWEN
    from torch_infini.checkpoints.gguf_file import GGUFFile

    gate, up = torch.randn(3, 32, 64), torch.randn(3, 32, 64)
    kinds, values, writer = ("Q8_0", "Q4_0"), [], gguf.GGUFWriter(tmp_path / "experts.gguf", "qwen3moe")
    for name, weight, kind in zip(("gate", "up"), (gate, up), kinds, strict=True):
        kind = gguf.GGMLQuantizationType[kind]
        data = gguf.quants.quantize(weight.numpy(), kind)
        values.append(torch.from_numpy(gguf.quants.dequantize(data, kind).copy()).view(weight.shape))
        writer.add_tensor(f"blk.0.ffn_{name}_exps.weight", data, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    architecture = next(one for one in QWEN if one.name == "qwen3moe")
    path = tmp_path / "experts.gguf"
    infos = {info.name: info for info in gguf.GGUFReader(path).tensors}
    file = GGUFFile(Metadata(path, {}, infos), architecture)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    assert not file.experts and file.tensors[name].shape == (3, 64, 64)
    assert torch.equal(file.read(name), torch.cat(values, 1))
    file.release(name)
    with pytest.raises(ValueError, match=r"experts.gate_up_proj in .* must have 2 parts, got 1"):
        GGUFFile(Metadata(path, {}, dict(list(infos.items())[:1])), architecture)


def test_parts_of_other_shapes(tmp_path: Path) -> None:
    """Fields that contradict a tensor's parts, and layers that an architecture cannot have."""
    import gguf

    from torch_infini.checkpoints.architecture import Metadata
    from torch_infini.checkpoints.gguf_file import GGUFFile

    path = tmp_path / "model.gguf"
    write(path, "qwen3next")
    infos = {info.name: info for info in gguf.GGUFReader(path).tensors}
    fields = {"general.architecture": "qwen3next", "qwen3next.ssm.group_count": 3, "qwen3next.ssm.state_size": 32}
    rule = r"in_proj_qkvz.weight in .* must have the shapes that the fields of a qwen3next give, got \[256, 64\], \["
    with pytest.raises(ValueError, match=rule):
        GGUFFile(Metadata(path, fields, infos), ARCHITECTURES["qwen3next"])
    sizes: dict[str, Any] = {
        "gemma4.block_count": 2,
        "gemma4.attention.head_count_kv": 2,
        "gemma4.feed_forward_length": 96,
    }
    fields = {"general.architecture": "gemma4", **sizes}
    for value, rule in (([True], "must have an entry for each of 2 layers, got 1"), (True, "must have full and slid")):
        fields["gemma4.attention.sliding_window_pattern"] = value
        with pytest.raises(ValueError, match=rule):
            ARCHITECTURES["gemma4"].config(Metadata(path, fields, {}))
    fields |= {"gemma4.attention.sliding_window_pattern": [True, False], "gemma4.attention.shared_kv_layers": 2}
    with pytest.raises(ValueError, match="shared_kv_layers in .* must be a number below that of layers, 2, got 2"):
        ARCHITECTURES["gemma4"].config(Metadata(path, fields, {}))


@pytest.mark.parametrize(
    "name, field, value, rule",
    [
        ("qwen35", "nextn_predict_layers", 4, "must be a number below that of blocks, 4, got 4"),
        ("qwen35", "ssm.time_step_rank", 3, "must be a multiple of ssm.group_count, 2, got 3"),
        ("qwen35", "ssm.inner_size", 4096, None),
        ("qwen35", "rope.dimension_sections", 7, "must be at least 3 numbers, got 7"),
        ("qwen35", "full_attention_interval", 0, "must be a positive integer, got 0"),
        ("qwen35", "ssm.group_count", 0, "must be a positive integer, got 0"),
        ("gemma3n", "activation_sparsity_scale", [1.5, 0.0], "must have an entry for each of 4 layers, got 2"),
        ("gemma3n", "activation_sparsity_scale", 1, r"must be numbers, got \[1, 1, 1, 1\]"),
        ("gemma3n", "attention.sliding_window_pattern", 2, "must say of each layer whether it has a window, got "),
        ("gemma3n", "attention.shared_kv_layers", 4, "must be a number below that of layers, 4, got 4"),
        ("gemma3n", "altup.active_idx", 4, "must be a number below that of inputs, 4, got 4"),
        ("gemma3n", "altup.num_inputs", 3, None),
        ("jamba", "attention.head_count_kv", 2, "must have an entry for each of 4 layers, a number, got 2"),
        ("jamba", "attention.head_count_kv", ["a"] * 4, "must have an entry for each of 4 layers, a number, got"),
        ("mamba2", "ssm.time_step_rank", 3, "must divide ssm.inner_size, 128, got 3"),
        ("mamba2", "ssm.inner_size", 100, "must be a multiple of embedding_length, 64, got 100"),
        ("jamba", "ssm.inner_size", 100, "must be a multiple of embedding_length, 64, got 100"),
    ],
)
def test_fields_that_contradict(
    name: str, field: str, value: Any, rule: str | None, tmp_path: Path, monkeypatch: Any
) -> None:
    """A sentence, before a weight is computed; None: about a tensor, whose shape or name follows from the field."""
    case = CASES[name]
    monkeypatch.setitem(CASES, name, case._replace(fields=lambda c: case.fields(c) | {field: value}))
    write(tmp_path / "model.gguf", name)
    of_tensors = r"A_log|in_proj|conv1d|altup_\w+projections|prediction_coefs|must have shape|rows must be|tensors in"
    with pytest.raises(ValueError, match=f"{name}.{field} in .* {rule}" if rule else of_tensors):
        torch_infini.load(tmp_path / "model.gguf", torch.float32)


@pytest.mark.parametrize("heads", [[2, 2, 0, 2], [0, 0, 0, 0], [0, 0, 2, 2]])
def test_layers_at_unlike_distances(heads: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = CASES["jamba"].fields
    changed = CASES["jamba"]._replace(fields=lambda c: fields(c) | {"attention.head_count_kv": heads})
    monkeypatch.setitem(CASES, "jamba", changed)
    write(tmp_path / "model.gguf", "jamba")
    with pytest.raises(NotImplementedError, match="layers with attention in .* must be at equal distances, .* of 4"):
        torch_infini.load(tmp_path / "model.gguf", torch.float32)


@pytest.mark.parametrize("values", [None, [0.5] * 3, ["a"] * 4])
def test_activations_that_are_none(values: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_model = CASES["apertus"].of_model
    changed = lambda model: {k: v for k, v in {**of_model(model), "xielu.beta": values}.items() if v is not None}
    monkeypatch.setitem(CASES, "apertus", CASES["apertus"]._replace(of_model=changed))
    write(tmp_path / "model.gguf", "apertus")
    with pytest.raises(ValueError, match=r"xielu.beta in .* must have a number for each of 4 layers, got "):
        torch_infini.load(tmp_path / "model.gguf", torch.float32)


@pytest.mark.parametrize("high", [4.0, 1.0])
def test_factors_of_rope(high: float) -> None:
    """Llama 3's, and Llama 4's, from what transformers divides the frequencies by; others are refused."""
    from types import SimpleNamespace

    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from torch_infini.checkpoints.architecture import Metadata, rope

    entries = {"low_freq_factor": 1.0, "high_freq_factor": high, "original_max_position_embeddings": 8192}
    expected = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 16.0, **entries}
    config = LlamaConfig(head_dim=128, max_position_embeddings=1 << 20, rope_parameters=expected)
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    divisors = 500000.0 ** (-torch.arange(0, 128, 2) / 128) / frequencies
    fields = {"general.architecture": "llama4", "llama4.rope.freq_base": 500000.0, "llama4.attention.key_length": 128}
    info = SimpleNamespace(data=divisors.numpy())
    found = rope(Metadata(Path("model.gguf"), fields, {"rope_freqs.weight": info}))
    assert found == {**expected, "factor": pytest.approx(16, rel=1e-6)}
    info.data[5] = 2
    with pytest.raises(NotImplementedError, match="rope_freqs.weight in model.gguf must be those of Llama 3 or 4, got"):
        rope(Metadata(Path("model.gguf"), fields, {"rope_freqs.weight": info}))


def test_a_stack_that_is_none(tmp_path: Path) -> None:
    import gguf

    from torch_infini.checkpoints.architecture import Metadata
    from torch_infini.checkpoints.gguf_file import GGUFFile

    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "gemma3n")
    writer.add_tensor("altup_proj.weight", torch.zeros(8, 4).numpy())
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    infos = {info.name: info for info in gguf.GGUFReader(path).tensors}
    with pytest.raises(ValueError, match=r"altup_proj.weight in .* must have 3 dimensions, got \[8, 4\]"):
        GGUFFile(Metadata(path, {}, infos), ARCHITECTURES["gemma3n"])


@pytest.mark.parametrize("name", ["qwen35", "granitehybrid"])
def test_a_decay_that_grows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logarithm would be NaN."""
    case = CASES[name]

    def grown(key: str, tensor: torch.Tensor, config: Any) -> Any:
        found = case.conversion(key, tensor, config)
        return [one._replace(pieces=[-p for p in one.pieces]) for one in found] if key.endswith("A_log") else found

    monkeypatch.setitem(CASES, name, case._replace(conversion=grown))
    write(tmp_path / "model.gguf", name)
    with pytest.raises(ValueError, match=r"A_log in .*model.gguf: the decay of a state must be negative, got \d"):
        torch_infini.load(tmp_path / "model.gguf", torch.float32)


@pytest.mark.parametrize(
    "name, field, value",
    [
        ("glm4", "rope.dimension_sections", [8, 12, 12, 0]),
        ("afmoe", "expert_weights_norm", False),
        ("llama4", "attention.sliding_window", 0),
    ],
)
def test_variants_that_are_refused(name: str, field: str, value: Any) -> None:
    """Their weights, or what they compute, would be others."""
    from torch_infini.checkpoints.architecture import Metadata

    metadata = Metadata(Path("model.gguf"), {"general.architecture": name, f"{name}.{field}": value}, {})
    with pytest.raises(NotImplementedError, match=f"an? {name} in model.gguf must .*{field}"):
        ARCHITECTURES[name].config(metadata)


def test_an_architecture_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module beside the others is found; a tensor or an architecture that is not known is named."""
    from torch_infini.checkpoints import architectures
    from torch_infini.checkpoints.architecture import Architecture, decoder

    (tmp_path / "arcee.py").write_text(
        "from torch_infini.checkpoints.architecture import Architecture, decoder\n"
        "ARCHITECTURES = (Architecture('maincoder', lambda m: decoder(m, 'qwen3')),)\n"
    )
    monkeypatch.setattr(architectures, "__path__", [*architectures.__path__, str(tmp_path)])
    assert "maincoder" in architectures._found() and "maincoder" not in ARCHITECTURES
    monkeypatch.setitem(ARCHITECTURES, "gemma", Architecture("gemma", lambda m: decoder(m, "gemma")))
    write(tmp_path / "model.gguf", "gemma2")
    monkeypatch.setitem(ARCHITECTURES, "gemma2", ARCHITECTURES["gemma"])
    with pytest.raises(ValueError, match=r"tensors in .* must be those of a gemma, got blk.0.post_attention_norm"):
        open_checkpoint(tmp_path / "model.gguf")


def test_a_tokenizer_that_transformers_cannot_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are token ids, and a tokenizer that is passed is used; the ends of a turn are ends, too."""
    import gguf

    import support.gguf_architectures as writers

    def with_tokens(writer: gguf.GGUFWriter, *args: Any) -> None:
        fields(writer, *args)
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(128)])
        writer.add_eos_token_id(2)
        writer.add_eot_token_id(3)

    fields = writers._write_fields
    monkeypatch.setattr(writers, "_write_fields", with_tokens)
    path = tmp_path / "model.gguf"
    write(path, "glm4")
    with pytest.warns(UserWarning, match=r"cannot read the tokenizer of .*glm4.*; pass a folder that has it as tok"):
        llm = LLM(path, dtype="float32", progress=False)
    assert set(llm.engine.model.config.eos_token_ids) == {2, 3}
    assert len(llm.generate([[5, 6]], SamplingParams(max_tokens=2, ignore_eos=True))[0].token_ids) == 2
    with pytest.raises(ValueError, match="prompt must be token ids because the model's folder has no tokenizer"):
        llm.generate(["text"])
    save_tokenizer(tmp_path, 128)
    assert LLM(path, tokenizer=tmp_path, progress=False).engine.tokenizer is not None
