"""Latent attention over pages, in every way and any tiles, against one query and head at a time;
and what it reads.

Everything outside the stored entries is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from octavo.kinds.mla.spec import MultiHeadLatent
from octavo.ops.latents import Heads, Queries
from octavo.ops.paged import CacheView, FieldView, StreamView
from octavo.ops.table import Ops
from octavo.ops.torch import latent as module
from octavo.ops.torch.backend import TORCH
from octavo.ops.torch.latent import attend_latent, way_of
from octavo.spec.latent import LatentParams
from tests.kinds.harness import Bench
from tests.runner.plans import Chunk

HEADS, RANK, ROPE, NOPE, VALUE = 3, 24, 8, 12, 10
KIND = MultiHeadLatent(
    latent=LatentParams(
        hidden_size=16,
        num_heads=HEADS,
        kv_lora_rank=RANK,
        rope_dim=ROPE,
        nope_dim=NOPE,
        value_dim=VALUE,
        q_lora_rank=None,
    )
)
CONTEXTS = ((0, 9), (37, 1), (30, 6), (33, 1), (5, 17), (0, 1))
"""(tokens in pages before the step, tokens of the step) of each request."""


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Scene:
    """Requests with random entries in pages, and a step's queries over them."""

    contexts: Sequence[tuple[int, int]] = CONTEXTS
    k: int | None = None

    def __post_init__(self) -> None:
        self.bench = Bench(KIND, (4,), requests=len(self.contexts), shuffle=3)
        lengths = [start + count for start, count in self.contexts]
        # As float32, as the cache holds them.
        self.latents = [
            random(length, RANK, seed=i).float().double() for i, length in enumerate(lengths)
        ]
        self.ropes = [
            random(length, ROPE, seed=50 + i).float().double() for i, length in enumerate(lengths)
        ]
        up = random(HEADS, NOPE + VALUE, RANK, seed=99) * RANK**-0.5
        self.heads = Heads.of(up, NOPE, 0.3, TORCH)
        before = [(i, 0, start) for i, (start, _) in enumerate(self.contexts) if start]
        self.step([(i, first, last) for i, first, last in before])
        self.bench.poison()
        count = sum(count for _, count in self.contexts)
        places = [
            (i, start + offset)
            for i, (start, length) in enumerate(self.contexts)
            for offset in range(length)
        ]
        self.places = places
        self.plain, self.rotated = (
            random(count, HEADS, NOPE, seed=7),
            random(count, HEADS, ROPE, seed=8),
        )
        self.chosen = (
            None
            if self.k is None
            else torch.stack([self.choice(place, self.k) for _, place in places])
        )

    def choice(self, place: int, k: int) -> Tensor:
        """Random tokens up to ``place``, ascending, -1 behind them."""
        order = torch.randperm(place + 1, generator=torch.Generator().manual_seed(place))
        found = order[:k].sort().values
        return torch.cat((found, found.new_full((k - found.numel(),), -1)))

    def step(self, parts: Sequence[tuple[int, int, int]]) -> CacheView:
        """Store entries ``[first, last)`` of each request; the step's view."""
        plan = self.bench.maker.plan([Chunk(i, [0] * (last - first)) for i, first, last in parts])
        view = self.bench.caches(plan)["latent"]
        latent = torch.cat([self.latents[i][first:last] for i, first, last in parts])
        view.keep(
            latent=latent,
            rope=torch.cat([self.ropes[i][first:last] for i, first, last in parts]),
        )
        return view

    def own(self) -> CacheView:
        """The step whose queries are asked."""
        return self.step(
            [(i, start, start + count) for i, (start, count) in enumerate(self.contexts)]
        )

    def attend(self, view: CacheView) -> Tensor:
        queries = Queries(plain=self.plain, rotated=self.rotated, chosen=self.chosen)
        return attend_latent(queries, view, self.heads)

    def expected(self) -> Tensor:
        out = torch.zeros(len(self.places), HEADS, VALUE, dtype=torch.float64)
        for query, (request, place) in enumerate(self.places):
            seen = (
                list(range(place + 1))
                if self.chosen is None
                else [n for n in self.chosen[query].tolist() if n >= 0]
            )
            for head in range(HEADS):
                made = self.latents[request][seen] @ self.heads.up[head].T
                scores = (
                    made[:, :NOPE] @ self.plain[query, head]
                    + self.ropes[request][seen] @ self.rotated[query, head]
                )
                out[query, head] = torch.softmax(scores * self.heads.scale, dim=0) @ made[:, NOPE:]
        return out


