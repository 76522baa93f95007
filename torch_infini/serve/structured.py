"""The form of an answer's text in the bodies of requests: response_format, and vLLM's structured_outputs."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from ..engine import StructuredOutputsParams
from .errors import ApiError, bad_request
from .fields import Body

SCHEMA, FORMS, GRAMMAR = "response_format.json_schema.schema", "structured_outputs", "grammar"


class JsonSchema(Body):
    """A named JSON schema. `strict` has no effect: an answer always has the schema's form."""

    name: str = Field(pattern="^[a-zA-Z0-9_-]{1,64}$")
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")  # schema is a method of pydantic's models
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's response_format."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def params(self) -> StructuredOutputsParams | None:
        """Return the form of the text; ApiError for fields that contradict each other, or a schema that is none."""
        self.reject_unsupported("response_format.")
        if (self.type == "json_schema") != (self.json_schema is not None):
            rule = "be given" if self.type == "json_schema" else f"be null where type is {self.type}"
            came = "none" if self.json_schema is None else "a schema"
            param = "response_format.json_schema"
            raise ApiError(400, f"{param} must {rule}, got {came}", param)
        if self.type == "text":
            return None
        if self.json_schema is None:
            return StructuredOutputsParams(json_object=True)
        self.json_schema.reject_unsupported("response_format.json_schema.")
        try:
            return StructuredOutputsParams(json=self.json_schema.schema_ or {})
        except ValueError as error:
            raise invalid_form(error, SCHEMA) from None


class StructuredOutputs(Body):
    """vLLM's structured_outputs."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")  # json is a method of pydantic's models
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None

    def params(self) -> StructuredOutputsParams:
        """Return the form of the text; ApiError for none, several, or one that is invalid."""
        self.reject_unsupported(f"{FORMS}.")
        given: dict[str, Any] = {
            "json": self.json_,
            "regex": self.regex,
            "choice": self.choice,
            "grammar": self.grammar,
            "json_object": self.json_object,
            "whitespace_pattern": self.whitespace_pattern,
            "disable_any_whitespace": self.disable_any_whitespace,
        }
        try:
            return StructuredOutputsParams(**{name: value for name, value in given.items() if value is not None})
        except ValueError as error:
            raise invalid_form(error, FORMS) from None


def form_of(
    response_format: ResponseFormat | None, forms: StructuredOutputs | None, grammar: str | None
) -> StructuredOutputsParams | None:
    """Return the form that a body asks for; None: any. ApiError if it asks for two."""
    form = None if response_format is None else response_format.params()
    given = "response_format asks for a form"
    if forms is not None:
        if form is not None:
            raise ApiError(400, f"{FORMS} must be null where {given}, got an object", FORMS)
        form, given = forms.params(), f"{FORMS} is given"
    if not grammar:  # "": clients of llama.cpp's server that ask for none
        return form
    if form is not None:
        raise ApiError(400, f"{GRAMMAR} must be null where {given}, got a text", GRAMMAR)
    try:
        return StructuredOutputsParams(grammar=grammar)
    except ValueError as error:
        raise invalid_form(error, GRAMMAR) from None


def invalid_form(error: ValueError, param: str) -> ApiError:
    """Return the error of a form that was given in this field: SCHEMA, FORMS, GRAMMAR or tools."""
    names = ("json", "regex", "choice", "grammar", "json_object", "whitespace_pattern")
    failure = bad_request(error, **{name: param if param != FORMS else f"{param}.{name}" for name in names})
    if failure.param is None or not failure.param.startswith(param):
        failure.param = param
    return failure
