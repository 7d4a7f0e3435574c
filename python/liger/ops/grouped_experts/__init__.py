"""The gated experts of a mixture of experts."""
