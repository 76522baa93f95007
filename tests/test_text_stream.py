"""TextStream: increments against the decode of all tokens, for the ways in which tokenizers make text of tokens."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest

from torch_infini.engine.sampling_params import SamplingParams
from torch_infini.engine.text import CONTEXT, TextStream

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TEXTS = [
    "The quick brown fox jumps over the lazy dog , and isn't it  nice .\n\n\tIndented\ttext   here.",
    "Grüße aus Köln: naïve façade, 東京は日本の首都です。Привет, мир! العربية 한국어",
    "Emoji 😀😁🤖👩‍👩‍👧‍👦🏳️‍🌈 in a row 😀 and apart; ½ ≠ ⅓ — “quotes” …",
]
REPLACEMENT = "\ufffd"


@cache
def demo():
    folder = Path(__file__).parent.parent / "torch_infini" / "demo" / "model"
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


@cache
def byte_level():
    """GPT-2's way: tokens are bytes, of which a character may have several."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXTS, trainer)
    core.add_tokens(["<tool>", "two words"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@cache
def metaspace():
    """T5's way: a token that begins a word begins with a mark, which is a space but at the beginning of the text."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    core.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    core.train_from_iterator(TEXTS, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")


@cache
def byte_fallback():
    """Llama 2's way: marks, and a token for each byte of what the vocabulary lacks."""
    vocabulary = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary += ["▁", "▁▁", *(f"▁{word}" for word in ("the", "fox", "is", "🤖", ".")), *"abcdefghijklmnop.,é東"]
    core = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: i for i, token in enumerate(vocabulary)},
            merges=[("▁", "▁")],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    core.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend("▁"), tokenizers.normalizers.Replace(" ", "▁")]
    )
    core.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


ALL = {"demo": demo, "byte level": byte_level, "metaspace": metaspace, "byte fallback": byte_fallback}
EVERY = pytest.mark.parametrize("name", ALL)


