"""Grammars: compiles StructuredOutputsParams; Matcher: follows one sequence, and masks the tokens that it cannot have.

The masks are llguidance's. They are computed on a thread of their own while the model computes the step.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .gbnf import is_gbnf, to_lark
from .structured_outputs import NAME, StructuredOutputsParams, invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher
    from transformers import PreTrainedTokenizerBase

KEPT = 64  # compiled grammars
# Bytes. llguidance recurses from rule to rule and from $ref to $ref: a chain of 3,000 ends a process whose stack has
# the usual 8 MiB, and the longest of MAX_BYTES fit 64 MiB. What is not used is not taken.
STACK = 128 << 20
_STARTING = threading.Lock()  # threading.stack_size is of the process
WHITE_SPACE = r"[ \t\n\r]{1,40}"
_BITS = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8)

Pending = tuple["Matcher", Sequence[int]]  # a matcher, and the tokens of its sequence's output


class Grammars:
    """The compiled grammars of one tokenizer. Threads may compile at the same time.

    Args:
        tokenizer: A fast tokenizer of transformers.
        vocab_size: The number of logits.
        eos_token_ids: The tokens that may end a text which has its form.

    Raises:
        ImportError: Without llguidance.
        ValueError: For a tokenizer whose tokens are not known.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        try:
            import llguidance.hf
        except ImportError as error:
            raise ImportError(
                "torch_infini: structured outputs need llguidance: pip install 'torch_infini[structured]'"
            ) from error
        ends = list(eos_token_ids)
        if not ends and tokenizer.eos_token_id is not None:
            ends = [tokenizer.eos_token_id]
        # llguidance needs an end-of-sequence token. Where the model has none, the last token stands in, and is never
        # allowed: the text ends where nothing can follow.
        self._stand_in = None if ends else vocab_size - 1
        fast: Any = tokenizer
        try:
            self._tokenizer = llguidance.hf.from_tokenizer(fast, vocab_size, ends or [vocab_size - 1])
        except Exception as error:  # whatever it makes of a tokenizer that is no fast one
            rule = f"be None where the tokenizer is no fast one of at most {vocab_size} tokens"
            came = f"{type(tokenizer).__name__} ({type(error).__name__}: {error})"
            raise ValueError(f"torch_infini.SamplingParams: structured_outputs must {rule}, got {came}") from error
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._words = -(-vocab_size // 32)
        self._compiled: OrderedDict[tuple[object, ...], LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, "torch_infini grammar masks")

    def compile(self, params: StructuredOutputsParams) -> Matcher:
        """Return a matcher at the beginning of a text of this form.

        Raises:
            ValueError: For a form that is invalid, that no text can have, or that is too complex.
        """
        from llguidance import LLMatcher

        key = params.form, params.texts, params.whitespace_pattern, params.disable_any_whitespace
        with self._lock:
            found = self._compiled.get(key)
            if found is not None:
                self._compiled.move_to_end(key)
                return Matcher(found.deep_copy(), self._words, self._stand_in)
        source = source_of(params)
        matcher = with_deep_stack(lambda: LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits))
        first = matcher.deep_copy()
        if not first.is_error():  # that no text has the form shows only here
            mask = torch.zeros(self._words, dtype=torch.int32)
            first.unsafe_compute_mask_ptr(mask.data_ptr(), mask.nbytes)
        if first.is_error():
            cause = " ".join(first.get_error().split())[:200]
            raise ValueError(f"{NAME}: {params.form} must be a form that texts can have, got an error: {cause}")
        with self._lock:
            self._compiled[key] = matcher
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return Matcher(matcher.deep_copy(), self._words, self._stand_in)

    def start(self, pending: Sequence[Pending]) -> None:
        """Compute the next masks of some sequences on the thread; Matcher.apply waits for them."""
        future = self._thread.submit(compute_all, pending)
        for matcher, _ in pending:
            matcher.future = future


def with_deep_stack(call: Callable[[], LLMatcher]) -> LLMatcher:
    """Return what the call returns, on a thread with a stack of STACK bytes."""
    result: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="torch_infini grammar compiler", daemon=True)
    with _STARTING:
        before = threading.stack_size(STACK)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    try:
        return result.result()
    finally:
        thread.join()


def source_of(params: StructuredOutputsParams) -> str:
    """Return llguidance's description of a form."""
    from llguidance import LLMatcher

    if params.form == "regex":
        return LLMatcher.grammar_from_regex(params.texts[0])
    if params.form == "grammar":
        text = params.texts[0]
        return LLMatcher.grammar_from_lark(to_lark(text) if is_gbnf(text) else text)
    if params.form == "choice":
        # Strings of Lark's syntax are those of JSON.
        return LLMatcher.grammar_from_lark(
            "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in params.texts)
        )
    options: dict[str, Any] = {"whitespace_pattern": params.whitespace_pattern or WHITE_SPACE}
    if params.disable_any_whitespace:
        options = {"whitespace_flexible": False}
    schema = {"type": "object"} if params.json is None else params.json
    assert isinstance(schema, dict)
    try:
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)  # type: ignore[arg-type]  # a TypedDict
    except ValueError as error:
        raise invalid(params.form, "be a JSON schema", str(error)) from error


class Matcher:
    """The state of one sequence in its grammar; one thread at a time.

    Args:
        matcher: llguidance's, at the beginning.
        words: The size of a mask in words of 32 tokens.
        never: A token that is never allowed, or None.

    Attributes:
        future: The computation of the mask, if one was started.
    """

    def __init__(self, matcher: LLMatcher, words: int, never: int | None = None) -> None:
        self._matcher, self._never = matcher, never
        self._read = 0  # tokens of the output
        self._mask = torch.zeros(words, dtype=torch.int32)
        self.future: Future[None] | None = None

    def copy(self) -> Matcher:
        """Return a matcher of the same grammar at the beginning."""
        self._wait()
        other = Matcher(self._matcher.deep_copy(), len(self._mask), self._never)
        other._matcher.reset()
        return other

    def compute(self, output: Sequence[int]) -> None:
        """Compute the mask of the token after these."""
        self._follow(output)
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(self._mask.data_ptr(), self._mask.nbytes)
            if self._never is not None:
                self._mask.view(torch.uint8)[self._never // 8] &= ~(1 << self._never % 8) & 0xFF

    def apply(self, logits: Tensor, output: Sequence[int]) -> str | None:
        """Set the logits [vocabulary] of the tokens that cannot follow to -infinity; return an error or None."""
        if not self._wait():
            self.compute(output)
        if self._matcher.is_error():
            return self.error
        size = logits.shape[0]
        forbidden = (self._mask.view(torch.uint8)[:, None] & _BITS) == 0
        logits.masked_fill_(forbidden.view(-1)[:size].to(logits.device), -inf)
        return None

    def has_ended(self, output: Sequence[int]) -> bool:
        """Return whether nothing can follow these tokens, because the form is complete."""
        self._follow(output)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on; None: it can."""
        if not self._matcher.is_error():
            return None
        cause = " ".join(self._matcher.get_error().split())[:200]
        return f"{NAME}: the form must be one that the text can go on with, got an error: {cause}"

    def _wait(self) -> bool:
        """Wait for the mask that was started; return whether there was one."""
        future, self.future = self.future, None
        if future is not None:
            future.result()
        return future is not None

    def _follow(self, output: Sequence[int]) -> None:
        """Read the tokens that were not read yet."""
        if self._read < len(output) and not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(output[self._read :]))
        self._read = len(output)


def compute_all(pending: Iterable[Pending]) -> None:
    for matcher, output in pending:
        matcher.compute(output)
