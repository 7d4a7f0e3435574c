# SPDX-License-Identifier: BSD-3-Clause
"""The experiments of docs/lab/experiments.md: ``python -m experiments E3 --minutes 8 --out DIR`` in
benchmarks/.

An experiment is a module below with an ``EXPERIMENT``: its cells, the function that measures one of them, a
table and pictures. Cells run in processes of their own (driver.py, process.py) and build on liger_bench.
"""

import importlib

# Experiment -> its module.
MODULES = {
    "E1": "ops",
    "E2": "training_8b",
    "E3": "training_batch",
    "E4": "training_length",
    "E5": "ablation",
    "E6": "snapshots",
    "E7": "convergence",
    "E8": "precision",
    "E9": "adapters",
    "E10": "long_context",
    "E11": "sharded_mlp",
    "E12": "post_training",
    "E13": "setting_curves",
    "E14": "headline",
    "E15": "scaling",
    "E16": "recomputation",
    "E17": "op_sizes",
    "E18": "small_batches",
}
# In the order in which --stale measures them: what README and docs/start/speed.md quote comes first.
IMPORTANCE = (
    "E14", "E16", "E17", "E9", "E18", "E3", "E4", "E2", "E12", "E10", "E5", "E1", "E13", "E7", "E11", "E15", "E8",
    "E6",
)  # fmt: skip


def experiment(name):
    """The Experiment of this name."""
    return importlib.import_module(f"{__name__}.{MODULES[name]}").EXPERIMENT
