"""So much room and no more, of which one client has a share: what is taken is given back, from any thread."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping


class NoRoomError(Exception):
    """There is not that much left just now."""


class OverShareError(Exception):
    """One client would hold more than its share; others may still find room."""

    def __init__(self, name: str, amount: int, limit: int) -> None:
        super().__init__(
            f"this client would have {amount:,} {name} here at once; at most {limit:,} are taken; "
            "wait for the answers to earlier requests"
        )


class Place:
    """Room that was taken; it can be left once."""

    def __init__(self, room: Room, client: str, amounts: dict[str, int]) -> None:
        self._room, self._client, self._amounts = room, client, amounts

    def leave(self) -> None:
        """Give it back; again does nothing."""
        amounts, self._amounts = self._amounts, {}
        self._room._give_back(self._client, amounts)


class Room:
    """Bounded amounts of several things at once, and of each a share that one client may hold.

    >>> room = Room(images=2, pixels=100, shares={"pixels": 90})
    >>> place = room.take("ann", images=1, pixels=90)
    >>> room.used("pixels"), room.used("images")
    (90, 1)
    >>> room.take("ann", pixels=1)
    Traceback (most recent call last):
    patchcleanser.service.room.OverShareError: this client would have 91 pixels here at once; at most 90 are taken; ...
    >>> room.take("bob", pixels=11)
    Traceback (most recent call last):
    patchcleanser.service.room.NoRoomError
    >>> place.leave(); place.leave()
    >>> room.used("images")
    0
    """

    def __init__(self, *, shares: Mapping[str, int] | None = None, **sizes: int) -> None:
        self._sizes, self._shares = sizes, {**sizes, **(shares or {})}
        self._used: Counter[str] = Counter()
        self._clients: dict[str, Counter[str]] = {}
        self._lock = threading.Lock()

    def take(self, client: str = "", **amounts: int) -> Place:
        """All of it, or nothing and NoRoomError or OverShareError."""
        with self._lock:
            self._require(client, amounts)
            self._used.update(amounts)
            self._clients.setdefault(client, Counter()).update(amounts)
        return Place(self, client, amounts)

    def require(self, client: str = "", **amounts: int) -> None:
        """As `take`, without taking it."""
        with self._lock:
            self._require(client, amounts)

    def used(self, name: str) -> int:
        """How much of it is taken."""
        return self._used[name]

    def _require(self, client: str, amounts: dict[str, int]) -> None:
        if any(self._used[name] + amount > self._sizes[name] for name, amount in amounts.items()):
            raise NoRoomError
        held = self._clients.get(client, Counter[str]())
        for name, amount in amounts.items():
            if held[name] + amount > self._shares[name]:
                raise OverShareError(name, held[name] + amount, self._shares[name])

    def _give_back(self, client: str, amounts: dict[str, int]) -> None:
        if not amounts:
            return
        with self._lock:
            held = self._clients[client]
            for used in (self._used, held):
                used.subtract(amounts)
            if not any(held.values()):
                del self._clients[client]
