"""The page pool against a slow obvious model: a dict of pages, and nothing else, after every
operation.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from octavo.base import ceil_div
from octavo.memory.layout import ArenaLayout
from octavo.memory.pool import Counts, PagePool

LAYOUTS = (
    ArenaLayout(unit_bytes=256, slab_units=4, num_slabs=4, page_units=(1,)),
    ArenaLayout(unit_bytes=256, slab_units=4, num_slabs=5, page_units=(2, 1)),
    ArenaLayout(unit_bytes=256, slab_units=7, num_slabs=6, page_units=(7, 3, 2)),
    ArenaLayout(unit_bytes=256, slab_units=1, num_slabs=6, page_units=(1, 1)),
)


@dataclass
class Page:
    """What the model knows of one page that is not free."""

    bucket: int
    references: int = 1
    uses: int = 0
    pins: int = 0
    steps: list[int] = field(default_factory=list)

    @property
    def requests(self) -> int:
        return self.references - len(self.steps)


@dataclass
class Model:
    """Pages by address. Slabs are derived: a slab belongs to the bucket of the pages in it."""

    layout: ArenaLayout
    pages: dict[int, Page] = field(default_factory=dict)

    def slab_pages(self, bucket: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for address, page in self.pages.items():
            if page.bucket == bucket:
                found.setdefault(address // self.layout.slab_units, []).append(address)
        return found

    def buckets(self) -> range:
        return range(len(self.layout.page_units))

    def free_slabs(self) -> int:
        return self.layout.num_slabs - sum(
            len(self.slab_pages(bucket)) for bucket in self.buckets()
        )

    def counts(self, bucket: int) -> Counts:
        mine = [page for page in self.pages.values() if page.bucket == bucket]
        total = len(self.slab_pages(bucket)) * self.layout.pages_per_slab(bucket)
        return Counts(
            free=total - len(mine),
            cached=sum(page.references == 0 for page in mine),
            held=sum(page.requests > 0 for page in mine),
            limbo=sum(page.references > 0 and page.requests == 0 for page in mine),
        )

    def ready(self, wanted: list[int]) -> bool:
        slabs = [
            ceil_div(
                max(0, wanted[bucket] - self.counts(bucket).free),
                self.layout.pages_per_slab(bucket),
            )
            for bucket in self.buckets()
        ]
        return sum(slabs) <= self.free_slabs()

    def shortfall(self, wanted: list[int]) -> int:
        slabs = 0
        for bucket in self.buckets():
            mine = {address: page for address, page in self.pages.items() if page.bucket == bucket}
            stay = sum(page.references > 0 or page.pins > 0 for page in mine.values())
            pinned = {
                address // self.layout.slab_units for address, page in mine.items() if page.pins
            }
            slabs += max(
                len(pinned), ceil_div(stay + wanted[bucket], self.layout.pages_per_slab(bucket))
            )
        return max(0, slabs - self.layout.num_slabs)

    def settle(self, address: int) -> None:
        page = self.pages[address]
        if page.references == page.uses == 0:
            del self.pages[address]


class PoolMachine(RuleBasedStateMachine):
    """Random allocate, retain, release, keep, drop, pin, compact, retire; the model says what must
    be.
    """

    @initialize(which=st.integers(0, len(LAYOUTS) - 1))
    def begin(self, which: int) -> None:
        self.pool = PagePool(LAYOUTS[which])
        self.model = Model(LAYOUTS[which])
        self.step = 0

    def draw(self, data: st.DataObject, wanted: str = "bucket") -> list[int]:
        pages = sorted(
            address
            for address, page in self.model.pages.items()
            if wanted == "bucket" or getattr(page, wanted)
        )
        return data.draw(st.lists(st.sampled_from(pages), max_size=5)) if pages else []

    @rule(data=st.data(), count=st.integers(0, 9))
    def allocate(self, data: st.DataObject, count: int) -> None:
        bucket = data.draw(st.sampled_from(list(self.model.buckets())))
        wanted = [count if other == bucket else 0 for other in self.model.buckets()]
        before = self.model.slab_pages(bucket)
        if not self.pool.ready(wanted):
            with pytest.raises(AssertionError):
                self.pool.allocate(bucket, count)
            return
        pages = self.pool.allocate(bucket, count)
        assert pages.dtype == np.int32 and len(set(pages.tolist())) == count
        for address in pages.tolist():
            self.check_choice(bucket, address, before)
            self.model.pages[address] = Page(bucket)
            before = self.model.slab_pages(bucket)

    def check_choice(self, bucket: int, address: int, before: dict[int, list[int]]) -> None:
        layout = self.model.layout
        slab, rest = divmod(address, layout.slab_units)
        assert address not in self.model.pages and rest % layout.page_units[bucket] == 0
        assert (
            rest + layout.page_units[bucket] <= layout.slab_units and 0 <= slab < layout.num_slabs
        )
        others = [other for other in self.model.buckets() if other != bucket]
        assert not any(slab in self.model.slab_pages(other) for other in others)
        room = [
            len(pages) for pages in before.values() if len(pages) < layout.pages_per_slab(bucket)
        ]
        assert len(before.get(slab, [])) == max(room, default=0), (
            "not the fullest slab with a free page"
        )

    @rule(data=st.data())
    def retain(self, data: st.DataObject) -> None:
        pages = self.draw(data)
        self.pool.retain(np.array(pages, np.int32))
        for address in pages:
            self.model.pages[address].references += 1

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        pages = self.draw(data)
        self.pool.keep(np.array(pages, np.int32))
        for address in pages:
            self.model.pages[address].uses += 1

    @rule(data=st.data())
    def trade(self, data: st.DataObject) -> None:
        kept = sorted(set(self.draw(data)))
        held = sorted(
            address
            for address, page in self.model.pages.items()
            if page.requests and address not in kept
        )
        pairs = list(zip(kept, held, strict=False))
        mine = self.pool.trade(
            np.array([pair[0] for pair in pairs], np.int32),
            np.array([pair[1] for pair in pairs], np.int32),
            self.step,
        )
        for (kept_one, held_one), taken in zip(pairs, mine.tolist(), strict=True):
            page, other = self.model.pages[kept_one], self.model.pages[held_one]
            assert taken == (page.references == 0 and page.uses == 1 and not page.pins)
            if taken:
                page.references, page.uses = 1, 0
                other.uses += 1
                other.steps.append(self.step)

    @rule(data=st.data(), which=st.sampled_from(["requests", "uses"]))
    def let_go(self, data: st.DataObject, which: str) -> None:
        pages = self.draw(data)
        call = self.pool.release if which == "requests" else self.pool.drop
        for address in set(pages):
            page, times = self.model.pages[address], pages.count(address)
            others = page.uses + len(page.steps) if which == "requests" else page.references
            left = getattr(page, which) - times
            if left < 0 or (page.pins and left == 0 and others == 0):
                with pytest.raises(AssertionError):
                    call(np.array(pages, np.int32))
                return
        call(np.array(pages, np.int32))
        for address in pages:
            page = self.model.pages[address]
            page.references, page.uses = (
                (page.references - 1, page.uses)
                if which == "requests"
                else (page.references, page.uses - 1)
            )
        for address in set(pages):
            self.model.settle(address)

    @rule(data=st.data())
    def hand_to_step(self, data: st.DataObject) -> None:
        pages = self.draw(data, "requests")
        if any(self.model.pages[address].requests < pages.count(address) for address in pages):
            with pytest.raises(AssertionError):
                self.pool.release(np.array(pages, np.int32), self.step)
            return
        self.pool.release(np.array(pages, np.int32), self.step)
        for address in pages:
            self.model.pages[address].steps.append(self.step)

    @rule(data=st.data())
    def release_all(self, data: st.DataObject) -> None:
        held = [
            address for address, page in self.model.pages.items() if page.requests and not page.pins
        ]
        for address in (
            data.draw(st.lists(st.sampled_from(sorted(held)), unique=True)) if held else []
        ):
            page = self.model.pages[address]
            self.pool.release(np.repeat(address, page.requests))
            page.references = len(page.steps)
            self.model.settle(address)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        pages = self.draw(data)[:1]
        self.pool.pin(pages)
        for address in pages:
            self.model.pages[address].pins += 1

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pages = self.draw(data, "pins")[:2]
        if any(self.model.pages[address].pins < pages.count(address) for address in pages):
            with pytest.raises(AssertionError):
                self.pool.unpin(pages)
            return
        self.pool.unpin(pages)
        for address in pages:
            self.model.pages[address].pins -= 1

    @rule()
    def next_step(self) -> None:
        self.step += 1

    @rule(back=st.integers(0, 2))
    def retire(self, back: int) -> None:
        until = self.step - back
        doomed = [p for p in self.model.pages.values() if p.pins and not p.uses and not p.requests]
        if any(p.steps and max(p.steps) <= until for p in doomed):
            return
        self.pool.retire(until)
        for address, page in list(self.model.pages.items()):
            stay = [step for step in page.steps if step > until]
            page.references -= len(page.steps) - len(stay)
            page.steps = stay
            self.model.settle(address)

    @rule()
    def compact(self) -> None:
        layout = self.model.layout
        before = self.model.free_slabs()
        moves = self.pool.compact()
        possible = [bucket for bucket in self.model.buckets() if self.movable(bucket)]
        assert (moves is not None) == bool(possible)
        if moves is None:
            return
        sources, targets = moves.sources.tolist(), moves.targets.tolist()
        assert moves.bucket in possible and moves.units == layout.page_units[moves.bucket]
        (slab,) = {source // layout.slab_units for source in sources}
        assert sorted(sources) == sorted(self.model.slab_pages(moves.bucket)[slab])
        assert len(set(targets)) == len(targets) and not set(targets) & set(self.model.pages)
        owned = self.model.slab_pages(moves.bucket)
        for source, target in zip(sources, targets, strict=True):
            assert target // layout.slab_units in owned and target // layout.slab_units != slab
            page = self.model.pages.pop(source)
            assert not page.pins
            self.model.pages[target] = page
        assert self.model.free_slabs() == before + 1

    def movable(self, bucket: int) -> bool:
        per_slab = self.model.layout.pages_per_slab(bucket)
        if self.model.counts(bucket).free < per_slab:
            return False
        slabs = self.model.slab_pages(bucket).values()
        pages = self.model.pages
        return any(all(not pages[a].pins for a in slab) for slab in slabs if len(slab) < per_slab)

    @rule(data=st.data())
    def admission_is_exact(self, data: st.DataObject) -> None:
        """What fits() promises is there after evicting all that may be evicted and compacting to
        the end.
        """
        wanted = [data.draw(st.integers(0, 8)) for _ in self.model.buckets()]
        promise = self.pool.fits(wanted)
        for address in [
            a for a, page in self.model.pages.items() if page.references == 0 and not page.pins
        ]:
            self.pool.drop(np.repeat(address, self.model.pages[address].uses))
            del self.model.pages[address]
        while (moves := self.pool.compact()) is not None:
            for source, target in zip(moves.sources.tolist(), moves.targets.tolist(), strict=True):
                self.model.pages[target] = self.model.pages.pop(source)
        assert self.pool.ready(wanted) == promise

    @rule(data=st.data())
    def refuses_what_is_not_live(self, data: st.DataObject) -> None:
        layout = self.model.layout
        address = data.draw(st.integers(-2, layout.scratch_unit + 2))
        page = self.model.pages.get(address)
        if page is not None:
            return
        for call in (
            self.pool.release,
            self.pool.retain,
            self.pool.keep,
            self.pool.drop,
            self.pool.pin,
            self.pool.unpin,
        ):
            with pytest.raises(AssertionError):
                call([address])

    @rule(data=st.data())
    def probes(self, data: st.DataObject) -> None:
        wanted = [data.draw(st.integers(0, 12)) for _ in self.model.buckets()]
        assert self.pool.ready(wanted) == self.model.ready(wanted)
        assert self.pool.shortfall(wanted) == self.model.shortfall(wanted)
        assert self.pool.fits(wanted) == (self.model.shortfall(wanted) == 0)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert self.pool.free_slabs == self.model.free_slabs()
        for bucket in self.model.buckets():
            assert self.pool.counts(bucket) == self.model.counts(bucket)
        addresses = list(range(self.model.layout.scratch_unit))
        pages = [self.model.pages.get(address, Page(0, references=0)) for address in addresses]
        assert self.pool.references(addresses).tolist() == [page.references for page in pages]
        assert self.pool.uses(addresses).tolist() == [page.uses for page in pages]
        alone = [
            page.references == 1 and page.uses == page.pins == 0 and not page.steps
            for page in pages
        ]
        assert self.pool.in_flight(addresses).tolist() == [len(page.steps) for page in pages]
        assert self.pool.exclusive(addresses).tolist() == alone


PoolMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestPoolAgainstModel = PoolMachine.TestCase
