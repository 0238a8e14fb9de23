"""Attention over windows and compressed entries: any tiling and any way of reading gives the same,
and little is read.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.kinds.v4_csa.spec import V4CompressedSparse
from octavo.kinds.v4_hca.spec import V4HeavilyCompressed
from octavo.nn.decoder import resolve
from octavo.ops.paged import FieldView
from octavo.ops.torch import choice, sparse
from octavo.ops.torch.backend import TORCH
from tests.kinds.harness import Bench

SPARSE, HEAVY = V4CompressedSparse.examples()[0], V4HeavilyCompressed.examples()[1]


def hidden_of(length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(
        length, SPARSE.attention.hidden_size, generator=generator, dtype=torch.float64
    )


@pytest.mark.parametrize("kind", [SPARSE, HEAVY], ids=["sparse", "heavy"])
@pytest.mark.parametrize(
    "sizes",
    [
        {"COPY": -100},
        {"COPY": -100, "TILE_ELEMENTS": 1},
        {"COPY": 10_000, "TILE_SCORES": 1},
        {"COPY": 0, "TILE_QUERIES": 3, "TILE_ELEMENTS": 700},
    ],
    ids=str,
)
def test_sizes_of_tiles_change_nothing(
    kind: V4CompressedSparse | V4HeavilyCompressed,
    sizes: dict[str, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in sizes.items():
        for module in (sparse, choice):
            monkeypatch.setattr(module, name, value, raising=module is sparse)
    stride = kind.ratio
    bench = Bench(kind, (stride * 2, stride), requests=4)
    hidden = [hidden_of(length, length) for length in (60, 47, 33, 9)]
    with torch.no_grad():
        expected = [resolve(kind.reference)(bench.layer, part) for part in hidden]
    for steps in ((30, 1, 30, 5), (1, 40, 1, 1), (1, 1, 1, 1), (20, 1, 1, 1)):
        parts = []
        for request, (length, part) in enumerate(zip(steps, hidden, strict=True)):
            done = bench.maker.computed[request]
            parts.append((request, part[done : done + length]))
        places = [(request, bench.maker.computed[request]) for request, _ in parts]
        for (request, done), out in zip(places, bench.run(parts), strict=True):
            torch.testing.assert_close(
                out, expected[request][done : done + len(out)], atol=2e-5, rtol=2e-5
            )


def test_decoding_reads_as_many_entries_whatever_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of entries a decode reads those that were chosen, of the window its own length, whatever has
    been computed before.
    """
    kind = replace(SPARSE, attention=replace(SPARSE.attention, window=8))
    read: dict[int, list[int]] = {}
    for length in (60, 240):
        bench = Bench(kind, (kind.ratio * 2,), requests=1)
        bench.run([(0, hidden_of(length, 1))])
        sizes = read[length] = []
        spied = {name: getattr(FieldView, name) for name in ("take", "gather_head")}

        def spy(name: str, into: list[int] = sizes, of: dict[str, object] = spied) -> object:
            def wrapped(view: FieldView, *args: object) -> torch.Tensor:
                found: torch.Tensor = of[name](view, *args)  # type: ignore[operator]
                if found.shape[-1] == kind.attention.head_dim:
                    into.append(found.numel() // found.shape[-1])
                return found

            return wrapped

        with monkeypatch.context() as patch:
            for name in spied:
                patch.setattr(FieldView, name, spy(name))
            bench.run([(0, hidden_of(1, 2))])
    assert read[60] == read[240]
    assert max(read[240]) <= max(kind.index_topk, kind.attention.window - 1, 2 * kind.ratio)


def test_a_choice_is_the_same_in_any_company() -> None:
    """Equal scores go to the lowest numbers: index queries of zero make all of them equal."""
    bench = Bench(SPARSE, (SPARSE.ratio * 2,), requests=2)
    indexer = bench.layer.get_submodule("compressor.indexer")
    with torch.no_grad():
        indexer.q_b_proj.weight.zero_()
    found: list[torch.Tensor] = []

    def kept(*args: object) -> torch.Tensor:
        found.append(TORCH.score_and_choose(*args))  # type: ignore[arg-type]
        return found[-1]

    indexer.ops = replace(TORCH, score_and_choose=kept)
    bench.run([(0, hidden_of(44, 3)), (1, hidden_of(30, 4))])
    bench.run([(0, hidden_of(1, 5)), (1, hidden_of(1, 6))])
    assert found[-1].tolist() == [list(range(SPARSE.index_topk))] * 2
    assert found[0][43].tolist() == list(range(SPARSE.index_topk))
    assert found[0][11].tolist() == [0, 1, 2, -1, -1], (
        "entries closed by the token itself are seen, later ones are not"
    )
