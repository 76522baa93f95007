"""What patch_model and the engine make of every causal type of transformers, each from a small config.

    python benchmarks/every_type.py [TYPE ...] [--write docs/families.csv]
    python benchmarks/every_type.py --images [--write docs/image-families.csv]
    python benchmarks/every_type.py --encoders [--write docs/encoder-families.csv]

In float32. --images: the text of every type that reads images too, and is not among the causal ones. --encoders: the
states of every type with a masked language model. Exit status 1 where something computes otherwise, or fails.
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from torch_infini import LLM, SamplingParams, patch_model
from torch_infini.distributed import TPGroup
from torch_infini.distributed.rank_threads import on_ranks
from torch_infini.patch.paged import OwnCacheModel
from torch_infini.patch.paged.serve import load_served_model
from torch_infini.testing import causal_types, encoder_types, image_types
from torch_infini.testing.causal_types import VOCABULARY

LIMIT = 600  # seconds for a type, also beside busy loops
ALLOWED = 1e-4  # of the difference
SIZES: dict[str, Any] = {"block_size": 4, "chunk_size": 8, "cache_blocks": 26}  # of the engine
NEW = 12  # tokens of a request


@dataclass
class Row:
    """What was found for one type.

    Attributes:
        type: Of transformers.
        patched: "fully" (some as a whole, some in parts), "partly", "left", or "not built" (from a small config).
        modules: Replaced and left, "12 / 3"; without those that are replaced in parts.
        reasons: Why modules were left, the commonest first, then by the alphabet.
        difference: Of the patched model's logits for two texts of 57 tokens in float32, relative (root mean square).
            The weights are twice those of the other columns, so that attention and gates are not nearly uniform.
        engine: "recorded" (decode steps too), "served", "own cache" (transformers' cache, one sequence at a time), "no
            cache" (all tokens again in each step), "differs", or "refused".
        why: Why not recorded.
        folder: Of the model once saved, read by LLM(folder): as engine.
        folder_why: Why not served.
        ranks: The same read by two ranks, threads of this process: "shared", "differs" or "refused".
        ranks_why: Why not shared.
    """

    type: str
    patched: str = "not built"
    modules: str = ""
    reasons: str = ""
    difference: str = ""
    engine: str = ""
    why: str = ""
    folder: str = ""
    folder_why: str = ""
    ranks: str = ""
    ranks_why: str = ""


def tokens_of(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(5, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


PROMPTS = tokens_of(3, 33, 18)


def build(kind: str) -> Any:
    """A small model of a type."""
    return (image_types if kind in image_types.image_types() else causal_types).build(kind)


def logits_of(model: Any, *texts: Sequence[int]) -> Tensor:
    """The logits of texts of one length, in rows."""
    with torch.no_grad():
        logits: Tensor = model(input_ids=torch.tensor([list(ids) for ids in texts]), use_cache=False).logits
    return logits.flatten(0, 1)


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def with_strong_weights(kind: str) -> Any:
    """A model of the type whose matrices are twice as large."""
    model = build(kind)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(2)
    return model


def difference_of(kind: str) -> float:
    """The relative distance of a patched model's logits from the original's.

    Raises ArithmeticError where it is neither below ALLOWED nor what rounding makes of such a model: a model that is
    chaotic with these weights is as far from itself if each of its weights moves by a unit in the last place.
    """
    texts = tokens_of(57, 57)
    model = with_strong_weights(kind)
    expected = logits_of(model, *texts)
    patch_model(model)
    found = distance(logits_of(model, *texts), expected)
    if found > ALLOWED:
        moved = with_strong_weights(kind)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for weight in moved.parameters():
                ulps = torch.randint(-1, 2, weight.shape, generator=generator)
                weight.mul_(1 + ulps * torch.finfo(torch.float32).eps)
        rounding = distance(logits_of(moved, *texts), expected)
        if not found < 10 * rounding:
            raise ArithmeticError(f"its logits are off by {found:.1e}, and by {rounding:.1e} where weights are rounded")
    return found


def patch(model: Any, row: Row) -> None:
    """Patch a model, and fill in what was replaced and why the rest was left."""
    report = patch_model(model)
    left = [one.reason for one in report.left if one not in report.in_parts]
    row.patched = "left" if report.reason or not report.replaced else "partly" if left else "fully"
    row.modules = f"{len(report.replaced)} / {len(left)}"
    reasons = (
        [report.reason.partition(" (")[0]]
        if report.reason
        else sorted(set(left), key=lambda reason: (-left.count(reason), reason))
    )
    row.reasons = "; ".join(reasons)


def examine(kind: str) -> Row:
    """Build a model of a type, patch it, serve it, and compare each with the model as it was."""
    row = Row(kind)
    try:
        model = build(kind)
        (ids,) = tokens_of(40)
        before = logits_of(model, ids)
    except Exception as error:
        row.reasons = shortened(error)
        return row
    patch(model, row)
    row.difference = f"{difference_of(kind):.1e}"
    size = float(before.square().mean().sqrt())
    row.engine, row.why = serve(model, model, size)
    with TemporaryDirectory() as folder:
        build(kind).save_pretrained(folder)
        row.folder, row.folder_why = serve(folder, model, size)
        if row.folder != "refused":
            row.ranks, row.ranks_why = share(folder, model, size)
    return row


def states_of(model: Any, text: Sequence[int]) -> Tensor:
    """The states of a text after an encoder's last layer."""
    with torch.no_grad():
        states: Tensor = model(input_ids=torch.tensor([list(text)]))[0][0]
    return states


def examine_encoder(kind: str) -> Row:
    """Build an encoder of a type, patch it, serve it and its folder, and compare each with the model as it was."""
    row = Row(kind)
    texts = tokens_of(40, 7, 23)
    try:
        model = encoder_types.build(kind)
        before = [states_of(model, text) for text in texts]
        if any(len(states) != len(text) for states, text in zip(before, texts, strict=True)):
            raise ValueError("it gives no state for each token")
    except Exception as error:
        row.reasons = shortened(error)
        return row
    patch(model, row)
    errors = [distance(states_of(model, text), states) for text, states in zip(texts, before, strict=True)]
    if max(errors) > ALLOWED:
        raise ArithmeticError(f"its states are off by {max(errors):.1e}")
    row.difference = f"{max(errors):.1e}"
    means = [states.mean(0) for states in before]
    row.engine, row.why = embed(model, texts, means)
    with TemporaryDirectory() as folder:
        encoder_types.build(kind).save_pretrained(folder)
        row.folder, row.folder_why = embed(folder, texts, means)
    return row


def embed(source: Any, texts: list[list[int]], means: Sequence[Tensor]) -> tuple[str, str]:
    """Embed texts by a model or a folder, and compare with the means of their states: (Row.engine, the reason)."""
    try:
        llm = LLM(source, runner="pooling")
    except ValueError as error:
        return "refused", shortened(error)
    outputs = llm.embed(texts, pooling="mean", normalize=False)
    errors = [
        distance(torch.tensor(output.outputs.embedding), mean) for output, mean in zip(outputs, means, strict=True)
    ]
    return ("differs", f"a vector is off by {max(errors):.1e}") if max(errors) > ALLOWED else ("served", "")


def outputs_of(llm: LLM) -> list[list[int]]:
    settings = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, settings)
    for output in outputs:
        if output.outputs[0].error is not None or len(output.token_ids) != NEW:
            one = output.outputs[0]
            raise RuntimeError(f"{len(one.token_ids)} of {NEW} tokens ({one.finish_reason}): {one.error}")
    return [list(output.token_ids) for output in outputs]


