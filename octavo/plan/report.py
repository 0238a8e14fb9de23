"""What a plan says: frozen dataclasses, and their form as JSON values.

Owns the names and units of every number that ``octavo.plan`` returns and ``octavo plan --json``
prints; both are documented in docs/planning.md and stable. Computes nothing but sums of its own
fields. All sizes are bytes, all lengths tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

JSON_VERSION = 1
"""Raised when a name or a unit changes; names may be added without."""


@dataclass(frozen=True, kw_only=True)
class FieldPlan:
    """One array of an entry. ``shape`` is that of one entry on one device; ``split``: tensor
    parallelism cuts it by heads.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    split: bool


@dataclass(frozen=True, kw_only=True)
class StreamPlan:
    """What one layer remembers of one sort: an entry of ``bytes_per_entry`` per ``stride`` tokens,
    for as long as ``law`` says.

    state: a token overwrites the entry instead of leaving one behind. entries: after the plan's
    ``context``; entries_at_most: ever, None where they grow.
    """

    name: str
    law: str
    grows: bool
    state: bool
    stride: int
    bytes_per_entry: int
    entries: int
    entries_at_most: int | None
    fields: tuple[FieldPlan, ...]


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A config field that decides what a layer remembers.

    given: it stands in the config, under this or an older name; else it is a class default, or
        follows from other fields.
    """

    field: str
    value: Any
    given: bool


@dataclass(frozen=True, kw_only=True)
class LayerPlan:
    """One layer. ``kind`` joins several mixers by ``+`` and is ``none`` where nothing mixes tokens.

    shares: the layer whose cache it reads instead of keeping one of its own. about: its kind in a
        sentence.
    """

    index: int
    kind: str
    about: str
    shares: int | None
    streams: tuple[StreamPlan, ...]
    decided_by: tuple[Decision, ...]


@dataclass(frozen=True, kw_only=True)
class GroupPlan:
    """Streams with one law, in one table.

    page_bytes: of one block of all its layers. bucket_bytes: what the arena spends on it.
    pages_at_most: of one request; None where they grow for ever.
    """

    law: str
    grows: bool
    block_tokens: int
    page_bytes: int
    bucket: int
    bucket_bytes: int
    pages_at_most: int | None
    layers: tuple[int, ...]
    streams: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class BytesAt:
    """One request of ``tokens`` tokens.

    ideal: entries it must keep at its worst moment. growing, bounded: entries after exactly
        ``tokens`` tokens, by sort.
    allocated: arena bytes of the pages that admission charges.
    """

    tokens: int
    ideal: int
    growing: int
    bounded: int
    allocated: int


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """How many requests of ``tokens`` tokens fit at once, and how many would if nothing were
    rounded (``ideal``).
    """

    tokens: int
    requests: int
    ideal: float


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How many requests fit whose lengths are distributed as ``shares`` says (length -> part of all
    requests).
    """

    shares: Mapping[int, float]
    requests: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where the cache's bytes come from.

    cache: bytes of one device's arena. assumed: nobody gave it. tp: devices that hold one copy of
        the model together; replicas:
    such copies. Requests are counted over all replicas. weights: bytes of one copy, over all its
    devices; None where the cache
    was given. scratch: bytes behind the arena that padding writes to, on top of ``cache``.
    """

    cache: int
    assumed: bool
    gpu: str | None
    device: int | None
    tp: int
    replicas: int
    parameters: int | None
    weights: int | None
    scratch: int


@dataclass(frozen=True, kw_only=True)
class ArenaPlan:
    """The arena of one device: ``num_slabs`` slabs of ``slab_bytes``; page size of every bucket, in
    bytes.
    """

    slab_bytes: int
    num_slabs: int
    bucket_bytes: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Waste:
    """Where the bytes of one device's arena go when as many requests of ``context`` tokens are held
    as fit.

    needed: entries at their worst moment. blocks: entries' places in blocks that are not needed:
        rounding outward, and a ring's
    worst alignment. alignment: between fields of a page. buckets: rounding of pages to units and to
    their bucket. slab_tails:
    ends of slabs, too small for a page. open_slabs: places in slabs that are partly used.
    free_slabs: slabs nobody needs, too
    few for one more request. arena_tail: behind the last slab. All of them add up to the arena.
    """

    needed: int
    blocks: int
    alignment: int
    buckets: int
    slab_tails: int
    open_slabs: int
    free_slabs: int
    arena_tail: int

    @property
    def total(self) -> int:
        """Bytes of the arena."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class StepTransient:
    """What a step may take beside what requests hold.

    copies: a shared block being copied, one per group: must be there for a request to be accepted.
    checkpoint: pages that a resume point inside a prompt keeps beside the ring until they leave it;
    skipped where they do not fit. fresh: entries of a prompt chunk of ``chunk`` tokens in the layer
    that has most, which are attended to before they are stored; not in the arena.
    """

    copies: int
    checkpoint: int
    chunk: int
    fresh: int


