"""find_sites: finds which keys each attention module of a model sees, by one ordinary call that records the masks.

transformers makes masks by functions of two positions, which say more than the names in a config.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from ...nn.states import StateShape
from ..checks.conditions import dense_last
from ..checks.trial import rms
from ..layers.interface import IMPLEMENTATION, attend
from ..layers.paged import CURRENT, AttentionBackend, ScoreTerms, paged_attention_forward

causal_conv1d = torch.ops.infini.causal_conv1d.default
gated_delta_rule = torch.ops.infini.gated_delta_rule.default
ssd = torch.ops.infini.ssd.default
selective_scan = torch.ops.infini.selective_scan.default

_RECORDING_NAME = "infini_recording"
_UNLIKE = 0.05  # of logits: beyond rounding in any dtype


# Entries of configs for layers that do not see all keys.
WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window")


class Unserved(Exception):  # noqa: N818 (an answer, not an error)
    """The reason why a model's attention cannot run over a paged cache."""


def text_rule(visible: Callable[..., Any], tokens: int) -> Callable[..., Any]:
    """Return a mask function of transformers without what it adds for images, of which the call's tokens have none.

    Args:
        visible: The function; of a union of rules, those may be left out that know the call's tokens alone.
        tokens: Their number.
    """
    cells = getattr(visible, "__closure__", None) or ()
    unions = [cell.cell_contents for cell in cells if isinstance(cell.cell_contents, tuple)]
    if getattr(visible, "__name__", "") != "or_mask" or len(unions) != 1:
        return visible
    rules = [text_rule(rule, tokens) for rule in unions[0]]
    zero, queries, keys = torch.tensor(0), torch.arange(tokens)[:, None], torch.arange(tokens)

    def adds_nothing(rule: Callable[..., Any]) -> bool:
        try:
            rule(zero, zero, torch.tensor(tokens), torch.arange(tokens + 1))
        except IndexError:
            return not bool(torch.as_tensor(rule(zero, zero, queries, keys)).any())
        return False

    rules = [rule for rule in rules if not adds_nothing(rule)]
    return rules[0] if len(rules) == 1 else visible


class Window(NamedTuple):
    """Which keys a query sees, of those up to its own position.

    Attributes:
        size: The number of keys, the newest; 0: all.
        positions: The rule holds below this position; sequences have to be shorter.
    """

    size: int
    positions: int


class Site(NamedTuple):
    """An attention module's layer of the cache, and what it computes.

    Attributes:
        layer: The number of its layer in the cache.
        writes: Whether it writes keys and values there; else they are those of a module before it.
        kv_heads: Heads of k and v.
        head_dim: Columns of q and k.
        v_dim: Columns of v.
        dtype: The dtype of k and v.
        window: Which keys it sees.
        scores: How it computes scores.
    """

    layer: int
    writes: bool
    kv_heads: int
    head_dim: int
    v_dim: int
    dtype: torch.dtype
    window: Window
    scores: ScoreTerms


class Sites(NamedTuple):
    """What of a model's call the cache has to serve.

    Attributes:
        attention: Its attention modules, in the order of their calls.
        states: The other states of each module that keeps some, in the order of its calls.
    """

    attention: dict[nn.Module, Site]
    states: dict[nn.Module, list[StateShape]]


