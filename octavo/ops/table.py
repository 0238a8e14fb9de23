"""The vocabulary in which layers compute, and the table that says who carries each word out.

Owns the contract of every op (shapes, dtypes, formulas), where its oracle is, and how a model gets
its ``Ops``: ``bind_ops`` picks an implementation of each for a device and dtype, once, after the
weights are loaded. Knows no implementation. Layers call what they are given and never ask what is
possible: whoever offers an op takes all that the contract allows.

An op is called in every step, or it is *prepared*: it is given its weights once, when a model is
bound, and gives back what is called in every step. What a step reads and writes in pages comes as a
``CacheView`` or a ``State``, with the group's one description (``ops/reads.py``). Scans read what
each request begins with and store the states that are wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from octavo.base import ConfigError
from octavo.ops.activation import Gating

if TYPE_CHECKING:
    from octavo.ops.latents import Heads, Queries
    from octavo.ops.paged import CacheView
    from octavo.ops.states import State

Product = Callable[[Tensor], Tensor]
"""What a prepared product is called as: x [..., K] -> [..., N]."""


class NormOp(Protocol):
    """Normalise the last axis: x [..., size] -> the same, computed in float32 at least.

    weight [size] or None; style says how it is used. ``scale``: ``x / rms(x)`` is rounded, then
    multiplied; ``wide``: multiplied, then rounded; ``offset``: multiplied by one plus the weight,
    then rounded; ``center``: as ``wide`` with the mean subtracted first; ``unit``: there is none.
    """

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, style: str) -> Tensor: ...


class RotateOp(Protocol):
    """Rotate the front of x [T, heads, dim] by tables [T, 1, rotated] in x's dtype: halves against
    each other, or neighbours where interleaved.
    """

    def __call__(
        self, x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False
    ) -> Tensor: ...


class NormRotateOp(Protocol):
    """``rotate`` of ``norm`` of x [T, heads, dim], with a weight."""

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        eps: float,
        style: str,
        cos: Tensor,
        sin: Tensor,
        *,
        interleaved: bool = False,
    ) -> Tensor: ...


class StoreOp(Protocol):
    """Put ``values[f][entries[i]]`` into row ``rows[i]`` of page ``pages[i]`` of ``fields[f]``.

    fields: [starts, heads, rows, ...] each. values: [E, heads, ...] each, in its field's dtype.
    pages, rows, entries: int64 [W]. No place is named twice.
    """

    def __call__(
        self,
        fields: Sequence[Tensor],
        pages: Tensor,
        rows: Tensor,
        values: Sequence[Tensor],
        entries: Tensor,
    ) -> None: ...


class GatherOp(Protocol):
    """Copies of single entries: row ``rows[i]`` of page ``pages[i]`` of field [starts, heads, rows,
    ...], int64 of any one shape -> [*shape, heads, ...].
    """

    def __call__(self, field: Tensor, pages: Tensor, rows: Tensor) -> Tensor: ...


class GreedyOp(Protocol):
    """The place of the largest of each row of logits [B, vocab], the first of equal ones: int64
    [B].

    Of rows that hold NaN, any place may come.
    """

    def __call__(self, logits: Tensor) -> Tensor: ...


class ProjectOp(Protocol):
    """Prepared: weight [N, K], bias [N] or None; x [..., K] -> ``x @ weight^T + bias``, [...,
    N].
    """

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Product: ...


class ProjectTogetherOp(Protocol):
    """Prepared: ``project`` of the same x with several weights [N_i, K]: x [..., K] -> [..., N_i]
    of each.
    """

    def __call__(
        self, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> Callable[[Tensor], Sequence[Tensor]]: ...


class GatedOp(Protocol):
    """Prepared: gate and up [N, K] with a bias [N] or None each; x [..., K] -> what ``gating``
    makes of both products, [..., N].
    """

    def __call__(
        self,
        gate: Tensor,
        up: Tensor,
        gating: Gating,
        biases: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Product: ...


class ProjectHeadsOp(Protocol):
    """Prepared: a matrix for each head, weight [H, inner, outer], or [H, outer, inner] where
    flipped; x [n, H, inner] -> [n, H, outer].
    """

    def __call__(self, weight: Tensor, *, flipped: bool = False) -> Product: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertWeights:
    """E small MLPs of one shape.

    first: [E, rows, size], of each expert its gate's rows, if any, then those that are gated. last:
    [E, size, inner]. first_bias, last_bias: [E, rows] and [E, size], or None. gating: how both
    halves of the first product become one; where there is no gate, the name of the activation.
    scores_inputs: an expert's input is multiplied by its score, not its output.
    """

    first: Tensor
    last: Tensor
    gating: Gating | str
    first_bias: Tensor | None = None
    last_bias: Tensor | None = None
    scores_inputs: bool = False


Experts = Callable[[Tensor, Tensor, Tensor], Tensor]
"""x [T, size], scores [T, active] in its dtype, chosen int64 [T, active] -> [T, size]."""


class ExpertsOp(Protocol):
    """Prepared: the sum over the experts that a token has chosen, each by its score."""

    def __call__(self, weights: ExpertWeights) -> Experts: ...


class AttendOp(Protocol):
    """Softmax attention of a step's queries q [Q, Hq, D] over the keys and values of their group,
    between ``view.begin`` and ``view.end`` -> [Q, Hq, Dv] in q's dtype.

    view: parts ``k`` [Hkv, D] and ``v`` [Hkv, Dv]. A query sees what ``view.reads.law`` says for
    its position, its own token included. scale: factor of the scores. softcap: scores become
    softcap * tanh(score / softcap). sinks: [Hq] logits that take part in the softmax and carry no
    value.
    """

    def __call__(
        self,
        q: Tensor,
        view: CacheView,
        *,
        scale: float,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class AttendLatentOp(Protocol):
    """Attention of a step's queries over latents that are all stored, the step's own included ->
    [Q, H, value] in the queries' dtype.

    view: parts ``latent`` [rank] and ``rope`` [rope] per token, under a law that lets nothing go. A
    query sees all tokens up to its own, or those of them that it has chosen.
    """

    def __call__(self, q: Queries, view: CacheView, heads: Heads) -> Tensor: ...


class AttendSparseOp(Protocol):
    """One softmax of each query, q [Q, H, D], over its window, far entries and a sink -> [Q, H, D].
    An entry is key and value at once, for all heads.

    window: one part [D] per token, under a law without a prefix, between ``begin`` and ``end``.
    far: one part [D] per ``stride`` tokens, all stored, under a law that lets nothing go; the query
    at p sees the first ``(p + 1) // stride``, or those of them that ``chosen`` names, int64 [Q, k],
    ascending and -1 behind the last. far None: there are none.
    """

    def __call__(
        self,
        q: Tensor,
        window: CacheView,
        far: CacheView | None,
        chosen: Tensor | None,
        *,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


class ScoreAndChooseOp(Protocol):
    """The k entries with the highest index scores among those that each query sees (DeepSeek-V3.2,
    equation 1): ``sum_h weights[h] * relu(q[h] . key)``; of equal ones those with the lowest
    number.

    q: [Q, H, D]; weights: [Q, H], all constant factors included. view: one part [D] per ``stride``
    tokens, all stored, under a law that lets nothing go; the query at p sees the first ``(p + 1) //
    stride``. Returns int64 [Q, min(k, most that any sees)]: ascending, then -1 where fewer are
    seen.
    """

    def __call__(self, q: Tensor, weights: Tensor, view: CacheView, k: int) -> Tensor: ...


class ConvOp(Protocol):
    """Causal depthwise convolution ``y[t] = bias + sum_j weight[:, j] x[t - K + 1 + j]``, all in
    x's dtype: x [E, C], weight [C, K], bias [C] or None -> [E, C].

    past: fields that keep the last K - 1 inputs, oldest first, of the channels in order: [heads,
    size, K - 1] or [size, K - 1] each. Zeros before a request's first token.
    """

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, past: Sequence[State]
    ) -> Tensor: ...


class SelectiveScanOp(Protocol):
    """Mamba-1: ``h = exp(dt a) h + dt u b^T; y = h c``, with a decay per channel and state.

    u and dt > 0 [E, I], a [I, N] < 0, b and c [E, N]; state: h [I, N]. Returns y [E, I] in float32,
    or float64 where anything given is.
    """

    def __call__(
        self, u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: State
    ) -> Tensor: ...


class SsdScanOp(Protocol):
    """Mamba-2: ``h = exp(dt a) h + dt x b^T; y = h c``.

    x [E, H, P], dt [E, H] > 0, a [H] < 0, b and c [E, G, N] (head j reads group j G // H); state: h
    [H, P, N]. Returns y [E, H, P] in float32, or float64 where anything given is.
    """

    def __call__(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: State
    ) -> Tensor: ...


class DeltaScanOp(Protocol):
    """The gated delta rule: ``S = exp(log_decay) S; S = S + k (beta (v - S^T k))^T; out = S^T q``.

    q, k [E, Hk, Dk] as they are multiplied (normalised and scaled); v [E, H, Dv], head j with key
    head j Hk // H; log_decay <= 0, [E, H] or [E, H, Dk]; beta [E, H]; state: S [H, Dk, Dv]. Returns
    out [E, H, Dv] in float32, or float64 where anything given is.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: State
    ) -> Tensor: ...


