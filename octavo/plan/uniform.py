"""What the same model would cost if every layer were charged as full attention.

Owns that charge: an entry for every token, for ever, of what a layer remembers longest. That is all
its growing streams, with no strides; else those with the longest span. A layer without anything per
token, such as a recurrent one, is charged as the model's largest layer that has; where no layer
has, as attention with as many keys and values as the hidden size. A layer that reads another's
cache is charged like that one. Layers that mix no tokens cost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.plan.report import UniformPlan
from octavo.spec.kind import count
from octavo.spec.stream import DTYPE_BYTES, Stream

if TYPE_CHECKING:
    from octavo.plan.planner import Model


def compare(model: Model, context: int, *, memory: int) -> UniformPlan:
    """Bytes per token and at ``context``, and requests of ``context`` tokens in ``memory`` bytes,
    unrounded.
    """
    streams: dict[int, list[Stream]] = {}
    for member in (member for group in model.groups for member in group.members):
        streams.setdefault(member.layer, []).append(member.stream)
    rates = {layer: entry_bytes(kept) for layer, kept in streams.items()}
    usual = (
        max(rates.values(), default=0)
        or 2 * count(model.normal, "hidden_size") * DTYPE_BYTES[model.dtypes.conv_inputs]
    )
    charged = sum(
        rates.get(layer.index if layer.shares is None else layer.shares, 0) or usual
        for layer in model.spec.layers
        if layer.mixers
    )
    return UniformPlan(
        bytes_per_token=charged, bytes=charged * context, requests=memory / (charged * context)
    )


def entry_bytes(streams: Sequence[Stream]) -> int:
    """Bytes of one entry of what a layer remembers longest; 0 where it keeps states only, which no
    token leaves behind.
    """
    growing = [stream for stream in streams if stream.law.prefix is None]
    if growing:
        return sum(stream.entry_bytes for stream in growing)
    kept = [stream for stream in streams if not stream.law.reads_before_writing]
    longest = max((stream.law.span for stream in kept), default=0)
    return sum(stream.entry_bytes for stream in kept if stream.law.span == longest)
