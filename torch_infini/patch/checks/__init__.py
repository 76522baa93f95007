"""Checks of patch_model: conditions for the infini ops, and trials of single modules and of the whole model."""
