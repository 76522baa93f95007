"""Ollama's interface: chats, continuations, embeddings, descriptions of the model; for editors and clients of it.

A body becomes one of completions (bodies.py), an answer becomes lines of JSON (answer.py); description.py has what
clients ask about a model.
"""

from .answer import GenerateAnswer, OllamaAnswer, OllamaChatAnswer
from .bodies import OllamaChatBody, OllamaEmbedBody, OllamaEmbeddingsBody, OllamaGenerateBody, OllamaShowBody
from .description import describe, list_entry, model_name, running_entry

__all__ = [
    "GenerateAnswer",
    "OllamaAnswer",
    "OllamaChatAnswer",
    "OllamaChatBody",
    "OllamaEmbedBody",
    "OllamaEmbeddingsBody",
    "OllamaGenerateBody",
    "OllamaShowBody",
    "describe",
    "list_entry",
    "model_name",
    "running_entry",
]
