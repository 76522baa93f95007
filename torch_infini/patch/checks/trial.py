"""Runs two tokens through the whole model before and after patching, to find what calls of single modules do not show.

Also runs a model without side effects, and bounds the differences that rounding explains.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ..decoder import Decoder, table_of
from ..ranks.hooks import RankHook
from ..shares import local
from .conditions import has_global_hooks

TOKENS = 2
# Largest relative rounding error of a branch, in units of half the dtype's epsilon: for sums of thousands of products
# in another order, or in half types a dozen results that are each rounded once.
UNITS = {torch.float32: 4096.0, torch.float64: 4096.0}
HALF_UNITS = 16.0
NOISE = 16.0  # magnitude of the noise on the embeddings, in the same units; 1 in half types
AMPLIFIED = 8.0  # rounding may also amount to this multiple of the noise's effect
SMALL = 1 << 16  # elements up to which a tensor's contents are restored


def labelled(label: str = "[patch_model trial] ") -> Any:
    """Return a context in which lines of INFINI_LOG begin with the label."""
    logging = sys.modules.get("torch_infini.ops._logging")  # only imported where the variable is set
    return nullcontext() if logging is None else logging.labelled(label)


@contextmanager
def without_side_effects(model: nn.Module) -> Iterator[None]:
    """Run the body in evaluation mode, without gradients, autocast and hooks, and restore the model's state afterwards.

    Hooks that combine ranks' results stay.

    The state is attributes and their contents, buffers and random generators. Compiled modules run eagerly.
    """
    modules = list(model.modules())
    before = [(module, dict(vars(module))) for module in modules]
    held = [value for _, attributes in before for value in attributes.values()]
    containers = [(value, value.copy()) for value in held if type(value) in (list, dict, set)]
    tensors = [*(value for value in held if type(value) is Tensor), *model.buffers()]
    contents = [(x, x.clone()) for x in tensors if not x.is_meta and local(x) is x and x.numel() <= SMALL]
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    try:
        for module in modules:
            own = vars(module)
            own["training"] = False
            for name in ("_forward_hooks", "_forward_pre_hooks"):  # patched modules check whether there are any
                hooks = own[name].items()
                own[name] = OrderedDict((key, h if isinstance(h, RankHook) else without_effect) for key, h in hooks)
            own.pop("_compiled_call_impl", None)
        on_cuda = torch.autocast("cuda", enabled=False) if devices else nullcontext()
        with torch.random.fork_rng(devices), torch.no_grad(), torch.autocast("cpu", enabled=False), on_cuda:
            yield
    finally:
        for module, attributes in before:
            own = vars(module)
            for name in own.keys() - attributes.keys():
                del own[name]
            own.update(attributes)
        for value, copy in containers:
            if not alike(value, copy):
                value.clear()
                value.extend(copy) if isinstance(value, list) else value.update(copy)
        for x, copy in contents:
            if not torch.equal(x, copy):
                with torch.no_grad():
                    x.copy_(copy)


def alike(a: Any, b: Any) -> bool:
    """Return whether two lists, dicts or sets hold the same objects."""
    a, b = ([id(each) for each in (*x, *(x.values() if isinstance(x, dict) else ()))] for x in (a, b))
    return bool(a == b)


def without_effect(*args: Any) -> None:
    """Do nothing; replaces hooks."""


def rounds_activations(model: nn.Module) -> bool:
    """Return whether layers are quantized: another last bit may give another of the activations' 255 integers."""
    # An attribute of layers.Quantized, which stands on this package.
    return any(hasattr(type(module), "is_savable") for module in model.modules())


def rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def units(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def tolerance(dtype: torch.dtype, layers: int) -> float:
    """Return the relative error that rounding may cause in so many layers, each of two branches."""
    return UNITS.get(dtype, HALF_UNITS) * units(dtype) * float(2 * layers) ** 0.5


class Logits:
    """Logits of a model for some tokens, and how much rounding may change them.

    Attributes:
        values: [S, vocabulary]; for a model without a head its hidden states.
        rounding: The root mean square of a difference that rounding explains.
    """

    def __init__(self, model: nn.Module, decoder: Decoder, ids: Tensor) -> None:
        self.model, self.decoder, self.ids = model, decoder, ids.expand(2, -1)
        embedding = decoder.embed_tokens
        dtype = table_of(embedding).dtype
        size = (NOISE if dtype in UNITS else 1.0) * units(dtype)
        generator = torch.Generator("cpu").manual_seed(0)

        def add_noise(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            noise = torch.randn(output.shape[1:], generator=generator, device="cpu").to(output)
            return torch.stack([output[0], output[1] * (1 + size * noise)])

        # The second of two equal sequences gets the noise: a batch of two costs little more, as weights are read once.
        with without_side_effects(model):
            hook = embedding.register_forward_hook(add_noise)
            try:
                self.values, noisy = self.run()
            finally:
                hook.remove()
        finite = self.values.isfinite() & noisy.isfinite()
        layers = len(decoder.layers)
        arithmetic = tolerance(self.values.dtype, layers)
        if rounds_activations(model):
            arithmetic = max(arithmetic, tolerance(torch.float16, layers))
        noise = rms((self.values.float() - noisy.float())[finite])
        self.rounding = max(arithmetic * rms(self.values[finite]), AMPLIFIED * noise)

    def run(self) -> Tensor:
        """Return the logits [2, S, vocabulary]."""
        config = getattr(self.model, "config", None)
        more = {"decoder_input_ids": self.ids} if getattr(config, "is_encoder_decoder", False) else {}
        output = self.model(input_ids=self.ids, use_cache=False, **more)
        if isinstance(output, tuple):
            return output[0]
        return output.logits if "logits" in output else output.last_hidden_state

    def again(self) -> Tensor:
        with without_side_effects(self.model):
            return self.run()[0]


class Trial:
    """The original's results for two tokens, to compare with those of the patched model.

    Attributes:
        untried: Why the original was not run; empty if it was.
    """

    def __init__(self, model: nn.Module, decoder: Decoder) -> None:
        self.untried = ""
        self.logits: Logits | None = None
        tensors = [*model.named_parameters(), *model.named_buffers()]
        away = next((name for name, tensor in tensors if tensor.is_meta), None)
        if away is not None:
            self.untried = f"{away} is on meta"
        elif has_global_hooks():
            self.untried = "hooks are registered for all modules"
        if self.untried:
            return
        # A decoder inside a model that needs more inputs than tokens is run alone.
        for whole in (getattr(model, "_orig_mod", model), decoder.module):
            try:
                table = table_of(decoder.embed_tokens)
                ids = torch.tensor([[table.rows // 2, table.rows // 3]], device=table.device)
                self.logits = Logits(whole, decoder, ids)
                self.untried = ""
                return
            except Exception as error:  # e.g. for inputs other than tokens
                self.untried = f"the original does not run {TOKENS} tokens: {shown(error)}"

    def fault(self) -> str:
        """Describe what is wrong with the patched model; empty if nothing is, or if it cannot be compared."""
        if self.logits is None:
            return ""
        try:
            after = self.logits.again()
        except Exception as error:
            return f"patched, it does not run {TOKENS} tokens: {shown(error)}"
        before = self.logits.values
        if after.shape != before.shape or after.dtype != before.dtype:
            return f"patched, it gives {kind(after)} for {TOKENS} tokens instead of {kind(before)}"
        finite = before.isfinite()
        before, after = before[finite].float(), after[finite].float()
        if not after.isfinite().all():
            # SDPA returns finite numbers for queries with NaN.
            broken = next((n for n, p in self.logits.model.named_parameters() if not local(p).isfinite().all()), None)
            if broken is not None:
                self.untried = f"{broken} has NaN or infinity in it"
                return ""
            return f"patched, it gives NaN or infinity for {TOKENS} tokens where the original gives numbers"
        difference = rms(after - before)
        if difference <= self.logits.rounding:
            return ""
        return (
            f"patched, it gives different results for {TOKENS} tokens: results of about {rms(before):.3g} differ by "
            f"{difference:.3g} (root mean square), and rounding explains {self.logits.rounding:.3g}"
        )


def kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def shown(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
