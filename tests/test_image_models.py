"""Models that read images beside text: folders of them, and their tokens with and without images.

Of each family: alone, in batches, in chunks that cut images, with reused prefixes, under preemption.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from support.checkpoint_writers import awq
from support.image_models import GEMMA3, GEMMA4, IMAGE_FAMILIES, LLAVA, QWEN2_5_VL, QWEN3_VL, ImageFamily
from support.rounding import assert_likeliest, sums_of
from torch_infini import LLM, AsyncLLM, SamplingParams
from torch_infini.__main__ import main
from torch_infini.engine import images as reading
from torch_infini.engine.images import PromptWithImages
from torch_infini.patch.paged import sites
from torch_infini.patch.paged.images import PromptEmbedder
from torch_infini.patch.paged.sites import Unserved
from torch_infini.testing.checkpoints import random_model, save_tokenizer

pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore::UserWarning")]

EVERY = pytest.mark.parametrize("family", IMAGE_FAMILIES, ids=lambda family: family.kind)
# A family with positions on several axes, and one whose images see each other; the others in make test-full.
SOME = pytest.mark.parametrize(
    "family",
    [one if one in (QWEN3_VL, GEMMA3) else pytest.param(one, marks=pytest.mark.full) for one in IMAGE_FAMILIES],
    ids=lambda family: family.kind,
)
COUNT = 8
MARK = LLAVA.image_mark


def greedy(count: int = COUNT, **settings: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, ignore_eos=True, **settings)


def image(seed: int, width: int = 60, height: int = 90) -> Any:
    """An image of noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (height * width * 3,), generator=generator, dtype=torch.uint8)
    return Image.frombytes("RGB", (width, height), bytes(pixels.tolist()))


def png(of: Any) -> bytes:
    file = io.BytesIO()
    of.save(file, "PNG")
    return file.getvalue()


def url(of: Any) -> str:
    return f"data:image/png;base64,{base64.b64encode(png(of)).decode()}"


def with_images(text: str, *images: Any) -> dict[str, Any]:
    return {"prompt": text, "multi_modal_data": {"image": list(images)}} if images else {"prompt": text}


def assert_continues(model: Any, llm: LLM, prompts: list[dict[str, Any]], outputs: list[Any]) -> None:
    """Each output's tokens are the likeliest by one ordinary call of the model, but for what rounding may decide."""
    sums = sums_of(model.config.get_text_config())
    for prompt, output in zip(prompts, outputs, strict=True):
        read = llm.engine.prompts.with_images(prompt)
        inputs = dict(read.inputs) if isinstance(read, PromptWithImages) else {}
        ids = torch.tensor([output.prompt_token_ids + output.token_ids[:-1]])
        if "mm_token_type_ids" in inputs:
            of_prompt = inputs["mm_token_type_ids"]
            more = ids.shape[1] - of_prompt.shape[1]
            inputs["mm_token_type_ids"] = torch.cat([of_prompt, of_prompt.new_zeros(1, more)], 1)
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs).logits
        assert_likeliest(torch.tensor(output.token_ids), logits[0, len(output.prompt_token_ids) - 1 :], *sums)


@SOME
def test_folders_of_text(family: ImageFamily, tmp_path: Path) -> None:
    """A folder continues texts, dense and quantized, in recorded steps."""
    model = family.save(tmp_path)
    given = [[5, 6, 7], list(range(40, 75))]
    llm = LLM(tmp_path, block_size=4, chunk_size=8)
    sums = sums_of(model.config.get_text_config())
    for prompt, output in zip(given, llm.generate(given, greedy()), strict=True):
        ids = torch.tensor([prompt + output.token_ids[:-1]])
        with torch.no_grad():
            scores = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :]
        assert_likeliest(torch.tensor(output.token_ids), scores, *sums)
    assert llm.engine.model.is_recordable
    [output] = LLM(tmp_path, quantization="int8").generate(given[:1], greedy())
    assert len(output.token_ids) == COUNT


