"""Who hits a shared prefix: five requests that share their first tokens, one after another, a
second turn, and a resend.

Owns the experiment and what it prints. The real scheduler and cache run with a runner that checks
every entry read and written, on layouts of real models; nothing of a model is computed. Each
sibling has 1,024 tokens of its own behind the shared ones and generates 40. The second turn is the
first sibling's whole conversation and 512 tokens more. ``announced`` says how the cache
learns of the junction: not at all, by a mark that the application sets, or by regular checkpoints.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
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


def serve(
    scheduler: Scheduler,
    runner: FakeRunner,
    name: str,
    prompt: Sequence[int],
    marks: tuple[int, ...],
) -> Request:
    """Run one request to its end."""
    params = SamplingParams(temperature=0, max_tokens=GENERATED, ignore_eos=True)
    request = Request(request_id=name, prompt_token_ids=list(prompt), params=params, marks=marks)
    runner.register(name, request.prompt_token_ids, params)
    scheduler.add(request)
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(runner.execute(plan))
        runner.settle(plan.step)
    runner.forget(name)
    return request


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
    prompts = [
        [*range(shared), *(10_000_000 * (index + 1) + k for k in range(OWN))]
        for index in range(SIBLINGS)
    ]
    sent = [
        serve(scheduler, runner, f"sibling {index}", prompt, marks)
        for index, prompt in enumerate(prompts)
    ]
    said = [*prompts[0], *sent[0].output_token_ids]
    turn = serve(scheduler, runner, "turn", [*said, *range(77_000_000, 77_000_000 + TURN)], ())
    resend = serve(scheduler, runner, "resend", prompts[0], ())
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
            floor_to(len(prompts[0]) - 1, unit),
        ),
        peer=PEER.get((model, shared), "-"),
    )


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
        typer.Option(help="Name of a config; default four layouts.", show_default=False),
    ] = None,
    shared: Annotated[
        list[int] | None,
        typer.Option(help="Shared tokens; default 16384 and 300.", show_default=False),
    ] = None,
    profile: Annotated[str, typer.Option(help="Device profile: cpu or gpu.")] = "cpu",
    interval: Annotated[
        int, typer.Option(help="Tokens between regular checkpoints, where they announce.")
    ] = 256,
    out: Annotated[
        Path | None, typer.Option("--json", help="Where to write the figures.", show_default=False)
    ] = None,
) -> None:
    """Run all and print."""
    outcomes = []
    for name in model or MODELS:
        read = read_model(configs / f"{name}.json", dtypes=CacheDtypes(kv="bfloat16"))
        layout = solve_layout(
            read.groups,
            arena_bytes=80 << 30,
            profile=PROFILES[profile],
            hash_unit=read.spec.hash_unit,
            max_model_len=read.spec.max_model_len,
        )
        outcomes += [
            experiment(layout, model=name, shared=count, announced=announced, interval=interval)
            for count in shared or SHARED
            for announced in ("no", "mark", "interval")
        ]
    Console(width=150).print(table(outcomes))
    if out is not None:
        about = {
            "command": sys.argv,
            "machine": platform.platform(),
            "profile": profile,
            "interval": interval,
        }
        out.write_text(
            json.dumps({**about, "results": [asdict(each) for each in outcomes]}, indent=1) + "\n"
        )
    raise typer.Exit(0 if all(each.good for each in outcomes) else 1)


if __name__ == "__main__":
    typer.run(main)