CHOICES = (1, 5, 12, 60)
WAYS = [(way, k) for way in ("expand", "absorb") for k in (None, *CHOICES)] + [
    ("gather", k) for k in CHOICES
]


@pytest.mark.parametrize(("way", "k"), WAYS)
@pytest.mark.parametrize("tile", [1, 1 << 20])
def test_every_way_is_the_same(
    monkeypatch: pytest.MonkeyPatch, way: str, k: int | None, tile: int
) -> None:
    for name in ("TILE_EXPANDED", "TILE_GATHERED", "TILE_SCORES"):
        monkeypatch.setattr(module, name, tile)
    monkeypatch.setattr(module, "way_of", lambda *_, **__: way)
    scene = Scene(k=k)
    torch.testing.assert_close(scene.attend(scene.own()), scene.expected(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("piece", [1, 24, 4096])
def test_the_way_that_is_least_work_is_the_same_too(
    monkeypatch: pytest.MonkeyPatch, piece: int, k: int | None
) -> None:
    monkeypatch.setattr(module, "PIECE_TOKENS", piece)
    scene = Scene(k=k)
    torch.testing.assert_close(scene.attend(scene.own()), scene.expected(), rtol=1e-9, atol=1e-9)


def test_bfloat16_entries_and_queries_stay_near() -> None:
    scene = Scene(k=5)
    scene.plain, scene.rotated = scene.plain.bfloat16(), scene.rotated.bfloat16()
    scene.heads = Heads.of(scene.heads.up.bfloat16(), NOPE, 0.3, TORCH)
    out = scene.attend(scene.own())
    assert out.dtype == torch.bfloat16
    scene.heads = Heads.of(scene.heads.up.double(), NOPE, 0.3, TORCH)
    scene.plain, scene.rotated = scene.plain.double(), scene.rotated.double()
    assert (out.double() - scene.expected()).abs().max() < 0.05


V3 = Heads.of(torch.empty(1, 256, 512), 128, 1.0, TORCH)


def test_which_way_is_least_work() -> None:
    """The sizes of DeepSeek-V3: chunks of a long prompt, whole prompts, single tokens; and of V3.2
    with 2,048 chosen.
    """

    def way(queries: int, start: int, chosen: int | None = None) -> str:
        return way_of(V3, queries=queries, start=start, chosen=chosen, rope=64)

    assert [way(queries, 1 << 20) for queries in (1, 170, 171, 2048)] == [
        "absorb",
        "absorb",
        "expand",
        "expand",
    ]
    assert [way(queries, 0) for queries in (2, 16, 4096)] == ["expand"] * 3, (
        "keys of own tokens only are few"
    )
    assert way(2048, 4900, 2048) == "expand" and way(2048, 5000, 2048) == "gather"
    assert [way(queries, 1 << 17, 2048) for queries in (1, 100, 2048)] == ["gather"] * 3
    assert way(1, 2000, 2048) == "absorb", "all are chosen"


def counting(field: FieldView, read: list[int]) -> FieldView:
    """The same field; every copy out of it adds its elements to ``read``."""

    class Counting(FieldView):
        def gather_head(self, pages: Tensor, head: int) -> Tensor:
            found = super().gather_head(pages, head)
            read.append(found.numel())
            return found

        def take(self, pages: Tensor, rows: Tensor, ops: Ops) -> Tensor:
            found = super().take(pages, rows, ops)
            read.append(found.numel())
            return found

    return Counting(field.data, field.headed)


@pytest.mark.parametrize("contexts", [((40, 1),), ((200, 1),), ((200, 1), (90, 1)), ((220, 3),)])
def test_sparse_reads_do_not_grow_with_the_context(contexts: tuple[tuple[int, int], ...]) -> None:
    scene, read = Scene(contexts=contexts, k=5), list[int]()
    view = scene.own()
    fields = {name: counting(field, read) for name, field in view.fields.items()}
    scene.attend(replace(view, over=StreamView(view.over.stream, fields)))
    assert sum(read) == len(scene.places) * 5 * (RANK + ROPE)


def test_entries_that_are_not_chosen_are_not_even_read() -> None:
    scene = Scene(contexts=((60, 1),), k=5)
    view, expected = scene.own(), scene.expected()
    assert scene.chosen is not None
    pages, rows = view.reads.locate(torch.zeros(61, dtype=torch.int64), torch.arange(61))
    lost = torch.ones(61, dtype=torch.bool).index_fill_(0, scene.chosen[0], False)
    for field in view.fields.values():
        field.data[pages[lost], :, rows[lost]] = float("nan")
    torch.testing.assert_close(scene.attend(view), expected, rtol=1e-9, atol=1e-9)
