"""Names of transformers 4 that scripts use and transformers 5 lacks, provided while `run` runs a script.

transformers itself is not imported here: each class gets its names after the script's first import of it. Names that
already exist, as with transformers 4, are not changed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from .._core.import_hooks import after_import


@contextmanager
def names() -> Iterator[None]:
    """Provide the names during the body:

    * tokenizers: encode_plus and batch_encode_plus; apply_chat_template returns a list of ids unless return_dict is
      given;
    * configs: rope_theta, which transformers 5 keeps in rope_parameters.

    Both releases have torch_dtype, as an argument and as an attribute of configs.
    """
    with ExitStack() as undo:
        for module, provide in (
            ("transformers.tokenization_utils_base", _provide_for_tokenizers),
            ("transformers.configuration_utils", _provide_for_configs),
        ):
            undo.callback(after_import(module, functools.partial(provide, undo)))
        yield


def _provide_for_tokenizers(undo: ExitStack, module: ModuleType) -> None:
    cls = module.PreTrainedTokenizerBase
    if hasattr(cls, "batch_encode_plus"):
        return
    _set(undo, cls, "encode_plus", encode_plus)
    _set(undo, cls, "batch_encode_plus", batch_encode_plus)
    applied = cls.apply_chat_template

    @functools.wraps(applied)
    def apply_chat_template(self: Any, conversation: Any, *args: Any, **kwargs: Any) -> Any:
        if not args:  # return_dict follows all arguments that callers pass by position
            kwargs.setdefault("return_dict", False)
        return applied(self, conversation, *args, **kwargs)

    _set(undo, cls, "apply_chat_template", apply_chat_template)


def encode_plus(self: Any, text: Any, text_pair: Any = None, add_special_tokens: bool = True, **settings: Any) -> Any:
    """Encode a text, or a pair of texts, as calling the tokenizer does."""
    return self(text, text_pair, add_special_tokens=add_special_tokens, **settings)


def batch_encode_plus(
    self: Any, batch_text_or_text_pairs: Sequence[Any], add_special_tokens: bool = True, **settings: Any
) -> Any:
    """Encode texts, or pairs of texts as tuples, as calling the tokenizer does."""
    return self(list(batch_text_or_text_pairs), add_special_tokens=add_special_tokens, **settings)


def _provide_for_configs(undo: ExitStack, module: ModuleType) -> None:
    cls = module.PretrainedConfig
    # A property in transformers 5, for rope_parameters.
    if hasattr(cls, "__getattr__") or not hasattr(cls, "rope_scaling"):
        return

    def __getattr__(self: Any, name: str) -> Any:  # called if there is no such attribute
        if name == "rope_theta":
            parameters = vars(self).get("rope_parameters")
            # With one dict per type of layer there is no single value.
            if isinstance(parameters, dict) and isinstance(parameters.get(name), (int, float)):
                return parameters[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    _set(undo, cls, "__getattr__", __getattr__)


def _set(undo: ExitStack, cls: type, name: str, value: object) -> None:
    """Set a class's attribute until `undo` is closed."""
    if name in vars(cls):
        undo.callback(setattr, cls, name, vars(cls)[name])
    else:
        undo.callback(delattr, cls, name)
    setattr(cls, name, value)
