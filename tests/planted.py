"""Exceptions planted in the half without tensors: where they may be, and when they are raised.

Owns the list of operations, found in the objects of a scheduler so that a new one is never
forgotten, and two ways to plant: at one call, or by chance at any.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import is_dataclass
from inspect import isfunction
from random import Random
from typing import Any

from octavo.sched.scheduler import Scheduler

PARTS = ("octavo.cache.", "octavo.memory.", "octavo.sched.scheduler")
"""Modules whose objects are searched."""


class PlantedError(RuntimeError):
    """What is raised."""


class Operation(tuple[type, str]):
    """A public method of a class."""

    def __str__(self) -> str:
        return f"{self[0].__name__}.{self[1]}"


def parts(scheduler: Scheduler) -> list[type]:
    """Classes of a scheduler and of everything it is made of, plain data left out."""
    found: dict[type, None] = {}
    seen: set[int] = set()
    left: list[Any] = [scheduler]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, tuple | list):
            left += one
        elif type(one).__module__.startswith(PARTS) and not is_dataclass(one):
            found[type(one)] = None
            left += getattr(one, "__dict__", {}).values()
    return list(found)


def operations(classes: Sequence[type]) -> list[Operation]:
    """Public methods, but for those that only assert, and recovery itself: where it fails, too,
    nothing is left to be done.
    """
    return [
        Operation((owner, name))
        for owner in classes
        for name, method in vars(owner).items()
        if isfunction(method)
        and not name.startswith(("_", "check"))
        and name not in ("successor", "restore")
    ]


@contextmanager
def wrapped(
    chosen: Sequence[Operation], around: Callable[[Operation, Callable[[], Any]], Any]
) -> Iterator[None]:
    """While the block runs, ``around(operation, call)`` stands in for every call."""
    originals = [(operation, vars(operation[0])[operation[1]]) for operation in chosen]

    def stand_in(operation: Operation, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(*args: Any, **more: Any) -> Any:
            return around(operation, functools.partial(method, *args, **more))

        return run

    try:
        for operation, method in originals:
            setattr(*operation, stand_in(operation, method))
        yield
    finally:
        for operation, method in originals:
            setattr(*operation, method)


@contextmanager
def counted(chosen: Sequence[Operation]) -> Iterator[Counter[Operation]]:
    """How often each operation is called while the block runs."""
    calls: Counter[Operation] = Counter()

    def count(operation: Operation, call: Callable[[], Any]) -> Any:
        calls[operation] += 1
        return call()

    with wrapped(chosen, count):
        yield calls


@contextmanager
def planted(operation: Operation, *, at: int, after: bool) -> Iterator[list[int]]:
    """Call number ``at`` (from 1 on) of an operation raises PlantedError, before or ``after`` its
    work is done; gives the calls so far.
    """
    calls = [0]

    def maybe(_: Operation, call: Callable[[], Any]) -> Any:
        calls[0] += 1
        if calls[0] != at:
            return call()
        with suppress(Exception):
            if after:
                call()
        raise PlantedError(f"planted in {operation}")

    with wrapped([operation], maybe):
        yield calls


class Chance:
    """Any call of any operation raises PlantedError with a probability, which may be changed."""

    def __init__(self, rng: Random, probability: float) -> None:
        self.probability, self.raised = probability, Counter[str]()
        self._rng = rng

    def __call__(self, operation: Operation, call: Callable[[], Any]) -> Any:
        fails = self._rng.random() < self.probability
        if fails and self._rng.random() < 0.5:
            call()
        if fails:
            self.raised[str(operation)] += 1
            raise PlantedError(f"planted in {operation}")
        return call()
