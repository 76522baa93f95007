"""Models of transformers that ranks share: tokens equal to those of one rank for each way of sharing layers, quantized
files and adapters, what each rank holds, and what is said of models that ranks cannot share.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import transformers

from support.adapters import adapt
from support.checkpoint_writers import BY_LIBRARY, CASES, SIZES, write_folder
from support.gguf_architectures import write
from test_checkpoint_experts import written
from torch_infini import LLM, LoRARequest, SamplingParams
from torch_infini.distributed import TPGroup
from torch_infini.distributed.rank_threads import on_ranks
from torch_infini.engine.loading import load_model
from torch_infini.patch.checks.trial import without_side_effects
from torch_infini.patch.files import foreign
from torch_infini.patch.layers.quantized_experts import QuantizedExperts
from torch_infini.patch.paged.serve import load_served_model
from torch_infini.patch.ranks.additive import is_additive
from torch_infini.patch.ranks.cut import Cut, Range, part_of
from torch_infini.patch.ranks.hooks import RankHook, combines_ranks
from torch_infini.patch.ranks.plan import Plan
from torch_infini.patch.ranks.split import split
from torch_infini.testing import causal_types as causal_types_module
from torch_infini.testing.causal_types import VOCABULARY, build
from torch_infini.testing.new_model import draw_weights

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

SETTINGS = {"block_size": 8, "cache_blocks": 60, "chunk_size": 16}
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, detokenize=False)
# Rows and columns; gathered results; experts whose gates alternate, with biases and sinks, and a derived plan; keys of
# several parts; a derived plan with fc1 and fc2; then an MLP that stays whole, experts that do nothing, linear
# attention, experts that take rows for all, one without the paged cache.
KINDS = (
    *("qwen3_moe", "phi3", "gpt_oss", "deepseek_v2", "opt"),
    *("gemma3n_text", "longcat_flash", "qwen3_next", "olmo2", "llama4_text", "inkling_text", "stablelm"),
)


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(5, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


ROWS = prompts(40, 3, 17)
ROWS.append(ROWS[0][:24] + ROWS[1])


def tokens_of(model: Any, **more: Any) -> list[list[int]]:
    outputs = LLM(model, **{**SETTINGS, **more}).generate(ROWS, GREEDY)
    assert [output.outputs[0].error for output in outputs] == [None] * len(ROWS)
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_alike(folder: Path, size: int, weights: str | None = None) -> list[Any]:
    """The tokens of ranks are those of one; returns the ranks' models."""
    want = tokens_of(load_served_model(folder, weights, None, "cpu", None, False))

    def work(tp_group: TPGroup) -> Any:
        model = load_served_model(folder, weights, None, "cpu", None, False, tp_group)
        return model, tokens_of(model)

    results = on_ranks(size, work)
    for result in results:
        assert not isinstance(result, Exception), result
        assert result[1] == want
    return [model for model, _ in results]


@pytest.mark.full(beyond=3)
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_one_rank(kind: str, tmp_path: Path) -> None:
    """In float32: prompts in pieces beside others and with a reused prefix, and recorded steps."""
    build(kind).save_pretrained(tmp_path)
    models = assert_alike(tmp_path, 2)
    assert [model.tp_group.rank for model in models] == [0, 1]
    # Layers whose results are summed or gathered are ours too: others would call ATen, which is slow in bfloat16.
    combined = [module for module in models[0].model.modules() if combines_ranks(module)]
    assert combined and not any(type(module) is torch.nn.Linear for module in combined)
    sizes = [sum(p.numel() for p in model.model.parameters()) for model in models]
    whole = sum(p.numel() for p in build(kind).parameters())
    assert sizes[0] == sizes[1] < 0.82 * whole


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("kind", ["qwen3", "gpt_oss"])
def test_fewer_key_heads_than_ranks(kind: str, tmp_path: Path) -> None:
    """Two key heads, each of two ranks."""
    build(kind).save_pretrained(tmp_path)
    for model in assert_alike(tmp_path, 4):
        assert model.config.num_key_value_heads == 1


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("kind", ["gemma2", "cohere"])
def test_a_tied_head_is_rows_of_the_embedding(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    config = copy.deepcopy(model.config)
    config.tie_word_embeddings, config.vocab_size = True, VOCABULARY - 1  # which 2 does not divide
    tied = type(model)._from_config(config, dtype=torch.float32)
    tied.save_pretrained(tmp_path)
    rows = [64, 63]
    for rank, served in enumerate(assert_alike(tmp_path, 2)):
        head, table = served.model.get_output_embeddings(), served.model.get_input_embeddings().weight
        assert head.weight.shape[0] == rows[rank] == head.out_features
        assert torch.equal(head.weight, table[64 * rank :][: rows[rank]])


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize("name", ["gemma2", "qwen3moe", "phi3", "starcoder2"])
def test_quantized_files(name: str, tmp_path: Path) -> None:
    """Each rank has its part of the file's integers, which are multiplied as those of one rank."""
    pytest.importorskip("gguf")
    sizes = {"hidden_size": 128, "intermediate_size": 128, "head_dim": 32}
    write(tmp_path / "model.gguf", name, **sizes, **({"moe_intermediate_size": 64} if name == "qwen3moe" else {}))

    def work(tp_group: TPGroup | None) -> Any:
        model: Any = foreign.load(tmp_path / "model.gguf", torch.float32, must_patch=False, tp_group=tp_group)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ROWS[0]]), use_cache=False).logits
        return logits, part_of(model.get_submodule("model.layers.0.self_attn.o_proj"))

    want, _ = work(None)
    for rank, (logits, part) in enumerate(on_ranks(2, work)):
        # Products of blocks may round x to 16 bits.
        assert float((logits - want).norm() / want.norm()) < 2**-11
        assert part == (((0, 128),), (64 * rank, 64), (128, 128))


