"""Every model type of the installed transformers, tiny and random, compared with a patched copy:
``make models``."""
