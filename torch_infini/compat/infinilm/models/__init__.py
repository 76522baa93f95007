"""infinilm.models: the models by family."""