def test_quantized_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gpt-oss in MXFP4: experts stay in blocks, a rank has its part; blocks that ranks would cut are refused."""
    with monkeypatch.context() as larger:
        larger.setitem(causal_types_module.SIZES, "intermediate_size", 128)
        (tmp_path / "larger").mkdir()
        written(tmp_path / "larger")
    one = load_served_model(tmp_path / "larger", None, None, "cpu", None, False)
    sizes = [experts_bytes(model) for model in (one, *assert_alike(tmp_path / "larger", 2))]
    assert sizes[0] == 2 * sizes[1] == 2 * sizes[2] > 0
    written(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["intermediate_size"] == 96

    def work(tp_group: TPGroup) -> Any:
        return load_served_model(tmp_path, None, None, "cpu", None, False, tp_group)

    for result in on_ranks(2, work):
        assert "ranks must not cut the blocks of 32 numbers, got 48 columns of each" in str(result)
    blocks = torch.arange(2 * 8 * 6 * 3, dtype=torch.uint8).view(2, 8, 6, 3)
    down = Cut(-2, (Range(64, 64),)).of_blocks(blocks, 32, True)
    assert torch.equal(down, blocks[:, :, 2:4])
    up = Cut(-1, (Range(2, 2), Range(6, 2))).of_blocks(blocks, 32, True)
    assert torch.equal(up, blocks[:, [2, 3, 6, 7]])
    assert torch.equal(Cut(-2, (Range(4, 4),)).of_blocks(blocks, 32, False), blocks[:, 4:])


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize(
    "case", ["awq", "w8a16", "gptq", "pack-quantized-zeros", "fp8-blocks", "mxfp4", "bitsandbytes-nf4"]
)
def test_quantized_folders(case: str, tmp_path: Path) -> None:
    """Of formats of integers, floats and blocks: each rank reads its rows or columns, with their scales and zeros."""
    if case in BY_LIBRARY:
        pytest.importorskip("compressed_tensors")
    config = transformers.AutoConfig.for_model(
        "gemma2",
        **{**SIZES, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY},
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    draw_weights(model)
    write_folder(tmp_path, CASES[case], given=model.eval())

    def work(tp_group: TPGroup | None) -> Any:
        loaded: Any = foreign.load(tmp_path, torch.float32, must_patch=False, tp_group=tp_group)
        with torch.no_grad():
            return loaded(input_ids=torch.tensor([ROWS[0]]), use_cache=False).logits

    want = work(None)
    for logits in on_ranks(2, work):
        assert float((logits - want).norm() / want.norm()) < 2**-11


def experts_bytes(served: Any) -> int:
    experts = [module for module in served.model.modules() if isinstance(module, QuantizedExperts)]
    return sum(buffer.nbytes for module in experts for buffer in module.buffers())


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_quantized_weights_are_alike_on_all_ranks(weights: str, tmp_path: Path) -> None:
    """Each quantizes its part; logits have the same bits on both, in bfloat16 too."""
    build("qwen3_moe").save_pretrained(tmp_path)

    def work(tp_group: TPGroup) -> Any:
        return tokens_of(load_served_model(tmp_path, weights, torch.bfloat16, "cpu", None, False, tp_group))

    first, second = on_ranks(2, work)
    assert not isinstance(first, Exception) and first == second


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("kind", ["qwen3_moe", "olmo2"])
def test_adapters(kind: str, tmp_path: Path) -> None:
    """Of layers whose rows are cut, whose columns are, and whose results are gathered."""
    pytest.importorskip("peft")
    base = build(kind)
    base.save_pretrained(tmp_path / "base")
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", *(("up_proj", "down_proj") if kind == "olmo2" else ())]
    lora = LoRARequest("one", 1, adapt(tmp_path / "lora", base, 1, r=8, target_modules=targets))

    def tokens(model: Any) -> Any:
        llm = LLM(model, enable_lora=True, **SETTINGS)
        return [
            [list(output.outputs[0].token_ids) for output in llm.generate(ROWS, GREEDY, False, [adapter] * len(ROWS))]
            for adapter in (None, lora)
        ]

    def work(tp_group: TPGroup | None) -> Any:
        return tokens(load_served_model(tmp_path / "base", None, None, "cpu", None, False, tp_group))

    want = work(None)
    assert want[0] != want[1]
    assert on_ranks(2, work) == [want, want]


@pytest.mark.full(beyond=1)
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_moe", "falcon_h1"])
def test_processes(kind: str, tmp_path: Path) -> None:
    """The program's own workers, which load the model by themselves; states of prefixes beyond those of sequences."""
    build(kind).save_pretrained(tmp_path)
    more = {"cache_blocks": 4000, "max_num_seqs": 3}
    want = tokens_of(tmp_path, **more)
    assert tokens_of(tmp_path, **more, tensor_parallel_size=2) == want


