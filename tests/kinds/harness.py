"""One layer of any kind over a real arena, driven by hand-made plans, with everything it must not
read made NaN.

Owns nothing a particular kind would know: a kind is its contract, its torch layer and its streams.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from octavo.base import NO_PAGE
from octavo.nn.decoder import build_mixer
from octavo.nn.step import Caches, Mixer
from octavo.ops.paged import CacheView, FieldView, StreamView
from octavo.ops.table import Ops
from octavo.ops.torch.backend import TORCH
from octavo.runner.arena import Arena
from octavo.runner.batch import make_reads, make_step
from octavo.sched.step import StepPlan
from octavo.spec.kind import Kind, LayerSpec, ModelSpec
from octavo.spec.stream import CacheDtypes, Stream
from tests.runner.plans import Chunk, PlanMaker, hand_layout

MIXER = "mixer"


def make_layer(kind: Kind, seed: int = 0) -> torch.nn.Module:
    """The kind's torch layer in float64 with random weights."""
    with torch.random.fork_rng():
        # Biases begin with what torch draws.
        torch.manual_seed(seed)
        layer = build_mixer(kind, torch.float64, "cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(layer.named_parameters()):
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            scale = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.2
            weight.copy_(noise * scale + (weight if weight.dim() == 1 else 0))
    return layer.double()


@dataclass
class Bench:
    """A one-layer model with its arena. blocks: block_tokens per group, in turn. ops: what views
    read and store by. dtypes: what the cache keeps in.
    """

    kind: Kind
    blocks: Sequence[int]
    requests: int
    shuffle: int = 0
    ops: Ops = TORCH
    dtypes: CacheDtypes | str = "float32"
    layer: torch.nn.Module = field(init=False)
    arena: Arena = field(init=False)
    maker: PlanMaker = field(init=False)

    def __post_init__(self) -> None:
        spec = ModelSpec(
            family="bench",
            layers=(LayerSpec(index=0, mixers=((MIXER, self.kind),)),),
            vocab_size=1,
            max_model_len=256,
        )
        self.layout = hand_layout(spec, self.blocks, dtype=self.dtypes)
        self.layer, self.arena = make_layer(self.kind), Arena(self.layout)
        self.maker = PlanMaker(self.layout, self.requests, shuffle=self.shuffle)
        self.arena.buffer.fill_(0xFF)

    @torch.no_grad()
    def run(self, parts: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """One step: (request, hidden [n, d]) each; returns the outputs [n, d] in the same order."""
        self.poison()
        plan = self.maker.plan([Chunk(request, [0] * hidden.shape[0]) for request, hidden in parts])
        step = make_step(plan, torch.device("cpu"))
        mixer: Mixer = self.layer  # type: ignore[assignment]
        out = mixer(torch.cat([hidden for _, hidden in parts]), step, self.caches(plan))
        return list(out.split([hidden.shape[0] for _, hidden in parts]))

    def caches(self, plan: StepPlan) -> Caches:
        """The layer's streams in this step."""
        parts, views = make_step(plan, torch.device("cpu")).parts, {}
        for group, step in zip(self.layout.groups, plan.groups, strict=True):
            reads = make_reads(parts, step, group.group.law)
            fields: dict[Stream, dict[str, FieldView]] = {}
            for slot in group.format.slots:
                made = fields.setdefault(slot.member.stream, {})
                made[slot.field.name] = self.arena.view(slot)
            for stream, found in fields.items():
                over = StreamView(stream, found)
                views[stream.name] = CacheView(over=over, reads=reads, ops=self.ops)
        return views

    def poison(self) -> None:
        """Make every byte of the arena NaN except the entries of ``needs(computed)`` of every
        request.
        """
        kept = []
        for number, group in enumerate(self.layout.groups):
            for slot in group.format.slots:
                view, stream = self.arena.view(slot), slot.member.stream
                for request, computed in enumerate(self.maker.computed):
                    entries = [
                        e
                        for a, b in stream.needs(computed)
                        for e in range(a // stream.stride, b // stream.stride)
                    ]
                    places = np.array(entries, dtype=np.int64)
                    pages = self._pages(number, request, places // slot.entries)
                    rows = torch.from_numpy(places % slot.entries)
                    kept.append((view, pages, rows, TORCH.gather(view.data, pages, rows)))
        self.arena.buffer.fill_(0xFF)
        for view, pages, rows, values in kept:
            TORCH.store([view.data], pages, rows, [values], torch.arange(len(rows)))

    def _pages(self, number: int, request: int, blocks: np.ndarray) -> Tensor:
        group, table = self.layout.groups[number], self.maker.tables[number]
        if group.fixed is None:
            found = table[request, blocks]
        else:
            found = table[
                request,
                np.where(
                    blocks < group.fixed,
                    blocks,
                    group.fixed + (blocks - group.fixed) % max(group.turning, 1),
                ),
            ]
        assert (found != NO_PAGE).all()
        return torch.from_numpy(found.astype(np.int64))
