"""Every model type of the installed transformers, tiny and random, patched and not: ``liger models``."""