def difference_in(outputs: Sequence[Sequence[int]], model: Any, size: float) -> str:
    """Return what is wrong with the outputs, by the model's logits, of that size; empty: nothing."""
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        logits = logits_of(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        behind = logits.amax(-1) - logits[torch.arange(len(tokens)), tokens]
        if float(behind.max()) > 1e-3 * size:
            return f"a token is behind the likeliest by {float(behind.max()):.2g}"
    return ""


def serve(source: Any, model: Any, size: float) -> tuple[str, str]:
    """Serve a model or a folder, and compare its tokens with the model's logits, of that size.

    Returns:
        (Row.engine, the reason).
    """
    try:
        llm = LLM(source, **SIZES)
    except ValueError as error:
        return "refused", shortened(error)
    if wrong := difference_in(outputs_of(llm), model, size):
        return "differs", wrong
    served = llm.engine.model
    if isinstance(served, OwnCacheModel):
        return ("own cache" if served.has_cache else "no cache"), served.reason[:200]
    return ("recorded", "") if served.is_recordable else ("served", "decode steps run op by op")


def share(folder: str, model: Any, size: float) -> tuple[str, str]:
    """Serve a folder by two ranks, and compare the tokens of both with the model's logits: (Row.ranks, the reason)."""

    def work(tp_group: TPGroup) -> list[list[int]]:
        return outputs_of(LLM(load_served_model(folder, None, None, "cpu", None, False, tp_group), **SIZES))

    for result in on_ranks(2, work):
        if isinstance(result, ValueError):
            return "refused", shortened(result)
        if isinstance(result, Exception):
            raise result
        if wrong := difference_in(result, model, size):
            return "differs", wrong
    return "shared", ""


def shortened(error: BaseException) -> str:
    """Return an error in a line, without this machine's folders."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = re.sub(rf"{re.escape(gettempdir())}/[\w./-]*\w", "FOLDER", text)
    return re.sub(r"^torch_infini\.LLM: \w+ cannot be served: ", "", text)[:200]


def examine_quietly(kind: str, examine: Callable[[str], Row] = examine) -> Row:
    """As `examine`, without warnings, within LIMIT seconds; what fails is a row too."""
    disabled, threads = logging.root.manager.disable, torch.get_num_threads()
    handler = signal.signal(signal.SIGALRM, _too_long)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.disable(logging.ERROR)
            disable_progress_bar()
            torch.set_num_threads(1)
            signal.alarm(LIMIT)
            return examine(kind)
    except Exception as error:  # the table has a row for every type
        return Row(kind, "failed", reasons=f"{type(error).__name__}: {shortened(error)}")
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)
        torch.set_num_threads(threads)
        logging.disable(disabled)


def _too_long(*signal: object) -> None:
    raise TimeoutError(f"not done after {LIMIT} s")


def examine_all(kinds: Sequence[str], processes: int = 2, examine: Callable[[str], Row] = examine) -> Iterator[Row]:
    """Examine types, several at a time, each batch of them in a process of its own; in the order of `kinds`."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, maxtasksperchild=24) as pool:
        yield from pool.imap(partial(examine_quietly, examine=examine), kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python benchmarks/every_type.py", description=__doc__)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="default: all of transformers'")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--images", action="store_true", help="all that read images, and no causal ones")
    which.add_argument("--encoders", action="store_true", help="encoders")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the rows as CSV")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    given = parser.parse_args(arguments)
    rows = []
    every = image_types.image_types() if given.images else causal_types.causal_types()
    if given.encoders:
        every = encoder_types.encoder_types()
    look = examine_encoder if given.encoders else examine
    for row in examine_all(given.types or every, given.processes, look):
        rows.append(row)
        print(
            f"{row.type:24} {row.patched:9} {row.modules:9} {row.difference:8} {row.engine:9} {row.why or row.reasons}"
        )
    if given.write is not None:
        with given.write.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow([one.name for one in fields(Row)])
            writer.writerows(map(astuple, rows))
    for column in ("patched", "engine", "folder", "ranks"):
        values = [getattr(row, column) for row in rows if getattr(row, column)]
        print(f"{column}: " + ", ".join(f"{values.count(value)} {value}" for value in dict.fromkeys(values)))
    return int(any("differs" in (row.engine, row.folder, row.ranks) or row.patched == "failed" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
