# SPDX-License-Identifier: BSD-3-Clause
"""Host memory for tensors of a device: a few blocks that grow to a bound and serve every step."""

import os
from collections import deque
from pathlib import Path
from typing import NamedTuple

# Offsets are multiples of a page.
_PAGE = 4096
# A new block has room for this many tensors like the one that asks for it: a power of two, because pinned
# memory is allocated in powers of two.
_PER_BLOCK = 4
# Share of the host's memory that a pool never takes.
_RESERVE = 0.1


class Span(NamedTuple):
    """Bytes of one block."""

    block: int
    offset: int
    size: int


class HostPool:
    """Spans of host memory, at most ``limit`` bytes in all blocks.

    Args:
        limit: bytes; None: what the host has, up to a reserve.
        allocate: a function of a number of bytes that returns a block, a tensor of bytes. It may raise
            RuntimeError.
    """

    def __init__(self, limit, allocate):
        self.limit, self._allocate = limit, allocate
        self._blocks, self._free = [], []
        # Spans that came back, each with its last reader's event; threads may append at any time.
        self._back = deque()

    @property
    def size(self):
        """Bytes of all blocks."""
        return sum(block.numel() for block in self._blocks)

    def room(self):
        """Bytes by which the blocks may grow."""
        left, limit = available(), self.limit
        room = left - int(_RESERVE * total()) if left is not None else limit or 0
        return max(room if limit is None else min(limit - self.size, room), 0)

    def take(self, size):
        """A span of ``size`` bytes; None if there is no room. The events of :meth:`settle` come first."""
        size = -(-size // _PAGE) * _PAGE
        for number, free in enumerate(self._free):
            for place, (offset, length) in enumerate(free):
                if length >= size:
                    free[place : place + 1] = [(offset + size, length - size)] if length > size else []
                    return Span(number, offset, size)
        return self.take(size) if self._grow(size) else None

    def _grow(self, size):
        room, wanted = self.room(), 1 << (_PER_BLOCK * size - 1).bit_length()
        while wanted > room and wanted >= size:
            wanted //= 2
        if wanted < size:
            return False
        try:
            self._blocks.append(self._allocate(wanted))
        except RuntimeError:
            # The driver has no pinned memory left: the pool has its final size.
            self.limit = self.size
            return False
        self._free.append([(0, wanted)])
        return True

    def memory(self, span):
        """The tensor of bytes of a span."""
        return self._blocks[span.block][span.offset : span.offset + span.size]

    def give_back(self, span, event):
        """Returns a span; whoever writes it next waits for the event."""
        self._back.append((span, event))

    def settle(self):
        """Makes the spans that came back free, and returns their events."""
        events = []
        while self._back:
            span, event = self._back.popleft()
            free = self._free[span.block]
            free.append((span.offset, span.size))
            free.sort()
            merged = [free[0]]
            for offset, length in free[1:]:
                before, size = merged[-1]
                if before + size == offset:
                    merged[-1] = (before, size + length)
                else:
                    merged.append((offset, length))
            self._free[span.block] = merged
            if event is not None:
                events.append(event)
        return events


def total():
    """Bytes of memory of the host, or of the control group of this process; 0 if the system does not say."""
    limits = [value for path, _, _ in _GROUPS if (value := _number(path)) is not None]
    return min([_meminfo("MemTotal") or 0, *limits])


def available():
    """Bytes that the host and this process's control group can give; None if the system is silent."""
    found = [_meminfo("MemAvailable")]
    for limit_of, used_of, cache in _GROUPS:
        limit, used = _number(limit_of), _number(used_of)
        if limit is not None and used is not None:
            found.append(limit - used + (_number(Path(limit_of).with_name("memory.stat"), cache) or 0))
    return min((value for value in found if value is not None), default=None)


# Of control groups, version 2 and 1: the files of the limit and of the use, and the counter of cached pages
# that the kernel drops on demand.
_GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "inactive_file"),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def _number(path, name=None):
    """The number in a file, or behind a name in it; None if there is none, as for the limit "max"."""
    try:
        words = Path(path).read_text().split()
        return int(words[words.index(name) + 1] if name else words[0])
    except (OSError, ValueError, IndexError):
        return None


def _meminfo(name):
    kilobytes = _number("/proc/meminfo", f"{name}:")
    if kilobytes is not None:
        return kilobytes * 1024
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES" if name == "MemAvailable" else "SC_PHYS_PAGES")
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
