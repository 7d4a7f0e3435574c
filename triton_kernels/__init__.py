"""Triton twins of the compiled ops: one module per op, with launchers that take exactly the schema's arguments.

The modules import Triton at their top and are imported only when their backend is chosen (see ``liger.backend``).
"""
