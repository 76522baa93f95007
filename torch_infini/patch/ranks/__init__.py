"""Models that ranks share by tensor parallelism: what each keeps of a model, and how their results are combined."""
