"""So much room and no more: what is taken is given back, from any thread."""

from __future__ import annotations

import threading


class NoRoomError(Exception):
    """There is not that much left just now."""


class Place:
    """Room that was taken; it can be left once."""

    def __init__(self, room: Room, amounts: dict[str, int]) -> None:
        self._room, self._amounts = room, amounts

    def leave(self) -> None:
        """Give it back; again does nothing."""
        amounts, self._amounts = self._amounts, {}
        self._room._give_back(amounts)


class Room:
    """Bounded amounts of several things at once.

    >>> room = Room(images=2, pixels=100)
    >>> place = room.take(images=1, pixels=90)
    >>> room.used("pixels"), room.fits(images=1, pixels=20)
    (90, False)
    >>> place.leave(); place.leave()
    >>> room.used("images")
    0
    """

    def __init__(self, **sizes: int) -> None:
        self._sizes, self._used = sizes, dict.fromkeys(sizes, 0)
        self._lock = threading.Lock()

    def take(self, **amounts: int) -> Place:
        """All of it, or NoRoomError and nothing."""
        with self._lock:
            if not self._fits(amounts):
                raise NoRoomError
            for name, amount in amounts.items():
                self._used[name] += amount
        return Place(self, amounts)

    def fits(self, **amounts: int) -> bool:
        """Whether it could be taken now."""
        with self._lock:
            return self._fits(amounts)

    def used(self, name: str) -> int:
        """How much of it is taken."""
        return self._used[name]

    def _fits(self, amounts: dict[str, int]) -> bool:
        return all(self._used[name] + amount <= self._sizes[name] for name, amount in amounts.items())

    def _give_back(self, amounts: dict[str, int]) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._used[name] -= amount
