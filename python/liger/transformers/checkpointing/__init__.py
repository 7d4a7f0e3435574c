"""``checkpoint``: which decoder layers recompute, by measured memory."""
