"""The patched modules: decoder layers, attention, MLPs, norms, linear layers."""
