"""The paged cache, the newer names: a number of blocks by position, offsets, and requests that join a running batch.

python paged_newer.py FOLDER "1,2;3,4,5" NEW_TOKENS [TP]
"""

import json
import sys

import infinicore
from infinilm.cache import PagedKVCacheConfig
from infinilm.distributed import DistConfig
from infinilm.infer_engine import InferEngine
from infinilm.modeling_utils import load_model_state_dict_by_file

path, new_tokens = sys.argv[1], int(sys.argv[3])
prompts = [[int(token) for token in row.split(",")] for row in sys.argv[2].split(";")]
ranks = int(sys.argv[4]) if len(sys.argv) > 4 else 1
BLOCKS, BLOCK = 64, 16


def main():
    model = InferEngine(
        path,
        device=infinicore.device("cpu", 0),
        distributed_config=DistConfig(ranks),
        cache_config=PagedKVCacheConfig(BLOCKS, BLOCK),
    )
    load_model_state_dict_by_file(model, path, dtype=model.config.dtype)
    show("paged", model.enable_paged_attn)
    show("blocks", [model.get_cache_config().num_blocks(), model.get_cache_config().block_size()])

    def longs(values):
        return infinicore.from_list(values, dtype=infinicore.int64)

    free = list(range(BLOCKS))[::-1]
    requests, waiting, step = [], list(enumerate(prompts)), 0
    made = {}
    while requests or waiting:
        if waiting and step % 2 == 0:  # a request joins at every other step
            number, prompt = waiting.pop(0)
            made[number] = []
            requests.append({"number": number, "new": prompt, "past": 0, "blocks": []})
        for request in requests:
            needed = -(-(request["past"] + len(request["new"])) // BLOCK)
            while len(request["blocks"]) < needed:
                request["blocks"].append(free.pop())
        width = max(len(request["blocks"]) for request in requests)
        offsets, slots, positions, ids = [0], [], [], []
        for request in requests:
            ids += request["new"]
            offsets.append(len(ids))
            for position in range(request["past"], request["past"] + len(request["new"])):
                positions.append(position)
                slots.append(request["blocks"][position // BLOCK] * BLOCK + position % BLOCK)
        output = model(
            longs([ids]),
            position_ids=longs(positions),
            past_kv_lengths=longs([request["past"] for request in requests]),
            total_kv_lengths=longs([request["past"] + len(request["new"]) for request in requests]),
            input_offsets=longs(offsets),
            block_tables=longs([r["blocks"] + [-1] * (width - len(r["blocks"])) for r in requests]),
            slot_mapping=longs(slots),
            temperature=1.0,
            top_k=1,
            top_p=0.8,
        )
        for request, token in zip(requests, output.to_numpy().reshape(-1).tolist()):
            request["past"] += len(request["new"])
            request["new"] = [token]
            made[request["number"]].append(token)
        for request in [r for r in requests if len(made[r["number"]]) == new_tokens]:
            free += request["blocks"]
            requests.remove(request)
        step += 1
    show("ids", [made[number] for number in sorted(made)])


def show(name, value):
    print(json.dumps({"name": name, "value": value}))


if __name__ == "__main__":
    main()
