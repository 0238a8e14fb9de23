"""What is learned of when prefixes come back, against a slow count of whole lives.

Protects: that every life is counted in the bucket of its age, whatever was asked in between; that
worth follows the rates it was taught; and that what is remembered has a bound.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from octavo.cache.index.returns import BOUNDS, GRADES, REFRESH, Returns


def key(number: int) -> bytes:
    """A name."""
    return number.to_bytes(16, "little")


class SlowReturns:
    """Lives as they are, and time by grade and bucket counted unit by unit."""

    def __init__(self) -> None:
        self.lives: dict[bytes, tuple[int, int]] = {}
        self.spent = np.zeros((GRADES, len(BOUNDS) + 1))
        self.returned = np.zeros_like(self.spent)
        self.now = 0

    def pass_time(self, now: int) -> None:
        for time in range(self.now, now):
            for start, grade in self.lives.values():
                self.spent[grade, self.bucket(time - start)] += 1
        self.now = now

    @staticmethod
    def bucket(age: int) -> int:
        return sum(bound <= age for bound in BOUNDS)

    def begin(self, name: bytes, grade: int) -> None:
        self.lives.setdefault(name, (self.now, min(grade, GRADES - 1)))

    def come_back(self, name: bytes, grade: int) -> None:
        if name in self.lives:
            start, before = self.lives.pop(name)
            self.returned[before, self.bucket(self.now - start)] += 1
        self.begin(name, grade)


@pytest.mark.parametrize("seed", range(4))
def test_every_life_is_counted_at_its_age(seed: int) -> None:
    rng, quick, slow, now = Random(seed), Returns(first_size=2), SlowReturns(), 0
    for _ in range(600):
        now += rng.choice((0, 1, 1, 2, 9, 40))
        slow.pass_time(now)
        name, grade = key(rng.randrange(60)), rng.randrange(GRADES + 2)
        if rng.random() < 0.5:
            quick.begin(name, grade, now)
            slow.begin(name, grade)
        else:
            quick.come_back(name, grade, now)
            slow.come_back(name, grade)
        if rng.random() < 0.1:
            quick.check(now)
        assert len(quick) == len(slow.lives)
    quick.check(now)
    spent, returned = quick.counts(now)
    assert returned.tolist() == slow.returned.tolist()
    assert spent.tolist() == slow.spent.tolist()
    grades = quick.known([key(number) for number in range(60)])
    assert dict(grades) == {
        number: slow.lives[key(number)][1] for number in range(60) if key(number) in slow.lives
    }


def test_before_anything_is_known_the_latest_is_worth_most() -> None:
    returns = Returns()
    for grade in range(GRADES):
        worths = [returns.worth(grade, age) for age in (0, *BOUNDS)]
        assert worths == sorted(worths, reverse=True) and worths[0] > worths[1] > 0
    assert returns.worth(0, 0) < returns.worth(1, 0) < returns.worth(2, 0)


def test_what_comes_back_late_is_worth_most_just_before() -> None:
    """A third of all places comes back, each 100 uses later; no other ever does."""
    returns, waiting = Returns(), dict[int, bytes]()
    for now in range(6000):
        returns.begin(key(now), 0, now)
        if now % 3 == 0:
            waiting[now + 100] = key(now)
        if now in waiting:
            returns.come_back(waiting.pop(now), 0, now)
    fresh, near, late = returns.worth(0, 0), returns.worth(0, 70), returns.worth(0, 300)
    assert late < fresh / 10 < fresh < near
    assert returns.next_bound(0) == BOUNDS[0] and returns.next_bound(BOUNDS[-1]) is None
    ages = np.array([0, 70, 300])
    assert np.asarray(returns.worth(np.zeros(3, int), ages)).tolist() == [fresh, near, late]


def test_traffic_that_changes_is_followed() -> None:
    returns, now = Returns(), 0
    for wait, uses in ((40, 3000), (400, 9000)):
        for _ in range(uses):
            now += 1
            returns.begin(key(now), 0, now)
            if now > wait and now % 2:
                returns.come_back(key(now - wait), 0, now)
        best = max((0, *BOUNDS), key=lambda age: returns.worth(0, age))
        assert best <= wait < 2 * best


def test_the_oldest_is_forgotten_and_arrays_stay_small() -> None:
    returns = Returns(max_lives=50, first_size=2)
    for now in range(20_000):
        returns.begin(key(now), 0, now)
        assert len(returns) <= 50
        if now % 1000 == 0:
            returns.check(now)
    assert [place for place, _ in returns.known([key(19_949), key(19_950)])] == [1]
    assert returns.capacity <= 128
    returns.clear()
    returns.check(20_000)
    assert not len(returns)


def test_nothing_is_learned_from_what_is_forgotten_by_order() -> None:
    returns = Returns()
    for number in range(REFRESH):
        returns.begin(key(number), 0, 0)
    returns.clear()
    spent, returned = returns.counts(10_000)
    assert not spent.any() and not returned.any()
