"""Patched models that two ranks share by transformers' tensor parallelism: tokens, integers, reports, and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_infini
from support.ranks import Ranks
from support.rounding import greedy_tokens, rounding_limit, sums_of
from torch_infini.patch.layers.quantized_linear import QuantizedLinear
from torch_infini.patch.report import pattern
from torch_infini.testing.checkpoints import SMALL, cast, random_model
from torch_infini.testing.compare import rounding_error
from torch_infini.weights import FORMATS, best

TOKENS = 20
# Relative, of the logits of a float32 model of SMALL's sizes that adds up in another order.
INT8 = f"linear_{best('int8', 'cpu').name}"
ROUNDING = rounding_error(torch.float32, SMALL["intermediate_size"], 6 * SMALL["num_hidden_layers"] + 1)
LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
LLAMA = {
    "model.embed_tokens": "embedding, all_reduce",
    "model.layers.*": "add_rms_norm",
    "model.layers.*.input_layernorm": "rms_norm",
    "model.layers.*.post_attention_layernorm": "rms_norm",
    "model.layers.*.self_attn": "fused_linear, rope, attention, linear",
    "model.layers.*.mlp": "fused_linear, swiglu, linear",
    **{f"model.layers.*.{name}": "linear" for name in LINEARS},
    "model.layers.*.self_attn.o_proj": "linear, all_reduce",
    "model.layers.*.mlp.down_proj": "linear, all_reduce",
    "model.norm": "rms_norm",
    "model.rotary_emb": "rope (sliced once for all layers)",
    "lm_head": "linear, all_gather",
}


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2) as two:
        yield two


# ---- what the ranks do ----


def load(folder: Path, plan: Any = "auto") -> Any:
    """The model, of which this rank has its part."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=2, tp_plan=plan))


def prompt() -> Tensor:
    """Two rows, longer than the models' sliding windows are after some tokens."""
    return torch.randint(3, SMALL["vocab_size"] - 3, (2, 14), generator=torch.Generator().manual_seed(0))


def greedy(model: Any, **options: Any) -> list[list[int]]:
    return greedy_tokens(model, prompt(), max_new_tokens=TOKENS, **options).tolist()


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(prompt()).logits


def ops(report: torch_infini.PatchReport) -> dict[str, str]:
    """The op of each kind of module."""
    return {pattern(row.name): row.op for row in report.rows}


def reasons(report: torch_infini.PatchReport) -> dict[str, str]:
    return {pattern(row.name): row.reason for row in report.left}


def generate_everywhere(folder: Path) -> dict[str, Any]:
    model = load(folder)
    limit = rounding_limit(logits(model), *sums_of(model.config))
    instance_forwards = {name for name, module in model.named_modules() if "forward" in vars(module)}
    before = greedy(model)
    with torch_infini.patched(model, verify=True) as report:
        inside = greedy(model)
        static = greedy(model, cache_implementation="static")
        kept = {name: type(p).__name__ for name, p in model.named_parameters()}
    after = greedy(model)
    restored = {name for name, module in model.named_modules() if "forward" in vars(module)}
    return {
        "tokens": [before, inside, static, after],
        "report": report,
        "limit": limit,
        "parameters": kept,
        "forwards": (instance_forwards, restored),
    }


def half_precision(folder: Path) -> tuple[Any, Tensor, str]:
    model = load(folder)
    types = {name: p.dtype for name, p in model.named_parameters()}
    parameters = dict(model.named_parameters())
    report = torch_infini.patch_model(model, verify=True)
    assert types == {name: p.dtype for name, p in model.named_parameters()}
    assert all(p is parameters[name] for name, p in model.named_parameters())
    return report.verification, logits(model), str(report)


