"""Folders of save_patched and checkpoints of other formats, read as patched models."""
