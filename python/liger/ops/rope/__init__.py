"""Rotary position embeddings, alone and after RMS norms of queries and keys."""
