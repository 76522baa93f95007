"""The routes of the server, one file per group; ROUTERS lists them."""

from . import chat, completions, embeddings, llama_cpp, messages, models, ollama, page, responses, status, tokens

GROUPS = (chat, completions, embeddings, llama_cpp, messages, models, ollama, page, responses, status, tokens)
ROUTERS = tuple(group.router for group in GROUPS)

__all__ = ["ROUTERS"]
