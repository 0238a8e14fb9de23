"""Latent attention over pages: dense and sparse, decodes and prefill chunks.

Owns ``latent_attend`` and the rule by which it computes (``way_of``). Knows no kind: a choice of
tokens comes as numbers.

One latent per token stands for the keys and values of all heads. They can be *expanded* from it, or
the projections be *absorbed* into queries and outputs, so that all heads attend to the latents
themselves (DeepSeek-V2, section 2.1.2): less work for few queries, more for many, since latents are
wider than keys. Both are the same but for rounding. Over a choice of tokens absorbed attention can
*gather* the chosen entries alone, so that what is read does not grow with the context. Decodes and
what gathers run compiled where ``octavo.kernels`` takes their device and dtypes, everything else in
plain torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from octavo.kernels.latent import latent_attention, takes
from octavo.ops.attention import TILE_SCORES, Rule, products, weights_of
from octavo.ops.entries import of_bucket, of_numbers, of_request, paged
from octavo.ops.paged import CacheView, DecodeBucket, RequestRead
from octavo.ops.table import Ops, Product
from octavo.spec.law import Everything

TILE_EXPANDED: Final = 1 << 24
"""Most elements of expanded keys and values that exist at once, as long as one head has its own."""

TILE_GATHERED: Final = 1 << 24
"""Most elements of gathered entries that exist at once, as long as a tile has one query."""

TILE_QUERIES: Final = 256
"""Most queries of one prefill tile: keys behind a tile's last query are not multiplied."""

