"""Functions and gated MLPs that are computed one shard of tokens at a time."""
