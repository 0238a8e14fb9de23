"""How soon prefixes come back.

Owns ``Returns``: what is learned from the requests themselves, whether or not the cache still had
what they came back to. Knows keys, hits and the index's clock, which counts uses; knows no pages
and decides nothing.

A *life* begins where a request could go on later: at a resume point, or, in models that never let
go, where a request ended. It ends when one does go on from there, or comes that far again after the
pages went. Until then it grows older, evicted or not: that is what a ghost teaches. Lives are
counted by *grade*, the number of times that their place had been found before, and by age, in
buckets that double.

From the counts follow rates of return (hits by time at that age, so that lives which still go on
count for as long as they have), and from those what it is *worth* to keep a place: the returns to
be expected for every unit of time it is kept, up to the age at which that is best. So a place that
has just been used may be worth less than one whose time to come back is near, and one that should
have come back long ago is worth nothing. That is the Gittins index of a job that may never end
(Gittins 1979; with ages as in LHD, Beckmann, Chen and Cidon 2018).

Until something has been learned, rates fall with age: then who was used last is worth most.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

GRADES = 3
"""Lives are told apart by whether their place had been found never, once or more often."""

BOUNDS = tuple(8 << doubling for doubling in range(17))
"""Ages at which a bucket of lives ends and the next begins; the last one has no end."""

MAX_LIVES = 1 << 16
"""Lives that are remembered; the oldest is forgotten first."""

REFRESH = 32
"""Lives that begin or end before worths are made again."""

FADE = 1024
"""Returns after which all that was learned counts half: traffic changes."""

_DOUBT = 0.2
"""Returns in every bucket that what is assumed counts for."""

_ASSUMED = 0.05
"""Part of lives assumed to return while their age doubles, for every grade."""

_BUCKETS = len(BOUNDS) + 1
_STARTS = np.array([0, *BOUNDS], np.float64)
_WIDTHS = np.diff([*_STARTS, 2.0 * BOUNDS[-1]])


class Returns:
    """Lives of places by their keys. Times are the index's, and never go back.

    max_lives: bound on what is remembered. first_size: lives there is room for at first.
    """

    def __init__(self, *, max_lives: int = MAX_LIVES, first_size: int = 1024) -> None:
        self._max_lives = max_lives
        # Numbers of the lives that go on, in the order in which they began.
        self._number_of: dict[bytes, int] = {}
        self._start = np.zeros(first_size, np.int64)
        self._grade = np.zeros(first_size, np.int8)
        self._goes_on = np.zeros(first_size, bool)
        # Lives are numbered in order; the first of those in the arrays, and the next.
        self._first = self._next = 0
        # Of every bound, the first life that has not reached it.
        self._reached = np.zeros(len(BOUNDS), np.int64)
        # By grade and bucket: lives there now, when they began, summed up; returns, and time spent
        # there by lives that have left.
        self._settled = -1
        self._there = np.zeros((GRADES, _BUCKETS), np.int64)
        self._began = np.zeros((GRADES, _BUCKETS), np.int64)
        self._returned = np.zeros((GRADES, _BUCKETS))
        self._spent = np.zeros((GRADES, _BUCKETS))
        self._news = 0
        self.worths = np.zeros((GRADES, _BUCKETS))
        self._learn(0)

    def __len__(self) -> int:
        """Lives that go on."""
        return len(self._number_of)

    # -- questions ---------------------------------------------------------------------------------

    def known(self, keys: Sequence[bytes]) -> list[tuple[int, int]]:
        """Positions of those keys that have a life, and the grade of each."""
        lives = self._number_of
        return [
            (place, int(self._grade[lives[key] - self._first]))
            for place, key in enumerate(keys)
            if key in lives
        ]

    def worth(self, grade: int | np.ndarray, age: int | np.ndarray) -> float | np.ndarray:
        """Returns to be expected by time, at best, from a place that had been found ``grade`` times
        when it began to be so old.
        """
        if isinstance(age, np.ndarray):
            bucket = np.searchsorted(BOUNDS, age, side="right")
            return np.asarray(self.worths[np.minimum(grade, GRADES - 1), bucket])
        return float(self.worths[min(int(grade), GRADES - 1), bisect_right(BOUNDS, age)])

    @staticmethod
    def next_bound(age: int) -> int | None:
        """The age at which ``worth`` changes next, None where it does not."""
        bucket = bisect_right(BOUNDS, age)
        return BOUNDS[bucket] if bucket < len(BOUNDS) else None

    def counts(self, now: int) -> tuple[np.ndarray, np.ndarray]:
        """Time spent, and returns, by grade and bucket [GRADES, buckets], up to ``now``."""
        self._settle(now)
        # Of those that are still there, the time since each came to its bucket.
        spent = self._spent + self._there * (now - _STARTS) - self._began
        return spent, self._returned.copy()

    @property
    def capacity(self) -> int:
        """Lives that there is room for."""
        return len(self._start)

    # -- events ------------------------------------------------------------------------------------

    def begin(self, key: bytes, grade: int, now: int) -> None:
        """A request could go on here from now on. Nothing happens where a life goes on already."""
        if key in self._number_of:
            return
        if self._next - self._first == len(self._start):
            self._make_room()
        at, grade = self._next - self._first, min(grade, GRADES - 1)
        self._start[at], self._grade[at], self._goes_on[at] = now, grade, True
        self._number_of[key] = self._next
        self._next += 1
        self._there[grade, 0] += 1
        self._began[grade, 0] += now
        self._note(now)
        assert len(self._number_of) <= self._max_lives

    def come_back(self, key: bytes, grade: int, now: int) -> None:
        """A request has come as far as here: its life, if any, ends, and another begins."""
        if key in self._number_of:
            self._settle(now)
            self._end(key, now, returned=True)
        self.begin(key, grade, now)
        assert key in self._number_of

    def clear(self) -> None:
        """Forget all lives, as if they had ended without coming back; what was learned stays."""
        for key in list(self._number_of):
            self._end(key, None, returned=False)
        assert not self._there.any() and not self._began.any()

    # -- counting ----------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """Forget what is too old, or double the arrays."""
        size = len(self._start)
        gone = 0
        if size >= 2 * self._max_lives:
            gone = size - self._max_lives
            for key in [k for k, n in self._number_of.items() if n < self._first + gone]:
                self._end(key, None, returned=False)
            self._first += gone
            self._reached = np.maximum(self._reached, self._first)
        more = 0 if gone else size
        for name in ("_start", "_grade", "_goes_on"):
            array = getattr(self, name)[gone:]
            setattr(self, name, np.concatenate([array, np.zeros(gone + more, array.dtype)]))
        assert len(self._start) == len(self._grade) == len(self._goes_on) == size + more

    def _end(self, key: bytes, now: int | None, *, returned: bool) -> None:
        """A life ends; without ``now`` nothing is known of the time it spent where it is."""
        number = self._number_of.pop(key)
        at = number - self._first
        grade, start = int(self._grade[at]), int(self._start[at])
        bucket = int(np.count_nonzero(self._reached > number))
        self._goes_on[at] = False
        self._there[grade, bucket] -= 1
        self._began[grade, bucket] -= start
        if now is not None:
            self._spent[grade, bucket] += now - start - _STARTS[bucket]
            self._returned[grade, bucket] += returned
        assert self._there[grade, bucket] >= 0, "who leaves a bucket was there"

    def _note(self, now: int) -> None:
        while len(self._number_of) > self._max_lives:
            self._settle(now)
            self._end(next(iter(self._number_of)), now, returned=False)
        self._news += 1
        if self._news >= REFRESH:
            self._news = 0
            self._learn(now)

    def _settle(self, now: int) -> None:
        """Move every life to the bucket of its age."""
        if now == self._settled:
            return
        self._settled = now
        starts = self._start[: self._next - self._first]
        stops = np.searchsorted(starts, now - np.array(BOUNDS), side="right") + self._first
        for bucket in np.flatnonzero(stops > self._reached).tolist():
            part = slice(int(self._reached[bucket]) - self._first, int(stops[bucket]) - self._first)
            moved = self._goes_on[part]
            grades = self._grade[part][moved]
            count = np.bincount(grades, minlength=GRADES)
            began = np.zeros(GRADES, np.int64)
            np.add.at(began, grades, starts[part][moved])
            self._there[:, bucket] -= count
            self._there[:, bucket + 1] += count
            self._began[:, bucket] -= began
            self._began[:, bucket + 1] += began
            self._spent[:, bucket] += count * _WIDTHS[bucket]
            self._reached[bucket] = stops[bucket]
        assert (self._there >= 0).all(), "a life is in one bucket"

    def _learn(self, now: int) -> None:
        """Make worths anew."""
        spent, returned = self.counts(now)
        middle = _STARTS + _WIDTHS / 2
        assumed = _ASSUMED * np.arange(1, GRADES + 1)[:, None] / middle
        rate = (returned + _DOUBT) / (spent + _DOUBT / assumed)
        left = np.ones((GRADES, _BUCKETS + 1))
        left[:, 1:] = np.exp(-np.cumsum(rate * _WIDTHS, axis=1))
        kept = np.zeros_like(left)
        kept[:, 1:] = np.cumsum((left[:, :-1] - left[:, 1:]) / rate, axis=1)
        # [grade, bucket it is in, bucket at whose end it is let go]
        gain = left[:, :-1, None] - left[:, None, 1:]
        time = kept[:, None, 1:] - kept[:, :-1, None]
        later = np.triu(np.ones((_BUCKETS, _BUCKETS), bool))
        gains = np.where(later, gain, 0.0) / np.where(later & (time > 0), time, 1.0)
        self.worths = gains.max(axis=2)
        if self._returned.sum() > FADE:
            self._returned *= 0.5
            self._spent *= 0.5
        assert np.isfinite(self.worths).all() and (self.worths >= 0).all()

    def check(self, now: int) -> None:
        """Assert from scratch that lives are counted where they are."""
        self._settle(now)
        there, began = np.zeros_like(self._there), np.zeros_like(self._began)
        for number in self._number_of.values():
            at = number - self._first
            assert self._goes_on[at]
            grade, start = int(self._grade[at]), int(self._start[at])
            bucket = bisect_right(BOUNDS, now - start)
            there[grade, bucket] += 1
            began[grade, bucket] += start
        assert (there == self._there).all() and (began == self._began).all()
        assert np.count_nonzero(self._goes_on) == len(self._number_of) <= self._max_lives
        assert (np.diff(list(self._number_of.values())) > 0).all(), "in order of beginning"
        assert len(self._start) == len(self._grade) == len(self._goes_on)
        assert 0 <= self._next - self._first <= len(self._start)
