"""chat_prompt: a conversation as a prompt, by the chat template of the model's tokenizer, with images or without."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any

from .errors import described
from .images import IMAGE_PARTS, file_of_url
from .prompts import Prompts

Message = Mapping[str, Any]  # {"role": ..., "content": ...}
MESSAGES = 'messages must be a list of mappings, {"role": ..., "content": ...}, at least one'
NAME = "torch_infini.LLM.chat"
_PROBE = "Are you there?"


def chat_prompt(prompts: Prompts, messages: SequenceOf[Message], template: Mapping[str, Any] | None) -> list[int]:
    """Return the tokens of a conversation up to the assistant's answer, a PromptWithImages if it has images.

    Args:
        prompts: The engine's.
        messages: One conversation.
        template: Variables of the chat template besides the messages, such as enable_thinking.

    Raises:
        ValueError: If there is no chat template, or it rejects the messages, or an image cannot be read.
    """
    is_list = isinstance(messages, SequenceOf) and len(messages) > 0
    if not is_list or not all(isinstance(message, Mapping) and "role" in message for message in messages):
        raise ValueError(f"{NAME}: {MESSAGES}, got {messages!r}")
    tokenizer: Any = prompts.tokenizer
    template = {"add_generation_prompt": True, **(template or {})}
    source = template.get("chat_template") or getattr(tokenizer, "chat_template", None)
    if source is None or tokenizer is None:
        raise ValueError(
            f"{NAME}: the model's tokenizer must have a chat template (use generate), got one without"
            if tokenizer is not None
            else f"{NAME}: the model's folder must have a tokenizer, got one without"
        )
    conversation, images = without_images(messages)
    prompts.images.check(len(images))
    try:
        if isinstance(source, str) and source not in prompts.reads_parts:
            prompts.reads_parts[source] = reads_parts(tokenizer, source)
        if isinstance(source, str) and prompts.reads_parts[source]:
            conversation = [in_parts(message) for message in conversation]
        if not images:
            encoded: Any = tokenizer.apply_chat_template(conversation, return_dict=True, **template)
            return list(encoded["input_ids"])
        text = tokenizer.apply_chat_template(conversation, tokenize=False, **template)
    except Exception as error:  # templates raise exceptions of any type
        raise ValueError(f"{NAME}: the chat template must take the messages, got {described(error)}") from error
    return prompts.images.read(text, images, special=False)


def without_images(messages: SequenceOf[Message]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return a conversation for a chat template, with a mark {"type": "image"} for each image, and the images.

    An image is a part {"type": "image_url", "image_url": {"url": data URL}}, as OpenAI's, {"type": "image_pil",
    "image_pil": image}, as vLLM's, or {"type": "image", "image": image}, as transformers'.

    Raises:
        ValueError: For an image that is none of these.
    """
    plain, images = [], []
    for message in messages:
        parts = message.get("content")
        if not isinstance(parts, list | tuple):
            plain.append(dict(message))
            continue
        content = []
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind not in IMAGE_PARTS:
                content.append(part)
                continue
            content.append({"type": "image"})
            image = part.get(kind)
            if kind == "image_url":
                image = file_of_url(image.get("url") if isinstance(image, Mapping) else image)
            if image is None:
                raise ValueError(
                    f"{NAME}: a part of type {kind} must have {kind}, an image of Pillow, got {list(part)}"
                )
            images.append(image)
        plain.append({**message, "content": content})
    return plain, images


def reads_parts(tokenizer: Any, source: str) -> bool:
    """Return whether a chat template shows the texts of parts, and none that is a message's content itself.

    Such templates of models with images would leave out the text of a message, and say nothing.
    """

    def shows(content: object) -> bool:
        try:
            message = {"role": "user", "content": content}
            return _PROBE in tokenizer.apply_chat_template([message], chat_template=source, tokenize=False)
        except Exception:  # templates raise exceptions of any type
            return False

    return not shows(_PROBE) and shows([{"type": "text", "text": _PROBE}])


def in_parts(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message whose content, if it is a text, is a list of one part."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message
