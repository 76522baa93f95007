"""patch_model: infini ops in the place of a transformers model's layers, in one model instance, until unpatch_model.

Importing this costs nothing; transformers is imported by the first call of patch_model.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from .report import PatchReport, Row, Verification
from .swap import STATE, Patched

__all__ = [
    "PatchReport",
    "Row",
    "Verification",
    "is_patched",
    "load_patched",
    "patch_model",
    "patched",
    "save_patched",
    "unpatch_model",
]


def is_patched(model: nn.Module) -> bool:
    """Whether a model is patched: by patch_model, and unpatch_model was not called since.

    A wrapper around a patched model (of peft, torch.compile, DataParallel) is patched, too, and so are a model that was
    taken out of its wrapper (peft's `merge_and_unload`), a copy, and the decoder (`model.model`) alone.

    Args:
        model: Any module.

    Returns:
        True where patch_model would not patch the model anew, and unpatch_model would take the patch back.
    """
    return isinstance(model, nn.Module) and any(STATE in vars(module) for module in model.modules())


def patch_model(
    model: nn.Module,
    *,
    weights: str | None = None,
    only: Sequence[str] | None = None,
    skip: Sequence[str] = (),
    verify: bool = False,
    strict: bool = False,
) -> PatchReport:
    """Let infini ops compute the layers of a transformers model, in this instance only.

    Norms, projections, rotary embedding, attention and MLP get another forward; parameters, names, hooks and caches
    stay as they are, and nothing is copied but weights that do not begin at a cache line. Calls that need gradients,
    autocast or attention weights run the original forwards. What a module computes is found out by numbers: a small
    twin of each kind, with random weights, has to give what its own forward gives, for numbers of several sizes and
    sequences of several lengths. Two tokens go through the whole model before and after, without a trace; where the
    patched model fails or gives something else, nothing is patched, and the report says why.

    A model that ranks share by transformers' tensor parallelism (`tp_plan="auto"`) is served on the CPU: each rank
    computes with its part of the weights, and torch.ops.infini.all_reduce and all_gather put the parts together. All
    ranks must make this call, with the same arguments. Docs: docs/distributed.md.

    Args:
        model: A causal language model of the Llama family (docs/patching.md), or its decoder, of transformers 5;
            on the CPU, in float32, bfloat16 or float16.
        weights: "int8" (a scale for each row) or "int4" (a scale and a zero for each 64 or 32 numbers of a row, the
            head in int8): the linear layers' weights become integers and are freed, one after the other. There is no
            way back from that; None leaves them where they are.
        only: Patterns of module names (fnmatch: "model.layers.0*" is that layer and what lies in it); others are left.
        skip: Patterns of module names that are left, with all that lies in them. Names are those that
            `model.named_modules()` gives; a pattern that matches none of them is an error.
        verify: Run 64 random tokens through the model before and after, and report how far the logits differ. A
            difference that rounding does not explain, and NaN, are a UserWarning.
        strict: Raise where a module would be left as it is, and where `verify` would warn.

    Returns:
        What was replaced, and what was left for which reason; print it for a table. A model that is patched already is
        not touched, and its report says so; neither is one without a decoder of the Llama family.

    Raises:
        TypeError: If model is no torch.nn.Module.
        ValueError: For unknown weights; for a pattern that matches no module; with strict=True where something would be
            left; or if only a part of the model is patched already; where ranks share the model, if their reports
            differ. The model is then as it was before. With strict=True where `verify` finds a fault: weights that
            became integers stay so.
        ImportError: Without transformers.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"torch_infini.patch_model: model must be a torch.nn.Module, got {type(model).__name__}")
    if weights not in (None, "int8", "int4"):
        raise ValueError(f"torch_infini.patch_model: weights must be None, 'int8' or 'int4', got {weights!r}")
    try:
        from . import apply
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise ImportError(
            "torch_infini.patch_model needs transformers: run `pip install 'transformers>=5,<6'`."
        ) from error
    selection = apply.Selection(patterns("only", only), patterns("skip", skip) or ())
    state = apply.whole_state(model)
    if state is not None:
        return replace(state.report, already_patched=True)
    if parts := [name for name, module in model.named_modules() if isinstance(module, Patched)]:
        part = next(filter(None, parts), type(model).__name__)
        raise ValueError(
            f"torch_infini.patch_model: model must not contain patched modules, got {part}: "
            "first call unpatch_model with this model."
        )
    decoder = apply.find_decoder(model)
    if decoder is not None:
        must_match(model, "only", selection.only or ())
        must_match(model, "skip", selection.skip)
    found = decoder if verify else None
    if found is None:
        return apply.apply(model, weights, strict, selection)
    from .verification import Measurement

    measurement = Measurement(model, found[1])
    report = apply.apply(model, weights, strict, selection)
    if report.reason:
        return report
    state = apply.state_of(model)
    try:
        report = replace(report, verification=measurement.compare(bool(state.quantised)))
        if fault := report.verification.fault:
            if strict:
                kept = ": it stays patched, for its weights are integers now" if state.quantised else ""
                raise ValueError(f"torch_infini.patch_model: strict=True, but {fault}{kept}")
            warnings.warn(f"torch_infini.patch_model: {fault}", UserWarning, stacklevel=2)
    except BaseException:
        if state.quantised:
            state.report = report
        else:
            apply.undo(model)
        raise
    state.report = report
    return report


