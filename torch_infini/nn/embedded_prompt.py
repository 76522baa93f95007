"""EmbeddedPrompt: what a model computes for a prompt with images, of which the tokens alone do not say all.

EmbeddedRows are those of one in a Batch.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Term(NamedTuple):
    """A further argument of a model's text part, with rows for the tokens of a prompt.

    Attributes:
        values: [S, ...] each.
        is_list: Whether the text part takes a list of them; else there is one.
        marked: The name of the term, of bool, whose rows the text part takes alone; "": it takes all rows.
    """

    values: list[Tensor]
    is_list: bool = False
    marked: str = ""


class EmbeddedPrompt(NamedTuple):
    """A prompt whose images were encoded.

    Attributes:
        embeddings: [S, hidden_size], of text and of images.
        positions: [axes, S], where each token counts more than its place; None: it counts that.
        shift: What is added to the places of the tokens that follow the prompt.
        terms: Further arguments of the text part by name.
        is_image: [S] bool, which tokens stand for a part of an image.
        spans: (first, end) of tokens that see each other, later ones too: one image each, or the whole prompt.
        first: The place of the token whose row is the first one here.
    """

    embeddings: Tensor
    positions: Tensor | None
    shift: int
    terms: dict[str, Term]
    is_image: Tensor
    spans: tuple[tuple[int, int], ...] = ()
    first: int = 0

    def part(self, start: int, end: int) -> EmbeddedPrompt:
        """Return a copy that has the rows of the tokens at start to end - 1 alone."""
        rows = slice(start - self.first, end - self.first)
        terms = {
            name: term._replace(values=[value[rows].clone() for value in term.values])
            for name, term in self.terms.items()
        }
        return self._replace(
            embeddings=self.embeddings[rows].clone(),
            positions=None if self.positions is None else self.positions[:, rows].clone(),
            terms=terms,
            is_image=self.is_image[rows].clone(),
            first=start,
        )


class EmbeddedRows(NamedTuple):
    """The rows of a batch that are tokens of an EmbeddedPrompt.

    Attributes:
        first: The index of the first one in the batch.
        start: Its row in the prompt.
        size: Their number.
        prompt: The prompt.
    """

    first: int
    start: int
    size: int
    prompt: EmbeddedPrompt