def test_hooks_of_ranks_stay(tmp_path: Path) -> None:
    """A trial leaves out hooks of who watches, and not those that are part of what a module computes."""

    models = [build("qwen3") for _ in range(2)]

    def work(tp_group: TPGroup) -> Any:
        model = models[tp_group.rank]
        split(model, tp_group)
        calls: list[str] = []
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda *_: calls.append("watched"))
        ids = torch.tensor([ROWS[1]])
        with torch.no_grad():
            watched = model(input_ids=ids).logits
            with without_side_effects(model):
                quiet = model(input_ids=ids).logits
        hooks = [hook for module in model.modules() for hook in module._forward_hooks.values()]
        return watched, quiet, calls, sum(isinstance(hook, RankHook) for hook in hooks)

    with torch.no_grad():
        want = build("qwen3")(input_ids=torch.tensor([ROWS[1]])).logits
    for watched, quiet, calls, count in on_ranks(2, work):
        torch.testing.assert_close(watched, want, rtol=1e-5, atol=1e-5)
        assert torch.equal(watched, quiet) and calls == ["watched"] and count == 4 * 2 + 1


def test_cuts() -> None:
    """A range is a view, several are a copy, none are zeros: a bias that is added once."""
    whole = torch.arange(4.0)
    one = Cut(-1, (Range(1, 2),)).of(whole)
    assert one.tolist() == [1, 2] and one.data_ptr() == whole[1:].data_ptr()
    assert Cut(-1, (Range(1, 1), Range(3, 1))).of(whole).tolist() == [1, 3]
    assert Cut(-1, ()).of(whole).tolist() == [0] * 4


def refused(kind: str, size: int, folder: Path, **changes: Any) -> str:
    model = build(kind)
    for name, value in changes.items():
        setattr(model.config, name, value)
    type(model)._from_config(model.config).save_pretrained(folder)
    results = on_ranks(size, lambda group: load_served_model(folder, None, None, "cpu", None, False, group))
    assert all(isinstance(result, ValueError) for result in results), results
    assert len(set(map(str, results))) == 1
    return str(results[0])


def test_models_that_ranks_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = refused("gpt2", 2, tmp_path / "a")
    assert said == (
        "torch_infini.LLM: tensor_parallel_size must be 1 for GPT2LMHeadModel, because transformers has no plan "
        "(tp_plan) of it, and none follows from its layers' names, got 2"
    )
    said = refused("qwen3", 3, tmp_path / "b")
    assert said.endswith("the heads of model.layers.0.self_attn.q_proj must be a multiple of the ranks, 3, got 4")
    said = refused("qwen3", 4, tmp_path / "c", intermediate_size=90)
    assert said.endswith("the columns of model.layers.0.mlp.down_proj must be a multiple of the ranks, 4, got 90")

    class Unknown(Plan):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            self.styles["model.layers.*.mlp.down_proj"] = "diagonal"

    monkeypatch.setattr("torch_infini.patch.ranks.split.Plan", Unknown)
    said = refused("qwen3", 2, tmp_path / "d")
    assert "the style 'diagonal' of model.layers.0.mlp.down_proj, a Linear, is unknown here, got 2" in said


