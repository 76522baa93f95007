"""A benchmark over batch sizes and lengths; --skip-load measures without reading a weight.

python bench.py --model FOLDER [--skip-load] [--batch-size 1,2] [--input-len 8] [--output-len 8]
"""

import argparse
import json
import time

import infinicore
from infinilm.auto_config import AutoConfig
from infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.distributed import DistConfig
from infinilm.infer_engine import GenerationConfig, InferEngine
from infinilm.modeling_utils import load_model_state_dict_by_file

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--skip-load", action="store_true")
parser.add_argument("--batch-size", default="1,2")
parser.add_argument("--input-len", type=int, default=8)
parser.add_argument("--output-len", type=int, default=8)
parser.add_argument("--enable-paged-attn", action="store_true")
args = parser.parse_args()
batches = [int(size) for size in args.batch_size.split(",")]

config = AutoConfig.from_pretrained(args.model)
length = args.input_len + args.output_len
model = InferEngine(
    args.model,
    device=infinicore.device("cpu", 0),
    distributed_config=DistConfig(1),
    cache_config=StaticKVCacheConfig(max(batches), length),
)
if not args.skip_load:
    load_model_state_dict_by_file(model, args.model, dtype=model.config.dtype)
for batch in batches:
    prompt = [[(7 * i + 3) % config.vocab_size for i in range(args.input_len)]] * batch
    if args.enable_paged_attn:
        model.reset_cache(PagedKVCacheConfig(num_blocks=batch * -(-length // 16), block_size=16))
    else:
        model.reset_cache(StaticKVCacheConfig(max_batch_size=batch, max_cache_len=length))
    start = time.perf_counter()
    steps = model.generate(
        infinicore.from_list(prompt),
        GenerationConfig(
            max_new_tokens=args.output_len, eos_token_id=[], top_k=1, top_p=1.0, temperature=1.0, stop_on_eos=False
        ),
        _measure_and_log_time=True,
        paged_block_size=16,
    )
    seconds = time.perf_counter() - start
    ids = [step.to_numpy().reshape(-1).tolist() for step in steps]
    print(json.dumps({"name": f"batch {batch}", "value": [list(row) for row in zip(*ids)]}))
    print(json.dumps({"name": f"tokens/s of batch {batch}", "value": len(steps) * batch / seconds > 0}))
