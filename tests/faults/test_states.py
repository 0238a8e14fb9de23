"""States in pages of a real arena: nobody reads what it did not store or adopt, and what is
published stays as it is.

Owns a bed that steps a whole engine, poisons every byte that is nobody's ahead of each step, and
takes pages from requests at will. What is right is what Transformers says of each prompt alone.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo import SamplingParams
from octavo.memory.page import PageState
from octavo.sched.request import Request
from tests import tiny
from tests.faults.test_recurrences import engine, right

COUNT = 6
NAMES = ("mamba", "mamba2", "falcon_h1", "zamba2")
every_model = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


class Bed:
    """One engine, stepped by hand. NaN wherever no page is held or cached."""

    def __init__(self, root: Path, name: str, **options: object) -> None:
        self.name, self.core = name, engine(root, name, **options).core
        self.arena, self.scheduler = self.core._runner.arena, self.core.scheduler
        self.pool = self.scheduler.cache.coordinator.pool
        self.made: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}

    def add(self, request_id: str, prompt: list[int], **more: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
        self.requests[request_id] = Request(
            request_id=request_id, prompt_token_ids=prompt, params=params, **more
        )
        self.made[request_id] = []
        self.core.add(self.requests[request_id])

    def step(self) -> None:
        self.poison()
        for event in self.core.step():
            assert event.error is None
            self.made[event.request_id] += event.token_ids

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def served(self, request_id: str, prompt: list[int]) -> int:
        """Serve one prompt alone, rightly; cached tokens."""
        self.add(request_id, prompt)
        self.run()
        self.check(request_id)
        return self.requests[request_id].num_cached_tokens

    def check(self, *request_ids: str) -> None:
        for request_id in request_ids or self.made:
            assert self.made[request_id] == right(
                self.name, tuple(self.requests[request_id].prompt_token_ids)
            ), request_id

    def retract(self, request_id: str) -> None:
        """Take a running request's pages, as the scheduler does where memory runs out."""
        self.scheduler._preempt(self.scheduler._requests[request_id])
        self.scheduler.check()

    def pages(self, state: PageState) -> dict[int, torch.Tensor]:
        """Bytes, in place, of every page in a state, by its first unit."""
        layout, snapshot, found = self.arena.layout, self.pool.snapshot(), {}
        for slab, bucket in enumerate(snapshot.slab_bucket.tolist()):
            for number in range(layout.pages_per_slab(bucket) if bucket >= 0 else 0):
                if snapshot.states[slab, number] == state:
                    units = layout.page_units[bucket]
                    first = slab * layout.slab_units + number * units
                    found[first] = self.arena.buffer[
                        first * layout.unit_bytes : (first + units) * layout.unit_bytes
                    ]
        return found

    def poison(self) -> None:
        slabs, size = (
            self.pool.snapshot().slab_bucket,
            self.arena.layout.slab_units * self.arena.layout.unit_bytes,
        )
        for slab in np.flatnonzero(slabs < 0).tolist():
            self.arena.buffer[slab * size : (slab + 1) * size] = 0xFF
        for page in self.pages(PageState.FREE).values():
            page.fill_(0xFF)


@every_model
def test_bytes_of_nobody_are_never_read(root: Path, name: str) -> None:
    """Requests that come while others are anywhere, cold and from prefixes, in pages that hold
    nothing but NaN before.
    """
    bed = Bed(root, name, max_num_batched_tokens=13)
    prompts = {
        f"r{i}": tiny.prompt(length, 200 + length) for i, length in enumerate((20, 1, 37, 2))
    }
    for request_id, prompt in prompts.items():
        bed.add(request_id, prompt)
        bed.step()
    bed.run()
    for request_id, prompt in prompts.items():
        bed.add(f"again {request_id}", prompt)
    bed.run()
    bed.check()
    assert {request.num_cached_tokens for request in bed.requests.values()} == {0, 16, 32}


@every_model
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("after", [2, 5])
def test_a_retracted_request_goes_on_with_its_own_state(
    root: Path, name: str, after: int, caching: bool
) -> None:
    """A is retracted in its prompt or behind it, B takes its row and computes in its pages, A
    resumes.
    """
    bed = Bed(root, name, max_num_seqs=1, max_num_batched_tokens=16, enable_prefix_caching=caching)
    bed.add("a", tiny.prompt(45, 245))
    for _ in range(after):
        bed.step()
    bed.retract("a")
    bed.add("b", tiny.prompt(21, 221), priority=1)
    bed.step()
    assert len(bed.made["a"]) == max(0, after - 2) and bed.made["b"] == []
    bed.run()
    bed.check()
    assert bed.requests["a"].num_preemptions == 1


@every_model
def test_a_request_that_leaves_takes_its_state_with_it(root: Path, name: str) -> None:
    """Aborted in the prompt and while decoding, with others before and behind it in the batch; the
    next get its pages.
    """
    bed = Bed(root, name, max_num_batched_tokens=24, enable_prefix_caching=False)
    prompts = [tiny.prompt(length, 320 + length) for length in (19, 60, 9, 33)]
    for i, prompt in enumerate(prompts[:3]):
        bed.add(f"r{i}", prompt)
    bed.step()
    assert bed.core.abort("r1")
    bed.add("r3", prompts[3])
    for _ in range(3):
        bed.step()
    assert 0 < len(bed.made["r0"]) < COUNT and bed.core.abort("r0")
    bed.add("late", prompts[1])
    bed.run()
    bed.check("r2", "r3", "late")
    assert not bed.pages(PageState.HELD) and not bed.pages(PageState.CACHED)


@every_model
def test_a_published_state_is_never_written_again(root: Path, name: str) -> None:
    """A resend and two siblings go on from one checkpoint, at once and later: its bytes are those
    that were published.
    """
    bed = Bed(root, name, checkpoint_interval=16)
    prompt = tiny.prompt(50, 251)
    bed.served("first", prompt)
    published = {page: held.clone() for page, held in bed.pages(PageState.CACHED).items()}
    siblings = [prompt[:40] + tiny.prompt(4, 400 + i) for i in range(2)]
    for i, sibling in enumerate(siblings):
        bed.add(f"sibling {i}", sibling)
    bed.run()
    assert bed.served("resend", prompt) == 48
    assert [bed.requests[f"sibling {i}"].num_cached_tokens for i in range(2)] == [32, 32]
    bed.check()
    kept = bed.pages(PageState.CACHED)
    same = [page for page in published if page in kept]
    assert same and all(torch.equal(kept[page], published[page]) for page in same)