@SOME
def test_ranks(family: ImageFamily, tmp_path: Path) -> None:
    """Two ranks: the tokens of the model itself, in chunks that cut images, and behind a reused prefix."""
    model = family.save(tmp_path)
    mark = family.image_mark
    given = [
        with_images(f"first {mark} and {mark}.", image(0), image(1, 120, 40)),
        with_images("a text"),
        with_images(f"first {mark} or {mark}.", image(0), image(3, 56, 56)),
    ]
    llm = LLM(tmp_path, block_size=4, chunk_size=8, tensor_parallel_size=2)
    read = llm.engine.prompts.with_images(given[0])
    assert isinstance(read, PromptWithImages)
    cut = {name: x[..., :-1] if x.is_floating_point() else x for name, x in read.inputs.items()}
    with pytest.raises(ValueError, match="the model must take the prompt's images, got:"):
        llm.engine.add(PromptWithImages(list(read), read.text, cut), greedy())
    for prompts in (given, given[2:]):
        outputs = llm.generate(prompts, greedy())
        assert all(len(output.token_ids) == COUNT for output in outputs), outputs
        assert_continues(model, llm, prompts, outputs)
    assert llm.engine.metrics().reused_tokens > 0


@EVERY
def test_tokens(family: ImageFamily, tmp_path: Path) -> None:
    """Alone, beside texts and other images, behind a reused prefix, and under preemption: those of the model itself."""
    model = family.save(tmp_path)
    mark = family.image_mark
    llm = LLM(tmp_path, block_size=4, chunk_size=8)
    given = [
        with_images(f"first {mark} and {mark}.", image(0), image(1, 120, 40)),
        with_images("a text"),
        with_images(f"{mark}", image(2)),
        with_images(f"first {mark} or {mark}.", image(0), image(3, 56, 56)),
    ]
    together = llm.generate(given, greedy())
    assert_continues(model, llm, given, together)
    assert llm.engine.model.is_recordable
    before = llm.metrics().reused_tokens
    again = llm.generate(given[:1], greedy())
    assert again[0].token_ids == together[0].token_ids and llm.metrics().reused_tokens > before
    many = [with_images(f"{'word ' * i}{mark}", image(i, 56, 56)) for i in range(3)]
    blocks = sum(-(-len(llm.engine.prompts.with_images(prompt)) // 4) for prompt in many)
    few = LLM(tmp_path, block_size=4, cache_blocks=blocks + 3, enable_prefix_caching=False)
    assert_continues(model, few, many, few.generate(many, greedy()))
    assert few.metrics().preemptions > 0


@SOME
def test_towers_attend_by_our_kernel(family: ImageFamily, tmp_path: Path) -> None:
    """While a prompt is embedded, and as the model's config says before and after."""
    family.save(tmp_path)
    llm = LLM(tmp_path)
    read = llm.engine.prompts.with_images(with_images(family.image_mark, image(0)))
    assert isinstance(read, PromptWithImages)
    configs = sites.configs_of(llm.engine.model.model)
    before = [config._attn_implementation for config in configs]
    with torch.profiler.profile() as profile:
        llm.engine.model.embed(read, read.inputs)
    calls = {event.key for event in profile.key_averages()}
    assert "infini::attention" in calls and not any("scaled_dot_product" in name for name in calls)
    assert [config._attn_implementation for config in configs] == before
    assert "sdpa" in before


@pytest.mark.parametrize(
    "family",
    [QWEN2_5_VL, *(pytest.param(one, marks=pytest.mark.full) for one in IMAGE_FAMILIES if one is not QWEN2_5_VL)],
    ids=lambda family: family.kind,
)
def test_awq(family: ImageFamily, tmp_path: Path) -> None:
    """Folders whose text is quantized and whose towers are not, with the names that files have."""
    model = family.save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, write = load_file(path), awq(32)
    of_text = [name for name in tensors if name.endswith("proj.weight") and "layers." in name and "vision" not in name]
    for name in of_text:
        stored, values = write(name, tensors.pop(name))
        tensors |= {f"{name.removesuffix('weight')}{last}": tensor.contiguous() for last, tensor in stored.items()}
        end = name[name.index("layers.") :]
        [own] = [one for key, one in model.named_parameters() if key.endswith(end) and "vis" not in key]
        own.data = values.float()
    assert of_text
    save_file(tensors, path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(tmp_path)
    given = [with_images("hello"), with_images(f"see {family.image_mark} end", image(0))]
    assert_continues(model, llm, given, llm.generate(given, greedy()))
    assert llm.engine.model.is_recordable


@SOME
def test_prefixes_of_images(family: ImageFamily, tmp_path: Path) -> None:
    """An image that differs in one pixel shares the text before it, and no token of its own."""
    family.save(tmp_path)
    llm = LLM(tmp_path, block_size=4, chunk_size=4)
    text = f"{'word ' * 4}{family.image_mark} end"
    first = image(0, 56, 56)
    other = first.copy()
    other.putpixel((0, 0), tuple(255 - x for x in first.getpixel((0, 0))))
    llm.generate(with_images(text, first), greedy())
    [output] = llm.generate(with_images(text, other), greedy())
    at = output.prompt_token_ids.index(family.image_id)
    assert at - 4 < output.num_cached_tokens <= at
    [output] = llm.generate(with_images(text, first), greedy())
    assert output.num_cached_tokens > at + 4


def test_chat(tmp_path: Path) -> None:
    """Parts of OpenAI's, vLLM's and transformers' form are one prompt; texts of templates that read parts stay."""
    model = QWEN2_5_VL.save(tmp_path)
    llm = LLM(tmp_path)
    seen = image(0)
    forms: tuple[dict[str, Any], ...] = (
        {"type": "image_url", "image_url": {"url": url(seen)}},
        {"type": "image_pil", "image_pil": seen},
        {"type": "image", "image": png(seen)},
    )
    question = {"type": "text", "text": "what?"}
    conversations = [[{"role": "user", "content": [form, question]}] for form in forms]
    outputs = llm.chat(conversations, greedy())
    prompt = outputs[0].prompt
    assert prompt.startswith(f"user: {QWEN2_5_VL.image_mark}what?") and prompt.endswith("assistant:")
    assert_continues(model, llm, [with_images(prompt, seen)] * 3, outputs)
    assert len({tuple(output.prompt_token_ids) for output in outputs}) == 1
    only_parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}|{% endfor %}"
    [output] = llm.chat([{"role": "user", "content": "hello"}], greedy(), chat_template=only_parts)
    assert llm.get_tokenizer().decode(output.prompt_token_ids) == "hello|"


def test_generate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line: images before the text of a chat, or for marks of a prompt; a file that is none."""
    QWEN3_VL.save(tmp_path)
    seen = tmp_path / "seen.png"
    seen.write_bytes(png(image(0)))
    llm = LLM(tmp_path)
    parts = [{"type": "image", "image": image(0)}, {"type": "text", "text": "what?"}]
    mark = QWEN3_VL.image_mark
    [chat] = llm.chat([{"role": "user", "content": parts}], greedy())
    [plain] = llm.generate(with_images(f"see {mark}", image(0)), greedy())
    for arguments, output in ((["--chat", "--prompt", "what?"], chat), (["--prompt", f"see {mark}"], plain)):
        options = ["--max-new-tokens", str(COUNT), "--ignore-eos", "--image", str(seen)]
        assert main(["generate", "--model", str(tmp_path), *arguments, *options]) == 0
        assert output.outputs[0].text in capsys.readouterr().out
    for file, rule in (
        (tmp_path / "none.png", "No such file"),
        (tmp_path / "config.json", "image 0 must be a file of"),
    ):
        assert main(["generate", "--model", str(tmp_path), "--chat", "--image", str(file)]) != 0
        assert rule in capsys.readouterr().err


def test_a_loaded_model_and_its_processor(tmp_path: Path) -> None:
    """LLM(model, tokenizer=processor): the processor reads images; without one a sentence says what is missing."""
    model = LLAVA.save(tmp_path)
    processor = LLM(tmp_path).engine.prompts.images.processor
    llm = LLM(LLAVA.build(), tokenizer=processor)
    given = [with_images(f"see {LLAVA.image_mark}", image(0))]
    assert_continues(model, llm, given, llm.generate(given, greedy()))
    with pytest.raises(ValueError, match="must have processor_config.json or preprocessor_config.json"):
        LLM(LLAVA.build(), tokenizer=processor.tokenizer).generate(given, greedy())


@pytest.mark.parametrize(
    "settings",
    [{"enforce_eager": True}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}, {"n": 3}],
    ids=["eager", "guesses", "samples"],
)
def test_ways_to_the_same_tokens(settings: dict[str, Any], tmp_path: Path) -> None:
    QWEN3_VL.save(tmp_path)
    given = [with_images(f"see {QWEN3_VL.image_mark} now now now", image(0)), with_images("now now now now")]
    expected = [output.token_ids for output in LLM(tmp_path).generate(given, greedy(24))]
    n = settings.pop("n", 1)
    outputs = LLM(tmp_path, **settings).generate(given, greedy(24, n=n))
    assert [output.outputs[i].token_ids for output in outputs for i in range(n)] == [
        e for e in expected for _ in range(n)
    ]


def test_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the images of several requests are encoded, a step comes after each that takes long."""
    LLAVA.save(tmp_path)
    given = with_images(f"see {LLAVA.image_mark}", image(0))
    done: list[str] = []

    async def run() -> None:
        async with AsyncLLM(tmp_path) as llm:
            engine: Any = llm.engine
            embed, step = engine.model.embed, engine.step

            def slow_embed(*args: Any) -> Any:
                time.sleep(0.06)
                done.append("embed")
                return embed(*args)

            def noted_step() -> Any:
                done.append("step")
                return step()

            monkeypatch.setattr(engine.model, "embed", slow_embed)
            monkeypatch.setattr(engine, "step", noted_step)
            await asyncio.gather(*(llm.generate(given, greedy()) for _ in range(4)))

    asyncio.run(run())
    assert done.count("embed") == 4
    assert all(pair != ("embed", "embed") for pair in zip(done, done[1:], strict=False))


def test_threads(tmp_path: Path) -> None:
    """Several read prompts with images at once: Gemma 4's processor pads, which no two threads can do."""
    GEMMA4.save(tmp_path)
    reader = LLM(tmp_path).engine.prompts.images
    text = f"see {GEMMA4.image_mark} " + "word " * 40
    expected = reader.read(text, [image(0)])
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: reader.read(text, [image(0)]), range(24)))
    assert all(one == expected for one in found)


