"""What a grammar costs: the share of a decoding step that masks take, eight requests at once.

    python -m benchmarks.structured [MODEL]

By default Gemma 3 270M, whose 262,144 tokens are the most that a model here has. Prints processor
seconds, which other processes on the machine do not change: of the mask (in its thread), of
applying it, and of a whole step.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import torch

from octavo import LLM, SamplingParams, StructuredOutputs
from octavo.cli.demo import weights
from octavo.runner import masks, runner

BATCH, COUNT = 8, 96
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"type": "string"}},
        "when": {"type": "string", "format": "date"},
        "more": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["name", "age", "tags", "when", "more"],
    "additionalProperties": False,
}


def main() -> None:
    """Measure and print."""
    llm = LLM(sys.argv[1] if len(sys.argv) > 1 else str(weights()[0]), kv_memory="256MiB")
    began = time.process_time()
    llm.prompts.make("a", SamplingParams(structured_outputs=wanted()), request_id="first")
    print(f"vocabulary and grammar, once: {time.process_time() - began:.2f} s")
    spent: dict[str, list[float]] = {"mask": [], "apply": [], "step": []}
    timed(spent, "mask", masks.Masks, "forbidden", time.thread_time)
    timed(spent, "apply", runner, "forbid", time.process_time)
    for structure in (None, wanted()):
        for times in spent.values():
            times.clear()
        run(llm, structure, spent)
        step = np.median(spent["step"])
        print(f"{'JSON schema' if structure else 'free'}: {1e3 * step:.1f} ms a step of {BATCH}")
        for name in ("mask", "apply") if structure else ():
            ms = 1e3 * np.array(spent[name])
            print(
                f"  {name}: mean {ms.mean():.2f} ms ({ms.mean() / step / 10:.1f} % of the step),"
                f" median {np.median(ms):.2f}, 99 % {np.quantile(ms, 0.99):.2f}"
            )


def wanted() -> StructuredOutputs:
    """A schema of common parts."""
    return StructuredOutputs(json=SCHEMA)


def timed(spent: dict[str, list[float]], name: str, owner: Any, method: str, clock: Any) -> None:
    """Note how long a function takes."""
    inner = getattr(owner, method)

    def outer(*args: Any, **more: Any) -> Any:
        began = clock()
        try:
            return inner(*args, **more)
        finally:
            spent[name].append(clock() - began)

    setattr(owner, method, outer)


def run(llm: LLM, structure: StructuredOutputs | None, spent: dict[str, list[float]]) -> None:
    """Decode in a full batch; steps with a prompt in them are left out."""
    for number in range(BATCH):
        params = SamplingParams(
            temperature=0.8,
            seed=number,
            max_tokens=COUNT,
            min_tokens=0 if structure else COUNT,
            structured_outputs=structure,
        )
        live = llm.prompts.make(f"{number}: JSON of a person:\n", params, request_id=str(number))
        llm.core.add(live.request)
    llm.core.step()
    for times in spent.values():
        times.clear()
    while llm.core.has_work:
        began = time.process_time()
        if len(llm.core.step()) == BATCH:
            spent["step"].append(time.process_time() - began)


if __name__ == "__main__":
    print(f"{torch.get_num_threads()} threads")
    main()