Way = Literal["expand", "absorb", "gather"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Heads:
    """What makes keys and values of latents. up: [H, nope + value, rank], of each head its keys'
    rows first. nope: how many.

    absorb: queries for keys [n, H, nope] -> queries for latents [n, H, rank]. values: mixed latents
        [n, H, rank] -> mixed values [n, H, value]. Both are products with ``up``.
    """

    up: Tensor
    nope: int
    scale: float
    absorb: Product
    values: Product

    @classmethod
    def of(cls, up: Tensor, nope: int, scale: float, ops: Ops) -> Heads:
        """By the products that ``ops`` make."""
        return cls(
            up=up,
            nope=nope,
            scale=scale,
            absorb=ops.project_heads(up[:, :nope]),
            values=ops.project_heads(up[:, nope:], flipped=True),
        )

    @property
    def rule(self) -> Rule:
        """Scores to weights."""
        return Rule(law=Everything(), scale=self.scale)


@dataclass(frozen=True, kw_only=True, eq=False)
class Queries:
    """Queries of n tokens: plain [n, H, nope], rotated [n, H, rope].

    requests: int64 [n], which request of the step each belongs to. chosen: int64 [n, k], the tokens
    that each attends to, of those it sees, ascending and -1 where there are fewer; None where it
    attends to all.
    """

    plain: Tensor
    rotated: Tensor
    requests: Tensor
    chosen: Tensor | None = None

    def __getitem__(self, part: slice | Tensor) -> Queries:
        chosen = None if self.chosen is None else self.chosen[part]
        return Queries(
            plain=self.plain[part],
            rotated=self.rotated[part],
            requests=self.requests[part],
            chosen=chosen,
        )

    @property
    def count(self) -> int:
        """n."""
        return self.plain.shape[0]


def way_of(heads: Heads, *, queries: int, start: int, chosen: int | None, rope: int) -> Way:
    """How ``queries`` tokens from position ``start`` on are attended to with the fewest
    multiplications, counted per head.

    With L = start + queries tokens, P pairs of a query and a token it sees, and ``u`` = nope +
    value:

    - expand: ``L rank u`` to make keys and values, and ``P (u + rope)``
    - absorb: ``queries rank u`` for queries and outputs, and ``P (2 rank + rope)``
    - gather, where each attends to ``chosen`` tokens only: ``queries (rank u + chosen (2 rank +
      rope))``

    DeepSeek-V3's sizes expand a chunk of a long prompt from 171 tokens on, and V3.2's gather for a
    chunk of 2,048 once about 7,000 tokens are there.
    """
    (_, both, rank), length = heads.up.shape, start + queries
    pairs = queries * start + queries * (queries + 1) // 2
    costs: dict[Way, int] = {
        "expand": length * rank * both + pairs * (both + rope),
        "absorb": queries * rank * both + pairs * (2 * rank + rope),
    }
    if chosen is not None and chosen < length:
        costs["gather"] = queries * (rank * both + chosen * (2 * rank + rope))
    return min(costs, key=lambda way: costs[way])


def latent_attend(q: Queries, view: CacheView, heads: Heads) -> Tensor:
    """Causal attention of one step's T tokens over latents that are all stored, the step's own
    included.

    ``view``: parts ``latent`` [rank] and ``rope`` [rope] per token, under a law that lets nothing
        go. Returns [T, H, value].
    """
    out = q.plain.new_empty(q.count, heads.up.shape[0], heads.up.shape[1] - heads.nope)
    if takes(q.plain, paged(view)):
        begin = view.batch.reads.query_start
        alone = (begin.diff() == 1).nonzero()[:, 0]
        out.index_copy_(
            0,
            begin[alone],
            _compiled(q[begin[alone]], view, view.batch.reads.start[alone] + 1, heads),
        )
    else:
        for bucket in view.batch.decodes:
            out.index_copy_(0, bucket.tokens, _bucket(q[bucket.tokens], view, bucket, heads))
    for request in view.batch.requests:
        own = slice(*request.query)
        out[own] = _request(q[own], view, request, heads)
    return out


def _compiled(q: Queries, view: CacheView, seen: Tensor, heads: Heads) -> Tensor:
    """Any queries, absorbed: over their choice, or else their first ``seen`` [n] entries."""
    absorbed = heads.absorb(q.plain)
    mixed = latent_attention(
        torch.cat((absorbed, q.rotated), dim=2),
        paged(view),
        view.batch.rows[q.requests],
        seen if q.chosen is None else (q.chosen >= 0).sum(dim=1),
        chosen=q.chosen,
        scale=heads.scale,
        value_dim=absorbed.shape[2],
    )
    return heads.values(mixed)


def _bucket(q: Queries, view: CacheView, bucket: DecodeBucket, heads: Heads) -> Tensor:
    """Decodes: always absorbed, and gathered where the context is longer than the choice."""
    if q.chosen is not None and q.chosen.shape[1] < bucket.hidden.shape[1]:
        return _gathered(q, view, heads)
    return heads.values(_piecewise(heads.absorb(q.plain), q.rotated, view, bucket, heads.scale))


def _piecewise(
    absorbed: Tensor, rotated: Tensor, view: CacheView, bucket: DecodeBucket, scale: float
) -> Tensor:
    """``_mixed`` of a bucket with the running maximum and sum of an online softmax (Milakov and
    Gimelshein 2018).
    """
    wide = torch.promote_types(absorbed.dtype, torch.float32)
    best = absorbed.new_full((*absorbed.shape[:2], 1), float("-inf"), dtype=wide)
    total, mixed = torch.zeros_like(best), torch.zeros_like(absorbed, dtype=wide)
    for rows, entry in of_bucket(view, bucket, absorbed.dtype):
        latent, hidden = entry["latent"], bucket.hidden[:, rows]
        # A weight of zero does not hide a NaN.
        latent.masked_fill_(hidden[:, :, None], 0)
        scores = products(absorbed, latent.transpose(1, 2)) + products(
            rotated, entry["rope"].transpose(1, 2)
        )
        scores = (scores.to(wide) * scale).masked_fill_(hidden[:, None], float("-inf"))
        # The first rows of every request are seen, so this is a number from the first piece on.
        higher = torch.maximum(best, scores.amax(dim=-1, keepdim=True))
        weights, kept = torch.exp(scores - higher), torch.exp(best - higher)
        total = total * kept + weights.sum(dim=-1, keepdim=True)
        mixed = mixed * kept + products(weights.to(latent.dtype), latent)
        best = higher
    return (mixed / total).to(absorbed.dtype)


def _request(q: Queries, view: CacheView, request: RequestRead, heads: Heads) -> Tensor:
    chosen = None if q.chosen is None else q.chosen.shape[1]
    way = way_of(
        heads, queries=q.count, start=request.start, chosen=chosen, rope=q.rotated.shape[2]
    )
    if way == "gather":
        return _gathered(q, view, heads)
    entry = of_request(view, request, q.plain.dtype)
    return (_expanded if way == "expand" else _absorbed)(q, entry, request.start, heads)


def _mixed(
    absorbed: Tensor, rotated: Tensor, entry: dict[str, Tensor], hidden: Tensor, rule: Rule
) -> Tensor:
    """Latents mixed by softmax weights: [n, H, rank] and [n, H, rope] -> [n, H, rank].

    entry: parts [L, ...] that all queries share, or [n, L, ...]. hidden: bool [n, L], True where a
        token is not seen.
    """
    latent, rope = entry["latent"], entry["rope"]
    if latent.dim() == 3 and latent.shape[0] == 1:
        latent, rope = latent[0], rope[0]
    scores = absorbed @ latent.transpose(-1, -2) + rotated @ rope.transpose(-1, -2)
    weights = weights_of(scores, hidden[:, None], rule, slice(None))
    return weights.to(latent.dtype) @ latent


def _gathered(q: Queries, view: CacheView, heads: Heads) -> Tensor:
    """Reads the chosen entries and no others."""
    assert q.chosen is not None
    if takes(q.plain, paged(view)):
        return _compiled(q, view, q.requests, heads)
    absorbed, out = heads.absorb(q.plain), []
    tile = max(1, TILE_GATHERED // (q.chosen.shape[1] * (absorbed.shape[2] + q.rotated.shape[2])))
    for first in range(0, q.count, tile):
        part = slice(first, first + tile)
        numbers = q.chosen[part]
        entry = of_numbers(view, q.requests[part, None].expand_as(numbers), numbers, absorbed.dtype)
        out.append(_mixed(absorbed[part], q.rotated[part], entry, numbers < 0, heads.rule))
    return heads.values(torch.cat(out))


def _hidden(q: Queries, first: int, last: int, start: int) -> Tensor:
    """Bool [last - first, start + last]: which tokens queries ``[first, last)`` of a request from
    ``start`` on do not see.
    """
    seen, device = start + last, q.plain.device
    places = torch.arange(seen, device=device)
    later = places > torch.arange(start + first, seen, device=device)[:, None]
    if q.chosen is None:
        return later
    chosen = q.chosen[first:last]
    # What pads a choice falls on a column of its own.
    mask = torch.ones(last - first, seen + 1, dtype=torch.bool, device=device)
    return later | mask.scatter_(1, torch.where(chosen < 0, seen, chosen), False)[:, :seen]


def _tiles(count: int, scores: int, step: Callable[[int, int], Tensor]) -> Tensor:
    """``step(first, last)`` of all tiles of queries, [last - first, ...] each. scores: of one
    query.
    """
    tile = max(16, min(TILE_QUERIES, TILE_SCORES // max(1, scores)))
    return torch.cat([step(first, min(first + tile, count)) for first in range(0, count, tile)])


def _absorbed(q: Queries, entry: dict[str, Tensor], start: int, heads: Heads) -> Tensor:
    """One request's chunk over its latents, parts [L, ...]."""
    absorbed = heads.absorb(q.plain)

    def tile(first: int, last: int) -> Tensor:
        seen = {name: part[: start + last] for name, part in entry.items()}
        return _mixed(
            absorbed[first:last],
            q.rotated[first:last],
            seen,
            _hidden(q, first, last, start),
            heads.rule,
        )

    return heads.values(_tiles(q.count, heads.up.shape[0] * (start + q.count), tile))


def _expanded(q: Queries, entry: dict[str, Tensor], start: int, heads: Heads) -> Tensor:
    """One request's chunk over keys and values made of its latents, parts [L, ...], some heads at a
    time.
    """
    total, both, _ = heads.up.shape
    latent, rope = entry["latent"], entry["rope"]
    length = latent.shape[0]
    step = max(1, min(total, TILE_EXPANDED // (length * both)))
    out = q.plain.new_empty(q.count, total, both - heads.nope)
    for low in range(0, total, step):
        mine = slice(low, low + step)
        up = heads.up[mine]
        made = (latent @ up.flatten(0, 1).T).view(length, -1, both).transpose(0, 1)
        keys, values = made[..., : heads.nope], made[..., heads.nope :]
        plain, rotated = q.plain[:, mine].transpose(0, 1), q.rotated[:, mine].transpose(0, 1)

        def tile(
            first: int,
            last: int,
            plain: Tensor = plain,
            rotated: Tensor = rotated,
            keys: Tensor = keys,
            values: Tensor = values,
        ) -> Tensor:
            seen = slice(0, start + last)
            scores = (
                torch.bmm(plain[:, first:last], keys[:, seen].transpose(1, 2))
                + rotated[:, first:last] @ rope[seen].T
            )
            weights = weights_of(scores, _hidden(q, first, last, start), heads.rule, slice(None))
            return torch.bmm(weights.to(values.dtype), values[:, seen]).transpose(0, 1)

        out[:, mine] = _tiles(q.count, up.shape[0] * length, tile)
    return out
