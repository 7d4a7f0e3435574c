"""Cross entropy of logits, and statistics of some of their classes."""