def whole(tokenizer, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def increments(stream: TextStream, tokens: list[int]) -> list[str]:
    return [*map(stream.add, tokens), stream.finish()]


def random_tokens(tokenizer, chance: random.Random, length: int) -> list[int]:
    """Any tokens; bytes of fallback only as whole characters, for the promise is of these."""
    tokens: list[int] = []
    while len(tokens) < length:
        token = chance.randrange(len(tokenizer))
        if tokenizer.convert_ids_to_tokens(token).startswith("<0x"):
            character = chr(chance.choice([0x41, 0x20, 0xE9, 0x20AC, 0x6771, 0x1F600]))
            tokens += [tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in character.encode()]
        else:
            tokens.append(token)
    return tokens


@EVERY
def test_texts(name: str) -> None:
    tokenizer = ALL[name]()
    for text in TEXTS:
        tokens = tokenizer.encode(text, add_special_tokens=False)
        given = increments(TextStream(tokenizer), tokens)
        assert "".join(given) == whole(tokenizer, tokens)
        assert not any(REPLACEMENT in part for part in given)
        assert all(given[i] for i in range(len(tokens)) if tokenizer.decode(tokens[i : i + 1]).isalpha())


@EVERY
def test_random_tokens(name: str) -> None:
    """At each step, what was given is a prefix of what all tokens so far decode to, short of it by little."""
    tokenizer = ALL[name]()
    for seed in range(150):
        chance = random.Random(seed)
        tokens = random_tokens(tokenizer, chance, chance.choice([1, 2, 5, 20, 60]))
        stream, given = TextStream(tokenizer), ""
        for count, token in enumerate(tokens, 1):
            given += stream.add(token)
            final = whole(tokenizer, tokens)
            assert final.startswith(given)
            assert len(whole(tokenizer, tokens[:count]).rstrip(REPLACEMENT)) <= len(given)
        assert given + stream.finish() == final
        assert stream.finish() == "" and stream.stopped is None


@EVERY
def test_behind_a_prompt(name: str) -> None:
    """The output continues the prompt: both together are the decode of both, with the space between them."""
    tokenizer = ALL[name]()
    special = tokenizer.convert_tokens_to_ids("</s>")
    for seed in range(150):
        chance = random.Random(seed)
        prompt = tokenizer.encode(chance.choice(TEXTS), add_special_tokens=False)[: chance.choice([1, 9, 40])]
        while REPLACEMENT in whole(tokenizer, prompt):  # not in the middle of a character
            prompt.pop()
        if seed % 3 == 0:
            prompt = [special, *prompt, *[special] * chance.choice([1, 30])]
        tokens = random_tokens(tokenizer, chance, 30)
        given = "".join(increments(TextStream(tokenizer, prompt_tokens=prompt), tokens))
        assert whole(tokenizer, prompt) + given == whole(tokenizer, prompt + tokens)


def test_leading_space() -> None:
    tokenizer = byte_fallback()
    fox = tokenizer.convert_tokens_to_ids("▁fox")
    assert increments(TextStream(tokenizer), [fox, fox]) == ["fox", " fox", ""]
    assert increments(TextStream(tokenizer, prompt_tokens=[fox]), [fox, fox]) == [" fox", " fox", ""]
    assert increments(TextStream(tokenizer, prompt_tokens=[1]), [fox, fox]) == ["fox", " fox", ""]


def test_prompt_that_ends_within_a_character() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        tokens = tokenizer.encode("a😁", add_special_tokens=False)
        assert "".join(increments(TextStream(tokenizer, prompt_tokens=tokens[:-1]), tokens[-1:])) == "😁"


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_characters_of_many_tokens(name: str) -> None:
    """Nothing is given before a character is complete, and a run of them does not wait for its end."""
    tokenizer = ALL[name]()
    if name == "byte level":  # its letters for bytes
        split = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str
        bytes_of = lambda character: split(character)[0][0]
    else:
        bytes_of = lambda character: [f"<0x{value:02X}>" for value in character.encode()]
    runs = [[tokenizer.convert_tokens_to_ids(byte) for byte in bytes_of(c)] for c in "😀é😁"] * 20
    assert [len(tokens) for tokens in runs[:3]] == [4, 2, 4]
    stream = TextStream(tokenizer)
    for tokens, character in zip(runs, "😀é😁" * 20):
        assert [stream.add(token) for token in tokens] == [*[""] * (len(tokens) - 1), character]


def test_bytes_that_are_no_text() -> None:
    """They do not block the text behind them, and at most four wait."""
    tokenizer = byte_level()
    tokens = [token for token in range(2, 258) if REPLACEMENT in tokenizer.decode([token])]
    for seed in range(100):
        chance = random.Random(seed)
        garbage = chance.choices(tokens, k=80)
        stream, given = TextStream(tokenizer), ""
        for count, token in enumerate(garbage, 1):
            given += stream.add(token)
            assert len(whole(tokenizer, garbage[:count])) - len(given) <= 4
        assert given + stream.finish() == whole(tokenizer, garbage)


def test_broken_run_of_byte_tokens() -> None:
    """What was complete stays; the rest is U+FFFD, and the text behind it comes whole."""
    tokenizer = byte_fallback()
    ids = lambda *tokens: [tokenizer.convert_tokens_to_ids(token) for token in tokens]
    tokens = ids("▁fox", "<0xC3>", "<0xA9>", "<0xE2>", "<0x82>", "▁the", "▁fox", "▁is", "▁the", "▁fox", "▁is")
    assert (
        "".join(increments(TextStream(tokenizer), tokens)) == "fox" + "é" + 2 * REPLACEMENT + " the fox is the fox is"
    )
    assert "".join(increments(TextStream(tokenizer), tokens[:5])) == "fox" + "é" + 2 * REPLACEMENT
    assert "".join(increments(TextStream(tokenizer), tokens[:4])) == "fox" + "é" + REPLACEMENT


@EVERY
def test_work_for_each_token(name: str) -> None:
    """A bounded number of tokens is decoded, whatever comes."""
    tokenizer, decoded = ALL[name](), []

    class Counting:
        added_tokens_decoder = tokenizer.added_tokens_decoder

        @staticmethod
        def decode(tokens, **kwargs):
            decoded.append(len(tokens))
            return tokenizer.decode(tokens, **kwargs)

    special = tokenizer.convert_tokens_to_ids("</s>")
    chance = random.Random(0)
    for tokens in (
        random_tokens(tokenizer, chance, 500),
        [special] * 500,
        chance.choices(range(len(tokenizer)), k=500),
    ):
        stream = TextStream(Counting, SamplingParams(stop="never"))
        for token in tokens:
            decoded.clear()
            stream.add(token)
            assert sum(decoded) <= 2 * CONTEXT * (CONTEXT + 1)
            assert max(decoded, default=0) <= 4 * CONTEXT
            assert len(stream._window) <= 4 * CONTEXT
    decoded.clear()
    TextStream(Counting, prompt_tokens=[*tokenizer.encode(TEXTS[0] * 20), special])
    assert max(decoded) <= 2 * CONTEXT


# Stop strings


def words(*pieces: str):
    """(tokenizer, tokens): a token for each piece."""
    core = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({piece: i for i, piece in enumerate(dict.fromkeys(pieces))})
    )
    core.decoder = tokenizers.decoders.Fuse()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=core)
    return tokenizer, [tokenizer.convert_tokens_to_ids(piece) for piece in pieces]


