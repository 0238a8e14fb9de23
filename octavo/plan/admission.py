"""The proof of a plan: synthetic requests, admitted one after another by the real cache manager
until one is refused.

Owns the order of calls, which is the scheduler's: look up, admit, extend by a chunk, commit; all
earlier requests decode in the same steps until they have their full length, and stay. Knows no
model and no tensors: a step is received as soon as planned.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from octavo.base import CapacityError
from octavo.cache.hashing import NO_KEYS
from octavo.cache.layout import CacheLayout, request_bytes
from octavo.cache.manager import KVCacheManager, Refusal


@dataclass(kw_only=True, eq=False)
class Synthetic:
    """A request of tokens that no other request has. It knows ``prompt`` tokens at first and
    ``total`` at last.
    """

    index: int
    prompt: int
    total: int
    request_id: str
    cache_salt: str = ""
    marks: tuple[int, ...] = ()
    unit_keys: np.ndarray = field(default_factory=NO_KEYS.copy)
    num_cached_tokens: int = 0
    cache_report: Any = None

    @property
    def num_tokens(self) -> int:
        """Tokens known."""
        return self.prompt

    def token_ids(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``[start, stop)``, int32: the request's own index, all of them."""
        return np.full(stop - start, self.index, np.int32)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What was held at the end: requests, arena bytes of their pages, and what the allocator would
    charge for as many.
    """

    requests: int
    held_bytes: int
    charged_bytes: int


def admit_until_refused(
    layout: CacheLayout, n: int, *, chunk: int, decoded: int = 3, caching: bool = True
) -> Held:
    """Admit requests of ``n`` tokens, the last ``decoded`` of them generated, until one does not
    fit.

    chunk: tokens of a prompt computed per step. caching: publish prefixes, as an engine does unless
        told. Admission charges
    what is known of a request: where its generated tokens open a further block of a growing group,
    one more may be admitted than will fit. An AssertionError is raised then, as wherever an
    admitted request would have to wait for pages.
    """
    most = (
        layout.arena.num_slabs
        * layout.arena.slab_units
        * layout.arena.unit_bytes
        // request_bytes(layout, n)
    )
    cache = KVCacheManager(layout, max_num_seqs=most + 2, enable_prefix_caching=caching)
    steps, admitted, decoding = count(), 0, list[Synthetic]()
    while _accepts(cache, n):
        new = Synthetic(
            index=admitted, prompt=max(1, n - decoded), total=n, request_id=str(admitted)
        )
        admission = cache.can_admit(new, cache.lookup(new))
        if isinstance(admission, Refusal):
            break
        cache.admit(admission)
        while cache.computed(new) < new.prompt:
            _step(cache, new, decoding, next(steps), chunk)
        admitted += 1
        decoding.append(new)
    while decoding:
        _step(cache, None, decoding, next(steps), chunk)
    pool, arena = cache.coordinator.pool, layout.arena
    held = (
        sum(pool.counts(bucket).held * units for bucket, units in enumerate(arena.page_units))
        * arena.unit_bytes
    )
    return Held(
        requests=admitted, held_bytes=held, charged_bytes=admitted * request_bytes(layout, n)
    )


def _accepts(cache: KVCacheManager, n: int) -> bool:
    try:
        cache.check_capacity(n)
    except CapacityError:
        return False
    return True


def _step(
    cache: KVCacheManager, new: Synthetic | None, decoding: list[Synthetic], step: int, chunk: int
) -> None:
    """One step: a chunk of the new request's prompt, and a token of every earlier one; complete
    ones leave the list.
    """
    decoding[:] = [request for request in decoding if cache.scheduled(request) < request.total]
    rows = np.array([cache.row(request) for request in decoding], np.int64)
    starts, planned = cache.scheduled_tokens(rows), cache.decode(rows, step)
    stops = starts + 1
    for request, stop, done in zip(decoding, stops.tolist(), planned.tolist(), strict=True):
        request.prompt = stop
        assert done or cache.extend(request, stop, step), (
            "rings that turn and blocks that open have their pages"
        )
    if new is not None:
        start = cache.scheduled(new)
        stop = min(new.prompt, start + chunk)
        assert cache.extend(new, stop, step) or cache.extend(new, stop, step, checkpoints=False), (
            "an admitted prompt has its pages"
        )
        rows, starts, stops = (
            np.append(rows, cache.row(new)),
            np.append(starts, start),
            np.append(stops, stop),
        )
    if len(rows):
        cache.take_step(rows, starts, np.concatenate([[0], np.cumsum(stops - starts)]))
        cache.commit(rows, stops)
    cache.receive(step)
