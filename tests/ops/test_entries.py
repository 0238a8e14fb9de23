"""Quantised latents and index keys: what a layer computes depends on the codec alone, not on how
the work is cut.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from octavo.kinds.dsa.spec import SparseLatent
from octavo.kinds.mla.spec import MultiHeadLatent
from octavo.spec.kind import Kind
from octavo.spec.stream import CacheDtypes
from tests.kinds.harness import Bench

LENGTH = 45
SPARSE = replace(SparseLatent.examples()[0], index_topk=40)
DTYPES = (
    ("float8_e4m3fn", None),
    ("float8_e4m3fn", "float4_e2m1fn_x2"),
    ("bfloat16", "float8_e4m3fn"),
)


def computed(kind: Kind, dtypes: CacheDtypes, hidden: Tensor, chunk: int) -> Tensor:
    """The layer's output in chunks over a cache in these dtypes, whose bytes are NaN where nothing
    is stored.
    """
    bench = Bench(kind, (4,), requests=1, shuffle=1, dtypes=dtypes)
    return torch.cat([bench.run([(0, part)])[0] for part in hidden.split(chunk)])


@pytest.mark.parametrize(
    "kind", [MultiHeadLatent.examples()[0], SPARSE, replace(SPARSE, index_topk=6)]
)
@pytest.mark.parametrize(("kv", "indexer"), DTYPES)
def test_no_way_of_cutting_shows(kind: Kind, kv: str, indexer: str | None) -> None:
    hidden = torch.randn(
        LENGTH, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    dtypes = CacheDtypes(kv=kv, indexer=indexer)
    whole = computed(kind, dtypes, hidden, LENGTH)
    for chunk in (1, 4, 7, 23):
        torch.testing.assert_close(
            computed(kind, dtypes, hidden, chunk), whole, rtol=1e-9, atol=1e-9
        )


@pytest.mark.parametrize("kind", [MultiHeadLatent.examples()[0], SPARSE])
@pytest.mark.parametrize(("kv", "indexer"), DTYPES)
def test_quantised_entries_stay_near_plain_ones(kind: Kind, kv: str, indexer: str | None) -> None:
    hidden = torch.randn(
        LENGTH, 48, generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    plain = computed(kind, CacheDtypes(kv="float32"), hidden, 7)
    error = computed(kind, CacheDtypes(kv=kv, indexer=indexer), hidden, 7) - plain
    assert 1e-9 < error.std() < (0.05 if kv == "float8_e4m3fn" else 0.02) * plain.std()
