"""What is planned, charged, printed and held are one set of numbers; and what goes first when
memory runs short.

Protects: closed forms of bytes per request, no cost that grows with budgets or seats, eviction that
    never strands a prefix.
"""

from __future__ import annotations

import pytest

from octavo.base import CapacityError
from octavo.cache.layout import CPU, GPU, ideal_bytes, request_bytes, request_pages, solve_layout
from octavo.kinds.full.spec import FullAttention
from octavo.memory.layout import ArenaLayout, solve_arena, waste
from octavo.memory.pool import PagePool
from octavo.sched.step import StepPlan
from octavo.sim.model import ToyGroup
from octavo.spec.group import Group, Member, make_groups
from octavo.spec.kind import LayerSpec, ModelSpec
from octavo.spec.law import Everything, Snapshot, Window
from octavo.spec.stream import CacheDtypes, Field, Stream
from tests.cache.drive import gemma_layout
from tests.cache.drive import group as kv_group
from tests.faults.toy import ALL_LAWS, Toy, chunked, full, layout_of, state, tail, window

KIB = 1024


def one_stream(
    layer: int,
    law: Everything | Window | Snapshot,
    size: int,
    *,
    dtype: str = "uint8",
    name: str = "x",
) -> Member:
    stream = Stream(name=name, law=law, fields=(Field(name=name, shape=(size,), dtype=dtype),))
    return Member(layer=layer, mixer="x", stream=stream)


@pytest.mark.parametrize(
    "groups",
    [
        (full(),),
        (window(8),),
        (full(), window(8)),
        (chunked(6),),
        (tail(4, 4),),
        (state(),),
        ALL_LAWS,
    ],
)
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_what_is_charged_is_what_is_held_at_most(groups: tuple[ToyGroup, ...], budget: int) -> None:
    """One function serves admission and planner: a lone request never holds more than it says, and
    does reach it.
    """
    layout = layout_of(*groups)
    toy = Toy(layout, budget=budget, enable_prefix_caching=False)
    toy.add("r", [1] * 30, max_tokens=31)
    peak = [0] * len(layout.groups)

    def look(plan: StepPlan) -> None:
        held = [len(toy.pages_of("r", index)) for index in range(len(layout.groups))]
        assert all(
            have <= most
            for have, most in zip(held, request_pages(layout, int(plan.stop[0])), strict=True)
        )
        peak[:] = map(max, zip(peak, held, strict=True))

    toy.run(look=look)
    assert tuple(peak) == request_pages(layout, 60)


def test_windows_are_charged_by_window_and_not_by_length() -> None:
    """50 windowed and 10 full layers, window 1,024, 8,192 tokens: 10 x 8,192 + 50 x 1,023 resident
    entries, and what is really charged is within a block per ring of that.
    """
    groups = (
        kv_group(Window(1024), layers=range(50)),
        kv_group(Everything(), layers=range(50, 60)),
    )
    layout = solve_layout(
        groups, arena_bytes=8 << 30, profile=GPU, hash_unit=16, max_model_len=8192
    )
    entry = 2 * 256 * 2
    assert ideal_bytes(layout, 8192) == entry * (10 * 8192 + 50 * 1023)
    block = layout.groups[0].block_tokens
    assert request_bytes(layout, 8192) <= entry * (10 * 8192 + 50 * (1024 + block)) * 1.01
    assert request_bytes(layout, 8192) < 0.3 * entry * 60 * 8192


@pytest.mark.parametrize(
    ("tokens", "ideal"),
    [(512, 18 * 512), (4096, 15 * 511 + 3 * 4096), (32768, 15 * 511 + 3 * 32768)],
)
def test_golden_numbers_of_gemma_3_270m(tokens: int, ideal: int) -> None:
    """Entries of 1 KiB: 15 layers with a window of 512, three full ones. The numbers a user can
    check by hand.
    """
    layout = gemma_layout()
    expected = (ideal if tokens > 512 else 15 * 511 + 3 * 512) * KIB
    assert ideal_bytes(layout, tokens) == expected
    assert expected <= request_bytes(layout, tokens) <= 1.15 * expected


