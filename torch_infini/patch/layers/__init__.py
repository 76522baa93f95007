"""Modules that take the place of a model's own: decoder layers, attention, MLPs, norms, linear layers."""
