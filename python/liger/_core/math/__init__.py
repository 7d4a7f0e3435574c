"""Arithmetic of the torch kernels: dtypes, GEMMs, blocks of rows."""
