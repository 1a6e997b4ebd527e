"""Contiguous placement, the slow and obvious way: one byte for each slot.

The buddy memory here is the textbook one, with a set of free buddies that are split on the way
down and merged on the way up; nothing of it is derived from holes.
"""

from __future__ import annotations


class ByteMapMemory:
    """First fit and best fit over a bytearray, 1 where a slot is taken."""

    def __init__(self, num_slots: int, *, best: bool) -> None:
        self.taken = bytearray(num_slots)
        self.best = best
        self.sizes: dict[int, int] = {}

    def holes(self) -> list[tuple[int, int]]:
        """(start, length) of every maximal run of free slots."""
        found = []
        slot = 0
        while slot < len(self.taken):
            end = slot
            while end < len(self.taken) and not self.taken[end]:
                end += 1
            if end > slot:
                found.append((slot, end - slot))
            slot = end + 1
        return found

    def place(self, size: int) -> int:
        fitting = [(start, length) for start, length in self.holes() if length >= size]
        if not fitting:
            return -1
        if self.best:
            start = min(fitting, key=lambda hole: (hole[1], hole[0]))[0]
        else:
            start = fitting[0][0]
        self.taken[start : start + size] = b"\1" * size
        self.sizes[start] = size
        return start

    def remove(self, start: int) -> int:
        size = self.sizes.pop(start)
        self.taken[start : start + size] = bytes(size)
        return size


class BuddyMemory:
    """A set of free (start, size) buddies over the descending powers of two of the memory."""

    def __init__(self, num_slots: int) -> None:
        self.pieces: list[tuple[int, int]] = []
        start = 0
        for bit in reversed(range(num_slots.bit_length())):
            if num_slots >> bit & 1:
                self.pieces.append((start, 1 << bit))
                start += 1 << bit
        self.free = set(self.pieces)
        self.sizes: dict[int, int] = {}

    def place(self, size: int) -> int:
        wanted = 1 << (size - 1).bit_length()
        fitting = [(room, start) for start, room in self.free if room >= wanted]
        if not fitting:
            return -1
        room, start = min(fitting)
        self.free.remove((start, room))
        while room > wanted:
            room //= 2
            self.free.add((start + room, room))
        self.sizes[start] = wanted
        return start

    def remove(self, start: int) -> int:
        released = size = self.sizes.pop(start)
        while (start, size) not in self.pieces:
            piece = next(p for p in self.pieces if p[0] <= start < p[0] + p[1])
            buddy = piece[0] + ((start - piece[0]) ^ size)
            if (buddy, size) not in self.free:
                break
            self.free.remove((buddy, size))
            start, size = min(start, buddy), 2 * size
        self.free.add((start, size))
        return released
