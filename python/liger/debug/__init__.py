"""Counters of the data that kernels process, for decisions about kernels. They are off by default.

They are no part of the stable interface: a release may change or remove them.
"""

from ._tile_mass import TileMass, TileMassCounts, tile_mass, tile_mass_of_logits

__all__ = ["TileMass", "TileMassCounts", "tile_mass", "tile_mass_of_logits"]
