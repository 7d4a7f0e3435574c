# SPDX-License-Identifier: BSD-3-Clause
"""Real text without a network: the sources of Python's standard library, with the tokenizer of
``liger demo``.

Tokens are kept in a cache folder, because training the tokenizer takes longer than most cells.
"""

import os

import torch

from liger.cli._demo_data import batches_of, text_tokens

# The text yields fewer entries of a tokenizer than that, so all larger vocabularies have the same tokens.
ENTRIES = 1 << 16


def tokens_of(machine, vocabulary):
    """Token ids of the text, below ``vocabulary``."""
    vocabulary = min(vocabulary, ENTRIES)
    size = 1 << 18 if machine.tiny else 12 << 20
    path = machine.cache / f"tokens-{vocabulary}-{size}.pt"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        tokens, _ = text_tokens(size, vocabulary)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        torch.save(tokens.int(), temporary)
        os.replace(temporary, path)
    return torch.load(path).long()


def batches(machine, vocabulary, steps, batch, sequence):
    """Token ids (steps, batch, sequence) on the device."""
    return batches_of(tokens_of(machine, vocabulary), steps, batch, sequence).to(machine.device)


def prepare(machine):
    """Fills the cache for vocabularies of ``ENTRIES`` and more."""
    tokens_of(machine, ENTRIES)
