"""liger_kernel's norms, activations, MLPs, rotary embeddings and experts."""
