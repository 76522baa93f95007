"""ImageReader: makes the tokens of a prompt with images, by the processor of the model's folder.

Images are those of Pillow, or files in memory. What has to be known of them is read before they are decoded.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import threading
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import read_object
from ..nn import EmbeddedPrompt
from .errors import described

MAX_PIXELS = 1 << 26  # of all images of a prompt: 192 MiB as bytes of three colours
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_PARTS = ("image_url", "image_pil", "image")  # parts of messages
OTHER_PARTS = ("video_processor", "feature_extractor")  # of processors: for videos and sound
PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
_NAME = "torch_infini.LLM"
_URL = "data:image/png;base64,..."


class PromptWithImages(list[int]):
    """The token ids of a prompt, those that stand for images among them.

    Args:
        tokens: The ids.
        text: The prompt as text, a mark for each image.
        inputs: What the model's processor made of the images: arguments of the model's forward.

    Attributes:
        text, inputs: As given.
    """

    def __init__(self, tokens: SequenceOf[int], text: str, inputs: Mapping[str, Tensor]) -> None:
        super().__init__(tokens)
        self.text, self.inputs = text, dict(inputs)


class ImageReader:
    """Reads images for one model.

    Args:
        folder: The model's, with the files of its processor.
        processor: A processor of transformers; None: the folder's, loaded with the first image.
        limit: The most images of a prompt; None: any number.
        reason: Why the model reads no images; "": it does.
    """

    def __init__(self, folder: Path, processor: Any = None, limit: int | None = None, reason: str = "") -> None:
        self._folder, self._processor, self.limit, self.reason = folder, processor, limit, reason
        self._lock = threading.Lock()

    @property
    def processor(self) -> Any:
        """The processor.

        Raises:
            ValueError: If the model reads no images, or its processor cannot be loaded.
        """
        self.check()
        with self._lock:
            if self._processor is None:
                self._processor = load_processor(self._folder)
            return self._processor

    def check(self, count: int = 1) -> None:
        """Raise ValueError if a prompt can have no images, or not so many."""
        if not count:
            return
        if self.reason:
            raise ValueError(f"{_NAME}: the prompt must have no images for this model ({self.reason}), got some")
        if self.limit is not None and count > self.limit:
            raise ValueError(
                f"{_NAME}: a prompt must have at most {self.limit} images (limit_mm_per_prompt), got {count}"
            )

    def read(self, text: str, images: SequenceOf[Any], special: bool = True) -> PromptWithImages:
        """Make a prompt of a text and its images, in the order of their marks in the text.

        Args:
            text: With the model's mark for each image.
            images: Images of Pillow, or files as bytes.
            special: Whether the tokenizer adds its special tokens.

        Raises:
            ValueError: For images that cannot be read, of more than MAX_PIXELS in all, or not as many as marks.
        """
        self.check(len(images))
        processor = self.processor
        decoded = decode_images(images)
        try:
            with self._lock:  # a tokenizer that pads cannot be used by two threads
                made = processor(text=[text], images=[decoded], return_tensors="pt", add_special_tokens=special)
            found = dict(made)
            tokens = found.pop("input_ids")[0].tolist()
        except Exception as error:  # processors raise exceptions of any type
            raise ValueError(
                f"{_NAME}: the model's processor must take text and images, got {described(error)}"
            ) from error
        for name in ("attention_mask", "labels"):
            found.pop(name, None)
        return PromptWithImages(tokens, text, {name: x for name, x in found.items() if isinstance(x, Tensor)})


def load_processor(folder: Path) -> Any:
    """Load the processor of a model's folder; where packages are missing, one that reads images alone.

    Raises:
        ValueError: If there is none that can be loaded.
    """
    try:
        import PIL  # noqa: F401  (the processors need it)
        from transformers import AutoProcessor
    except ImportError as error:
        raise ValueError(f"{_NAME}: images need Pillow (pip install torch_infini[images]), got: {error}") from error
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        names = " or ".join(PROCESSOR_FILES)
        raise ValueError(f"{_NAME}: the model's folder must have {names} to read images, got {folder} without")
    options: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}
    try:
        return AutoProcessor.from_pretrained(folder, **options)
    except Exception as error:  # broken files raise exceptions of any type, and so do packages that are missing
        with suppress(Exception):
            return _images_alone(folder).from_pretrained(folder, **options)
        cause = " ".join(str(error).split())[:300] or type(error).__name__
        raise ValueError(f"{_NAME}: {folder} must hold a processor that transformers loads, got: {cause}") from error


def _images_alone(folder: Path) -> Any:
    """Return the class of a folder's processor, less its parts for videos and sound, which need further packages.

    Raises:
        TypeError: If the folder names no class of transformers.
    """
    import transformers
    from transformers import ProcessorMixin

    named = (read_object(folder / name).get("processor_class") for name in PROCESSOR_FILES if (folder / name).is_file())
    cls = next((getattr(transformers, name, None) for name in named if isinstance(name, str)), None)
    if not isinstance(cls, type) or not issubclass(cls, ProcessorMixin):
        raise TypeError(cls)
    base: Any = cls
    parts = base.get_attributes()

    class ImagesAlone(base):  # type: ignore[misc]  # known here alone
        names = parts

        @classmethod
        def get_attributes(cls) -> list[str]:
            return list(cls.names)

        @classmethod
        def _get_arguments_from_pretrained(cls, *args: Any, **settings: Any) -> list[Any]:
            cls.names = [name for name in parts if name not in OTHER_PARTS]
            try:
                found: list[Any] = super()._get_arguments_from_pretrained(*args, **settings)
            finally:
                cls.names = parts
            for at, name in enumerate(parts):
                if name in OTHER_PARTS:
                    found.insert(at, None)
            return found

        def check_argument_for_proper_class(self, name: str, part: Any) -> Any:
            return None if part is None else super().check_argument_for_proper_class(name, part)

    ImagesAlone.__name__ = cls.__name__
    return ImagesAlone


def decode_images(images: SequenceOf[Any]) -> list[Any]:
    """Return images of Pillow in three colours, upright.

    Raises:
        ValueError: For anything but an image of Pillow or the bytes of a file, or more than MAX_PIXELS in all.
    """
    from PIL import Image, ImageOps

    opened = []
    for at, image in enumerate(images):
        if isinstance(image, bytes):
            size = len(image)
            try:
                image = Image.open(io.BytesIO(image), formats=FORMATS)
            except Exception as error:  # Pillow's readers raise exceptions of any type
                came = f"{size} bytes that are none ({type(error).__name__})"
                raise ValueError(f"{_NAME}: image {at} must be a file of {', '.join(FORMATS)}, got {came}") from error
        if not isinstance(image, Image.Image):
            raise ValueError(
                f"{_NAME}: image {at} must be an image of Pillow or the bytes of a file, got {type(image).__name__}"
            )
        opened.append(image)
    pixels = sum(image.width * image.height for image in opened)
    if pixels > MAX_PIXELS:
        raise ValueError(f"{_NAME}: the images of a prompt must have at most {MAX_PIXELS} pixels in all, got {pixels}")
    decoded = []
    for at, image in enumerate(opened):
        try:
            decoded.append(ImageOps.exif_transpose(image).convert("RGB"))
        except Exception as error:
            raise ValueError(f"{_NAME}: image {at} must be whole, got {described(error)}") from error
    return decoded


def keys_of(tokens: SequenceOf[int], embedded: EmbeddedPrompt) -> list[int]:
    """Return a prompt's tokens, for those of images a negative number that follows from what the model sees there.

    Digests of 128 bits: two images with one number will not be found.
    """
    keys = list(tokens)
    rows = embedded.is_image.nonzero().flatten().tolist()
    # Where a token counts is part of what it is: images of one colour have like rows in any shape.
    where = embedded.positions if embedded.positions is not None else torch.tensor([[0]]).expand(1, len(keys))
    places = where.cpu().t().contiguous()
    values = embedded.embeddings.detach().cpu().contiguous().view(torch.uint8)
    for row in rows:
        keys[row] = number_of(values[row], (places[row] - places[rows[0]]).tolist())
    for first, end in embedded.spans:  # each token's keys and values follow from all of them
        whole = number_of(values[first:end], (places[first:end] - places[first]).tolist())
        keys[first:end] = range(whole, whole - (end - first), -1)
    return keys


def number_of(values: Tensor, places: list[Any]) -> int:
    """Return a negative number that follows from bytes and places."""
    digest = hashlib.blake2b(values.numpy().tobytes(), digest_size=16)
    digest.update(repr(places).encode())
    return -1 - int.from_bytes(digest.digest(), "little")


def file_of_url(url: Any) -> bytes:
    """Return the file that a data URL holds.

    Raises:
        ValueError: For any other URL: nothing is fetched, and no file is read.
    """
    head, comma, body = url.partition(",") if isinstance(url, str) else ("", "", "")
    if not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        shown = url[:40] if isinstance(url, str) else type(url).__name__
        raise ValueError(f"{_NAME}: an image's url must be a data URL ({_URL}), because none is fetched, got {shown!r}")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"{_NAME}: an image's data URL must be base64, got {error}") from error
