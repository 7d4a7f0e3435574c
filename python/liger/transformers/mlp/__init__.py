"""Gated MLPs, activations and experts."""
