"""What patch_model finds out before and after it replaces: conditions, trials of modules and of the whole model."""
