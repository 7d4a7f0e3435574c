"""Norms, gated norms, and norms fused with the residual addition before them."""
