"""Anthropic's interface: POST /v1/messages and its count of tokens, for clients and coding agents that speak it.

A body becomes one of chat completions (bodies.py), an answer becomes blocks of content and events (answer.py).
"""

from .answer import MessagesAnswer
from .bodies import CountBody, MessagesBody

__all__ = ["CountBody", "MessagesAnswer", "MessagesBody"]
