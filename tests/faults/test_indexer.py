"""Layers that choose what they read: the choice is made where nobody has keys of their own, at any
length, and counted.

Protects: sharing a choice never turns sparse attention off; a long context is indexed whole; index
    keys are charged.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from octavo.kinds.dsa.reference import sparse_latent
from octavo.kinds.dsa.spec import SparseLatent
from octavo.nn.latent import dense_latent
from octavo.nn.step import Step
from octavo.ops.latents import Heads, Queries
from octavo.ops.torch.backend import TORCH
from octavo.runner.arena import Arena
from octavo.runner.batch import make_step
from octavo.spec.group import make_groups
from octavo.spec.kind import LayerSpec, ModelSpec
from tests.kinds.harness import Bench
from tests.runner.plans import Chunk, PlanMaker, hand_layout

FULL = SparseLatent.examples()[0]
SHARED = replace(FULL, shares_index=True)


def hidden_of(layer: torch.nn.Module, length: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, layer.hidden_size, generator=generator, dtype=torch.float64)


def chosen_by(bench: Bench, hidden: torch.Tensor) -> list[list[int]]:
    """The tokens that each query of a layer with an indexer takes, one score at a time."""
    layer = bench.layer
    step = Step.alone(hidden.shape[0])
    keys = layer.indexer.key(hidden, step)
    q, weights = layer.indexer.queries(hidden, layer.source(hidden), step)
    found = []
    for query in range(hidden.shape[0]):
        scores = [
            float(weights[query] @ torch.relu(q[query] @ keys[token])) for token in range(query + 1)
        ]
        found.append(
            sorted(
                sorted(range(query + 1), key=lambda token: (-scores[token], token))[
                    : FULL.index_topk
                ]
            )
        )
    return found


@pytest.mark.parametrize("chunk", [1, 7, 45])
@torch.no_grad()
def test_a_layer_that_borrows_a_choice_still_attends_to_that_choice_only(chunk: int) -> None:
    """The second layer has no index keys; what it attends to is what the first chose in the same
    step, not everything.
    """
    first, second = Bench(FULL, (4,), requests=1), Bench(SHARED, (4,), requests=1, shuffle=2)
    hidden, other = hidden_of(first.layer, 45, 1), hidden_of(second.layer, 45, 2)
    expected = dense_latent(second.layer, other, chosen_by(first, hidden))  # type: ignore[arg-type]
    assert (expected - dense_latent(second.layer, other)).abs().max() > 0.01, "the choice matters"  # type: ignore[arg-type]
    alone = sparse_latent(first.layer, hidden)  # type: ignore[arg-type]
    for low in range(0, 45, chunk):
        part = slice(low, min(low + chunk, 45))
        count = part.stop - low
        plan = first.maker.plan([Chunk(0, [0] * count)])
        step = make_step(plan, torch.device("cpu"))
        own = first.layer(hidden[part], step, first.caches(plan))
        torch.testing.assert_close(own, alone[part], atol=2e-5, rtol=2e-5)
        found = second.layer(
            other[part], step, second.caches(second.maker.plan([Chunk(0, [0] * count)]))
        )
        torch.testing.assert_close(found, expected[part], atol=2e-5, rtol=2e-5)


def test_a_choice_never_outlives_its_step() -> None:
    bench = Bench(SHARED, (4,), requests=1)
    with pytest.raises(KeyError, match="nearest indexer"):
        bench.run([(0, hidden_of(bench.layer, 3, 1))])


def test_a_context_of_32768_tokens_is_indexed_whole() -> None:
    """Scores that single out tokens all over the context: the choice finds them, and attention
    reads them, at any place.
    """
    length, k = 32768, 6
    spec = ModelSpec(
        family="x",
        layers=(LayerSpec(index=0, mixers=(("mixer", FULL),)),),
        vocab_size=1,
        max_model_len=length,
    )
    bench = Bench(FULL, (4,), requests=1)
    bench.layout = replace(hand_layout(spec, (256,), num_pages=160), max_model_len=length)
    bench.maker, bench.arena = PlanMaker(bench.layout, 1, shuffle=1), Arena(bench.layout)
    bench.arena.buffer.fill_(0xFF)
    wanted = [0, 255, 256, 20000, 32766, 32767]
    keys = torch.randn(length, FULL.index_dim, generator=torch.Generator().manual_seed(1)) * 0.01
    keys[wanted] = 1.0
    views = bench.caches(bench.maker.plan([Chunk(0, [0] * (length - 1))]))
    latent = torch.randn(length, 24, generator=torch.Generator().manual_seed(2))
    rope = torch.zeros(length, 8)
    views["latent"].keep(latent=latent[:-1], rope=rope[:-1])
    views["index"].keep(key=keys[:-1])
    views = bench.caches(bench.maker.plan([Chunk(0, [0])]))
    views["latent"].keep(latent=latent[-1:], rope=rope[-1:])
    views["index"].keep(key=keys[-1:])
    q = torch.ones(1, 16, FULL.index_dim)
    chosen = TORCH.score_and_choose(q, torch.ones(1, 16), views["index"], k)
    assert chosen.tolist() == [wanted]
    heads = Heads.of(bench.layer._heads().up.float(), 12, 1.0, TORCH)
    queries = Queries(plain=torch.zeros(1, 4, 12), rotated=torch.zeros(1, 4, 8), chosen=chosen)
    mean = torch.einsum("r,hvr->hv", latent[wanted].mean(0), heads.up[:, 12:])
    torch.testing.assert_close(
        TORCH.attend_latent(queries, views["latent"], heads)[0], mean, atol=1e-5, rtol=1e-5
    )


def test_index_keys_are_charged() -> None:
    """Bytes of a token are those of its latent, and of its index key where the layer has an
    indexer, planned as allocated.
    """
    own, shared = ((LayerSpec(index=0, mixers=(("mixer", kind),)),) for kind in (FULL, SHARED))
    sizes = []
    for layers in (own, shared):
        (group,) = make_groups(
            ModelSpec(family="x", layers=layers, vocab_size=1, max_model_len=64), "bfloat16"
        )
        sizes.append(group.page_format(64).page_bytes)
    assert sizes[0] - sizes[1] == 64 * FULL.index_dim * 2
    assert sizes[1] == 64 * (24 + 8) * 2
