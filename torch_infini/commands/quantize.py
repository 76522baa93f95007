"""quantize: writes a folder with integer weights, for LLM, load_patched and transformers.

patch_model and save_patched do the work.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ..weights import names
from .errors import CommandError

HELP = "quantize a Hugging Face model and write it to a folder"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a Hugging Face folder of a model that patch_model takes")
    parser.add_argument("folder", metavar="FOLDER", help="where it goes; made if there is none")
    parser.add_argument(
        "--quantization",
        "-q",
        default="int4",
        metavar="FORMAT",
        help=f"{', '.join(names())}, or auto:BITS, int4 or int8 for each layer, so many bits a weight on the mean and "
        "the least error (default: int4)",
    )
    parser.add_argument(
        "--calibrate", metavar="FILE", help="a text in UTF-8 by which auto:BITS measures (default: random tokens)"
    )
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PATTERN", help="modules that stay as they are; may be repeated"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..patch import TRANSFORMERS, patch_model, save_patched

    try:
        import transformers
    except ImportError as error:
        raise CommandError(f"quantize needs transformers: run `pip install '{TRANSFORMERS}'`") from error

    folder = Path(arguments.model)
    if not (folder / "config.json").is_file():
        raise CommandError(f"MODEL must be a Hugging Face folder with a config.json, got {folder}")
    if Path(arguments.folder).exists() and not Path(arguments.folder).is_dir():
        raise CommandError(f"FOLDER must be a folder, got {arguments.folder}, which is something else")
    if arguments.calibrate is not None and not arguments.quantization.startswith("auto:"):
        raise CommandError(
            f"--calibrate must come with --quantization auto:BITS, got --quantization {arguments.quantization}"
        )
    if arguments.quantization not in names() and not arguments.quantization.startswith("auto:"):
        raise CommandError(
            f"--quantization must be one of {', '.join(names())} or auto:BITS, got {arguments.quantization}"
        )
    try:
        text = None if arguments.calibrate is None else Path(arguments.calibrate).read_text("utf-8")
    except (OSError, ValueError) as error:
        raise CommandError(f"--calibrate must be a text in UTF-8, got {arguments.calibrate}: {error}") from error
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype="auto"
        ).eval()
        tokenizer = tokens = None
        if text is not None or (folder / "tokenizer_config.json").is_file():
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if text is not None and tokenizer is not None:
            tokens = tokenizer(text, return_tensors="pt")["input_ids"][0]
            if len(tokens) < 2:
                count = f"{len(tokens)} in {arguments.calibrate}"
                raise CommandError(f"--calibrate must have at least 2 tokens, got {count}")
        report = patch_model(model, weights=arguments.quantization, skip=arguments.skip, calibrate=tokens)
        if report.already_patched:
            raise CommandError(f"MODEL must have weights in full precision, got integers in {folder}")
        if report.reason:
            raise CommandError(f"MODEL must be one that patch_model takes, got {folder}: {report.reason}")
        save_patched(model, arguments.folder, tokenizer)
    except ImportError as error:  # of a checkpoint that another library has quantized
        raise CommandError(
            f"MODEL must have weights in full precision, got {folder}: {error} (generate, serve and torch_infini.load "
            "read it as it is)"
        ) from error
    except (OSError, ValueError, RuntimeError, MemoryError) as error:
        raise CommandError(str(error)) from error
    print(report)
    print(f"written to {arguments.folder}")
    return 0
