# SPDX-License-Identifier: BSD-3-Clause
"""Hides an installed liger-kernel from the process that has this folder in PYTHONPATH.

Neither the import system nor importlib.metadata finds it; files on disk do not change. Folders named in the
environment variable VISIBLE_LIGER_KERNEL are searched as usual.
"""

import importlib.metadata
import importlib.util
import os
import sys
from importlib import machinery

NAME = "liger_kernel"
HERE = os.path.dirname(os.path.realpath(__file__))
VISIBLE = {os.path.realpath(p) for p in os.environ.get("VISIBLE_LIGER_KERNEL", "").split(os.pathsep) if p}
LOADERS = (
    (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
    (machinery.SourceFileLoader, machinery.SOURCE_SUFFIXES),
    (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
)


class Folder(machinery.FileFinder):
    def find_spec(self, fullname, target=None):
        hidden = fullname == NAME and os.path.realpath(self.path) not in VISIBLE
        return None if hidden else super().find_spec(fullname, target)


class Path(machinery.PathFinder):
    @classmethod
    def find_distributions(cls, context=None):
        found = super().find_distributions(context or importlib.metadata.DistributionFinder.Context())
        for distribution in found:
            name = (distribution.metadata["Name"] or "").lower().replace("-", "_")
            if name != NAME or os.path.realpath(distribution.locate_file("")) in VISIBLE:
                yield distribution


sys.path_hooks.insert(0, Folder.path_hook(*LOADERS))
sys.path_importer_cache.clear()
sys.meta_path[:] = [
    Path if finder is machinery.PathFinder else finder
    for finder in sys.meta_path
    # Editable installations have a finder of their own.
    if finder is machinery.PathFinder or finder.find_spec(NAME, None) is None
]

# The environment's own file of this name, which this one shadows.
others = [folder for folder in sys.path if os.path.realpath(folder) != HERE]
shadowed = machinery.PathFinder.find_spec("sitecustomize", others)
if shadowed is not None and shadowed.loader is not None:
    shadowed.loader.exec_module(importlib.util.module_from_spec(shadowed))
