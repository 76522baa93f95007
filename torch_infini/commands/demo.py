"""demo: generates from one prompt with a LLaMA, unpatched and patched: both texts, equality of tokens, and speeds."""

from __future__ import annotations

import argparse

from ..weights import names

HELP = "generate with a small LLaMA, unpatched and patched, and compare texts and speeds"

DTYPES = ("float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="PATH", help="a local Hugging Face LLaMA folder (default: the small one here)"
    )
    parser.add_argument("--prompt", default="A class definition", help="the text to continue")
    parser.add_argument(
        "--quantization", "-q", choices=names(), help="quantize the linear layers of the patched model (default: no)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=96, metavar="N", help="tokens to generate (default: 96)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="what to compute in (default: float32)")
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="timed runs of each, interleaved (default: 5)")


def run(arguments: argparse.Namespace) -> int:
    from .demo_run import run_demo  # transformers takes seconds to import, so only this command does

    return run_demo(arguments)