@pytest.mark.parametrize(
    ("pieces", "stop", "parts", "found"),
    [
        (("ab", "c", "d"), "c", ["ab", "", "", ""], "c"),
        (("a", "b", "c", "d"), "bc", ["a", "", "", "", ""], "bc"),
        (("a", "b", "d"), "bc", ["a", "", "bd", ""], None),
        (("a", "b"), "bc", ["a", "", "b"], None),
        (("xaa", "a", "b"), "aab", ["x", "a", "", ""], "aab"),
        (("one STOP two", "x"), "STOP", ["one ", "", ""], "STOP"),
        (("ab", "cd"), ("bcd", "bc"), ["a", "", ""], "bc"),  # complete first
        (("ab", "cd"), ("cd", "bcd"), ["a", "", ""], "bcd"),  # of two that end there the longest
        (("ab", "cd"), ("d", "x"), ["ab", "c", ""], "d"),
        (("\n", "\n", "\n"), "\n\n", ["", "", "", ""], "\n\n"),
    ],
)
def test_stop_strings(pieces: tuple, stop: str | tuple, parts: list[str], found: str | None) -> None:
    tokenizer, tokens = words(*pieces)
    stream = TextStream(tokenizer, SamplingParams(stop=stop))
    assert increments(stream, tokens) == parts
    assert stream.stopped == found
    kept = TextStream(tokenizer, SamplingParams(stop=stop, include_stop_str_in_output=True))
    assert "".join(increments(kept, tokens)) == "".join(parts) + (found or "")


def test_stop_strings_do_not_depend_on_tokens() -> None:
    """However a text is cut into tokens, the same text comes out, and nothing of the stop string before."""
    for seed in range(300):
        chance = random.Random(seed)
        text = "".join(chance.choices("ab", k=40))
        stop = ["".join(chance.choices("ab", k=chance.randint(3, 7))) for _ in range(3)]
        ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stop))]
        expected, found = text, None
        if ends:
            found = max((s for s in stop if text[: ends[0]].endswith(s)), key=len)
            expected = text[: ends[0] - len(found)]
        pieces = []
        while sum(map(len, pieces)) < len(text):
            begin = sum(map(len, pieces))
            pieces.append(text[begin : begin + chance.randint(1, 4)])
        tokenizer, tokens = words(*pieces)
        stream, given = TextStream(tokenizer, SamplingParams(stop=stop)), ""
        for part in increments(stream, tokens):
            given += part
            assert expected.startswith(given)
        assert (given, stream.stopped) == (expected, found)


def test_stop_strings_and_the_minimum_of_tokens() -> None:
    tokenizer, tokens = words("a", "b", "c", "a", "b", "c")
    stream = TextStream(tokenizer, SamplingParams(stop="bc", min_tokens=4))
    assert increments(stream, tokens) == ["a", "b", "c", "a", "", "", ""]
    assert stream.stopped == "bc"


def test_stop_string_within_a_character() -> None:
    tokenizer = byte_level()
    tokens = tokenizer.encode("a😁b東c", add_special_tokens=False)
    stream = TextStream(tokenizer, SamplingParams(stop="東"))
    assert "".join(increments(stream, tokens)) == "a😁b" and stream.stopped == "東"