def integers(folder: Path, weights: str) -> tuple[dict[str, str], dict[str, str], Tensor, Tensor, list[Any], str]:
    model = load(folder)
    before = logits(model)
    parameters = model.named_parameters(remove_duplicate=False)
    own = {name: local(parameter).detach().clone() for name, parameter in parameters}
    report = torch_infini.patch_model(model, weights=weights)
    errors = [
        float((module.weight - own[f"{name}.weight"]).abs().max() / own[f"{name}.weight"].abs().max())
        for name, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
    ]
    try:
        model(prompt())
        sentence = ""
    except RuntimeError as error:
        sentence = str(error)
    return ops(report), reasons(report), before, logits(model), errors, sentence


def reported(
    folder: Path, plan: Any, runs: bool, options: dict[str, Any]
) -> tuple[dict[str, str], dict[str, str], float]:
    """Ops, reasons, and the relative error of the logits, where transformers can compute any."""
    model = load(folder, plan)
    before = logits(model) if runs else torch.zeros(())
    report = torch_infini.patch_model(model, **options)
    error = float((logits(model) - before).norm() / before.norm()) if runs else 0.0
    return ops(report), reasons(report), error


def reported_with_groups(folder: Path) -> tuple[dict[str, str], dict[str, str], float]:
    """The same with int4's groups."""
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(FORMATS["table4"], "serves_on", lambda device: False)
        return reported(folder, "auto", True, {"weights": "int4"})


def disagree(folder: Path) -> tuple[str, list[str], bool]:
    model = load(folder)
    before = greedy(model)
    with pytest.raises(ValueError) as caught:
        torch_infini.patch_model(model, skip=["*.mlp"] if torch.distributed.get_rank() else [])
    patched = [name for name, module in model.named_modules() if hasattr(module, "infini_ops")]
    return str(caught.value), patched, greedy(model) == before


def gradients(folder: Path) -> tuple[int, float]:
    """How many gradients there are, and the largest difference of one."""
    found = []
    for patch in (False, True):
        model = load(folder)  # anew: what adds up gradients is hooked to the parameters in the first call
        if patch:
            torch_infini.patch_model(model)
        model(prompt(), labels=prompt()).loss.backward()
        found.append({name: local(p.grad) for name, p in model.named_parameters()})
    return len(found[0]), max(float((found[0][name] - found[1][name]).abs().max()) for name in found[0])


def local(x: Any) -> Tensor:
    return x.to_local() if hasattr(x, "to_local") else x


def save(folder: Path, to: Path) -> str:
    model = load(folder)
    torch_infini.patch_model(model)
    model.save_pretrained(to)
    with pytest.raises(ValueError) as caught:
        torch_infini.save_patched(model, to)
    return str(caught.value)


def by_gloo(folder: Path, store: Path, rank: int) -> tuple[list[Any], str]:
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    return generate_everywhere(folder)["tokens"], torch.distributed.get_backend()


# ---- the tests ----


