"""RandomSample of the C ABI, described for tests, fuzzer and benchmarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..c_ops import CErrorCase, COp, CSample, Described

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
RESULTS = tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64))
# How far the running sum may be off, relative to the sum of all weights.
SLACK = {torch.float64: 1e-12}


def float32(x: float) -> float:
    return torch.tensor(x, dtype=torch.float32).item()


def ordered(probs: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The indices by descending logit, lower index first, and the running sums of their weights."""
    x = probs.double()
    order = torch.argsort(x, descending=True, stable=True)
    return order, ((x[order] - x.max()) / temperature).exp().cumsum(0)


def reference(
    result: Tensor, probs: Tensor, random_val: float, topp: float, topk: int, temperature: float
) -> dict[str, Tensor]:
    if 0 in (random_val, topp, temperature) or topk == 1:
        return {"result": probs.double().argmax()}
    order, sums = ordered(probs, temperature)
    kept = min(topk, len(order)) if topk > 0 else len(order)
    limit = random_val * min(sums[kept - 1], topp * sums[-1])
    return {"result": order[(sums >= limit).nonzero()[0, 0]]}


def compare(sample: CSample, outputs: dict[str, Tensor]) -> None:
    """The reference's token, or a neighbour where the limit lies between the two but for rounding."""
    args = {k: float32(v) if k in ("random_val", "topp", "temperature") else v for k, v in sample.args.items()}
    token, expected = int(outputs["result"]), int(reference(**args)["result"])
    if token == expected:
        return
    where = f"{sample.name}: token {token} instead of {expected}"
    assert 0 <= token < len(args["probs"]) and 0 not in (args["random_val"], args["topp"], args["temperature"]), where
    order, sums = ordered(args["probs"], args["temperature"])
    place = int((order == token).nonzero())
    kept = min(args["topk"], len(order)) if args["topk"] > 0 else len(order)
    assert place < kept and args["topk"] != 1, where
    limit = args["random_val"] * min(sums[kept - 1], args["topp"] * sums[-1])
    slack = SLACK.get(args["probs"].dtype, 2e-6) * sums[-1]
    below = sums[place - 1] if place else 0
    assert below - slack <= limit <= sums[place] + slack, where


def tensors(
    n: int,
    dtype: torch.dtype,
    random_val: float,
    topp: float = 1.0,
    topk: int = 0,
    temperature: float = 1.0,
    result: torch.dtype = torch.int64,
) -> dict[str, Any]:
    return {
        "result": torch.tensor(77, dtype=result),
        "probs": (3 * torch.randn(n)).to(dtype),
        "random_val": random_val,
        "topp": topp,
        "topk": topk,
        "temperature": temperature,
    }


def samples() -> Iterator[CSample]:
    settings = (
        ("greedy by random_val", (0.0, 0.9, 5, 0.8)),
        ("greedy by topp", (0.5, 0.0, 5, 0.8)),
        ("greedy by topk", (0.5, 0.9, 1, 0.8)),
        ("greedy by temperature", (0.5, 0.9, 5, 0.0)),
        ("all", (0.37, 1.0, 0, 1.0)),
        ("top-k", (0.6, 1.0, 5, 1.0)),
        ("top-p", (0.9, 0.4, -1, 0.7)),
        ("both", (0.99, 0.8, 50, 1.5)),
        ("the end", (1.0, 2.0, -7, 2.0)),
        ("near the start", (1e-6, 0.9, 3, 0.1)),
    )
    for dtype in DTYPES:
        kind = str(dtype)[6:]
        for name, values in settings:
            for n in (1, 2, 37, 3001):
                yield CSample(f"{kind} {name}, {n}", tensors(n, dtype, *values))
        args = tensors(40, dtype, 0.7, 0.9, 10)
        args["probs"][3:] = args["probs"][5]
        yield CSample(f"{kind} ties", args)
        args = tensors(40, dtype, 0.7, 0.9, 10)
        args["probs"][torch.arange(40) % 3 != 1] = -torch.inf
        yield CSample(f"{kind} masked", args)
        yield CSample(f"{kind} masked, all kept", {**args, "topk": 0, "topp": 1.0, "random_val": 1.0})
        args = tensors(40, dtype, 0.7, 0.9, 10)
        yield CSample(f"{kind} broadcast", {**args, "probs": Described(args["probs"], (1,), (0,), 7)})
        yield CSample(f"{kind} large", tensors(128_256, dtype, 0.83, 0.9, 50))
    for result in RESULTS:
        yield CSample(f"{str(result)[6:]} result", tensors(128, torch.float32, 0.4, result=result))


