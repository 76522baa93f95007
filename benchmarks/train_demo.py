"""Train the small LLaMA that `python -m torch_infini demo` runs, from nothing but what Python itself carries.
Text: `pydoc_data.topics`, the language reference behind `help()`; it differs a little from one Python to the next.
Use: python benchmarks/train_demo.py [--out FOLDER] [--steps N] [--minutes M] [--seed S]
"""

from __future__ import annotations

import argparse
import math
import random
import re
import time
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from torch_infini.demo import MODEL

PAD, BOS, EOS = "<pad>", "<s>", "</s>"  # ids 0, 1, 2
VOCABULARY = 2048
TOKENS_A_STEP = 2048  # small, as steps are what a short run lacks: 4096 was clearly worse for the same time
SHORT, LONG = 256, 512  # attention is cheaper over short windows; the last steps teach the longer reach
LONG_FROM = 0.75  # the part of the run after which windows are LONG
PEAK_LR, FINAL_LR, WARM_UP_STEPS, WEIGHT_DECAY, CLIP = 2e-3, 2e-5, 100, 0.1, 1.0
NOISE = 0.1  # the part of the tokens read that are wrong, so that the model finds back into the text after a slip
QUOTED = re.compile(r'"([a-z* ]+)"(?= (?:statement|clause|expression|keyword))')
PROMPTS = ("The with statement", "A class definition", "The try statement")


@dataclass
class Stream:
    """Documents end to end, and where in them a paragraph begins."""

    tokens: torch.Tensor
    paragraphs: list[int]


def split_topics(seed: int, share: float = 0.02) -> tuple[list[str], list[str]]:
    """Training and held-out texts. Topics quote each other, so only those that share no paragraph are held out."""
    parts = {name: {part for part in text.split("\n\n") if len(part) > 20} for name, text in topics.items()}
    seen = Counter(part for found in parts.values() for part in found)
    alone = sorted(name for name, found in parts.items() if all(seen[part] == 1 for part in found))
    random.Random(seed).shuffle(alone)
    budget = int(share * sum(len(text) for text in topics.values()))
    held: set[str] = set()
    for name in alone:
        if len(topics[name]) <= budget:
            held.add(name)
            budget -= len(topics[name])
    # 'The "with" statement' loses its quotes: nobody types them into a prompt.
    texts = {name: QUOTED.sub(r"\1", topics[name].strip("\n")) for name in sorted(topics)}
    return [text for name, text in texts.items() if name not in held], [texts[name] for name in sorted(held)]


# The model continues text, whoever wrote it: a conversation is its messages, a blank line apart.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['content'] }}"
    "{{ '' if loop.last else '\\n\\n' }}{% endfor %}"
)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The whole byte alphabet is in the vocabulary, so that no text is out of it and no unknown token is needed.
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[PAD, BOS, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    bos = (BOS, tokenizer.token_to_id(BOS))
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[bos])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=1024,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,  # decoding gives back the very text, spaces before punctuation included
    )


def make_stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> Stream:
    tokens: list[int] = []
    paragraphs: list[int] = []
    for text in texts:
        encoded = tokenizer(text, return_offsets_mapping=True, verbose=False)
        begins = [begin for begin, _ in encoded["offset_mapping"]]
        # The first token is <s>, with an empty span; the second begins the text.
        paragraphs += [len(tokens) + i for i, at in enumerate(begins) if i == 1 or (i and text[at - 2 : at] == "\n\n")]
        tokens += [*encoded["input_ids"], tokenizer.eos_token_id]
    return Stream(torch.tensor(tokens), paragraphs)


def draw_windows(stream: Stream, bos: int, length: int, rng: random.Random) -> torch.Tensor:
    """Half of the windows start anywhere, half at a paragraph and after <s>: a prompt looks like the latter."""
    rows = []
    for _ in range(TOKENS_A_STEP // length):
        start = rng.randrange(len(stream.tokens))
        at_paragraph = rng.random() < 0.5
        if at_paragraph:
            start = stream.paragraphs[max(bisect_right(stream.paragraphs, start) - 1, 0)] - 1
        row = stream.tokens[(torch.arange(start, start + length)) % len(stream.tokens)]
        if at_paragraph:
            row[0] = bos
        rows.append(row)
    return torch.stack(rows)


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """2.9 million parameters, as many as fit into 5.8 MB of bfloat16."""
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == tuple(ids.values())
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=ids["pad_token_id"],
        bos_token_id=ids["bos_token_id"],
        eos_token_id=ids["eos_token_id"],
    )
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(do_sample=False, **ids)
    return model


