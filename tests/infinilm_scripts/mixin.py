"""The model of pure_python.py with infinilm's GenerationMixin: greedy tokens, an end token, and text by a tokenizer.

python mixin.py FOLDER PROMPT NEW_TOKENS END_TOKEN
"""

import json
import sys

import infinicore
from infinilm.cache_utils import DynamicCache
from infinilm.generation.utils import GenerationMixin, infini_to_numpy
from infinilm.infer_engine import GenerationConfig
from pure_python import Llama, config, loaded, new, prompt
from transformers import AutoTokenizer

infinicore.Tensor.to_numpy = infini_to_numpy
end = int(sys.argv[4])


class LlamaForCausalLM(Llama, GenerationMixin):
    seen = ()

    def forward(self, input_ids, position_ids, past_key_values=None, use_cache=None, **kwargs):
        assert use_cache and isinstance(past_key_values, DynamicCache)
        self.seen = (*self.seen, input_ids.shape[1])
        return super().forward(input_ids, position_ids, past_key_values).view([1, 1, config["vocab_size"]])


model = loaded(LlamaForCausalLM())
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
ids = infinicore.from_list([prompt], dtype=infinicore.int64)
made = {
    "ids": model.generate(ids, GenerationConfig(max_new_tokens=new, top_k=1, stop_on_eos=False)),
    "until end": model.generate(ids, max_new_tokens=new, top_k=1, eos_token_id=end),
    "by a cache": model.generate(ids, max_new_tokens=3, temperature=0.0, past_key_values=DynamicCache()),
}
for name, steps in made.items():
    print(json.dumps({"name": name, "value": [int(step.to_numpy()[0]) for step in steps]}))
print(json.dumps({"name": "seen", "value": model.seen}))
text = tokenizer.decode([int(step.to_numpy()[0]) for step in made["ids"]], skip_special_tokens=True)
print(json.dumps({"name": "text", "value": text}))
