"""Divergences between two distributions, from logits."""
