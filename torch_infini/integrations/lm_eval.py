"""The model "infini" of lm-evaluation-harness: torch_infini.LLM as `lm_eval --model infini` needs it.

    python -m torch_infini.integrations.lm_eval --model infini --model_args pretrained=FOLDER --tasks TASK

is lm_eval's command line with this model, for where torch_infini is not installed, only on the path.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

try:
    import lm_eval.models  # noqa: F401  # before the first entry of the registry: it is imported only while that is empty
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import model_registry
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise ImportError(
        "torch_infini.integrations.lm_eval: lm-evaluation-harness must be installed "
        f"(pip install 'torch_infini[eval]'), got {error}"
    ) from error

import torch
from tqdm import tqdm  # type: ignore[import-untyped]  # it has no stubs

from ..engine import LLM, RequestOutput, SamplingParams

NAME = "infini"
DEFAULT_DEVICE = "cuda:0"  # lm_eval's
MAX_NEW_TOKENS = 256  # where neither task nor max_gen_toks says how many
LIMITS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")  # one thing; the first one counts
log = logging.getLogger("torch_infini")

Pair = tuple[Any, list[int], list[int]]  # what the harness caches it under, context, continuation


class InfiniLM(TemplateLM):  # type: ignore[misc]  # lm_eval has no types
    """A model for lm-evaluation-harness.

    Args:
        pretrained: As LLM's model: a folder, a GGUF file or a name of the hub.
        tokenizer: As LLM's.
        max_length: The most tokens of a prompt and its output; None: the model's positions. Also as max_model_len.
        max_gen_toks: The most tokens of an answer whose task does not say.
        add_bos_token: Whether texts get the tokenizer's special tokens; None: as the tokenizer does by itself.
        prefix_token_id: The token before texts without context; None: the tokenizer's token at the beginning of texts,
            or else at their end.
        chat_template_args: Variables of the chat template, such as enable_thinking.
        think_end_token: Text that ends the reasoning of an answer; what is before it is no part of the answer, and
            does not stop it. None: all of the text is the answer.
        batch_size, max_batch_size: Without effect: the engine has max_num_seqs sequences in a step.
        device: As LLM's; "cuda:0", which lm_eval passes where its user names none, is the CPU where torch sees no GPU.
        seed: Of samples.
        **settings: Other arguments of LLM: dtype, quantization, tensor_parallel_size, max_num_seqs, ...

    Raises:
        FileNotFoundError, ValueError: As LLM; ValueError also for a model without tokenizer.
    """

    def __init__(
        self,
        pretrained: str,
        tokenizer: str | None = None,
        max_length: int | None = None,
        max_gen_toks: int = MAX_NEW_TOKENS,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
        think_end_token: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        device: str = "cpu",
        seed: int = 1234,
        **settings: Any,
    ) -> None:
        super().__init__()
        if max_length is not None:
            if settings.get("max_model_len") not in (None, max_length):
                given = f"{max_length} and {settings['max_model_len']}"
                raise ValueError(f"{NAME}: max_length and max_model_len must be equal, got {given}")
            settings["max_model_len"] = max_length
        if not isinstance(max_gen_toks, int) or max_gen_toks < 1:
            raise ValueError(f"{NAME}: max_gen_toks must be an integer of at least 1, got {max_gen_toks!r}")
        if batch_size not in (None, 1, "1", "auto"):
            log.info("%s: batch_size=%r changes nothing: max_num_seqs sequences are in a step", NAME, batch_size)
        if device == DEFAULT_DEVICE and not torch.cuda.is_available():
            log.warning("%s: the model runs on the CPU, because torch sees no GPU for %s", NAME, device)
            device = "cpu"
        self.llm = LLM(pretrained, tokenizer=tokenizer, device=device, seed=seed, **settings)
        self.tokenizer: Any = self.llm.get_tokenizer()
        if self.tokenizer is None:
            raise ValueError(f"{NAME}: pretrained must have a tokenizer, got {pretrained}, which has none")
        self.max_length = self.llm.engine.max_model_len
        self.max_gen_toks = max_gen_toks
        self._add_bos, self._prefix = add_bos_token, prefix_token_id
        self._template = dict(chat_template_args or {})
        self._think_end = think_end_token

    @property
    def eot_token_id(self) -> int | None:
        """The tokenizer's end-of-sequence token."""
        token: int | None = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context."""
        for token in (self._prefix, self.tokenizer.bos_token_id, self.tokenizer.eos_token_id):
            if token is not None:
                return int(token)
        raise ValueError(f"{NAME}: prefix_token_id must be given where the tokenizer has no bos_token and no eos_token")

    @property
    def tokenizer_name(self) -> str:
        """The tokenizer's name in the harness's caches of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize a text; one that begins with the prefix token's text, as of a chat template, gets no other."""
        adds = self._add_bos if add_special_tokens is None else add_special_tokens
        begin = self.tokenizer.bos_token
        if begin and string.startswith(begin):
            adds = False
        return list(self.tokenizer(string, **({} if adds is None else {"add_special_tokens": adds}))["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return a conversation as text; its last message is continued if nothing is to be added."""
        ends = {"add_generation_prompt": add_generation_prompt, "continue_final_message": not add_generation_prompt}
        return str(self.tokenizer.apply_chat_template(chat_history, tokenize=False, **ends, **self._template))

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in windows that have one token of context in common."""
        windows: list[Pair] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            # A prompt leaves room for a generated token.
            most = {"max_seq_len": self.max_length - 2, "context_len": 1}
            cut = get_rolling_token_windows(token_list=tokens, prefix_token=self.prefix_token_id, **most)
            for context, continuation in map(make_disjoint_window, cut):
                windows.append((None, context, continuation))
                owners.append(number)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            sums[owner] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[Pair], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return for each continuation its log-likelihood behind its context, and whether it is the likeliest."""
        most = self.max_length - 1  # a prompt leaves room for a generated token
        long = [len(context) + len(continuation) for _, context, continuation in requests]
        if too_long := sum(length > most for length in long):
            log.warning("%s: %d texts have more than %d tokens: the first ones are cut off", NAME, too_long, most)
        prompts = [[*context, *continuation][-most:] for _, context, continuation in requests]
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        results = []
        outputs = self._outputs(prompts, [params] * len(prompts), "scored texts", disable_tqdm)
        for (key, _, continuation), output in zip(requests, outputs, strict=True):
            entries = output.prompt_token_logprobs or []
            scored = entries[max(len(entries) - len(continuation), 0) :]
            result = sum(one.logprob for one in scored), all(one.rank == 1 for one in scored)
            results.append(result)
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, result)
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return an answer to each context, without its stop string."""
        prompts, settings, stops = [], [], []
        for request in requests:
            context, given = request.args
            params, until = self._params(given)
            tokens = self.tok_encode(context)
            assert params.max_tokens is not None
            room = max(self.max_length - params.max_tokens, 1)
            if len(tokens) > room:
                log.warning("%s: a context of %d tokens is cut to its last %d", NAME, len(tokens), room)
            prompts.append(tokens[-room:])
            settings.append(params)
            stops.append(until)
        texts = []
        outputs = self._outputs(prompts, settings, "answers", disable_tqdm)
        for request, until, output in zip(requests, stops, outputs, strict=True):
            text = self._answer(output.text, until)
            texts.append(text)
            self.cache_hook.add_partial("generate_until", request.args, text)
        return texts

    def _params(self, given: Mapping[str, Any]) -> tuple[SamplingParams, list[str]]:
        """Return the settings of a task's generation, and its stop strings; ValueError for one that is unknown."""
        more = dict(given)
        until = more.pop("until", None) or []
        until = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        limits = [more.pop(name, None) for name in LIMITS]
        most = next((int(limit) for limit in limits if limit is not None), self.max_gen_toks)
        samples = more.pop("do_sample", None)
        temperature = float(more.pop("temperature", 1.0 if samples else 0.0))
        ends = [] if self.eot_token_id is None else [self.eot_token_id]
        try:
            params = SamplingParams(
                temperature=0.0 if samples is False else temperature,
                max_tokens=min(most, self.max_length - 1),
                stop=[] if self._think_end else until,
                stop_token_ids=ends,
                **more,
            )
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{NAME}: generation_kwargs must be those of SamplingParams, got {given}: {error}"
            ) from error
        return params, until

    def _answer(self, text: str, until: Sequence[str]) -> str:
        """Return the answer in a text: what follows the reasoning, up to a stop string."""
        if self._think_end:
            text = text.rpartition(self._think_end)[2].lstrip()
        for stop in until:
            text = text.partition(stop)[0]
        return text

    def _outputs(
        self, prompts: list[list[int]], params: list[SamplingParams], what: str, disable_tqdm: bool
    ) -> Iterator[RequestOutput]:
        """Yield the output of each prompt; RuntimeError for one that the engine could not compute."""
        if not prompts:
            return
        outputs = self.llm.iterate(prompts, params)
        for output in tqdm(outputs, desc=what, total=len(prompts), disable=disable_tqdm):
            if (error := output.outputs[0].error) is not None:
                raise RuntimeError(f"{NAME}: {error}")
            yield output


def register() -> None:
    """Add the model to the harness's registry, by the name of this module."""
    if NAME not in model_registry:
        model_registry.register(NAME, target=f"torch_infini.integrations.lm_eval:{InfiniLM.__name__}")


register()

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
