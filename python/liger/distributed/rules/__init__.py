"""DTensor rules of every op."""