class DecayedScanOp(Protocol):
    """Linear attention with a decay per head: ``S = exp(log_decay) S + k v^T; out = S^T q``.

    q, k [E, H, Dk], v [E, H, Dv], log_decay <= 0, [H] where it is the same for all tokens, or
    [E, H]; state: S [H, Dk, Dv]. Returns out [E, H, Dv] in float32, or float64 where anything given
    is.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: State
    ) -> Tensor: ...


class FeatureScanOp(Protocol):
    """Plain linear attention: ``S = S + f(k) v^T; z = z + f(k); out = S^T f(q) / (z f(q) + 1e-6)``
    with the feature map f(x) = elu(x) + 1.

    q, k [E, H, Dk], v [E, H, Dv]; sums: S [H, Dk, Dv]; keys: z [H, Dk]. Returns out [E, H, Dv] in
    float32, or float64 where anything given is.
    """

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sums: State, keys: State) -> Tensor: ...


class LinearScanOp(Protocol):
    """``h = a h + b``, elementwise: a in [0, 1] (0 forgets, as at a first token) and b [E, W];
    state: h [W]. Returns h behind every token [E, W] in float32, or float64 where anything given
    is.
    """

    def __call__(self, a: Tensor, b: Tensor, state: State) -> Tensor: ...


def _oracle(where: str) -> Mapping[str, str]:
    """``module:function`` of the slow computation that says what is right, called like the op, or,
    where that is prepared, like the op and what it gives in turn.
    """
    return {"oracle": f"octavo.ops.oracles.{where}"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """One implementation of every op: what a model computes with. chosen: op -> name of its
    backend.
    """

    norm: NormOp = field(metadata=_oracle("pointwise:norm"))
    rotate: RotateOp = field(metadata=_oracle("pointwise:rotate"))
    norm_rotate: NormRotateOp = field(metadata=_oracle("pointwise:norm_rotate"))
    store: StoreOp = field(metadata=_oracle("pointwise:store"))
    gather: GatherOp = field(metadata=_oracle("pointwise:gather"))
    greedy: GreedyOp = field(metadata=_oracle("pointwise:greedy"))
    project: ProjectOp = field(metadata=_oracle("products:project"))
    project_together: ProjectTogetherOp = field(metadata=_oracle("products:project_together"))
    gated: GatedOp = field(metadata=_oracle("products:gated"))
    project_heads: ProjectHeadsOp = field(metadata=_oracle("products:project_heads"))
    experts: ExpertsOp = field(metadata=_oracle("products:experts"))
    attend: AttendOp = field(metadata=_oracle("attention:attend"))
    attend_latent: AttendLatentOp = field(metadata=_oracle("attention:attend_latent"))
    attend_sparse: AttendSparseOp = field(metadata=_oracle("attention:attend_sparse"))
    score_and_choose: ScoreAndChooseOp = field(metadata=_oracle("attention:score_and_choose"))
    conv: ConvOp = field(metadata=_oracle("recurrent:conv"))
    selective_scan: SelectiveScanOp = field(metadata=_oracle("recurrent:selective_scan"))
    ssd_scan: SsdScanOp = field(metadata=_oracle("recurrent:ssd_scan"))
    delta_scan: DeltaScanOp = field(metadata=_oracle("recurrent:delta_scan"))
    decayed_scan: DecayedScanOp = field(metadata=_oracle("recurrent:decayed_scan"))
    feature_scan: FeatureScanOp = field(metadata=_oracle("recurrent:feature_scan"))
    linear_scan: LinearScanOp = field(metadata=_oracle("recurrent:linear_scan"))
    chosen: Mapping[str, str] = field(default_factory=dict)


ORACLES: Mapping[str, str] = MappingProxyType(
    {each.name: each.metadata["oracle"] for each in fields(Ops) if "oracle" in each.metadata}
)
"""Every op's name, and where its oracle is."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a model runs. dtype: of its weights and activations."""

    device: torch.device
    dtype: torch.dtype


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Implementations of some ops.

    name: for people. takes: whether they run at a place at all. ops: by name of ``ORACLES``; each
    keeps the contract for every tensor that it may be given there, if need be by calling another
    backend's.
    """

    name: str
    takes: Callable[[Place], bool]
    ops: Mapping[str, Any]

    def __post_init__(self) -> None:
        unknown = sorted(self.ops.keys() - ORACLES.keys())
        if unknown:
            raise ConfigError(
                f"backend {self.name!r} offers {', '.join(unknown)}, which is no op; there are"
                f" {', '.join(ORACLES)}"
            )


def bind_ops(
    place: Place, backends: Iterable[Backend], *, asked: Mapping[str, str] = MappingProxyType({})
) -> Ops:
    """The ops of a model at ``place``: of all backends that take it, the last that has an op does
    it.

    asked: op -> name of the backend that is to do it, of those that take the place. Raises
        ConfigError where that one does not have it, or nobody has.
    """
    unknown = sorted(asked.keys() - ORACLES.keys())
    if unknown:
        raise ConfigError(f"{unknown[0]!r} is no op; there are {', '.join(ORACLES)}")
    chosen: dict[str, str] = {}
    found: dict[str, Any] = {}
    for backend in backends:
        for name, run in backend.ops.items() if backend.takes(place) else ():
            if asked.get(name, backend.name) == backend.name:
                chosen[name], found[name] = backend.name, run
    for name in ORACLES.keys() - found.keys():
        who = f"backend {asked[name]!r}" if name in asked else "any backend"
        raise ConfigError(f"{name!r} is not in {who} for {place.device} and {place.dtype}")
    return Ops(**found, chosen=chosen)
