"""Text for prompts, as an InfiniLM user's first script has it: tokenizer, chat template, InferEngine.generate.

python generate.py --model_path FOLDER --prompts "..." "..." [--enable_paged_attn] [--tp 2]
"""

import argparse
import json
import time

import infinicore
import numpy as np
from infinilm.cache import PagedKVCacheConfig, StaticKVCacheConfig
from infinilm.distributed import DistConfig
from infinilm.infer_engine import GenerationConfig, InferEngine
from infinilm.modeling_utils import load_model_state_dict_by_file
from transformers import AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model_path", required=True)
parser.add_argument("--prompts", nargs="+", required=True)
parser.add_argument("--max_new_tokens", type=int, default=16)
parser.add_argument("--enable_paged_attn", action="store_true")
parser.add_argument("--tp", type=int, default=1)
args = parser.parse_args()


def main():
    device = infinicore.device("cpu", 0)
    model = InferEngine(args.model_path, device=device, distributed_config=DistConfig(args.tp))
    load_model_state_dict_by_file(model, args.model_path, dtype=model.config.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.model_path, trust_remote_code=True)
    contents = [
        tokenizer.apply_chat_template(
            conversation=[{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False
        )
        for prompt in args.prompts
    ]
    ids = tokenizer.batch_encode_plus(contents)["input_ids"]
    print(json.dumps({"name": "prompt ids", "value": ids}))
    shortest = min(map(len, ids))
    ids = [row[:shortest] for row in ids]  # rows of one length
    batch, length = len(ids), shortest + args.max_new_tokens
    if args.enable_paged_attn:
        model.reset_cache(PagedKVCacheConfig(batch * (length // 16 + 1), 16))
    else:
        model.reset_cache(StaticKVCacheConfig(max_batch_size=batch, max_cache_len=length))
    start = time.time()
    steps = model.generate(
        infinicore.from_list(ids),
        GenerationConfig(max_new_tokens=args.max_new_tokens, temperature=1, top_k=1, top_p=0.8),
        _measure_and_log_time=True,
    )
    seconds = time.time() - start
    made = np.array([step.to_numpy() for step in steps])  # [steps, batch]
    print(json.dumps({"name": "ids", "value": made.reshape(len(steps), batch).T.tolist()}))
    print(json.dumps({"name": "texts", "value": [tokenizer.decode(row, skip_special_tokens=True) for row in made.T]}))
    print(json.dumps({"name": "took time", "value": seconds > 0}))


if __name__ == "__main__":
    main()
