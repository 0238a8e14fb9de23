"""From a plan to what layers see: every token, page and row is the plan's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octavo.kinds.full.spec import FullAttention
from octavo.kinds.sliding.spec import SlidingWindow
from octavo.runner.batch import make_reads, make_step
from octavo.spec.kind import LayerSpec, ModelSpec
from tests.runner.plans import Chunk, PlanMaker, hand_layout

KINDS = (FullAttention.examples()[0], SlidingWindow.examples()[2])


@pytest.mark.parametrize("seed", range(4))
def test_reads_are_the_plan(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers = tuple(LayerSpec(index=i, mixers=(("mixer", k),)) for i, k in enumerate(KINDS))
    spec = ModelSpec(family="x", layers=layers, vocab_size=9, max_model_len=256)
    layout = hand_layout(spec, (4, 3))
    maker = PlanMaker(layout, 3, shuffle=seed)
    for _ in range(4):
        chunks = [Chunk(i, [i] * int(rng.integers(1, 12)), samples=i != 1) for i in (2, 0, 1)]
        plan = maker.plan(chunks)
        step = make_step(plan, torch.device("cpu"))
        assert step.token_ids.tolist() == plan.token_ids.tolist()
        assert step.last.tolist() == [
            int(plan.query_start[i + 1]) - 1 for i in range(3) if plan.samples[i]
        ]
        positions = [p for a, b in zip(plan.start, plan.stop, strict=True) for p in range(a, b)]
        assert step.positions.tolist() == step.parts.query_positions.tolist() == positions
        assert step.parts.stop.tolist() == plan.stop.tolist()
        for group, named in zip(plan.groups, layout.groups, strict=True):
            reads = make_reads(step.parts, group, named.group.law)
            assert reads.parts is step.parts and reads.law == named.group.law
            assert reads.fresh.tolist() == group.fresh.tolist()
            blocks = np.arange(40)
            if group.fixed is not None:
                assert reads.columns(blocks).tolist() == [group.column(b) for b in blocks.tolist()]
            stored = {
                int(e): (int(p), int(r))
                for e, p, r in zip(
                    reads.stored.entries, reads.stored.pages, reads.stored.rows, strict=True
                )
            }
            assert stored == {
                token: (int(group.write_page[token]), int(group.write_row[token]))
                for token in range(plan.num_tokens)
                if group.write_page[token] >= 0
            }
