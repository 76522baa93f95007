"""PromptEmbedder: makes an EmbeddedPrompt of a prompt with images, and lets a step's text part compute with it.

The model's own forward runs as far as the call of its text part: the arguments of that call are what is kept. A step
calls the model with tokens as always, and a hook puts the kept rows among the arguments of its text part. So what
images are made of (towers, projectors, positions on several axes, features for several layers) stays the model's.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ...nn import EmbeddedPrompt, EmbeddedRows, Term
from ..layers.interface import IMPLEMENTATION
from ..layers.interface import NAME as NAME_OF_OURS
from ..layers.paged import paged_attention_forward
from ..ranks.hooks import combines_ranks
from .causal_model import NAME, find_causal_model
from .sites import Unserved, configs_of, implementations

_IMAGE_MASKS = "infini_image_masks"
_ROWS = 256  # of a mask at a time
# Arguments of a text part that say nothing of its tokens, or what the engine says in its own way.
_OWN = frozenset(
    ("input_ids", "inputs_embeds", "position_ids", "attention_mask", "cache_position", "past_key_values", "cache")
)
_VISIBLE = "visual_pos_masks"  # which tokens the rows of other arguments are of


class _Rules(threading.local):
    """The functions of this thread's masks, while a prompt is embedded."""

    found: list[Callable[..., Any]] | None = None


_RULES = _Rules()


class _Called(Exception):  # noqa: N818 (an answer, not an error)
    """The arguments with which the text part is called."""


