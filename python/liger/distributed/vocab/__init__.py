"""Losses of a vocabulary that is sharded over the processes of a group."""