def test_folders_that_ranks_cannot_share(tmp_path: Path) -> None:
    """Of save_patched; and other files on another rank."""
    from torch_infini import patch_model
    from torch_infini.patch import save_patched

    model = build("qwen3")
    patch_model(model)
    save_patched(model, tmp_path / "patched")
    for result in on_ranks(2, lambda group: foreign.load(tmp_path / "patched", tp_group=group)):
        assert "tensor_parallel_size must be 1 for a folder of save_patched, got 2" in str(result)
    model = build("qwen3")
    for rank in range(2):
        model.model.norm.weight.data += 1
        model.save_pretrained(tmp_path / str(rank))
    for result in on_ranks(
        2, lambda group: load_model(tmp_path / str(group.rank), None, None, "cpu", None, False, group)
    ):
        assert "the checkpoint must be the same on all ranks, got another one on rank 1" in str(result)


def test_a_plan_that_follows() -> None:
    """Of attention and MLPs by their names, where nothing else of them has parameters."""
    plan = Plan(build("stablelm"))
    assert not plan.is_of_class and plan.has_layers and Plan(build("qwen3")).is_of_class
    assert plan.styles == {
        "lm_head": "colwise_gather_output",
        **{f"model.layers.*.self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        "model.layers.*.self_attn.o_proj": "rowwise",
        **{f"model.layers.*.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")},
        "model.layers.*.mlp.down_proj": "rowwise",
    }
    model = build("stablelm")
    for layer in model.model.layers:
        layer.mlp.norm = torch.nn.LayerNorm(model.config.intermediate_size)
        layer.self_attn.scale = torch.nn.Parameter(torch.ones(64))
    assert not Plan(model).has_layers


class _Gated(torch.nn.Module):
    """An MLP whose gates are the first half of a layer's results, or every other one, or normalized."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.gate_up_proj = torch.nn.Linear(8, 32, device="meta")
        self.down_proj = torch.nn.Linear(16, 8, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        both = self.gate_up_proj(x)
        gate, up = (both[..., ::2], both[..., 1::2]) if self.kind == "alternating" else both.chunk(2, -1)
        if self.kind == "normalized":
            gate = gate - gate.mean(-1, keepdim=True)
        if self.kind == "broken":
            raise RuntimeError("a forward that needs more")
        result: Tensor = self.down_proj(torch.nn.functional.silu(gate) * up)
        return result


@pytest.mark.parametrize(
    ("kind", "want"), [("halves", True), ("alternating", False), ("normalized", False), ("broken", None)]
)
def test_is_additive(kind: str, want: bool | None) -> None:
    assert is_additive(_Gated(kind), ("gate_up_proj",), "down_proj", 2) is want


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize("kind", ["glm", "qwen3_5_text", "qwen3_next", "phi3"])
def test_heads_of_fused_layers(kind: str, tmp_path: Path) -> None:
    """Attention, its cache, and the states of the delta rule are shared too, not computed whole on each rank."""
    build(kind).save_pretrained(tmp_path)
    one = load_served_model(tmp_path, None, None, "cpu", None, False)
    for model in assert_alike(tmp_path, 2):
        assert type(model).__name__ == "PagedModel" and model.is_recordable
        assert model.bytes_per_token(torch.float32) * 2 == one.bytes_per_token(torch.float32)
        assert model.bytes_per_sequence * 2 == one.bytes_per_sequence
        assert sum(p.numel() for p in model.model.parameters()) < 0.56 * sum(p.numel() for p in one.model.parameters())


def test_parts_together_are_the_whole(tmp_path: Path) -> None:
    """Every parameter's parts, along the dimension that is cut."""

    models = [build("gpt_oss") for _ in range(2)]

    def work(tp_group: TPGroup) -> Any:
        model = models[tp_group.rank]
        return split(model, tp_group), {name: p.detach() for name, p in model.named_parameters()}

    whole: dict[str, Tensor] = {name: p.detach() for name, p in build("gpt_oss").named_parameters()}
    (_, first), (cuts, second) = on_ranks(2, work)  # rank 0 has biases that are added once, whole
    cut_names = {name.rpartition(".")[2] for name in cuts if "experts" in name}
    assert cut_names == {"gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"}
    for name, tensor in whole.items():
        cut = cuts.get(name)
        if cut is None:
            assert torch.equal(first[name], tensor) and torch.equal(second[name], tensor)
        elif cut.ranges:
            assert torch.equal(torch.cat([first[name], second[name]], cut.dim), tensor), name
        else:
            assert torch.equal(first[name], tensor) and not second[name].any(), name