def test_async(tmp_path: Path) -> None:
    LLAVA.save(tmp_path)
    given = with_images(f"see {LLAVA.image_mark}", image(0))
    [expected] = LLM(tmp_path).generate(given, greedy())

    async def run() -> None:
        async with AsyncLLM(tmp_path) as llm:
            texts = [llm.generate([5, 6, 7], greedy()) for _ in range(3)]
            output, *_ = await asyncio.gather(llm.generate(given, greedy()), *texts)
            assert output.token_ids == expected.token_ids
            with pytest.raises(ValueError, match="must have at most"):
                await llm.generate(with_images(f"see {LLAVA.image_mark}", image(0, 9000, 9000)), greedy())

    asyncio.run(run())


@EVERY
def test_every_logit(family: ImageFamily, tmp_path: Path) -> None:
    """Each token of a prompt in chunks has the log-probability that one ordinary call gives it."""
    model = family.save(tmp_path)
    llm = LLM(tmp_path, block_size=4, chunk_size=8)
    prompt = with_images(f"{'word ' * 3}{family.image_mark} and {family.image_mark}.", image(0), image(1, 120, 40))
    [output] = llm.generate(prompt, greedy(prompt_logprobs=0))
    read = llm.engine.prompts.with_images(prompt)
    assert isinstance(read, PromptWithImages)
    ids = torch.tensor([list(read)])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **read.inputs).logits[0]
    want = logits.log_softmax(-1)[:-1].gather(1, ids[0, 1:, None])[:, 0]
    assert output.prompt_logprobs is not None
    got = [one[token].logprob for one, token in zip(output.prompt_logprobs[1:], read[1:], strict=True)]
    torch.testing.assert_close(torch.tensor(got), want, rtol=1e-4, atol=1e-4)