def errors() -> Iterator[CErrorCase]:
    op = "infini::random_sample: "
    args = tensors(200, torch.float32, 0.5)
    refused: list[tuple[str, dict[str, Any], str, str]] = [
        (
            "result of one dimension",
            {"result": torch.zeros(1).long()},
            "BAD_TENSOR_SHAPE",
            "result must have 0 dimensions, got 1 (shape [1])",
        ),
        (
            "result dtype",
            {"result": torch.tensor(0.0)},
            "BAD_TENSOR_DTYPE",
            "result must be int64, int32, int16, int8, uint64, uint32, uint16 or uint8, got float32",
        ),
        (
            "narrow result",
            {"result": torch.tensor(0, dtype=torch.int8)},
            "BAD_TENSOR_DTYPE",
            "result must hold the indices up to 199, got int8",
        ),
        (
            "probs dtype",
            {"probs": args["probs"].int()},
            "BAD_TENSOR_DTYPE",
            "probs must be float32, bfloat16, float16 or float64, got int32",
        ),
        (
            "probs rank",
            {"probs": args["probs"][None]},
            "BAD_TENSOR_SHAPE",
            "probs must have 1 dimension, got 2 (shape [1, 200])",
        ),
        ("no probs", {"probs": args["probs"][:0]}, "BAD_TENSOR_SHAPE", "probs must have 1 to 16777216 elements, got 0"),
        (
            "stride",
            {"probs": args["probs"][::2]},
            "BAD_TENSOR_STRIDES",
            "probs must have stride 1 in its last dimension (call .contiguous() on it), got strides [2]",
        ),
    ]
    for case, changed, status, sentence in refused:
        yield CErrorCase(case, {**args, **changed}, status, op + sentence)
    at_run: list[tuple[str, dict[str, Any], str]] = [
        ("random_val", {"random_val": 1.5}, "random_val must be at least 0 and at most 1, got 1.5"),
        ("negative random_val", {"random_val": -0.5}, "random_val must be at least 0 and at most 1, got -0.5"),
        ("topp", {"topp": float("inf")}, "topp must be a finite number of at least 0, got inf"),
        ("temperature", {"temperature": -1.0}, "temperature must be a finite number of at least 0, got -1"),
        (
            "temperature nan",
            {"temperature": float("nan")},
            "temperature must be a finite number of at least 0, got nan",
        ),
    ]
    for dtype in DTYPES:
        for value, name in ((float("inf"), "inf"), (float("nan"), "nan")):
            probs = args["probs"].to(dtype).clone()
            probs[150] = value
            at_run.append(
                (
                    f"{name} in {dtype}",
                    {"probs": probs},
                    f"probs must be below +infinity and not NaN, got {name} at 150",
                )
            )
        probs = torch.full((200,), -torch.inf, dtype=dtype)
        at_run.append((f"all masked in {dtype}", {"probs": probs}, "probs must have a value above -infinity, got none"))
    for case, changed, sentence in at_run:
        yield CErrorCase(
            case, {**args, **changed}, "BAD_PARAM", op + sentence, at="run", of_values=sentence.startswith("probs")
        )


C_OPS = [COp("RandomSample", ["result"], reference, samples, errors, compare)]
