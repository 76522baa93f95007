"""The code paths that .ci/sass_paths.py counts: the instructions of a thread in calls of ops on bfloat16."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """A path through the kernel that serves a call of an op."""

    name: str
    source: str  # in csrc/infiniop
    kernel: str  # a regular expression for the demangled name of one kernel
    path: str  # what is executed on it: LDG.E.128=4 STG.E.128=2
    bytes: int  # that a thread moves from and to memory on the path; not what comes from a cache
    loop: bool = False  # one step of a loop

    @property
    def wanted(self) -> dict[str, int]:
        return {opcode: int(number) for opcode, _, number in (word.partition("=") for word in self.path.split())}


RMS_NORM = ("rms_norm/rms_norm.cu", r"norm_rows<bf16, bf16, 2, false>")
ONE = ("elementwise/elementwise.cu", r"map_elements<8, bf16, 1,")
TWO = ("elementwise/elementwise.cu", r"map_elements<8, bf16, 2,")
LAYER_NORM = ("layer_norm/layer_norm.cu", r"norm_rows<bf16, bf16, cuda::RowReducer<bf16, 2, bf16>")
SOFTMAX = ("softmax/softmax.cu", r"bf16, true, cuda::RowReducer<bf16, 2, float>")
CAUSAL = ("causal_softmax/causal_softmax.cu", r"bf16, false, cuda::RowReducer<bf16, 2, float>")
SAMPLE = ("random_sample/random_sample.cu", r"sample_rows<bf16>")
COPY = ("rearrange/rearrange.cu", r"Copy>")

# F2F are roundings to bfloat16 in between, as Llama has them.
# A line of 4,096 has 8 warps of two vectors a thread: LDS=8 are the sums of the warps, which each thread adds up.
SUM = "SHFL=5 STS=1 LDS=8 BAR=2"
TWO_SUMS = "SHFL=10 STS=2 LDS=16 BAR=4"

CASES = (
    Case("rms_norm, rows of 4096", *RMS_NORM, f"LDG.E.128=4 STG.E.128=2 F2F=16 {SUM}", 64),
    Case("add_rms_norm, rows of 4096", *RMS_NORM, f"LDG.E.128=6 STG.E.128=4 F2F=32 {SUM}", 128),
    Case("layer_norm, rows of 4096", *LAYER_NORM, f"LDG.E.128=6 STG.E.128=2 STG.E.U16=0 {TWO_SUMS}", 64),
    Case("softmax, rows of 4096", *SOFTMAX, f"LDG.E.128=2 STG.E.128=2 MUFU.EX2=16 {TWO_SUMS}", 64),
    Case("causal_softmax, rows of 4096", *CAUSAL, f"LDG.E.128=2 STG.E.128=2 MUFU.EX2=16 {TWO_SUMS}", 64),
    Case("add", *TWO, "LDG.E.128=4 STG.E.128=2 FADD=16 MUFU=0", 96),
    Case("mul", *TWO, "LDG.E.128=4 STG.E.128=2 FMUL=16 MUFU=0", 96),
    Case("swiglu", *TWO, "LDG.E.128=4 STG.E.128=2 MUFU.EX2=16 MUFU.RCP=16 FFMA=0", 96),
    Case("geglu", *TWO, "LDG.E.128=4 STG.E.128=2 MUFU.EX2=16 MUFU.RCP=16 FFMA=16", 96),
    Case("silu", *ONE, "LDG.E.128=4 STG.E.128=4 MUFU.EX2=32 MUFU.RCP=32 FMUL=64 FFMA=0", 128),
    Case("gelu", *ONE, "LDG.E.128=4 STG.E.128=4 MUFU.EX2=32 MUFU.RCP=32 FFMA=320", 128),
    Case(
        "rope, two heads of 128",
        "rope/rope.cu",
        r"rotate_heads<bf16, float>",
        "LDG.E.128=8 LDG.E.64=1 STG.E.128=4 FFMA=32",
        128,
    ),
    Case(
        "qkv_rope_cache, a token's two heads of q or k",
        "qkv_rope_cache/qkv_rope_cache.cu",
        r"write_heads<bf16, float>",
        "LDG.E.128=8 LDG.E.64=1 STG.E.128=4 FFMA=32",
        128,
        loop=True,
    ),
    Case(
        "paged_caching, a token's two heads",
        "paged_caching/paged_caching.cu",
        r"write_heads<unsigned short>",
        "LDG.E.128=4 STG.E.128=4",
        128,
        loop=True,
    ),
    Case(
        "embedding, rows of 4096",
        "embedding/embedding.cu",
        r"copy_rows<unsigned short, long>",
        "LDG.E.64=1 LDG.E.128=4 STG.E.128=4",
        128,
    ),
    Case("rearrange, vectors", COPY[0], r"map_elements<8, unsigned short, 1, .*Copy>", "LDG.E.128=4 STG.E.128=4", 128),
    Case(
        "rearrange, a tile of 2-byte elements transposed",
        COPY[0],
        r"transpose_tiles<unsigned short>",
        "LDG.E.U16=16 STS=16 LDS=16 STG.E.U16=16",
        64,
    ),
    Case("random_sample, the maximum", *SAMPLE, "LDG.E.128=1 MUFU=0 ATOMS=0", 16, loop=True),
    Case("random_sample, weights to a histogram", *SAMPLE, "LDG.E.128=1 MUFU.EX2=8 ATOMS=16", 16, loop=True),
    Case("quantize_int8, the maximum", "quantize/quantize.cu", r"int8_rows<bf16>", "LDG.E.128=1 STG=0", 16, loop=True),
    Case(
        "quantize_int8, integers",
        "quantize/quantize.cu",
        r"int8_rows<bf16>",
        "LDG.E.128=1 FCHK=8 F2I=8 STG.E.64=1",
        24,
        loop=True,
    ),
    Case(
        "quantize_int4, groups of 128",
        "quantize/quantize.cu",
        r"int4_groups<bf16, 128>",
        "LDG.E.64=1 LDG.E.U16=0 F2I=4 STG.E.U16=3",
        10,
    ),
    Case(
        "topkrouter, before the choice",
        "topk/topk.cu",
        r"topk_router_rows<bf16>",
        "LDG.E.128=1 LDG.E.U16=0 MUFU.EX2=8",
        16,
    ),
    Case("topksoftmax, rows of 256", "topk/topk.cu", r"topk_softmax_rows<bf16, 1>", "LDG.E.128=1 MUFU.EX2=8", 16),
)