def test_every_declared_stream_is_counted() -> None:
    """A side stream (an indexer's keys, say) beside the main one: planned bytes are allocated
    bytes, field by field.
    """
    members = (
        one_stream(0, Everything(), 512, name="kv"),
        one_stream(0, Everything(), 132, name="index"),
    )
    both = Group(law=Everything(), members=members)
    layout = solve_layout(
        (both,), arena_bytes=1 << 20, profile=CPU, hash_unit=16, max_model_len=512
    )
    group = layout.groups[0]
    assert {slot.field.name for slot in group.format.slots} == {"kv", "index"}
    assert sum(
        slot.entries * slot.field.entry_bytes for slot in group.format.slots
    ) == group.block_tokens * (512 + 132)
    assert ideal_bytes(layout, 512) == 512 * (512 + 132) <= request_bytes(layout, 512)
    last = max(group.format.slots, key=lambda slot: slot.offset)
    assert (
        last.offset + last.entries * last.field.entry_bytes
        <= group.page_units * layout.arena.unit_bytes
    )


def test_a_layer_that_shares_is_counted_once() -> None:
    """Layer 1 reads layer 0's cache: it has no stream, so there is one place per token to write to,
    and no bytes of its own.
    """
    kind = FullAttention.examples()[0]
    layers = tuple(
        LayerSpec(index=i, mixers=(("self_attn", kind),), shares=shares)
        for i, shares in enumerate((None, 0, None))
    )
    spec = ModelSpec(family="toy", layers=layers, vocab_size=5, max_model_len=64)
    (shared,) = make_groups(spec, "bfloat16")
    assert shared.layers == (0, 2) and len(shared.members) == 2
    assert shared.bytes_needed(64) == 2 * 64 * kind.streams(CacheDtypes())[0].entry_bytes


def test_more_seats_than_states_queue_and_finish() -> None:
    """32 seats, memory for three states at a time: the rest wait their turn; seats reserve
    nothing.
    """
    toy = Toy(layout_of(state(), slabs=4), budget=64, seqs=32)
    for i in range(12):
        toy.add(f"r{i}", [i] * 6, max_tokens=3)
    most = 0

    def look(plan: StepPlan) -> None:
        nonlocal most
        most = max(most, toy.scheduler.num_running)

    toy.run(look=look)
    assert 2 <= most <= 4
    toy.assert_all_free()


@pytest.mark.parametrize("profile", [CPU, GPU])
@pytest.mark.parametrize("size", [128, 512, 1024])
def test_pages_are_never_coarser_than_the_window(profile: object, size: int) -> None:
    """A window in pages twice as wide would cost twice its bytes: the solver never chooses that,
    and what a ring costs stays within a half of the window's own bytes.
    """
    groups = (kv_group(Window(size), layers=range(4)), kv_group(Everything(), layers=(4,)))
    layout = solve_layout(
        groups, arena_bytes=1 << 28, profile=profile, hash_unit=16, max_model_len=8192
    )  # type: ignore[arg-type]
    assert layout.groups[0].block_tokens <= size
    ring = layout.groups[0].turning * layout.groups[0].block_tokens
    assert size <= ring <= 1.5 * size


def test_a_page_twice_the_window_costs_what_the_formula_says() -> None:
    """Told to use such pages all the same, the charge says so."""
    costs = {}
    for block in (128, 256):
        layout = layout_of(
            ToyGroup(law=Window(128), block_tokens=block), unit=16, max_model_len=1024
        )
        costs[block] = request_bytes(layout, 1024)
    assert costs == {128: 2 * 128 * 64, 256: 2 * 256 * 64}


@pytest.mark.parametrize("depth", [1, 2])
def test_tokens_in_flight_are_charged_to_nobody(depth: int) -> None:
    """Window 4, budget 32, up to two steps in flight, five requests: what is held is five rings and
    what single steps turn over, not a budget's worth of blocks for each request.
    """
    toy = Toy(layout_of(window(4)), budget=32, seqs=5, enable_prefix_caching=False)
    ring = toy.layout.groups[0].turning
    for i in range(5):
        toy.add(f"r{i}", [i] * 60, max_tokens=8)
    peak = 0

    def look(plan: StepPlan) -> None:
        nonlocal peak
        peak = max(peak, toy.held()[0])

    toy.run(depth=depth, look=look)
    assert 5 <= peak <= 5 * ring + 5
    assert peak < 32 // 4 + 5 * ring, "not even once"


