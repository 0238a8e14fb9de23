"""Who hits a shared prefix: five requests that share their first tokens, a second turn, and a
resend.

Owns the experiments and what they print. The real scheduler and cache run with a runner that checks
every entry read and written, on layouts of real models; nothing of a model is computed. Each
sibling has 1,024 tokens of its own behind the shared ones and generates 40. The second turn is the
first sibling's whole conversation and 512 tokens more.

Two tables. *Announced*: siblings one after another; ``announced`` says how the cache learns of the
junction: not at all, by a mark that the application sets, or by regular checkpoints. *Drawn*: the
shared length is drawn at random, nothing is announced, siblings come together or one after another
with most of the memory idle, on a layout for every law.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octavo.base import floor_to
from octavo.cache.layout import PROFILES, CacheLayout, solve_layout
from octavo.plan.planner import read_model
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.sim.fake import FakeRunner
from octavo.sim.model import ToyGroup, toy_layout
from octavo.spec.law import Everything, SinkWindow
from octavo.spec.stream import CacheDtypes

MODELS = ("bamba-9b", "qwen3-next-80b-a3b", "jamba-1.5-mini", "llama-3.1-8b")
SHARED = (16_384, 300)
SIBLINGS, OWN, GENERATED, TURN = 5, 1_024, 40, 512
PEER = {
    ("bamba-9b", 16_384): "0 0 P P P",
    ("qwen3-next-80b-a3b", 16_384): "0 0 P P P",
    ("bamba-9b", 300): "0 0 0 0 0",
    ("qwen3-next-80b-a3b", 300): "0 0 0 0 0",
}
"""Hits of vLLM 0.32's own manager in this experiment, nothing announced, P short for all shared
tokens.
"""

LAWS = ("llama-3.1-8b", "gpt-oss-120b", "llama-4-scout", "bamba-9b", "deepseek-v4-flash", "sinks")
"""Layouts that have everything, windows, chunks, states, and windows, tails and compressed entries;
``sinks`` is a toy, since no released model keeps its sinks in the cache.
"""

DRAWN = 16_384
"""Most shared tokens that are drawn."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Tokens found in the cache. best: what could have been found, by every sibling but the first,
    the turn and the resend.
    """

    model: str
    shared: int
    announced: str
    siblings: tuple[int, ...]
    turn: int
    resend: int
    best: tuple[int, int, int]
    peer: str

    @property
    def good(self) -> bool:
        """Does the second sibling hit what was announced, the third in any case, and turn and
        resend all there is?
        """
        first = 1 if self.announced != "no" else 2
        hits = self.siblings[first:]
        least = self.best[0] if self.announced != "interval" else 1
        return min(hits) >= least and (self.turn, self.resend) == self.best[1:]


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """Tokens that siblings found in the cache. shared: drawn, in whole hash units.

    together: do they come at once? spacing: how far behind the best the second of those that come
    one after another may stay.
    """

    model: str
    seed: int
    shared: int
    together: bool
    siblings: tuple[int, ...]
    spacing: int

    @property
    def good(self) -> bool:
        """Does everybody but the first hit all that is shared, the second sibling nearly so where
        nobody knew that it would come?
        """
        _, second, *others = self.siblings
        least = self.shared if self.together else self.shared - self.spacing
        return second >= least and set(others) == {self.shared}


def serve(
    scheduler: Scheduler,
    runner: FakeRunner,
    prompts: dict[str, Sequence[int]],
    marks: tuple[int, ...] = (),
) -> list[Request]:
    """Run requests that come together to their ends."""
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    requests = [
        Request(request_id=name, prompt_token_ids=list(prompt), params=params, marks=marks)
        for name, prompt in prompts.items()
    ]
    for request in requests:
        runner.register(request.request_id, request.prompt_token_ids, params)
        scheduler.add(request)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(runner.execute(plan))
        runner.settle(plan.step)
    for request in requests:
        runner.forget(request.request_id)
    return requests


def sibling_prompts(shared: int) -> dict[str, Sequence[int]]:
    """Prompts with ``shared`` tokens in common and others of their own, by name."""
    return {
        f"sibling {index}": [*range(shared), *(10_000_000 * (index + 1) + k for k in range(OWN))]
        for index in range(SIBLINGS)
    }


def experiment(
    layout: CacheLayout, *, model: str, shared: int, announced: str, interval: int
) -> Outcome:
    """Five siblings, a second turn of the first, and the first one again."""
    scheduler = Scheduler(
        layout,
        max_num_batched_tokens=8192,
        max_num_seqs=4,
        checkpoint_interval=interval if announced == "interval" else None,
    )
    runner, unit = FakeRunner(layout), layout.hash_unit
    marks = (shared,) if announced == "mark" else ()
    prompts = sibling_prompts(shared)
    sent = [
        request
        for name, prompt in prompts.items()
        for request in serve(scheduler, runner, {name: prompt}, marks)
    ]
    first = sent[0].prompt_token_ids
    said = [*first, *sent[0].output_token_ids]
    (turn,) = serve(scheduler, runner, {"turn": [*said, *range(77_000_000, 77_000_000 + TURN)]})
    (resend,) = serve(scheduler, runner, {"resend": first})
    return Outcome(
        model=model,
        shared=shared,
        announced=announced,
        siblings=tuple(request.num_cached_tokens for request in sent),
        turn=turn.num_cached_tokens,
        resend=resend.num_cached_tokens,
        best=(
            floor_to(shared, unit),
            floor_to(len(said) - 1, unit),
            floor_to(len(first) - 1, unit),
        ),
        peer=PEER.get((model, shared), "-"),
    )


def draw(layout: CacheLayout, *, model: str, seed: int, together: bool, spacing: int) -> Drawn:
    """Siblings of a prefix whose length is drawn, in whole hash units."""
    unit = layout.hash_unit
    shared = unit * Random(f"{model}/{seed}").randint(1, DRAWN // unit)
    scheduler = Scheduler(layout, max_num_batched_tokens=8192, max_num_seqs=8)
    runner, prompts = FakeRunner(layout), sibling_prompts(shared)
    batches = [prompts] if together else [{name: prompt} for name, prompt in prompts.items()]
    sent = [request for batch in batches for request in serve(scheduler, runner, batch)]
    return Drawn(
        model=model,
        seed=seed,
        shared=shared,
        together=together,
        siblings=tuple(request.num_cached_tokens for request in sent),
        spacing=spacing,
    )


def layout_of(name: str, configs: Path, profile: str) -> CacheLayout:
    """A real model's layout in 80 GiB, or the toy's."""
    if name == "sinks":
        laws = (Everything(), SinkWindow(4, 1_024))
        return toy_layout(
            [ToyGroup(law=law, block_tokens=16) for law in laws],
            hash_unit=16,
            slab_pages=64,
            num_slabs=4_096,
            max_model_len=131_072,
        )
    read = read_model(configs / f"{name}.json", dtypes=CacheDtypes(kv="bfloat16"))
    return solve_layout(
        read.groups,
        arena_bytes=80 << 30,
        profile=PROFILES[profile],
        hash_unit=read.spec.hash_unit,
        max_model_len=read.spec.max_model_len,
    )


def drawn_table(found: Sequence[Drawn]) -> Table:
    """One row per draw."""
    made = Table(title="The same, drawn at random, nothing announced", title_justify="left")
    for name in ("model", "shared", "siblings come", "hits", ""):
        made.add_column(name, justify="right" if name == "shared" else "left")
    for each in found:
        made.add_row(
            each.model,
            f"{each.shared:,}",
            "together" if each.together else "one after another",
            " ".join("P" if hit == each.shared else str(hit) for hit in each.siblings),
            "" if each.good else "BAD",
        )
    return made


def table(outcomes: Sequence[Outcome]) -> Table:
    """One row per run."""
    made = Table(title="Tokens found in the cache", title_justify="left")
    for name in (
        "model",
        "shared",
        "announced",
        "five siblings",
        "vLLM's",
        "second turn",
        "resend",
        "",
    ):
        made.add_column(name, justify="left" if name in ("model", "announced", "") else "right")
    for each in outcomes:
        made.add_row(
            each.model,
            f"{each.shared:,}",
            each.announced,
            " ".join(map(str, each.siblings)),
            each.peer,
            f"{each.turn} of {each.best[1]}",
            f"{each.resend} of {each.best[2]}",
            "" if each.good else "BAD",
        )
    return made


def main(
    configs: Annotated[Path, typer.Option(help="Directory of config files.")] = Path(
        "tests/data/configs"
    ),
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a config, for both tables; default four layouts, and one for every law.",
            show_default=False,
        ),
    ] = None,
    shared: Annotated[
        list[int] | None,
        typer.Option(help="Shared tokens; default 16384 and 300.", show_default=False),
    ] = None,
    profile: Annotated[str, typer.Option(help="Device profile: cpu or gpu.")] = "cpu",
    interval: Annotated[
        int, typer.Option(help="Tokens between regular checkpoints, where they announce.")
    ] = 256,
    draws: Annotated[int, typer.Option(help="Shared lengths drawn for every law.")] = 4,
    spacing: Annotated[
        int,
        typer.Option(help="Tokens that the second of those one after another may stay behind."),
    ] = 1_024,
    out: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.", show_default=False)
    ] = None,
) -> None:
    """Run all and print."""
    outcomes = [
        experiment(
            layout_of(name, configs, profile),
            model=name,
            shared=count,
            announced=announced,
            interval=interval,
        )
        for name in model or MODELS
        for count in shared or SHARED
        for announced in ("no", "mark", "interval")
    ]
    found = [
        draw(
            layout_of(name, configs, profile),
            model=name,
            seed=seed,
            together=together,
            spacing=spacing,
        )
        for name in model or LAWS
        for seed in range(draws)
        for together in (True, False)
    ]
    console = Console(width=150)
    console.print(table(outcomes))
    console.print(drawn_table(found))
    if out is not None:
        about = {
            "command": sys.argv,
            "machine": platform.platform(),
            "profile": profile,
            "interval": interval,
        }
        results = {
            "results": [asdict(each) for each in outcomes],
            "drawn": [asdict(each) for each in found],
        }
        out.write_text(json.dumps({**about, **results}, indent=1) + "\n")
    raise typer.Exit(0 if all(each.good for each in (*outcomes, *found)) else 1)


if __name__ == "__main__":
    typer.run(main)