@pytest.mark.full(beyond=2)
@pytest.mark.parametrize(
    "name", ["llama", "llama-biases-tied", "mistral", "mistral-no-window", "qwen2", "qwen3", "uneven"]
)
def test_tokens_are_those_of_one_process(ranks: Ranks, name: str, tmp_path: Path) -> None:
    """Greedy ones in float32: of one process, of transformers' two ranks, patched, with a static cache, unpatched."""
    sizes = {"vocab_size": SMALL["vocab_size"] - 3, "intermediate_size": 95} if name == "uneven" else {}
    model = random_model("llama" if name == "uneven" else name, **sizes)
    model.save_pretrained(tmp_path)
    want = greedy(model)
    for result in ranks.run(generate_everywhere, tmp_path):
        assert result["tokens"] == [want] * 4
        assert not result["report"].left
        assert result["report"].verification.difference < result["limit"]
        more = {f"model.layers.*.self_attn.{norm}": "rms_norm" for norm in ("q_norm", "k_norm")}
        assert ops(result["report"]) == LLAMA | (more if name == "qwen3" else {})
        assert set(result["parameters"].values()) == {"DTensor", "Parameter"}
        before, after = result["forwards"]
        assert "lm_head" in before and before == after


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(ranks: Ranks, dtype: torch.dtype, tmp_path: Path) -> None:
    """As close to float32 as transformers is; the same bits on both ranks; the report counts what this rank has."""
    cast(random_model("qwen2"), dtype).save_pretrained(tmp_path)
    (first, one, text), (second, other, _) = ranks.run(half_precision, tmp_path)
    assert torch.equal(one, other)
    assert first == second
    assert first.original_difference > 0
    assert first.difference < 2 * first.original_difference
    assert "lm_head                                  Linear                linear, all_gather" in text
    assert "10.2 k parameters" in text and "20.5 kB" in text  # half of 320 x 64 numbers


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_integers(ranks: Ranks, weights: str, tmp_path: Path) -> None:
    random_model("llama-biases-tied", intermediate_size=192).save_pretrained(tmp_path)
    op = f"linear_{best(weights, 'cpu').name}"
    first, second = ranks.run(integers, tmp_path, weights)
    for served, left, before, after, errors, sentence in (first, second):
        assert not left
        assert served == LLAMA | {
            **{f"model.layers.*.{name}": op for name in LINEARS},
            "model.layers.*.self_attn.o_proj": f"{op}, all_reduce",
            "model.layers.*.mlp.down_proj": f"{op}, all_reduce",
            "lm_head": f"{INT8}, all_gather",
        }
        assert len(errors) == 7 * SMALL["num_hidden_layers"] + 1
        assert max(errors) < (0.6 / 127 if weights == "int8" else 1.2 / 15)
        assert (after - before).norm() / before.norm() < (0.05 if weights == "int8" else 0.4)
        assert sentence == (
            "torch_infini: a sharded layer with quantized weights must be called under torch.no_grad, in float32, "
            "bfloat16 or float16, without autocast and hooks for all modules; got float32 with gradients on"
        )
    assert torch.equal(first[3], second[3])


def test_rows_that_no_group_fits(ranks: Ranks, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)  # its MLP has 96 columns
    for served, left, error in ranks.run(reported_with_groups, tmp_path):
        sentence = "its rows of each of 2 ranks must be a multiple of 32, int4's smallest group, got 48"
        assert left == {"model.layers.*.mlp.down_proj": sentence}
        assert served["model.layers.*.mlp.gate_proj"] == "linear_int4"
        assert error < 0.4


@pytest.mark.parametrize(("weights", "op", "most"), [(None, "linear", ROUNDING), ("int8", INT8, 0.05)])
def test_other_plans(ranks: Ranks, weights: str | None, op: str, most: float, tmp_path: Path) -> None:
    """Results that ranks gather (Phi-3, OLMo 2), and experts, which are left."""
    import transformers

    for name in ("Phi3", "Olmo2", "Mixtral"):
        torch.manual_seed(0)
        model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**SMALL))
        model.save_pretrained(tmp_path / name)
    for served, left, error in ranks.run(reported, tmp_path / "Phi3", "auto", True, {"weights": weights}):
        assert error < most and not left
        assert served["model.layers.*.self_attn.qkv_proj"] == f"{op}, all_gather"
        assert served["model.layers.*.mlp.down_proj"] == f"{op}, all_reduce"
        assert served["model.layers.*.self_attn"] == "fused_linear, rope, attention, linear"
    for served, left, error in ranks.run(reported, tmp_path / "Olmo2", "auto", True, {"weights": weights}):
        assert error < most and not left
        assert served["model.layers.*.self_attn.k_proj"] == f"{op}, all_gather"
    for _, left, error in ranks.run(reported, tmp_path / "Mixtral", "auto", True, {"weights": weights}):
        assert error < most
        assert left == {
            "model.layers.*.mlp": "it is a mixture of experts, which runs as it is: no op computes experts yet",
            "model.layers.*.mlp.experts": "it is a MixtralExperts, which transformers shards by MoeExpertsParallel, "
            "not a torch.nn.Linear",
        }


