"""Parsers of generated text: tool calls and reasoning, in the forms that chat templates teach models.

OutputParser reads an answer, forms/ has a file for each form. To add a form, add a file there with a subclass of Form.
"""

from .events import CallBegin, CallDelta, CallEnd, Content, Event, Reasoning
from .form import Form, Tools, all_forms, all_thinkings, form_of, thinking_of
from .grammar import Lark
from .output import OutputParser
from .scanner import Scanner, Steps
from .thinking import Thinking

__all__ = [
    "CallBegin",
    "CallDelta",
    "CallEnd",
    "Content",
    "Event",
    "Form",
    "Lark",
    "OutputParser",
    "Reasoning",
    "Scanner",
    "Steps",
    "Thinking",
    "Tools",
    "form_of",
    "all_forms",
    "thinking_of",
    "all_thinkings",
]
