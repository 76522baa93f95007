"""InfiniLM's tokens beside transformers', from one script, which says things as transformers 4 does.

python compare.py --model_path FOLDER --prompt "..."
"""

import argparse
import json

import infinicore
import torch
import transformers
from infinilm.infer_engine import GenerationConfig
from infinilm.modeling_utils import load_model_state_dict_by_tensor
from infinilm.models.llama import AutoLlamaModel
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser()
parser.add_argument("--model_path", required=True)
parser.add_argument("--prompt", required=True)
args = parser.parse_args()


def show(name, value):
    print(json.dumps({"name": name, "value": value}))


tokenizer = AutoTokenizer.from_pretrained(args.model_path)
config = transformers.AutoConfig.from_pretrained(args.model_path)
show("config", [str(config.torch_dtype), config.rope_theta])
theirs = AutoModelForCausalLM.from_pretrained(args.model_path, torch_dtype=torch.float32)
assert theirs.dtype == torch.float32
inputs = tokenizer(args.prompt, return_tensors="pt")
with torch.no_grad():
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    made = theirs.generate(ids, attention_mask=mask, max_new_tokens=16, do_sample=False)
expected = made[0, inputs["input_ids"].shape[1] :].tolist()
show("transformers", expected)

ours = AutoLlamaModel.from_pretrained(args.model_path, device=infinicore.device("cpu", 0))
load_model_state_dict_by_tensor(ours, args.model_path)
steps = ours.generate(
    infinicore.from_torch(inputs["input_ids"]), GenerationConfig(max_new_tokens=16, top_k=1, temperature=1.0)
)
tokens = [int(step.to_numpy()[0]) for step in steps]
show("infinilm", tokens)
show("same", tokens == expected)
