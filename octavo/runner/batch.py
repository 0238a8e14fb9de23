"""From a step plan to what layers and ops see of it, once per step.

Owns the translation. Knows plans and laws (for what a query sees); knows no kinds.
"""

from __future__ import annotations

import numpy as np
import torch

from octavo.nn.step import Step
from octavo.ops.reads import Parts, Reads, on_device
from octavo.sched.step import GroupStep, StepPlan
from octavo.spec.law import Law


def make_step(plan: StepPlan, device: torch.device) -> Step:
    """What all layers share of a plan: every token is an entry and has its query."""
    return Step(
        token_ids=on_device(plan.token_ids, device),
        last=on_device(plan.query_start[1:][plan.samples] - 1, device),
        parts=Parts.of(plan.start, plan.query_start, device),
    )


def make_reads(parts: Parts, group: GroupStep, law: Law) -> Reads:
    """What a plan says of one group, whose streams live by ``law``."""
    return Reads(
        parts=parts,
        law=law,
        table=group.table,
        rows=group.rows.astype(np.int64),
        fixed=group.fixed,
        turning=group.turning,
        block_tokens=group.block_tokens,
        pages=group.write_page,
        page_rows=group.write_row,
        fresh=np.ascontiguousarray(group.fresh, dtype=np.bool_),
    )
