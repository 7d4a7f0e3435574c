"""Divergences between the outputs of two linear layers."""
