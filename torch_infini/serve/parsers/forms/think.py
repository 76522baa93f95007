"""Reasoning between <think> and </think>: Qwen3, DeepSeek, GLM and others."""

from ..thinking import Thinking

THINK = Thinking("think", "<think>", "</think>")
