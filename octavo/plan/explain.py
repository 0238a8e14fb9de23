"""A model's layers in plain words, with the arithmetic.

Owns the wording, and the two worked examples that people know. Every number is a plan's or a law's;
none is written down here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from octavo.config import format_size
from octavo.plan.report import Plan, StreamPlan
from octavo.plan.words import Alike, alike, decided
from octavo.spec.law import Everything, Law, Snapshot, Window
from octavo.spec.stream import Field, Stream

MEANINGS: Final = {
    "kv": "keys and values, head by head: ordinary attention, not MLA",
    "latent": "one latent vector and one rotated key that all heads share: this is MLA",
    "index": (
        "index keys, by which the entries to be read are chosen: sparse attention (DSA); any may be"
        " chosen later"
    ),
    "window": "entries of single tokens that are key and value at once, for all heads",
    "compressed": "one entry for several tokens together, key and value at once",
    "compressor": "what the compressor must still see of tokens whose entry is not finished",
    "index_compressor": "the same for the compressor of index keys",
    "state": "a state that every token overwrites: no KV cache",
}
"""What streams of these names hold; others are explained by their fields alone."""


def walk(plan: Plan) -> str:
    """The walk through all layers, then what they come to, then the examples."""
    parts = [_opening(plan), *(_layers(each, plan) for each in alike(plan)), _sum(plan), examples()]
    return "\n\n".join(parts)


def _opening(plan: Plan) -> str:
    cached = sum(bool(layer.streams) for layer in plan.layers)
    return (
        f"{plan.model} ({plan.family}) has {len(plan.layers)} layers; {cached} keep something of"
        f" the past. Below is what they\nkeep after {plan.context:,} tokens of one"
        f" request{_device(plan)}. What no layer needs any more is let go at once."
    )


def _device(plan: Plan) -> str:
    return f", on one of {plan.memory.tp} devices" if plan.memory.tp > 1 else ""


def _layers(each: Alike, plan: Plan) -> str:
    several = len(each.layers) > 1
    lines = [f"{'Layers' if several else 'Layer'} {each.indices} ({len(each.layers)}): {each.name}"]
    lines.append(f"  {each.first.about}")
    lines.append(f"  Does it need a KV cache? {_need(each)}")
    for stream in each.first.streams:
        lines += _stream(stream, plan.context, len(each.layers))
    if why := decided(each.first.decided_by):
        lines.append(f"  Decided by {why}")
    return "\n".join(lines)


def _need(each: Alike) -> str:
    streams = each.first.streams
    if each.first.shares is not None:
        return f"None of its own: it {each.words}."
    if not streams:
        return "No: it mixes no tokens."
    if all(stream.state for stream in streams):
        return "No: a state of one size, however long the text."
    grows, stays = (
        any(stream.grows for stream in streams),
        any(not stream.grows for stream in streams),
    )
    if grows:
        return "Yes, and it grows with every token" + (
            "; a part of it stays bounded." if stays else "."
        )
    return "Yes, but a bounded one: what leaves it is let go."


def _stream(stream: StreamPlan, context: int, layers: int) -> Iterator[str]:
    meaning = MEANINGS.get(stream.name)
    yield f"  {stream.name} ({stream.law}){': ' + meaning if meaning else ''}"
    fields = " + ".join(
        f"{field.name} {'x'.join(map(str, field.shape))} {field.dtype}" for field in stream.fields
    )
    yield f"    one entry: {fields} = {stream.bytes_per_entry:,} B"
    count = (
        stream.entries if stream.entries_at_most is None else min(stream.entries_at_most, context)
    )
    total = count * stream.bytes_per_entry
    yield (
        f"    {_counted(stream, count, context)} x {stream.bytes_per_entry:,} B ="
        f" {format_size(total)} per layer, x {layers} = {format_size(total * layers)}"
    )


def _counted(stream: StreamPlan, count: int, context: int) -> str:
    if stream.state:
        return f"{count} state"
    if stream.grows:
        division = f"{context:,} / {stream.stride} = " if stream.stride > 1 else ""
        return f"{division}{count:,} entries"
    return f"at most {count:,} entries" + (
        f" ({stream.entries:,} now)" if count != stream.entries else ""
    )


def _sum(plan: Plan) -> str:
    at = plan.bytes_at[plan.context]
    lines = [
        (
            f"Together after {plan.context:,} tokens: {format_size(at.growing)} that grows +"
            f" {format_size(at.bounded)} that does not = {format_size(at.growing + at.bounded)}."
        ),
        (
            f"A further token adds {plan.slope_bytes_per_token:,.10g} B for ever; the rest is at"
            f" most {format_size(plan.fixed_bytes_per_request)}, however long the text."
        ),
        (
            f"In pages of the arena that is {format_size(at.allocated)}:"
            f" {at.allocated / at.ideal - 1:.1%} more than the {format_size(at.ideal)} needed at"
            " the worst moment."
        ),
    ]
    if plan.uniform is not None:
        lines.append(
            "Were every layer charged as full attention, it would be"
            f" {format_size(plan.uniform.bytes)}: {plan.uniform.bytes / at.allocated:.2f} times as"
            " much."
        )
    return "\n".join(lines)


def _entries(law: Law, n: int, stride: int = 1) -> int:
    """Entries that a stream of one byte each keeps after ``n`` tokens, token n included where it
    has a window.
    """
    stream = Stream(
        name="example", law=law, fields=(Field(name="x", shape=(1,), dtype="uint8"),), stride=stride
    )
    now = 1 if law.prefix is not None and not law.reads_before_writing else 0
    return stream.bytes_needed(n) + now


def examples() -> str:
    """Two examples by which the sizes can be followed by hand."""
    return "\n".join(("Two examples to follow by hand", "", *_mixed(), "", *_compressed()))


def _mixed(n: int = 100_000, layers: int = 10, window: int = 4096) -> Iterator[str]:
    full, near, state = (_entries(law, n) for law in (Everything(), Window(window), Snapshot()))
    kept, uniform = layers * (full + near), 3 * layers * n
    yield (
        f"{n:,} tokens over {layers} layers with full attention, {layers} with a window of"
        f" {window:,}, {layers} with Mamba:"
    )
    yield f"  full:   {layers} x {full:,} = {layers * full:,} entries; nothing is ever let go"
    yield (
        f"  window: {layers} x {near:,} = {layers * near:,} entries; the token itself is among the"
        f" {near:,}"
    )
    yield f"  Mamba:  {layers} x {state} state; no entry per token at all"
    factor = f"{uniform / kept:.2f} times as many"
    yield (
        f"  together {kept:,} entries and {layers * state} states; {3 * layers} full layers would"
        f" keep {uniform:,}, {factor}"
    )


def _compressed(
    n: int = 1 << 20, ratios: Sequence[int] = (4, 128), window: int = 128
) -> Iterator[str]:
    entries = [_entries(Everything(), n, ratio) for ratio in ratios]
    yield (
        f"{n:,} tokens through compressed attention with a window of {window} beside it"
        " (DeepSeek-V4):"
    )
    for ratio, count in zip(ratios, entries, strict=True):
        yield (
            f"  c{ratio}a: {n:,} / {ratio} = {count:,} entries, each of {ratio} tokens together,"
            " and kept for ever"
        )
    yield (
        f"  window: {_entries(Window(window), n)} entries, the token itself among them, however"
        " long the text"
    )
    kept, full = sum(entries), len(ratios) * n
    yield (
        f"  a layer of each keeps {kept:,} entries where {len(ratios)} full ones would keep"
        f" {full:,}: {kept / full:.1%}"
    )