def patterns(argument: str, value: Sequence[str] | None) -> tuple[str, ...] | None:
    """The patterns, or TypeError; a single string would be taken for a pattern a letter."""
    if value is None:
        return None
    whole = isinstance(value, Collection) and not isinstance(value, str)
    if not whole or not all(isinstance(pattern, str) for pattern in value):
        raise TypeError(f"torch_infini.patch_model: {argument} must be a sequence of patterns, got {value!r}")
    return tuple(value)


def likeness(name: str, pattern: str) -> float:
    """How near a pattern is to a name, or to as many parts of its end: "lm_haed" to "base_model.model.lm_head"."""
    end = ".".join(name.split(".")[-pattern.count(".") - 1 :])
    return max(SequenceMatcher(None, pattern, part).ratio() for part in (name, end))


def must_match(model: nn.Module, argument: str, patterns: Sequence[str]) -> None:
    """ValueError for a pattern that no name of a module matches: it is most likely a name misspelt."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in patterns:
        if any(fnmatchcase(name, pattern) for name in names):
            continue
        nearest = sorted(set(names), key=lambda name: (-likeness(name, pattern), name))[:3]
        raise ValueError(
            f"torch_infini.patch_model: every pattern of {argument} must match the name of a module of the model "
            f"(fnmatch, as in model.named_modules()), got {pattern!r}; the nearest names are {', '.join(nearest)}"
        )


def unpatch_model(model: nn.Module) -> None:
    """Take patch_model back: every module has its own class again, and the model its own config.

    Args:
        model: What patch_model was called with, a copy of it, a wrapper around it, or what was taken out of a wrapper
            (`is_patched` says whether it is patched). What lies outside of it, as the head outside of `model.model`,
            stays as it is.

    Raises:
        ValueError: If it is not patched, or if its weights were quantised.
    """
    if not is_patched(model):
        raise ValueError(
            f"torch_infini.unpatch_model: model must be patched, got a {type(model).__name__} that is not."
        )
    from . import apply

    if quantised := [name for state in apply.states_in(model) for name in state.quantised]:
        raise ValueError(
            f"torch_infini.unpatch_model: the model's weights must be there, got {len(quantised)} layers whose weights "
            "were replaced by integers: load the original model again."
        )
    apply.undo(model)


@contextmanager
def patched(model: nn.Module, **options: Any) -> Iterator[PatchReport]:
    """patch_model for the body of a with statement, unpatch_model behind it.

    Args:
        model: As patch_model takes it.
        options: Of patch_model, but for `weights`, from which there is no way back.

    Yields:
        The report.

    Raises:
        ValueError: For `weights`, or a model that is patched already; and what patch_model raises.
    """
    if options.get("weights") is not None:
        raise ValueError("torch_infini.patched: weights must be None, for they could not be restored")
    if is_patched(model):
        raise ValueError("torch_infini.patched: model must not be patched already")
    report = patch_model(model, **options)
    try:
        yield report
    finally:
        if is_patched(model):
            unpatch_model(model)


def _register_quantizer() -> None:
    """Let from_pretrained of transformers know the folders of save_patched, now or when transformers is imported."""
    place = "transformers.quantizers.auto"
    if place in sys.modules:
        if hasattr(sys.modules[place], "register_quantizer"):  # of transformers 5
            from . import hugging_face  # noqa: F401
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder(place))


class _Finder(MetaPathFinder):
    """Registers the quantizer behind the import of the module that it belongs to: transformers takes seconds."""

    def __init__(self, place: str) -> None:
        self.place = place

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != self.place:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        loader = spec and spec.loader
        if spec is None or loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _register_quantizer()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def save_patched(model: nn.Module, folder: str | Path, tokenizer: Any = None) -> None:
    """Write a patched model, with its quantised weights as they are.

    `load_patched` reads the folder, `AutoModelForCausalLM.from_pretrained` does, and `torch_infini.LLM` if it serves
    such a model. Without quantised weights transformers alone reads it as well; with them from_pretrained needs
    `import torch_infini` before, and fails without.

    The folder gets what save_pretrained writes, torch_infini.json (which layers are integers, and how) and
    torch_infini.safetensors (buffers that save_pretrained leaves out).

    Args:
        model: A patched model of a class of transformers.
        folder: Made if it is not there; files of these names are replaced.
        tokenizer: Saved, too; None: the files of the folder that the model was read from, if they are on this machine.

    Raises:
        ValueError: If the model is not patched, its class is not one of transformers, or ranks share it.
    """
    if not is_patched(model):
        raise ValueError(
            f"torch_infini.save_patched: model must be patched, got a {type(model).__name__} that is not: "
            "use its own save_pretrained."
        )
    from . import saved

    saved.save(model, Path(folder), tokenizer)


def load_patched(folder: str | Path) -> nn.Module:
    """Read a model that save_patched wrote; it is patched, and in evaluation mode.

    Integers stay integers: at no time is there a full-precision weight of a quantised layer.

    Args:
        folder: What save_patched was called with.

    Returns:
        The model.

    Raises:
        FileNotFoundError: If the folder is not one of save_patched, or a file of it is missing.
        ValueError: If a file is not what save_patched writes, or its files do not fit each other; the message names
            the file and the field or the tensors. Nothing is allocated before that is known.
    """
    from . import saved

    return saved.load(Path(folder))


_register_quantizer()
