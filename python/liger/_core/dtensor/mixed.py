"""The error about plain tensors mixed with DTensors."""


class MixedTensors(RuntimeError):
    """Tensors of a call that are not all DTensors on one mesh."""
