"""Greedy decoding with the static cache on _infinilm, in the names of its documentation: cache_lengths, keywords.

python static.py --model_path FOLDER --prompt 1,2,3 [--tp 2]
"""

import argparse
import json
from pathlib import Path

import infinicore
from infinilm.auto_config import AutoConfig
from infinilm.lib import _infinilm
from safetensors.torch import load_file

parser = argparse.ArgumentParser()
parser.add_argument("--model_path", required=True)
parser.add_argument("--prompt", required=True, help="token ids, comma-separated; rows by ;")
parser.add_argument("--max_new_tokens", type=int, default=16)
parser.add_argument("--device", default="cpu")
parser.add_argument("--tp", type=int, default=1)
args = parser.parse_args()


def main():
    config = AutoConfig.from_pretrained(args.model_path)
    assert isinstance(config, _infinilm.LlamaConfig)
    assert config.validate() in (None, True)
    rows = [[int(token) for token in row.split(",")] for row in args.prompt.split(";")]
    cache_config = _infinilm.StaticKVCacheConfig(max_batch_size=len(rows), max_cache_len=256)
    device = infinicore.device(args.device, 0)
    engine = _infinilm.InferEngine(
        config=config,
        distributed_config=_infinilm.DistConfig(tp_size=args.tp),
        device_type=device._underlying.type,
        cache_config=cache_config,
    )
    for path in sorted(Path(args.model_path).glob("*.safetensors")):
        for name, param in load_file(path).items():
            engine.load_param(name, infinicore.from_torch(param)._underlying)

    for attempt in range(2):  # again after a reset
        past, step, made = 0, rows, [[] for _ in rows]
        for _ in range(args.max_new_tokens):
            length = len(step[0])
            input_ids = infinicore.from_list(step, dtype=infinicore.int64)
            position_ids = infinicore.from_list([list(range(past, past + length))] * len(rows), dtype=infinicore.int64)
            cache_lengths = infinicore.from_list([past] * len(rows), dtype=infinicore.int64)
            output = engine.forward(
                _infinilm.InferEngine.Input(
                    input_ids=input_ids._underlying,
                    position_ids=position_ids._underlying,
                    cache_lengths=cache_lengths._underlying,
                    temperature=1.0,
                    top_k=1,
                    top_p=1.0,
                )
            )
            tokens = output.output_ids
            assert isinstance(tokens, infinicore.Tensor) and tokens.dtype == infinicore.int64, tokens.dtype
            tokens = [int(token) for token in tokens.to_numpy().reshape(-1)]
            for row, token in zip(made, tokens):
                row.append(token)
            past, step = past + length, [[token] for token in tokens]
        print(json.dumps({"name": f"attempt {attempt}", "value": made}))
        engine.reset_cache(cache_config)
    print(json.dumps({"name": "engine", "value": repr(engine)}))
    states = engine.state_dict()
    print(json.dumps({"name": "ranks", "value": len(states)}))
    shape = states[0]["model.layers.0.self_attn.q_proj.weight"].shape
    print(json.dumps({"name": "q_proj", "value": list(shape)}))


if __name__ == "__main__":
    main()