def test_what_the_engine_does_not_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is refused with the reason once a prompt's images are there, and other requests go on."""
    LLAVA.save(tmp_path)
    llm = LLM(tmp_path)
    kept = PromptEmbedder._arguments

    def more(self: PromptEmbedder, *args: Any) -> Any:
        found, rules = kept(self, *args)
        return {**found, "cross_attention_states": torch.zeros(1, 3, 8)}, rules

    with monkeypatch.context() as patch:
        patch.setattr(PromptEmbedder, "_arguments", more)
        with pytest.raises(ValueError, match=r"its text part takes cross_attention_states of \[1, 3, 8\] beside"):
            llm.generate([with_images("a"), with_images(f"see {MARK}", image(0))], greedy())
    given = [with_images("a"), with_images(f"see {MARK}", image(0))]
    assert [len(output.token_ids) for output in llm.generate(given, greedy())] == [COUNT, COUNT]


def test_rules_that_are_read(tmp_path: Path) -> None:
    """A mask's function gives the tokens that see each other; one that is no text's otherwise is refused."""
    GEMMA3.save(tmp_path)
    embedder = LLM(tmp_path).engine.model._embedder
    seen = torch.ones(9, 9, dtype=torch.bool).tril()
    seen[2:5, 2:5] = seen[5:7, 5:7] = True

    def rule(of: torch.Tensor) -> Any:
        return lambda batch, head, query, key: of[query, key]

    assert embedder._spans(rule(seen), 9) == ((2, 5), (5, 7))
    assert embedder._spans(rule(torch.ones(9, 9, dtype=torch.bool)), 9) == ((0, 9),)
    wrong = seen.clone()
    wrong[8, 0] = False
    more = seen.clone()
    more[2, 7] = True
    for bad in (wrong, more):
        with pytest.raises(Unserved, match="its attention sees other keys"):
            embedder._spans(rule(bad), 9)


