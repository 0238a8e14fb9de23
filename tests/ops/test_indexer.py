"""Index scores and choices against one query, head and key at a time, and sorted lists."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from octavo.ops.oracles.attention import score_and_choose as oracle
from octavo.ops.paged import CacheView
from octavo.ops.torch import choice
from octavo.ops.torch.choice import choose, index_scores, score_and_choose
from octavo.spec.law import Everything
from octavo.spec.stream import Field, Stream
from tests.ops.worlds import make_parts, make_reads, make_view


def parts(n: int, heads: int, dim: int, length: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(n, heads, dim, generator=generator, dtype=torch.float64),
        torch.randn(n, heads, generator=generator, dtype=torch.float64),
        torch.randn(length, dim, generator=generator, dtype=torch.float64),
    )


def plain_scores(q: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    rows = []
    for query in range(q.shape[0]):
        row = []
        for key in keys if keys.dim() == 2 else keys[query]:
            row.append(
                sum(
                    float(w) * max(0.0, float(vector @ key))
                    for w, vector in zip(weights[query], q[query], strict=True)
                )
            )
        rows.append(row)
    return torch.tensor(rows, dtype=torch.float64)


def plain_choice(scores: Tensor, visible: Tensor, k: int) -> list[list[int]]:
    found = []
    for row, count in zip(scores.tolist(), visible.tolist(), strict=True):
        best = sorted(range(count), key=lambda number: (-row[number], number))[:k]
        found.append(sorted(best) + [-1] * (min(k, len(row)) - len(best)))
    return found


@pytest.mark.parametrize("tile", [1, 30, 1 << 22])
@pytest.mark.parametrize("own", [False, True])
def test_scores_in_any_tiles(monkeypatch: pytest.MonkeyPatch, tile: int, own: bool) -> None:
    monkeypatch.setattr(choice, "TILE_PRODUCTS", tile)
    q, weights, keys = parts(5, 3, 4, 23, 0)
    if own:
        keys = torch.stack([keys * (i + 1) for i in range(5)])
    torch.testing.assert_close(index_scores(q, weights, keys), plain_scores(q, weights, keys))


def test_scores_are_wide_whatever_the_cache_keeps() -> None:
    q, weights, keys = parts(2, 3, 4, 9, 1)
    narrow = index_scores(q.bfloat16(), weights.bfloat16(), keys.bfloat16())
    assert narrow.dtype == torch.float32
    wide = plain_scores(
        q.bfloat16().double(), weights.bfloat16().double(), keys.bfloat16().double()
    )
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 5, 16, 17, 40])
@pytest.mark.parametrize("values", [1, 2, 3, 1000])
def test_ties_go_to_the_lowest_number(k: int, values: int) -> None:
    """With few different scores nearly all are ties; the same entries are chosen however many there
    are behind them.
    """
    generator = torch.Generator().manual_seed(k)
    scores = torch.randint(values, (60, 17), generator=generator).float()
    visible = torch.randint(1, 18, (60,), generator=generator)
    expected = plain_choice(scores, visible, k)
    assert choose(scores.clone(), visible, k).tolist() == expected
    longer = torch.cat((scores, torch.full((60, 9), float("nan"))), dim=1)
    found = choose(longer, visible, k).tolist()
    assert [[n for n in row if n >= 0] for row in found] == [
        [n for n in row if n >= 0] for row in expected
    ]


def test_zeros_that_the_relu_makes_are_equal_whatever_their_sign() -> None:
    """Two negative products of weights of either sign: 0 and -0 score alike, so positions
    decide.
    """
    q, keys = torch.ones(1, 1, 1), torch.tensor([[-1.0], [-2.0], [-3.0], [4.0]])
    for weight in (1.0, -1.0):
        scores = index_scores(q, torch.tensor([[weight]]), keys)
        expected = [[0, 3]] if weight > 0 else [[0, 1]]
        assert choose(scores, torch.tensor([4]), 2).tolist() == expected


def scene(seed: int, stride: int = 1) -> tuple[Tensor, Tensor, CacheView]:
    """(queries, weights, index keys)."""
    parts_ = make_parts(seed, fewer=seed % 2 == 1)
    reads = make_reads(seed, parts_, Everything(), block=stride * 3)
    field = Field(name="key", shape=(8,), dtype="float32")
    stream = Stream(name="index", law=Everything(), fields=(field,), stride=stride)
    view = make_view(seed, reads, stream, {"key": (8,)})
    q, weights, _ = parts(len(parts_.query_positions), 4, 8, 1, seed)
    return q, weights, view


@pytest.mark.parametrize("stride", [1, 4])
@pytest.mark.parametrize(("scores", "elements"), [(1, 1), (64, 60), (1 << 23, 1 << 22)])
def test_any_tiles_choose_alike(
    monkeypatch: pytest.MonkeyPatch, stride: int, scores: int, elements: int
) -> None:
    """What lies behind a query is NaN: never chosen, and no reason to choose otherwise."""
    monkeypatch.setattr(choice, "TILE_SCORES", scores)
    monkeypatch.setattr(choice, "TILE_ELEMENTS", elements)
    for seed in range(4):
        q, weights, view = scene(seed, stride)
        for k in (1, 6, 100):
            found = score_and_choose(q, weights, view, k)
            assert found.tolist() == oracle(q, weights, view, k).tolist()
