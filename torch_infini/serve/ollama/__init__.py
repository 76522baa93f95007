"""Ollama's interface: chats, continuations and descriptions of the model, for editors and clients that speak it.

A body becomes one of completions (bodies.py), an answer becomes lines of JSON (answer.py); description.py has what
clients ask about a model.
"""

from .answer import GenerateAnswer, OllamaAnswer, OllamaChatAnswer
from .bodies import OllamaChatBody, OllamaGenerateBody, OllamaShowBody
from .description import describe, list_entry, model_name, running_entry

__all__ = [
    "GenerateAnswer",
    "OllamaAnswer",
    "OllamaChatAnswer",
    "OllamaChatBody",
    "OllamaGenerateBody",
    "OllamaShowBody",
    "describe",
    "list_entry",
    "model_name",
    "running_entry",
]
