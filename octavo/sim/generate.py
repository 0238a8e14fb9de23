"""Traffic made from a seed: eight shapes that caches meet, each with what it does to them.

Owns the generators and the reading of names such as ``zipf:seed=3,requests=500``. Knows no
scheduler and no cache; equal names give equal requests on every machine.

Sizes are options of the generators, so that one shape serves a toy with a cache of a few hundred
tokens and a model with one of millions.
"""

from __future__ import annotations

import inspect
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, count
from math import inf
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Any

from octavo.base import ConfigError
from octavo.sim.traces import MOONCAKE_BLOCK, Piece, TraceRequest, read_trace

Generator = Callable[..., Iterator[TraceRequest]]


def _length(rng: Random, mean: int) -> int:
    """A length around ``mean`` tokens, between half of it and half more."""
    return rng.randint(max(1, mean // 2), max(1, mean + mean // 2))


class _Shelf:
    """Documents that prompts begin with, each with a length of its own, the first the most wanted.

    skew: document k is wanted in proportion to ``(k + 1) ** -skew``; 0 wants all alike.
    """

    def __init__(self, rng: Random, name: str, *, size: int, length: int, skew: float) -> None:
        self._rng = rng
        self._pieces = [((name, each), _length(rng, length)) for each in range(size)]
        self._shares = list(accumulate((each + 1) ** -skew for each in range(size)))

    def __getitem__(self, index: int) -> Piece:
        return self._pieces[index % len(self._pieces)]

    def draw(self) -> Piece:
        """A document, the more wanted ones more often."""
        return self._pieces[bisect(self._shares, self._rng.random() * self._shares[-1])]


def uniform(
    rng: Random, *, documents: int = 200, length: int = 2048, own: int = 64, output: int = 64
) -> Iterator[TraceRequest]:
    """Questions about documents, all documents alike: what is kept matters little, how much does.

    own: tokens of the question behind the document.
    """
    yield from zipf(rng, documents=documents, skew=0.0, length=length, own=own, output=output)


def zipf(
    rng: Random,
    *,
    documents: int = 400,
    skew: float = 1.0,
    length: int = 2048,
    own: int = 64,
    output: int = 64,
) -> Iterator[TraceRequest]:
    """Questions about documents of which few are asked for often, and many seldom."""
    shelf = _Shelf(rng, "document", size=documents, length=length, skew=skew)
    for index in count():
        yield _question(rng, shelf.draw(), index, own, output)


def _question(
    rng: Random, document: Piece, index: int, own: int, output: int, salt: str = ""
) -> TraceRequest:
    return TraceRequest(
        prompt=(document, (("question", index), _length(rng, own))),
        output_length=_length(rng, output),
        salt=salt,
    )


def scans(
    rng: Random,
    *,
    documents: int = 60,
    skew: float = 0.8,
    scan: int = 40,
    between: int = 40,
    length: int = 2048,
    own: int = 64,
    output: int = 64,
) -> Iterator[TraceRequest]:
    """Questions about wanted documents, and in between long runs over documents that are read once
    and never again.

    scan: documents of a run. between: questions before the next run.
    """
    shelf = _Shelf(rng, "document", size=documents, length=length, skew=skew)
    for index in count():
        if index % (between + scan) < between:
            yield _question(rng, shelf.draw(), index, own, output)
        else:
            once = ("read once", index), _length(rng, length)
            yield _question(rng, once, index, own, output)


def loops(
    rng: Random, *, documents: int = 100, length: int = 2048, own: int = 64, output: int = 64
) -> Iterator[TraceRequest]:
    """The same documents in the same order, over and over: where they do not all fit, the least
    recently used one is always the next to come.
    """
    shelf = _Shelf(rng, "document", size=documents, length=length, skew=0.0)
    for index in count():
        yield _question(rng, shelf[index], index, own, output)


@dataclass(kw_only=True)
class _Talk:
    """One conversation: all that was said, for the next prompt to begin with."""

    index: int
    said: tuple[Piece, ...]
    turns: int = 0

    def say(self, what: str, length: int) -> Piece:
        """Add a piece that nobody said before."""
        piece = (what, self.index, self.turns), length
        self.said = (*self.said, piece)
        return piece


def sessions(
    rng: Random,
    *,
    users: int = 20,
    turns: int = 8,
    systems: int = 3,
    system: int = 512,
    own: int = 256,
    output: int = 128,
) -> Iterator[TraceRequest]:
    """Conversations: every prompt is all that was said before, and a new question.

    users: conversations at once; who has just spoken does not speak again at once. turns: how many
        a conversation has on average. systems: different system prompts, of ``system`` tokens.
    """
    yield from _talks(rng, users, turns, systems, system, own, output, tenants=0)


def salts(
    rng: Random,
    *,
    tenants: int = 6,
    users: int = 20,
    turns: int = 8,
    systems: int = 3,
    system: int = 512,
    own: int = 256,
    output: int = 128,
) -> Iterator[TraceRequest]:
    """Conversations of several tenants, some of them busier than others, who begin alike and may
    share nothing (``cache_salt``).
    """
    yield from _talks(rng, users, turns, systems, system, own, output, tenants=tenants)


def _talks(
    rng: Random,
    users: int,
    turns: int,
    systems: int,
    system: int,
    own: int,
    output: int,
    *,
    tenants: int,
) -> Iterator[TraceRequest]:
    shelf = _Shelf(rng, "system", size=systems, length=system, skew=1.0)
    made = count()
    talks: list[tuple[_Talk, str]] = []
    busy = list(accumulate(1 / (each + 1) for each in range(tenants)))
    while True:
        if len(talks) < users:
            salt = f"tenant {bisect(busy, rng.random() * busy[-1])}" if busy else ""
            talks.append((_Talk(index=next(made), said=(shelf.draw(),)), salt))
        talk, salt = _take(rng, talks)
        yield _turn(rng, talk, "question", own, output, salt)
        if rng.random() * turns >= 1:
            talks.append((talk, salt))


def _take(rng: Random, queue: list[Any]) -> Any:
    """Somebody from the first half of a queue: those behind are still waiting for an answer."""
    return queue.pop(rng.randrange(len(queue) + 1 >> 1))


def _turn(
    rng: Random, talk: _Talk, what: str, own: int, output: int, salt: str = ""
) -> TraceRequest:
    talk.say(what, _length(rng, own))
    prompt = talk.said
    answer = talk.say("answer", _length(rng, output))
    talk.turns += 1
    return TraceRequest(prompt=prompt, output=(answer,), output_length=answer[1], salt=salt)


def agents(
    rng: Random,
    *,
    runs: int = 12,
    tools: int = 3,
    tool: int = 1024,
    depth: int = 8,
    fork: float = 0.25,
    width: int = 3,
    own: int = 128,
    output: int = 64,
) -> Iterator[TraceRequest]:
    """Agents that think in trees: every step goes on from all before it, some branch, and branches
    take turns.

    runs: trees at once. tools: different sets of tools, ``tool`` tokens each, that trees begin
        with. depth: steps to the end of a branch. fork: how often a step branches, in ``width``.
    """
    shelf = _Shelf(rng, "tools", size=tools, length=tool, skew=1.0)
    made = count()
    queue: list[tuple[int, _Talk]] = []
    open_branches: Counter[int] = Counter()
    while True:
        while len(open_branches) < runs:
            start = _Talk(index=next(made), said=(shelf.draw(),))
            queue.append((start.index, start))
            open_branches[start.index] += 1
        tree, branch = _take(rng, queue)
        yield _turn(rng, branch, "found", own, output)
        more = 0
        if branch.turns < depth:
            more = width if rng.random() < fork else 1
        queue += [(tree, replace(branch, index=next(made))) for _ in range(more)]
        open_branches[tree] += more - 1
        if not open_branches[tree]:
            del open_branches[tree]


def phases(
    rng: Random,
    *,
    period: int = 100,
    sets: int = 4,
    documents: int = 60,
    skew: float = 0.8,
    length: int = 2048,
    own: int = 64,
    output: int = 64,
) -> Iterator[TraceRequest]:
    """What is wanted changes: after every ``period`` requests others of ``sets`` sets of documents
    are, and the first ones only much later again.
    """
    shelves = [
        _Shelf(rng, f"document of set {each}", size=documents, length=length, skew=skew)
        for each in range(sets)
    ]
    for index in count():
        yield _question(rng, shelves[index // period % sets].draw(), index, own, output)


GENERATORS: Mapping[str, Generator] = MappingProxyType(
    {made.__name__: made for made in (uniform, zipf, scans, loops, sessions, agents, phases, salts)}
)
"""Generators by name."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A generator and its options, as a name such as ``zipf:seed=3,requests=500`` says.

    requests: how many. rate: of them a second, on average, at random moments. options: of the
        generator.
    """

    generator: str
    seed: int = 0
    requests: int = 500
    rate: float = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self) -> list[TraceRequest]:
        """The requests."""
        rng = Random(f"octavo/traffic/{self.generator}/{self.seed}")
        clock, gaps = 0.0, Random(f"octavo/arrivals/{self.seed}")
        made = []
        for request in GENERATORS[self.generator](rng, **self.options):
            made.append(replace(request, arrival=clock))
            if len(made) == self.requests:
                break
            clock += gaps.expovariate(self.rate)
        return made


def read_recipe(name: str) -> Recipe:
    """The recipe that a name gives. Raises ConfigError for an unknown generator or option."""
    generator, _, options = name.partition(":")
    if generator not in GENERATORS:
        raise ConfigError(
            f"trace {name!r} is no file and no generator; generators: {', '.join(GENERATORS)}"
        )
    known: dict[str, Any] = {"seed": 0, "requests": 500, "rate": 1.0} | {
        each.name: each.default
        for each in inspect.signature(GENERATORS[generator]).parameters.values()
        if each.kind is inspect.Parameter.KEYWORD_ONLY
    }
    given: dict[str, Any] = {}
    for item in filter(None, options.split(",")):
        option, _, text = item.partition("=")
        option = option.strip()
        if option not in known:
            raise ConfigError(
                f"trace {name!r}: {generator} has no option {option!r}; options:"
                f" {', '.join(f'{each}={value}' for each, value in known.items())}"
            )
        given[option] = _number(name, option, text, known[option])
    own = {
        option: value for option, value in given.items() if option in ("seed", "requests", "rate")
    }
    rest = {option: value for option, value in given.items() if option not in own}
    return Recipe(generator=generator, options=rest, **own)


_MAY_BE_ZERO = ("seed", "skew", "fork")


def _number(name: str, option: str, text: str, default: float) -> float:
    whole = isinstance(default, int)
    try:
        value = int(text) if whole else float(text)
    except ValueError:
        value = -1
    least = 0 if option in _MAY_BE_ZERO else 1 if whole else 1e-9
    if not least <= value < inf:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"trace {name!r}: {option} must be {kind} from {least} on, not {text!r}")
    return value


def load_trace(
    name: str, *, block_size: int = MOONCAKE_BLOCK, limit: int | None = None
) -> list[TraceRequest]:
    """The requests of a file, or of a generator by name; at most ``limit``.

    Raises ConfigError where the name is neither, or wrong.
    """
    if Path(name).exists():
        return read_trace(name, block_size=block_size, limit=limit)
    recipe = read_recipe(name)
    requests = recipe.requests if limit is None else min(limit, recipe.requests)
    return replace(recipe, requests=requests).make()
