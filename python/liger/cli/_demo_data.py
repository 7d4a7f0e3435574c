"""Training data without a download: the sources of Python's standard library, and a tokenizer trained on them."""

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


def token_batches(size):
    """(token ids (steps, batch, sequence), vocabulary size) for a demo size; deterministic.

    The tokenizer is a byte-level byte-pair encoding trained on the text, with at most ``size.vocab`` entries. If a run
    needs more tokens than the text has, it repeats the text.
    """
    from tokenizers import ByteLevelBPETokenizer

    texts = standard_library_text(size.text_bytes)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(texts, vocab_size=size.vocab, show_progress=False)
    tokens = torch.tensor([token for encoding in tokenizer.encode_batch(texts) for token in encoding.ids])
    windows = tokens[: tokens.numel() // size.sequence * size.sequence].view(-1, size.sequence)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    index = torch.arange(size.steps * size.batch) % len(windows)
    return windows[order[index]].view(size.steps, size.batch, size.sequence), tokenizer.get_vocab_size()
