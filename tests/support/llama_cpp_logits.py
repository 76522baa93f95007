"""Run by llama.cpp's environment: prints its logits of a GGUF file, in float32 throughout, for token ids.

python llama_cpp_logits.py FILE VOCABULARY ID...
"""

from __future__ import annotations

import ctypes
import json
import sys

import llama_cpp


def main() -> None:
    path, vocabulary, ids = sys.argv[1], int(sys.argv[2]), [int(one) for one in sys.argv[3:]]
    llama_cpp.llama_backend_init()
    model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
    assert model, "llama.cpp does not load it"
    params = llama_cpp.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 64
    params.type_k = params.type_v = params.flash_attn_type = 0  # float32
    params.n_threads = params.n_threads_batch = 1
    context = llama_cpp.llama_init_from_model(model, params)
    batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
    batch.n_tokens = len(ids)
    for i, token in enumerate(ids):
        batch.token[i], batch.pos[i], batch.logits[i] = token, i, 1
        batch.n_seq_id[i], batch.seq_id[i][0] = 1, 0
    assert llama_cpp.llama_decode(context, batch) == 0
    rows = [llama_cpp.llama_get_logits_ith(context, i) for i in range(len(ids))]
    print(
        json.dumps([list((ctypes.c_float * vocabulary).from_address(ctypes.addressof(row.contents))) for row in rows])
    )


main()
