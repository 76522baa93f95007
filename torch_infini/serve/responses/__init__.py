"""OpenAI's Responses: POST /v1/responses, whose answers may be kept and continued.

A body becomes one of chat completions (bodies.py), an answer becomes items and events (answer.py); store.py keeps them.
"""

from .answer import ResponsesAnswer
from .bodies import ResponsesBody
from .store import ResponseStore

__all__ = ["ResponseStore", "ResponsesAnswer", "ResponsesBody"]
