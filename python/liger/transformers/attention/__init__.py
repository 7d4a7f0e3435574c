"""Rotary embeddings in attention, alone or with the norms of queries and keys."""