BAD: tuple[tuple[Any, str], ...] = (
    (with_images("no mark", image(0)), "the model's processor must take text and images"),
    (with_images(f"{MARK}{MARK}", image(0)), "the model's processor must take text and images"),
    (with_images(MARK, b"no image"), "image 0 must be a file of PNG, JPEG, WEBP, GIF, BMP, got 8 bytes that are none"),
    (with_images(MARK, png(image(0))[:300]), "image 0 must be whole"),
    (with_images(MARK, b""), "image 0 must be a file of"),
    (with_images(MARK, "path.png"), "image 0 must be an image of Pillow or the bytes of a file, got str"),
    (with_images(MARK * 3, *[image(0)] * 3), "a prompt must have at most 2 images"),
    (
        {"prompt_token_ids": [1, 2], "multi_modal_data": {"image": image(0)}},
        "prompt must be a text where it has images",
    ),
    ({"prompt": "a", "multi_modal_data": {"video": []}}, "multi_modal_data must be"),
    ({"prompt": "a", "multi_modal_data": [image(0)]}, "multi_modal_data must be"),
)


def test_bad_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence each; what has to be known is read before anything is decoded."""
    LLAVA.save(tmp_path)
    llm = LLM(tmp_path, limit_mm_per_prompt={"image": 2})
    for prompt, rule in BAD:
        with pytest.raises(ValueError, match=rule):
            llm.generate(prompt, greedy())
    monkeypatch.setattr(reading, "MAX_PIXELS", 60 * 90)
    with pytest.raises(ValueError, match="at most 5400 pixels in all, got 10800"):
        llm.generate(with_images(MARK * 2, image(0), image(1)), greedy())
    whole = with_images(MARK, image(0))
    with pytest.raises(ValueError, match="truncate_prompt_tokens must be None for a prompt with images"):
        llm.generate(whole, greedy(truncate_prompt_tokens=3))
    with pytest.raises(ValueError, match="a prompt that becomes a vector must have no images"):
        llm.embed(whole)
    chat = lambda part: llm.chat([{"role": "user", "content": [part]}])
    for bad in ("https://example.com/a.png", "file:///etc/passwd", "data:text/plain;base64,AAAA", 5):
        with pytest.raises(ValueError, match="an image's url must be a data URL"):
            chat({"type": "image_url", "image_url": {"url": bad}})
    with pytest.raises(ValueError, match="data URL must be base64"):
        chat({"type": "image_url", "image_url": {"url": "data:image/png;base64,?"}})
    with pytest.raises(ValueError, match="must have image, an image of Pillow"):
        chat({"type": "image", "path": "a.png"})
    assert len(llm.generate(whole, greedy())[0].token_ids) == COUNT
    for wrong in ({"video": 1}, {"image": -1}, {"image": True}, [1]):
        with pytest.raises(ValueError, match="limit_mm_per_prompt must be"):
            LLM(tmp_path, limit_mm_per_prompt=wrong)


def test_a_model_of_text(tmp_path: Path) -> None:
    model = random_model("llama")
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path, model.config.vocab_size)
    llm = LLM(tmp_path)
    with pytest.raises(ValueError, match=r"must have no images for this model \(Llama reads text alone\)"):
        llm.generate(with_images("a", image(0)), greedy())
    with pytest.raises(ValueError, match="must have no images for this model"):
        llm.chat([{"role": "user", "content": [{"type": "image", "image": image(0)}]}])


def test_without_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LLAVA.save(tmp_path)
    llm = LLM(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(ValueError, match=r"images need Pillow \(pip install torch_infini\[images\]\)"):
        llm.generate(with_images(MARK, b""), greedy())
