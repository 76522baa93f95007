"""infinilm.models: the models by their families' names."""
