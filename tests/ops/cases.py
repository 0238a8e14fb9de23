"""Arguments for every op: what a backend's implementation and the op's oracle are both called with.

Owns the making of them. A case has what is given when an op is called or prepared, and, for a
prepared one, what its result is called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from octavo.ops.activation import Gating
from octavo.ops.latents import Heads, Queries
from octavo.ops.paged import CacheView
from octavo.ops.reads import Parts
from octavo.ops.states import State, states
from octavo.ops.table import ExpertWeights
from octavo.ops.torch.backend import TORCH
from octavo.spec.law import Chunk, Everything, SinkWindow, Snapshot, Window
from octavo.spec.stream import Field, Stream
from tests.kernels.pages import stream_of
from tests.ops.worlds import make_parts, make_reads, make_view


@dataclass(frozen=True, kw_only=True)
class Case:
    """One call. given: arguments of the op. then: of what a prepared op gives; None where it is not
    prepared. changes: tensors among the arguments that the op writes to.
    """

    given: tuple[Any, ...]
    more: dict[str, Any] = field(default_factory=dict)
    then: tuple[Any, ...] | None = None
    changes: Callable[[Case], list[Tensor]] = lambda case: []


class Numbers:
    """Random tensors of one seed and dtype."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self.generator, self.seed, self.dtype = torch.Generator().manual_seed(seed), seed, dtype

    def __call__(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(dtype or self.dtype)

    def below(self, most: int, *shape: int) -> Tensor:
        return torch.randint(0, most, shape, generator=self.generator)


def norm(some: Numbers) -> Iterator[Case]:
    for size in (5, 64):
        for style in ("scale", "wide", "offset", "center"):
            yield Case(given=(some(3, size) * 3 + 1, some(size), 1e-5, style))
        yield Case(given=(some(2, 4, size), None, 1e-5, "unit"))
    # A weight of another dtype, and rows that do not lie side by side.
    yield Case(given=(some(3, 32), some(32, dtype=torch.float32), 1e-5, "wide"))
    yield Case(given=(some(3, 32), some(32, dtype=torch.float32), 1e-5, "scale"))
    yield Case(given=(some(32, 3).T, some(32), 1e-5, "scale"))


def rotate(some: Numbers) -> Iterator[Case]:
    for rotated, size in ((8, 8), (6, 17)):
        for interleaved in (False, True):
            tables = some(4, 1, rotated), some(4, 1, rotated)
            yield Case(given=(some(4, 3, size), *tables), more={"interleaved": interleaved})
            yield Case(given=(some(4, 9, size)[:, 2:5], *tables), more={"interleaved": interleaved})
    wide = (some(4, 1, 8, dtype=torch.float32), some(4, 1, 8, dtype=torch.float32))
    yield Case(given=(some(4, 3, 8), *wide))


def norm_rotate(some: Numbers) -> Iterator[Case]:
    for style in ("scale", "offset"):
        x, weight, tables = some(4, 9, 12)[:, 2:5], some(12), (some(4, 1, 8), some(4, 1, 8))
        yield Case(given=(x, weight, 1e-5, style, *tables), more={"interleaved": style == "scale"})


def store(some: Numbers) -> Iterator[Case]:
    places = torch.tensor([6, 0, 3, 3]), torch.tensor([0, 3, 1, 2])
    entries = torch.tensor([5, 0, 1, 1])
    # Pages of one field between others, heads one behind the other.
    pages, made = some(7, 2, 3, 4, 5), some(6, 3, 9)[:, :, 2:7]
    fields = [pages[:, 1], pages[:, 0]]
    yield Case(
        given=(fields, *places, [made, made + 1], entries), changes=lambda case: case.given[0]
    )
    narrow = torch.randint(0, 100, (7, 1, 4, 6), dtype=torch.uint8).view(torch.float8_e4m3fn)
    yield Case(
        given=([narrow], *places, [narrow[:6, :, 0].clone()], entries),
        changes=lambda case: [one.view(torch.uint8) for one in case.given[0]],
    )


def gather(some: Numbers) -> Iterator[Case]:
    yield Case(given=(some(7, 3, 4, 5), some.below(7, 2, 6), some.below(4, 2, 6)))


def greedy(some: Numbers) -> Iterator[Case]:
    yield Case(given=(some(3, 70_001).float(),))
    yield Case(given=(some(2, 40).round(),))
    yield Case(given=(some(40, 2).T,))


def project(some: Numbers) -> Iterator[Case]:
    for rows, outputs, size in ((1, 7, 64), (5, 33, 96), (40, 16, 32), (3, 4, 50)):
        weight, bias = some(outputs, size) / size**0.5, some(outputs) if rows != 5 else None
        yield Case(given=(weight, bias), then=(some(rows, 2 * size)[:, size:],))
    yield Case(given=(some(8, 64), None), then=(some(2, 3, 64),))


def project_together(some: Numbers) -> Iterator[Case]:
    for rows, size in ((1, 64), (40, 64), (2, 20)):
        weights = [some(outputs, size) / size**0.5 for outputs in (8, 33, 1)]
        yield Case(given=(weights, [None, some(33), None]), then=(some(rows, size),))


def gated(some: Numbers) -> Iterator[Case]:
    for rows in (2, 40):
        for gating in (
            *(Gating(activation=name) for name in ("silu", "gelu", "gelu_pytorch_tanh", "relu2")),
            Gating(activation="silu", limit=0.5),
            Gating(activation="silu", clamp=(0.7, 1.7)),
        ):
            pair = some(24, 64) / 8, some(24, 64) / 8
            biases = (None, None) if gating.limit is None else (some(24), some(24))
            yield Case(given=(*pair, gating, biases), then=(some(rows, 64),))


def project_heads(some: Numbers) -> Iterator[Case]:
    for rows, inner, outer in ((1, 16, 48), (40, 16, 48), (3, 10, 7)):
        for flipped in (False, True):
            shape = (outer, inner) if flipped else (inner, outer)
            weight, x = some(3, *shape) / inner**0.5, some(3, rows, inner).transpose(0, 1)
            yield Case(given=(weight,), more={"flipped": flipped}, then=(x,))


def experts(some: Numbers) -> Iterator[Case]:
    for gating in (Gating(activation="silu"), Gating(activation="silu", clamp=(0.7, 1.7)), "relu2"):
        rows = 8 if gating == "relu2" else 16
        weights = ExpertWeights(
            first=some(5, rows, 12) / 4,
            last=some(5, 12, 8) / 4,
            gating=gating,
            first_bias=some(5, rows) if gating == "relu2" else None,
            last_bias=some(5, 12) if gating == "relu2" else None,
            scores_inputs=gating == Gating(activation="silu"),
        )
        chosen = torch.stack([torch.randperm(5, generator=some.generator)[:2] for _ in range(7)])
        yield Case(given=(weights,), then=(some(7, 12), some(7, 2).abs(), chosen))


# -- attention -------------------------------------------------------------------------------------


def attend(some: Numbers) -> Iterator[Case]:
    name = str(some.dtype).removeprefix("torch.")
    kept = ("float32", "bfloat16") if some.dtype == torch.float32 else (name,)
    kept = ("float32",) if some.dtype == torch.float64 else kept
    for seed, law in enumerate((Everything(), Window(9), Chunk(8), SinkWindow(3, 7))):
        for dtype in kept:
            parts = make_parts(seed, longest=30, chunk=40, fewer=seed == 1)
            reads = make_reads(seed, parts, law, ring=seed == 1, fresh=0.5)
            widths = {"k": (2, 16), "v": (2, 24)}
            fields = tuple(
                Field(name=part, shape=shape, dtype=dtype, shard="heads")
                for part, shape in widths.items()
            )
            view = make_view(seed, reads, Stream(name="kv", law=law, fields=fields), widths)
            q = some(len(parts.query_positions), 6, 16)
            rule = {"scale": 0.25, "softcap": 3.0 if seed == 2 else None}
            yield Case(given=(q, view), more={**rule, "sinks": some(6) if seed % 2 else None})


def _entries(some: Numbers, parts: Parts, form: str, dim: int, rope: int, stride: int) -> CacheView:
    """Entries under a law that lets nothing go, in a format of ``tests.kernels.pages``."""
    stream = replace(stream_of(form, dim, rope), stride=stride)
    reads = make_reads(some.seed, parts, Everything(), block=2 * stride)
    name = form.split("_")[0]
    widths = {name: (dim - rope if name == "latent" else dim,)}
    return make_view(
        some.seed, reads, stream, {**widths, **({"rope": (rope,)} if name == "latent" else {})}
    )


def _forms(some: Numbers, name: str) -> list[str]:
    """Formats of entries that a model in this dtype may keep."""
    plain = ["float32"] if some.dtype != torch.bfloat16 else ["bfloat16"]
    quantised = {"key": ["fp8", "fp4"], "latent": ["fp8", "plain_fp8"], "kv": ["fp8"]}[name]
    return [f"{name}_{kept}" for kept in (*plain, *quantised)]


def _chosen(some: Numbers, parts: Parts, stride: int, k: int) -> Tensor:
    """Entries that each query has chosen."""
    chosen = torch.full((len(parts.query_positions), k), -1)
    for query, position in enumerate(parts.query_positions.tolist()):
        seen = (position + 1) // stride
        numbers = torch.randperm(seen, generator=some.generator)[:k].sort().values
        chosen[query, : len(numbers)] = numbers
    return chosen


def attend_latent(some: Numbers) -> Iterator[Case]:
    for seed, form in enumerate(_forms(some, "latent")):
        for k in (None, 5):
            parts = make_parts(some.seed + seed, longest=30, chunk=12, fewer=seed == 1)
            view = _entries(some, parts, form, 40, 8, 1)
            heads = Heads.of(some(3, 28, 32) / 6, 12, 0.2, TORCH)
            count = len(parts.query_positions)
            chosen = None if k is None else _chosen(some, parts, 1, k)
            queries = Queries(plain=some(count, 3, 12), rotated=some(count, 3, 8), chosen=chosen)
            yield Case(given=(queries, view, heads))


def attend_sparse(some: Numbers) -> Iterator[Case]:
    for seed, form in enumerate(_forms(some, "kv")):
        for k in (None, 3, 0):
            parts = make_parts(some.seed + seed, longest=30, chunk=12, fewer=seed == 1)
            far = None if k == 0 else _entries(some, parts, form, 40, 8, 3)
            law = Window(6)
            reads = make_reads(some.seed, parts, law, ring=True, fresh=0.5)
            stream = replace(stream_of(form, 40, 8), law=law)
            window = make_view(some.seed + 1, reads, stream, {"kv": (40,)})
            chosen = _chosen(some, parts, 3, k) if k else None
            q = some(len(parts.query_positions), 4, 40)
            yield Case(
                given=(q, window, far, chosen), more={"scale": 0.2, "sinks": some(4).float()}
            )


def score_and_choose(some: Numbers) -> Iterator[Case]:
    for seed, form in enumerate(_forms(some, "key")):
        for stride, k in ((1, 4), (3, 4), (1, 100)):
            parts = make_parts(some.seed + seed, longest=30, chunk=12, fewer=seed == 1)
            view, count = _entries(some, parts, form, 32, 0, stride), len(parts.query_positions)
            yield Case(given=(some(count, 3, 32), some(count, 3).float(), view, k))


# -- recurrences -----------------------------------------------------------------------------------


def _states(
    some: Numbers, widths: dict[str, tuple[int, ...]], headed: bool = True
) -> Iterator[tuple[int, Sequence[State]]]:
    """(entries of a step, fields of a stream of snapshots): ragged parts; one token each, from page
    to page; and the same where one request writes what another still reads.
    """
    fields = tuple(
        Field(name=n, shape=w, dtype="float32", shard="heads" if headed else "replicated")
        for n, w in widths.items()
    )
    stream = Stream(name="state", law=Snapshot(), fields=fields)
    for decode in (0.3, 1.0, 2.0):
        parts = make_parts(some.seed, longest=2 if decode < 1 else 9, chunk=70, decode=decode)
        reads = make_reads(some.seed, parts, Snapshot(), block=1 if decode == 2.0 else 4)
        if decode < 1:
            wanted = torch.rand(parts.num_entries, generator=some.generator).numpy() < 0.1
            wanted[parts.entry_start_loc[1:] - 1] = True
            reads.pages[~wanted] = -1
        if decode == 2.0:
            # Everybody writes where the next request reads.
            pages, rows = reads.find(np.arange(parts.num_requests), np.maximum(parts.start - 1, 0))
            reads.pages[:], reads.page_rows[:] = np.roll(pages, 1), np.roll(rows, 1)
        yield (
            parts.num_entries,
            states(make_view(some.seed, reads, stream, widths, begun=False), *widths),
        )


def _fields(case: Case) -> list[Tensor]:
    """The fields of all states that a case is given."""
    flat = [one for one in case.given if isinstance(one, State)]
    flat += [one for some in case.given if isinstance(some, list) for one in some]
    return [state.field.data for state in flat]


def conv(some: Numbers) -> Iterator[Case]:
    for headed in (True, False):
        widths = {"a": (2, 3, 3), "b": (1, 4, 3)} if headed else {"a": (10, 3)}
        for count, past in _states(some, widths, headed):
            bias = some(10) if headed else None
            yield Case(given=(some(count, 10), some(10, 4), bias, past), changes=_fields)


def _decay(some: Numbers, *shape: int) -> Tensor:
    return -torch.rand(shape, generator=some.generator).to(some.dtype)


def selective_scan(some: Numbers) -> Iterator[Case]:
    for count, (state,) in _states(some, {"recurrent": (6, 5)}):
        given = (some(count, 6), -_decay(some, count, 6), _decay(some, 6, 5))
        yield Case(given=(*given, some(count, 5), some(count, 5), state), changes=_fields)


def ssd_scan(some: Numbers) -> Iterator[Case]:
    for count, (state,) in _states(some, {"recurrent": (4, 3, 5)}):
        given = (some(count, 4, 3), -_decay(some, count, 4), _decay(some, 4))
        yield Case(given=(*given, some(count, 2, 5), some(count, 2, 5), state), changes=_fields)


def delta_scan(some: Numbers) -> Iterator[Case]:
    for channels in ((), (6,)):
        for count, (state,) in _states(some, {"recurrent": (4, 6, 5)}):
            keys = torch.nn.functional.normalize(some(2, count, 2, 6), dim=-1)
            beta = -_decay(some, count, 4)
            decay = _decay(some, count, 4, *channels)
            given = (*keys.unbind(0), some(count, 4, 5), decay, beta, state)
            yield Case(given=given, changes=_fields)


def decayed_scan(some: Numbers) -> Iterator[Case]:
    for count, (state,) in _states(some, {"recurrent": (3, 4, 5)}):
        q, k = some(2, count, 3, 4).unbind(0)
        yield Case(given=(q / 2, k / 2, some(count, 3, 5), _decay(some, 3), state), changes=_fields)


def feature_scan(some: Numbers) -> Iterator[Case]:
    for count, (sums, keys) in _states(some, {"recurrent": (3, 4, 5), "normaliser": (3, 4)}):
        for state in (sums, keys):
            # Sums of features are positive.
            state.field.data.abs_()
        q, k = some(2, count, 3, 4).unbind(0)
        yield Case(given=(q, k, some(count, 3, 5), sums, keys), changes=_fields)


def linear_scan(some: Numbers) -> Iterator[Case]:
    for count, (state,) in _states(some, {"recurrent": (9,)}):
        yield Case(given=(_decay(some, count, 9).exp(), some(count, 9), state), changes=_fields)


CASES: Final = MappingProxyType(
    {
        made.__name__: made
        for made in (
            norm,
            rotate,
            norm_rotate,
            store,
            gather,
            greedy,
            project,
            project_together,
            gated,
            project_heads,
            experts,
            attend,
            attend_latent,
            attend_sparse,
            score_and_choose,
            conv,
            selective_scan,
            ssd_scan,
            delta_scan,
            decayed_scan,
            feature_scan,
            linear_scan,
        )
    }
)
"""By the name of the op."""