@dataclass(frozen=True, kw_only=True)
class UniformPlan:
    """The same model with every layer charged as full attention: bytes of one request and requests
    that fit, at ``context``.
    """

    bytes_per_token: int
    bytes: int
    requests: float


@dataclass(frozen=True, kw_only=True)
class VllmGroup:
    """One of vLLM's groups: ``layers`` caches of one sort, blocks of ``block_tokens``,
    ``page_bytes`` per cache and block.
    """

    sort: str
    layers: int
    block_tokens: int
    page_bytes: int
    padded_bytes: int
    planned_blocks: int
    held_blocks: int


@dataclass(frozen=True, kw_only=True)
class VllmPlan:
    """The same model under vLLM's rules, for requests of ``context`` tokens; ``reason`` says why
    where they do not apply.

    planned: the concurrency it prints. resident: requests that really fit. min_hit_tokens: its hash
        block.
    """

    groups: tuple[VllmGroup, ...]
    block_bytes: int
    num_blocks: int
    planned: float
    resident: int
    held_bytes: int
    min_hit_tokens: int
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a model's caches cost and what fits.

    slope_bytes_per_token, fixed_bytes_per_request: bytes of entries that every further token adds
    for ever, and the most that bounded streams keep; ``allocated_*``: the same in pages.
    requests_that_fit: at ``context``, over all replicas. max_context: the longest at which
        ``requests`` of them fit; 0 where none does. min_hit_tokens: the shortest prefix that can
        ever hit.
    resume_point_bytes: pages a resume point at ``context`` keeps for itself alone; those of growing
        groups are shared.
    assumed: sizes that the config does not give, with the class defaults taken for them. curves: by
    kind and stream, bytes of entries after each of ``curve_lengths`` tokens.
    """

    model: str
    family: str
    max_model_len: int
    context: int
    profile: str
    dtypes: Mapping[str, str]
    memory: Memory
    arena: ArenaPlan
    layers: tuple[LayerPlan, ...]
    groups: tuple[GroupPlan, ...]
    slope_bytes_per_token: float
    fixed_bytes_per_request: int
    allocated_slope_bytes_per_token: float
    allocated_fixed_bytes_per_request: int
    bytes_at: Mapping[int, BytesAt]
    requests_that_fit: int
    capacity: tuple[Capacity, ...]
    mix: Mix | None
    requests: int
    max_context: int
    min_hit_tokens: int
    resume_point_bytes: int
    step: StepTransient
    waste: Waste
    assumed: Mapping[str, int]
    curve_lengths: tuple[int, ...]
    curves: Mapping[str, tuple[int, ...]]
    uniform: UniformPlan | None
    vllm: VllmPlan | None

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values: names as here, mappings by length with the length as a
        string.
        """
        return {"version": JSON_VERSION, **_values(self)}


def _values(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _values(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _values(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_values(item) for item in value]
    return value