class PromptEmbedder:
    """Embeds the prompts with images of one model.

    Args:
        model: A model of transformers with images, in evaluation mode.
        modules: Its attention modules, and others that keep states: all of the text part.
        windows: How many keys its layers see; 0: all.

    Attributes:
        needs_all_ranks: Whether ranks share what encodes images, so that all of them must call embed.

    Raises:
        Unserved: If the model has no part that computes with embeddings of text and images.
    """

    def __init__(self, model: nn.Module, modules: Collection[nn.Module], windows: Collection[int]) -> None:
        self._model, self._windows = model, {0, *windows}  # a rule for all keys may be of no layer
        inner = find_causal_model(model)
        self._embedding: nn.Module = inner.get_input_embeddings()
        self._text = text_part(inner, [*modules, self._embedding])
        beside = set(inner.modules()) - set(self._text.modules()) - {inner.get_output_embeddings()}
        self.needs_all_ranks = any(map(combines_ranks, beside))
        self._parameters = list(inspect.signature(self._text.forward).parameters)
        self._configs = mask_configs(inner, self._text)
        others = [config for config in configs_of(inner) if all(config is not one for one in self._configs)]
        # SDPA's attention of towers takes 2.4 to 2.9 times as long (bfloat16, 577 to 4096 patches, by hand).
        self._towers = [config for config in others if getattr(config, IMPLEMENTATION) == "sdpa"]
        AttentionInterface.register(_IMAGE_MASKS, paged_attention_forward)
        AttentionMaskInterface.register(_IMAGE_MASKS, _recording_mask)

    def embed(self, tokens: Tensor, inputs: Mapping[str, Tensor]) -> EmbeddedPrompt:
        """Encode the images of a prompt.

        Args:
            tokens: [S] ids, with those that stand for images.
            inputs: What the model's processor made of the images: further arguments of its forward.

        Raises:
            Unserved: If the text part computes what the engine does not with these arguments.
            ValueError: If the model does not take them.
        """
        found, rules = self._arguments(tokens, inputs)
        embeddings = found.get("inputs_embeds")
        if embeddings is None or embeddings.shape[:2] != (1, len(tokens)):
            raise Unserved("its text part gets no embedding for each token")
        mask = found.get("attention_mask")
        says_nothing = isinstance(mask, Tensor) and mask.dim() == 2 and bool(mask.all())
        if mask is not None and not rules and not says_nothing:
            raise Unserved("its attention has a mask that is not of transformers' mask functions")
        spans = {self._spans(rule, len(tokens)) for rule in rules}
        if len(spans) > 1:
            raise Unserved("the tokens of an image see each other in some layers alone")
        positions = found.get("position_ids")
        positions = None if positions is None else positions.reshape(-1, len(tokens))
        shift = 0
        if positions is not None:
            # Of four axes the first is the place in the text, which the others do not continue.
            counted = positions[1:] if len(positions) == 4 else positions
            shift = int(counted.max()) + 1 - len(tokens)
        of_text = self._embedding(tokens[None])
        is_image = (of_text != embeddings.to(of_text.dtype)).any(-1)[0]
        terms = self._terms(found, len(tokens))
        return EmbeddedPrompt(embeddings[0], positions, shift, terms, is_image, spans.pop() if spans else ())

    @contextmanager
    def replacing(self, rows: Collection[EmbeddedRows]) -> Iterator[None]:
        """Let the text part compute these rows of its calls with what was kept of their prompts, for the body."""
        if not rows:
            yield
            return

        def replace(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], Any]:
            return (), with_rows({**self._bound(args), **kwargs}, rows)

        handle = self._text.register_forward_pre_hook(replace, with_kwargs=True)
        try:
            yield
        finally:
            handle.remove()

    def _bound(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Return positional arguments of the text part by name."""
        return dict(zip(self._parameters, args, strict=False))

    def _arguments(
        self, tokens: Tensor, inputs: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], list[Callable[..., Any]]]:
        """Return the arguments of the text part in an ordinary call, and the functions of the masks made for it."""

        def stop(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            raise _Called({**self._bound(args), **kwargs})

        handle = self._text.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            with implementations({NAME_OF_OURS: self._towers}), recorded_masks(self._configs) as rules:
                self._model(
                    input_ids=tokens[None], attention_mask=torch.ones_like(tokens)[None], use_cache=False, **inputs
                )
        except _Called as called:
            arguments: dict[str, Any] = called.args[0]
            return arguments, rules
        except Exception as error:  # a forward may raise anything for inputs that it does not take
            cause = " ".join(str(error).split())[:300] or type(error).__name__
            raise ValueError(f"{NAME}: the model must take the prompt's images, got: {cause}") from error
        finally:
            handle.remove()
        raise Unserved("its forward computes images without its text part")

    def _terms(self, found: Mapping[str, Any], count: int) -> dict[str, Term]:
        """Return the further arguments that have rows for the tokens.

        Raises:
            Unserved: For an argument whose rows are of something else.
        """
        terms: dict[str, Term] = {}
        marks = found.get(_VISIBLE)
        for name, value in sorted(found.items(), key=lambda item: item[0] != _VISIBLE):
            is_list = isinstance(value, list | tuple)
            values = [one for one in (value if is_list else [value]) if isinstance(one, Tensor)]
            if name in _OWN or not values:
                continue
            kept = []
            marked = ""
            for one in values:
                is_number = one.is_floating_point() or one.dtype == torch.bool
                if is_number and one.shape[:2] == (1, count):
                    kept.append(one[0])
                elif is_number and isinstance(marks, Tensor) and len(one) == int(marks.sum()):
                    spread = one.new_zeros(count, *one.shape[1:])
                    spread[marks[0]] = one
                    kept.append(spread)
                    marked = _VISIBLE
                else:
                    raise Unserved(f"its text part takes {name} of {list(one.shape)} beside embeddings of images")
            terms[name] = Term(kept, is_list, marked)
        return terms

    def _spans(self, visible: Callable[..., Any], count: int) -> tuple[tuple[int, int], ...]:
        """Return which tokens of a prompt see each other by a mask's function, as EmbeddedPrompt.spans.

        Raises:
            Unserved: If a token sees other keys than those of its span, and as many before as in a text.
        """
        shown = torch.empty(count, count, dtype=torch.bool)
        zero, keys = torch.tensor(0), torch.arange(count)
        try:
            for queries in keys.split(_ROWS):
                shown[queries] = torch.as_tensor(visible(zero, zero, queries[:, None], keys)).expand(len(queries), -1)
        except (IndexError, RuntimeError) as error:
            raise Unserved("which keys its attention sees follows from more than positions") from error
        ends = (torch.where(shown, keys, -1).amax(1) + 1).tolist()  # of the keys that a token sees
        spans: list[tuple[int, int]] = []
        for place, end in enumerate(ends):
            if end > place + 1 and (not spans or place >= spans[-1][1]):
                spans.append((place, end))
        allowed = keys[:, None] >= keys
        for first, end in spans:
            allowed[first:end, first:end] = True
        behind = keys[:, None] - keys
        if not any(bool((shown == (allowed & (behind < (size or count)))).all()) for size in self._windows):
            raise Unserved("its attention sees other keys of a prompt with images than of a text")
        return tuple(spans)


def text_part(inner: nn.Module, modules: Collection[nn.Module]) -> nn.Module:
    """Return the smallest part of a model that has all of these modules and takes embeddings.

    Raises:
        Unserved: If there is none but the model itself.
    """
    names = [name for name, module in inner.named_modules() if any(module is one for one in modules)]
    common = names[0].split(".") if names else []
    for name in names[1:]:
        parts = name.split(".")
        common = common[: next((i for i, (a, b) in enumerate(zip(common, parts, strict=False)) if a != b), len(parts))]
    while common:
        part = inner.get_submodule(".".join(common))
        if "inputs_embeds" in inspect.signature(part.forward).parameters:
            return part
        common.pop()
    raise Unserved("it has no text part of its own")


def mask_configs(inner: nn.Module, text: nn.Module) -> list[Any]:
    """Return the configs that name the attention implementation of a text part, whoever makes its masks.

    The part and the model around it may have copies of one config. Those of towers are left out.
    """
    inside = set(text.modules())
    around = {module for module in inner.modules() if any(one is text for one in module.modules())}
    towers = {type(vars(module).get("config")) for module in inner.modules() if module not in inside | around}
    kept = {type(vars(module).get("config")) for module in inside | around}
    return [config for config in configs_of(inner) if type(config) in kept or type(config) not in towers]


def with_rows(arguments: dict[str, Any], rows: Collection[EmbeddedRows]) -> dict[str, Any]:
    """Return the arguments of a text part [1, T, ...] with the rows that were kept of prompts.

    Args:
        arguments: Of a call with tokens alone.
        rows: Which rows to replace.
    """
    found = dict(arguments)
    embeddings = found["inputs_embeds"].clone()
    for first, start, count, prompt in rows:
        embeddings[0, first : first + count] = prompt.embeddings[start : start + count]
    found["inputs_embeds"] = embeddings
    axes = max((len(row.prompt.positions) for row in rows if row.prompt.positions is not None), default=0)
    if axes:
        positions = found["position_ids"]
        # One row for all axes, or one for each; of one axis the model takes [1, T].
        positions = positions.reshape(-1, 1, positions.shape[-1]).expand(axes, 1, -1).clone()
        for first, start, count, prompt in rows:
            if prompt.positions is not None:
                positions[:, 0, first : first + count] = prompt.positions[:, start : start + count]
        found["position_ids"] = positions if axes > 1 else positions[0]
    names = dict.fromkeys(name for row in rows for name in row.prompt.terms)
    marks: dict[str, Tensor] = {}
    for name in sorted(names, key=lambda name: name != _VISIBLE):
        terms = {id(row.prompt): row.prompt.terms[name] for row in rows if name in row.prompt.terms}
        term = next(iter(terms.values()))
        own, values = found.get(name), []
        for i, like in enumerate(term.values):
            given = own[i] if term.is_list and own is not None else own
            value = like.new_zeros(embeddings.shape[1], *like.shape[1:]) if given is None else given[0].clone()
            for first, start, count, prompt in rows:
                if name in prompt.terms:
                    value[first : first + count] = prompt.terms[name].values[i][start : start + count]
            marks[name] = value
            values.append(value[marks[term.marked]] if term.marked else value[None])
        found[name] = values if term.is_list else values[0]
    return found


@contextmanager
def recorded_masks(configs: list[Any]) -> Iterator[list[Callable[..., Any]]]:
    """Yield a list to which the functions of masks are added that these configs' attention gets in the body."""
    outer, _RULES.found = _RULES.found, []
    try:
        with implementations({_IMAGE_MASKS: configs}):
            yield _RULES.found
    finally:
        _RULES.found = outer


def _recording_mask(**kwargs: Any) -> Tensor | None:
    assert _RULES.found is not None, "the name is set by recorded_masks alone"
    _RULES.found.append(kwargs["mask_function"])
    mask: Tensor | None = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return mask
