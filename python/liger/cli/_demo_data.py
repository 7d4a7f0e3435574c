# SPDX-License-Identifier: BSD-3-Clause
"""Training data without a download: the sources of Python's library, and a tokenizer trained on them."""

import sysconfig
from pathlib import Path

import torch

# Installed packages, and test data in many encodings.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


def standard_library_text(limit):
    """Sources of the standard library in a fixed order, one string per file, about ``limit`` bytes in all."""
    root = Path(sysconfig.get_path("stdlib"))
    texts, size = [], 0
    for path in sorted(root.rglob("*.py")):
        if SKIPPED.isdisjoint(path.relative_to(root).parts[:-1]):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
            size += len(texts[-1])
            if size >= limit:
                break
    return texts


def text_tokens(text_bytes, vocabulary):
    """(token ids of the text, one after the other; vocabulary size); deterministic.

    The tokenizer is a byte-level byte-pair encoding trained on the text, with at most ``vocabulary`` entries.
    """
    from tokenizers import ByteLevelBPETokenizer

    texts = standard_library_text(text_bytes)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=vocabulary, show_progress=False)
    ids = [token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids]
    return torch.tensor(ids), tokenizer.get_vocab_size()


def batches_of(tokens, steps, batch, sequence):
    """Token ids (steps, batch, sequence): windows of ``tokens`` in a fixed random order, again and again."""
    windows = tokens[: tokens.numel() // sequence * sequence].view(-1, sequence)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    index = torch.arange(steps * batch) % len(windows)
    return windows[order[index]].view(steps, batch, sequence)


def token_batches(size):
    """(token ids (steps, batch, sequence), vocabulary size) for a demo size; deterministic.

    If a run needs more tokens than the text has, it repeats the text.
    """
    tokens, vocabulary = text_tokens(size.text_bytes, size.vocab)
    return batches_of(tokens, size.steps, size.batch, size.sequence), vocabulary