def train(model: LlamaForCausalLM, stream: Stream, steps: int, minutes: float, seed: int) -> None:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=PEAK_LR, betas=(0.9, 0.95))
    rng, bos = random.Random(seed), model.config.bos_token_id
    assert bos is not None
    began = printed = time.monotonic()
    progress, step, losses = 0.0, 0, []
    while progress < 1:
        # The schedule follows whichever of the two limits is nearer, so that a run cut short still cools down.
        rate = FINAL_LR + (PEAK_LR - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARM_UP_STEPS)
        tokens = draw_windows(stream, bos, LONG if progress > LONG_FROM else SHORT, rng)
        wrong = torch.rand(tokens.shape) < NOISE
        slips = stream.tokens[torch.randint(len(stream.tokens), tokens.shape)]
        # Twice as fast where the CPU multiplies bfloat16, and the weights end up in that type anyway.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(input_ids=torch.where(wrong, slips, tokens), labels=tokens, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        step += 1
        losses.append(loss.item())
        now = time.monotonic()
        progress = max(step / steps, (now - began) / (60 * minutes))
        if now - printed > 5 or progress >= 1:
            speed = step * TOKENS_A_STEP / (now - began)
            left = (now - began) * max(1 / progress - 1, 0)
            mean = sum(losses) / len(losses)
            print(f"step {step}/{steps}  loss {mean:.4f}  {speed:.0f} tokens/s  {left:.0f} s left", flush=True)
            printed, losses = now, []


@torch.inference_mode()
def mean_loss(model: LlamaForCausalLM, stream: Stream) -> float:
    rows = stream.tokens[: len(stream.tokens) // SHORT * SHORT].view(-1, SHORT)
    losses = [model(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in rows]
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(MODEL), help="folder to write (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=4000, help=f"steps of {TOKENS_A_STEP} tokens")
    limit_help = "end by then at the latest; the weights then depend on the machine's speed, not on the seed alone"
    parser.add_argument("--minutes", type=float, default=math.inf, help=limit_help)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    transformers_logging.disable_progress_bar()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)  # sums in one fixed order: the same seed gives the same weights on the same machine

    texts, held_out = split_topics(arguments.seed)
    tokenizer = train_tokenizer(texts)
    stream, validation = make_stream(tokenizer, texts), make_stream(tokenizer, held_out)
    model = make_model(tokenizer)
    print(f"{len(stream.tokens)} tokens to train on, {len(validation.tokens)} held out", flush=True)
    print(f"{model.num_parameters()} parameters", flush=True)
    train(model, stream, arguments.steps, arguments.minutes, arguments.seed)

    # What is judged is what was written, read back: rounded to bfloat16, with a tokenizer that needs no network.
    model.bfloat16().save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    # transformers 5 writes its new name of the class, which 4 does not know; both know the old one.
    settings = arguments.out / "tokenizer_config.json"
    settings.write_text(settings.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))
    model = LlamaForCausalLM.from_pretrained(arguments.out, trust_remote_code=False, dtype=torch.float32).eval()
    written = AutoTokenizer.from_pretrained(arguments.out, trust_remote_code=False)
    print(f"loss {mean_loss(model, stream):.4f} on the training text, {mean_loss(model, validation):.4f} held out")
    for prompt in PROMPTS:
        output = model.generate(**written(prompt, return_tensors="pt"), max_new_tokens=60)
        print(f"\n--- {prompt}\n{written.decode(output[0], skip_special_tokens=True)}")
    print()
    for path in sorted(arguments.out.iterdir()):
        print(f"{path.stat().st_size:9d} bytes  {path.name}")


if __name__ == "__main__":
    main()
