"""Body, the base of all bodies of requests, and what checks their fields: validators that state a rule.

A field is supported, or has no effect on the answer (WITHOUT_EFFECT), or must have a neutral value (NEUTRAL); bodies of
other interfaces than OpenAI's have tables of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PlainValidator

from .errors import ApiError, shown

# Fields without effect on the answer, whatever their value.
WITHOUT_EFFECT = {
    "metadata",
    "parallel_tool_calls",  # but of chat, where it is a field
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
}
# Fields that must be null or have one of these values, which request no feature.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_obfuscation": (False,),
    "modalities": (["text"],),
    "skip_special_tokens": (True,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "annotations": ([],),
}


def checked(rule: str, check: Callable[[Any], Any], value: Any) -> Any:
    """Return check(value); if it raises, raise the ValueError that pydantic expects, with this rule."""
    try:
        return check(value)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        # A message that the check wrote itself begins with "must".
        given = str(error)
        raise ValueError(f"{given if given.startswith('must ') else rule}, got {shown(value)}") from None


def validator(form: Any, rule: str, check: Callable[[Any], Any]) -> PlainValidator:
    """Make the validator of a field that has several forms.

    Args:
        form: The type of the field in a body, for the schema.
        rule: The rule in the error message.
        check: Converts the value; raises TypeError, or a ValueError whose message replaces the rule, to reject it.
    """
    return PlainValidator(partial(checked, rule, check), json_schema_input_type=form)


def check_utf8(text: str) -> str:
    """Return the text; ValueError if it has a lone surrogate, which JSON can contain and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("must be text that UTF-8 can encode, without lone surrogates") from error
    return text


class Body(BaseModel):
    """A body, or an object within a body.

    Attributes:
        without_effect: Names of fields that are accepted with any value.
        neutral: The values besides null that fields of these names may have.
    """

    model_config = ConfigDict(strict=True, extra="allow")
    without_effect: ClassVar[Collection[str]] = WITHOUT_EFFECT
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = NEUTRAL

    def reject_unsupported(self, within: str = "") -> None:
        """Raise ApiError for an unknown field, and for an unsupported one unless its value is neutral."""
        for name, value in (self.model_extra or {}).items():
            if value is None or name in self.without_effect:
                continue
            if name not in self.neutral:
                unknown = f"{within}{shown(name)[1:-1]} must be a field of this request, got an unknown one"
                raise ApiError(400, unknown, within + name)
            neutral = self.neutral[name]
            if not any(type(value) is type(one) and value == one for one in neutral):
                allowed = " or ".join(["null", *map(repr, neutral)])
                refused = f"{within}{name} must be {allowed} (more is not supported), got {shown(value)}"
                raise ApiError(400, refused, within + name)
