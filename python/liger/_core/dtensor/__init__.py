"""DTensors among the arguments of ops and public functions."""
