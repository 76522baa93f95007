"""torch_infini in other projects' programs: a module for each, loaded when that project asks for it.

lm_eval.py: lm-evaluation-harness. ray/: Ray Data and Ray Serve. torchao/: quantize_. vllm/: the plugin for vLLM's CPU
build.
"""