def window_of(visible: Callable[..., Any], positions: int) -> Window:
    """Return the window of a mask function of transformers, visible(batch, head, query, key).

    Raises:
        Unserved: If a query sees a later key.
    """
    keys = torch.arange(positions)

    def seen(query: int) -> Tensor:
        try:
            shown = visible(torch.tensor(0), torch.tensor(0), torch.tensor(query), keys)
        except (IndexError, RuntimeError) as error:
            raise Unserved("which keys its attention sees follows from more than positions") from error
        return torch.as_tensor(shown).expand(positions)

    def newest(query: int) -> int:
        """Return how many keys the query sees, if they are the newest ones; else -1."""
        shown = seen(query)
        if bool(shown[query + 1 :].any()):
            raise Unserved("its attention sees later tokens, so that it does not continue a text")
        count = int(shown.sum())
        return count if bool(shown[query + 1 - count : query + 1].all()) else -1

    last = positions - 1
    newest(last // 2)  # raises for later keys, of which the last query has none
    size = newest(last)
    if size == positions:
        return Window(0, positions)
    probes = sorted({0, 1, 2, size - 1, size, size + 1, last // 3, last // 2, last - 1} & set(range(positions)))
    if size > 0 and all(newest(query) == min(query + 1, size) for query in probes):
        return Window(size, positions)
    # Another rule, such as chunks of keys: for the first positions it is the same as no window.
    low, high = 0, last  # the first query that misses a key is in (low, high]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if newest(middle) == middle + 1 else (low, middle)
    return Window(0, high)


def memory_of(x: Tensor) -> Hashable:
    """Return what two tensors have in common if and only if they are views of the same elements in the same order."""
    return x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride()


class _RecordingBackend:
    """Backend of one ordinary call: records each module's site, and computes attention over the call's own tokens."""

    fuses = False

    def __init__(self, positions: int) -> None:
        self.positions = positions
        # With the tensors themselves, so that no memory is reused; and whether transformers may leave the mask out.
        self.masks: dict[Hashable, tuple[Tensor, Callable[..., Any], bool]] = {}
        self.written: dict[Hashable, tuple[Tensor, Tensor, Site]] = {}
        self.sites = Sites({}, {})
        # Whether a module that is not causal by itself gets a causal mask here: outside of this call transformers may
        # leave such a mask out, and SDPA then shows all tokens.
        self.leaves_masks = False

    def mask(self, **kwargs: Any) -> Tensor | None:
        """Make the mask as for SDPA, and keep its function. transformers calls it once for each kind of mask."""
        made = sdpa_mask(**{**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        if made is not None:
            self.masks[memory_of(made)] = made, kwargs["mask_function"], kwargs.get("allow_is_causal_skip", True)
        return made

    def attend(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scores: ScoreTerms
    ) -> Tensor:
        if module in self.sites.attention:
            raise Unserved(f"{type(module).__name__} attends twice in a call")
        if q.shape[:2] != k.shape[:2]:
            raise Unserved("its attention has other keys than those of the tokens")
        if v.shape[2] != k.shape[2] or v.shape[3] > k.shape[3]:
            raise Unserved(f"its values have {v.shape[2]} heads of {v.shape[3]} columns, its keys {list(k.shape[2:])}")
        if mask is None:
            if not scores.causal and q.shape[1] > 1:
                raise Unserved("its attention sees later tokens, so that it does not continue a text")
            if named := next((n for n in WINDOWS if value_of(vars(module).get("config"), n)), None):
                raise Unserved(
                    f"its attention gets no mask that says which keys it sees, though its config has {named}"
                )
            window = Window(0, self.positions)
        elif (made := self.masks.get(memory_of(mask))) is not None:
            window = window_of(text_rule(made[1], q.shape[1]), self.positions)
            if made[2] and not (scores.causal or window.size):
                self.leaves_masks = True
        else:
            raise Unserved("its attention has a mask that is not of transformers' mask functions")
        if scores.window:
            window = Window(min(window.size or scores.window, scores.window), window.positions)
            near = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).tril().triu(1 - scores.window)
            mask = near if mask is None else mask & near  # of sdpa_mask, in bool
        sizes = k.shape[2], k.shape[3], v.shape[3]
        place = memory_of(k), memory_of(v)
        shared = self.written.get(place)
        layer = len(self.written) if shared is None else shared[2].layer
        site = self.sites.attention[module] = Site(layer, shared is None, *sizes, k.dtype, window, scores)
        self.written.setdefault(place, (k, v, site))
        q, k, v = dense_last(q), dense_last(k), dense_last(v)
        return attend(q, k, v, mask, scores.scale, scores.causal, scores.softcap, scores.sinks)

    def attend_fused(self, *args: Any) -> Tensor:
        raise AssertionError("fuses is False")

    def convolve(self, module: nn.Module, x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
        self._add_state(module, (x.shape[2], weight.shape[-1] - 1), x.dtype)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        causal_conv1d(out, x, weight, bias, None, None, None, silu)
        return out

    def delta_rule(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, l2norm: bool
    ) -> Tensor:
        self._add_state(module, (v.shape[2], q.shape[3], v.shape[3]), torch.float32)
        out = torch.empty_like(v, memory_format=torch.contiguous_format)
        gated_delta_rule(out, q, k, v, g, beta, None, None, None, None, l2norm)
        return out

    def ssd(
        self,
        module: nn.Module,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        dt_softplus: bool,
        dt_limit: tuple[float, float],
    ) -> Tensor:
        self._add_state(module, (*x.shape[2:], b.shape[3]), torch.float32)
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        ssd(out, x, dt, a, b, c, d, dt_bias, None, None, None, dt_softplus, *dt_limit)
        return out

    def selective_scan(
        self,
        module: nn.Module,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        dt_bias: Tensor | None,
        z: Tensor | None,
        dt_softplus: bool,
    ) -> Tensor:
        self._add_state(module, tuple(a.shape), torch.float32)
        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        selective_scan(out, x, dt, a, b, c, d, dt_bias, z, None, None, None, dt_softplus)
        return out

    def _add_state(self, module: nn.Module, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        self.sites.states.setdefault(module, []).append(StateShape(sizes, dtype))


def _recording_mask(**kwargs: Any) -> Tensor | None:
    backend = CURRENT.backend
    assert isinstance(backend, _RecordingBackend), "the name is set by find_sites alone"
    return backend.mask(**kwargs)


def value_of(config: Any, name: str, default: Any = None) -> Any:
    """Return an entry of a config, of those that may differ by layer the one for all."""
    try:
        return getattr(config, name, default)
    except RuntimeError:  # transformers refuses to read those
        return vars(config).get(name, default)


def configs_of(model: nn.Module) -> list[Any]:
    """Return the configs that name a model's attention implementation: of the model, its parts, and inside these."""
    waiting = [config for module in model.modules() if (config := vars(module).get("config")) is not None]
    found: dict[int, Any] = {}
    while waiting:
        config = waiting.pop()
        if hasattr(config, IMPLEMENTATION) and id(config) not in found:
            found[id(config)] = config
            waiting += vars(config).values()
    return list(found.values())


@contextmanager
def implementations(named: Mapping[str, list[Any]]) -> Iterator[None]:
    """Set the attention implementation of configs by its name for the body."""
    before = [(config, getattr(config, IMPLEMENTATION)) for configs in named.values() for config in configs]
    try:
        for name, configs in named.items():
            for config in configs:
                setattr(config, IMPLEMENTATION, name)
        yield
    finally:
        for config, old in before:
            setattr(config, IMPLEMENTATION, old)


@contextmanager
def implementation(configs: list[Any], name: str, backend: AttentionBackend) -> Iterator[None]:
    """Set the attention implementation of these configs, and this thread's backend, for the body."""
    outer, CURRENT.backend = CURRENT.backend, backend
    try:
        with implementations({name: configs}):
            yield
    finally:
        CURRENT.backend = outer


def find_sites(model: nn.Module, tokens: Tensor, positions: int) -> tuple[Sites, Tensor]:
    """Call a model once, and record what its attention modules compute, and those with other states.

    Args:
        model: A causal language model of transformers, patched or not, in evaluation mode; on meta if only the sites
            are needed.
        tokens: [1, S] ids on the model's device.
        positions: The longest sequence to be served.

    Returns:
        The sites, and the logits [S, vocabulary].

    Raises:
        Unserved: With the reason.
    """
    backend = _RecordingBackend(positions)
    AttentionInterface.register(_RECORDING_NAME, paged_attention_forward)
    AttentionMaskInterface.register(_RECORDING_NAME, _recording_mask)
    try:
        with implementation(configs_of(model), _RECORDING_NAME, backend), torch.no_grad():
            # On meta transformers cannot rule out that a call packs several texts, unless it has a cache.
            logits = model(input_ids=tokens, use_cache=tokens.is_meta).logits[0]
    except Unserved:
        raise
    except NotImplementedError as error:  # of paged_attention_forward
        raise Unserved(str(error)) from error
    except Exception as error:  # a forward that needs other arguments may raise anything
        cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise Unserved(f"it does not run {tokens.shape[1]} tokens: {cause}") from error
    if not logits.is_meta and not logits.isfinite().all():
        name = next((name for name, p in model.named_parameters() if not p.isfinite().all()), None)
        raise Unserved(f"its logits are NaN or infinite{f', as {name} is' if name else ''}")
    if backend.leaves_masks and not logits.is_meta:
        with torch.no_grad():
            ordinary = model(input_ids=tokens, use_cache=False).logits[0]
        if rms((ordinary - logits).float()) > _UNLIKE * rms(logits.float()):
            raise Unserved("its attention sees later tokens where a mask would be causal alone")
    if not backend.sites.attention and not backend.sites.states:
        raise Unserved("no layer of it calls transformers' attention interface")
    return backend.sites, logits
