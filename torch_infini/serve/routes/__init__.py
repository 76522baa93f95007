"""The routes of the server, one file per group; ROUTERS lists them."""

from . import (
    chat,
    completions,
    embeddings,
    llama_cpp,
    messages,
    models,
    ollama,
    page,
    responses,
    scores,
    status,
    tokens,
)

GROUPS = (chat, completions, embeddings, llama_cpp, messages, models, ollama, page, responses, scores, status, tokens)
ROUTERS = tuple(group.router for group in GROUPS)

__all__ = ["ROUTERS"]