def test_bytes_are_a_fixed_part_and_a_slope() -> None:
    """One quotient "bytes per token" would vary forty-fold with length; bytes = fixed + slope x
    tokens is exact at whole blocks.
    """
    layout = layout_of(full(), window(8), state(256), max_model_len=4096)
    slope = (request_bytes(layout, 4000) - request_bytes(layout, 2000)) / 2000
    fixed = request_bytes(layout, 2000) - 2000 * slope
    assert slope == 64 and fixed == 3 * 4 * 64 + request_pages(layout, 4096)[2] * 256
    for tokens in (40, 400, 4096):
        assert request_bytes(layout, tokens) == fixed + slope * tokens
    assert request_bytes(layout, 40) / 40 > 1.35 * request_bytes(layout, 4096) / 4096


def test_seats_and_budget_take_no_bytes() -> None:
    """The same traffic under 8 and 32 seats, budgets of 16 and 64: nothing is reserved at start and
    the peak of one request is the same.
    """
    peaks = set()
    for seqs, budget in ((8, 16), (32, 16), (8, 64), (32, 64)):
        toy = Toy(
            layout_of(full(), window(8), state()),
            seqs=seqs,
            budget=budget,
            enable_prefix_caching=False,
        )
        assert toy.pool.free_slabs == toy.layout.arena.num_slabs
        request = toy.serve("r", [1] * 40, max_tokens=9)
        peaks.add(tuple(group.blocks for group in request.cache_report.groups))
    assert len(peaks) == 1


def test_a_smaller_cache_dtype_pays_in_proportion() -> None:
    """Attention in 1-byte instead of 2-byte elements beside a state that stays as it is:
    attention's bytes halve, since the state has pages of its own size and forces nobody's.
    """
    sizes = {}
    for dtype in ("bfloat16", "uint8"):
        attention = Group(
            law=Everything(),
            members=tuple(one_stream(i, Everything(), 1024, dtype=dtype) for i in range(4)),
        )
        states = tuple(one_stream(i, Snapshot(), 24_576, dtype="bfloat16") for i in range(4, 8))
        recurrent = Group(law=Snapshot(), members=states)
        layout = solve_layout(
            (attention, recurrent),
            arena_bytes=1 << 26,
            profile=GPU,
            hash_unit=16,
            max_model_len=4096,
        )
        pages = request_pages(layout, 4096)
        unit = layout.arena.unit_bytes
        by_group: dict[str, int] = {}
        for count, group in zip(pages, layout.groups, strict=True):
            name = group.group.law.describe()
            by_group[name] = (
                by_group.get(name, 0) + count * layout.arena.page_units[group.bucket] * unit
            )
        sizes[dtype] = by_group
    wide, narrow = sizes["bfloat16"], sizes["uint8"]
    assert narrow["snapshot"] == wide["snapshot"]
    assert wide["everything"] / narrow["everything"] == pytest.approx(2, rel=0.02)


@pytest.mark.parametrize("pages", [(100, 36), (12_648_448, 12_416), (7, 5, 3), (4096, 4095)])
def test_page_sizes_that_do_not_divide_share_an_arena(pages: tuple[int, ...]) -> None:
    """Page sizes without a common measure: a bucket each, no error, no padding to one another, and
    the waste is itemised.
    """
    arena_bytes = 40 * sum(pages)
    layout, buckets = solve_arena(pages, arena_bytes, unit_bytes=1)
    for size, bucket in zip(pages, buckets, strict=True):
        assert size <= layout.page_units[bucket] <= size * 1.01 + 1
    lost = waste(layout, arena_bytes=arena_bytes)
    assert lost.arena_tail + layout.scratch_unit == arena_bytes
    pool = PagePool(layout)
    for bucket in range(len(layout.page_units)):
        pool.allocate(bucket, 3)
    pool.check()


# -- what goes first