def test_heads_that_do_not_divide(ranks: Ranks, tmp_path: Path) -> None:
    """transformers itself fails there, when it is called: nothing is hidden by that."""
    random_model("llama", num_key_value_heads=1).save_pretrained(tmp_path)
    for _, left, _ in ranks.run(reported, tmp_path, "auto", False, {}):
        assert left == {"model.layers.*.self_attn": "the 1 heads of its k_proj cannot be divided among 2 ranks"}


@pytest.mark.parametrize(("weights", "op", "most"), [(None, "linear", ROUNDING), ("int8", INT8, 0.05)])
def test_plans_of_the_caller(ranks: Ranks, weights: str | None, op: str, most: float, tmp_path: Path) -> None:
    """Another plan for the MLPs, and a head that is not sharded but has a forward of transformers."""
    random_model("llama").save_pretrained(tmp_path)
    plan = {f"model.layers.*.mlp.{name}": "colwise_gather_output" for name in ("gate_proj", "up_proj")}
    plan |= {"model.layers.*.mlp.down_proj": "rowwise_split_input", "lm_head": "replicate"}
    for served, left, error in ranks.run(reported, tmp_path, plan, True, {"weights": weights}):
        assert error < most
        assert served["model.layers.*.mlp.up_proj"] == f"{op}, all_gather"
        assert served["model.layers.*.mlp.down_proj"] == f"{op}, all_reduce"
        replaced, whole = "its forward was replaced on the instance", "its weight is not sharded along one dimension"
        assert left == {"lm_head": replaced if weights else whole}


def test_skip(ranks: Ranks, tmp_path: Path) -> None:
    """What is left runs transformers' forwards."""
    random_model("qwen2").save_pretrained(tmp_path)
    skip = {"skip": ["model.layers.0", "*.o_proj", "model.embed_tokens"]}
    for served, left, error in ranks.run(reported, tmp_path, "auto", True, skip):
        assert error < ROUNDING
        assert left["model.embed_tokens"] == "skip='model.embed_tokens'"
        assert left["model.layers.*.self_attn"] == "o_proj.weight is a DTensor, not a plain parameter"
        assert served["model.layers.*.mlp"] == "fused_linear, swiglu, linear"


def test_ranks_that_disagree(ranks: Ranks, tmp_path: Path) -> None:
    random_model("llama").save_pretrained(tmp_path)
    for sentence, patched, same in ranks.run(disagree, tmp_path):
        assert sentence == (
            "torch_infini.distributed.TPGroup: what patch_model does must be the same on all ranks, got another "
            "one on rank 1 than on rank 0"
        )
        assert not patched and same


def test_gradients(ranks: Ranks, tmp_path: Path) -> None:
    """Calls that need them run transformers' forwards, which also add up those of Qwen3's norms of heads."""
    random_model("qwen3").save_pretrained(tmp_path)
    for count, difference in ranks.run(gradients, tmp_path):
        assert count == 11 * SMALL["num_hidden_layers"] + 3
        assert difference == 0


def test_saved(ranks: Ranks, tmp_path: Path) -> None:
    """save_pretrained writes the whole model; save_patched says that it does not."""
    from transformers import AutoModelForCausalLM

    model = random_model("llama")
    model.save_pretrained(tmp_path / "a")
    for sentence in ranks.run(save, tmp_path / "a", tmp_path / "b"):
        assert sentence == "torch_infini.save_patched: model must not be sharded, got one under tensor parallelism"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b").state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


@pytest.mark.full
def test_by_gloo(tmp_path: Path) -> None:
    """What transformers initialises by itself on the CPU; the collective ops have a separate communicator."""
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    want = greedy(model)
    with Ranks(2, initialise=False) as two:
        for rank in range(2):
            two.begin(by_gloo, tmp_path, tmp_path / "store", rank, only=[rank])
        for tokens, backend in two.answers():
            assert backend == "gloo"
            assert tokens == [want] * 4