def test_nothing_cached_is_taken_while_anything_is_free() -> None:
    """Most of the pool is empty: other requests come and go, and a resend still hits all it ever
    could.
    """
    toy = Toy(layout_of(full(), window(8), state(), slabs=120))
    prompt = list(range(32))
    toy.serve("first", prompt, max_tokens=1)
    for i in range(6):
        toy.serve(f"other {i}", [60 + i] * 20, max_tokens=1)
    assert toy.cache.coordinator.index.evicted_nodes == 0
    assert toy.serve("again", prompt, max_tokens=1).num_cached_tokens == 28


def test_the_end_of_a_chain_goes_first() -> None:
    """Three units cached: evicting once costs the last, so that what stays can still be hit. Taking
    the head would strand the rest.
    """
    toy = Toy(layout_of(full()))
    prompt = list(range(12))
    toy.serve("r", [*prompt, 90], max_tokens=1)
    for left in (8, 4, 0):
        assert toy.cache.coordinator.index.evict()
        toy.scheduler.check()
        assert toy.hit(prompt) == left
    assert toy.cached() == [0]


@pytest.mark.parametrize("groups", [(full(), window(4)), (full(), state()), ALL_LAWS])
def test_eviction_strands_nothing(groups: tuple[ToyGroup, ...]) -> None:
    """Resume points and branches, evicted one victim at a time: while any page is cached some
    request can find it, while a bounded group has a page somebody can resume on it, and at the end
    nothing is left.
    """
    toy = Toy(layout_of(*groups), checkpoint_interval=4)
    prompts = [[*range(18), 90], [*range(10), *range(50, 60)], [*range(60, 75)]]
    for i, prompt in enumerate(prompts):
        toy.serve(f"r{i}", prompt, max_tokens=1)
    index, lanes = toy.cache.coordinator.index, toy.cache.coordinator.grains[1].lanes
    evictions = 0
    while index.evict():
        evictions += 1
        toy.scheduler.check()
        found = [toy.probe([*prompt, 99]) for prompt in prompts]
        assert any(one.matched for one in found) == any(toy.cached())
        assert any(hit for prompt in prompts for hit in toy.warm_hits(prompt)) == bool(
            (index.pages[lanes] >= 0).any()
        )
    assert evictions > 6 and not any(toy.cached())


def test_scattered_pages_do_not_pin_whole_slabs() -> None:
    """16 pages in slabs of four, all but one per slab freed: after compaction one slab holds the
    four, three serve others, and admission counts on that beforehand.
    """
    pool = PagePool(ArenaLayout(unit_bytes=64, slab_units=4, num_slabs=4, page_units=(4, 1)))
    pages = pool.allocate(1, 16)
    pool.release([page for i, page in enumerate(sorted(pages.tolist())) if i % 4 != i // 4])
    assert pool.free_slabs == 0 and pool.fits([3, 0]) and not pool.ready([3, 0])
    while not pool.ready([3, 0]):
        assert pool.compact() is not None
    assert pool.free_slabs == 3 and pool.counts(1).held == 4
    pool.check()


@pytest.mark.parametrize("interval", [None, 4, 16])
def test_states_do_not_crowd_attention_out(interval: int | None) -> None:
    """A state costs six attention blocks and the pool is small. With few resume points a 20-turn
    chat resumes at the end of the last prompt each time; even with one per hash unit, no turn falls
    back to nothing.
    """
    toy = Toy(
        layout_of(full(4, 64), state(6 * 256), slabs=20, max_model_len=200),
        checkpoint_interval=interval,
    )
    tokens: list[int] = list(range(8))
    for turn in range(16):
        known = len(tokens)
        tokens += [turn, turn + 1, turn + 2]
        request = toy.serve(f"turn {turn}", tokens, max_tokens=3)
        if turn:
            computed = len(tokens) - request.num_cached_tokens
            assert computed <= len(tokens) - known + 3 + 2 * toy.layout.hash_unit
        tokens += request.output_token_ids


def test_refusals_and_reports_use_the_same_arithmetic() -> None:
    """The refusal's page counts are what the planner's function says, plus the one block per group
    that copying may take.
    """
    layout = layout_of(full(), window(8), slabs=9)
    toy = Toy(layout)
    with pytest.raises(CapacityError) as refusal:
        toy.add("r", [1] * 40, max_tokens=4)
    for count in request_pages(layout, 44):
        assert f"{count + 1} pages of" in str(refusal.value)
