"""The engines that `benchmarks.peers` compares: one of them in a process, driven by lines of JSON.

Owns how each engine is started, and how a run gives the seconds of its prefill and of every
decoding step. Runs as a script with the Python of the engine's own environment, so it may import
nothing at its top but the standard library.

Every engine gets token ids, decodes greedily, makes no text where that can be turned off, and keeps
no prefixes. Chunk sizes, K/V types and schedules are each engine's own defaults.

- octavo: ``LLM.core.step`` in a loop, with the bookkeeping that ``generate`` does.
- vllm: ``LLM.llm_engine.step`` in a loop, the engine in its own processes as by default. By default
  vLLM leaves one core to its scheduler; here its threads are bound to as many cores as every other
  engine has threads.
- transformers: ``generate`` with the default cache; a stopping criterion, asked after each token,
  takes the times.
- llama.cpp: the server inside the wheel ``xllamacpp``, a slot per request; all prompts go in as one
  streamed completion, and the arrival of each token is its time. K and V are fp16, the server's
  default. The wheel on PyPI is built for AVX2.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

LONGEST = 16384 + 256
"""Most tokens of one request in any case."""


@dataclass
class Stamps:
    """When the tokens of one run came.

    requests: how many run together. steps: decoding steps wanted, all requests decoding. room: most
        tokens a request may have.
    """

    requests: int
    steps: int
    room: int
    began: float = field(default_factory=time.perf_counter)
    _counts: dict[int, int] = field(default_factory=dict)
    _last: int | None = None
    _times: list[float] = field(default_factory=list)

    def token(self, request: int) -> bool:
        """A token of this request is here; True once nothing more is wanted.

        Raises RuntimeError where a request has used its room: then not all requests are decoding
        any more.
        """
        first = request not in self._counts
        self._counts[request] = self._counts.get(request, 0) + 1
        if first and len(self._counts) == self.requests:
            self._last = request
        if request == self._last:
            self._times.append(time.perf_counter())
        if not self.done and self._counts[request] >= self.room:
            raise RuntimeError(
                f"a request has had {self.room} tokens before all others had {self.steps} steps"
                " beside it"
            )
        return self.done

    @property
    def done(self) -> bool:
        """True once all steps are measured."""
        return len(self._times) > self.steps

    def found(self) -> dict[str, Any]:
        """Seconds from submission until every request had a token, and between the tokens of the
        one that was last.

        Raises RuntimeError where the run ended early.
        """
        if not self.done:
            raise RuntimeError(
                f"the run ended after {max(0, len(self._times) - 1)} of {self.steps} steps"
            )
        steps = [
            after - before for before, after in zip(self._times, self._times[1:], strict=False)
        ]
        return {"prefill": self._times[0] - self.began, "steps": steps[: self.steps]}


Run = Callable[[list[list[int]], Stamps], None]


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A started engine. detail: how it was built, where it tells."""

    version: str
    run: Run
    detail: str = ""


def octavo_engine(model: str, threads: int) -> Engine:
    """Our own engine; its threads are OMP_NUM_THREADS."""
    import octavo
    from octavo.kernels.library import library

    llm = octavo.LLM(
        model,
        dtype="bfloat16",
        kv_memory="4GiB",
        max_model_len=LONGEST,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )

    def run(given: list[list[int]], stamps: Stamps) -> None:
        params = octavo.SamplingParams(temperature=0, max_tokens=stamps.room, ignore_eos=True)
        live = {
            str(i): llm.prompts.make(ids, params, request_id=str(i)) for i, ids in enumerate(given)
        }
        for one in live.values():
            llm.core.add(one.request)
        try:
            while not stamps.done:
                for event in llm.core.step():
                    if event.error is not None:
                        raise event.error
                    live[event.request_id].advance(llm.core, event)
                    stamps.token(int(event.request_id))
        finally:
            for name in live:
                llm.core.abort(name)

    kernels = library()
    detail = f"{threads} threads, kernels {kernels.isa if kernels is not None else 'off'}"
    return Engine(version=octavo.__version__, run=run, detail=detail)


def vllm_engine(model: str, threads: int) -> Engine:
    """vLLM's CPU backend with its defaults, except for the cores."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", ",".join(map(str, cores)))
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
    import vllm

    llm = vllm.LLM(
        model,
        dtype="bfloat16",
        max_model_len=LONGEST,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    engine = llm.llm_engine

    def run(given: list[list[int]], stamps: Stamps) -> None:
        params = vllm.SamplingParams(
            temperature=0, max_tokens=stamps.room, ignore_eos=True, detokenize=False
        )
        names = [str(i) for i in range(len(given))]
        for name, ids in zip(names, given, strict=True):
            engine.add_request(name, {"prompt_token_ids": ids}, params)
        try:
            while not stamps.done:
                for output in engine.step():
                    stamps.token(int(output.request_id))
        finally:
            engine.abort_request(names)

    return Engine(
        version=vllm.__version__, run=run, detail="cores " + os.environ["VLLM_CPU_OMP_THREADS_BIND"]
    )


def transformers_engine(model: str, threads: int) -> Engine:
    """Transformers' generate with its dynamic cache."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    net = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()

    def run(given: list[list[int]], stamps: Stamps) -> None:
        ids = torch.tensor(given)

        def stop(ids: Any, scores: Any, **_: Any) -> Any:
            for row in range(len(ids)):
                stamps.token(row)
            return torch.full((len(ids),), stamps.done)

        net.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=stamps.room,
            min_new_tokens=stamps.room,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[stop],
        )

    return Engine(version=transformers.__version__, run=run, detail=f"{threads} threads")


def llama_engine(model: str, threads: int) -> Engine:
    """llama.cpp's server in this process; ``model`` is a GGUF file."""
    import xllamacpp

    def serve(slots: int) -> Any:
        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_parallel, params.n_ctx = slots, slots * LONGEST
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
        # Nothing of a request is kept for another one, as in the other engines.
        params.cache_prompt, params.cache_ram_mib, params.n_ctx_checkpoints = False, 0, 0
        params.n_gpu_layers, params.fit_params, params.verbosity = 0, False, 1
        return xllamacpp.Server(params)

    servers = {1: serve(1)}

    def run(given: list[list[int]], stamps: Stamps) -> None:
        if len(given) not in servers:
            servers.clear()
            servers[len(given)] = serve(len(given))
            stamps.began = time.perf_counter()
        failed: list[Exception] = []

        def arrived(chunk: Any) -> bool:
            try:
                if not isinstance(chunk, dict):
                    # The server's signs of life.
                    return False
                if "choices" not in chunk:
                    raise RuntimeError(f"llama.cpp answered {chunk}")
                # A chunk with a finish reason brings no token.
                tokens = [
                    choice["index"]
                    for choice in chunk["choices"]
                    if choice["finish_reason"] is None
                ]
                return any(stamps.token(request) for request in tokens)
            except Exception as error:
                failed.append(error)
                return True

        asked = {
            "prompt": given,
            "n_predict": stamps.room,
            "ignore_eos": True,
            "stream": True,
            "cache_prompt": False,
            "temperature": 0,
            "samplers": ["top_k"],
            "top_k": 1,
        }
        answer = servers[len(given)].handle_completions(asked, arrived)
        if failed:
            raise failed[0]
        if answer is not None and not stamps.done:
            raise RuntimeError(f"llama.cpp answered {answer}")

    return Engine(version=version("xllamacpp"), run=run, detail=xllamacpp.get_system_info())


ENGINES: dict[str, Callable[[str, int], Engine]] = {
    "octavo": octavo_engine,
    "vllm": vllm_engine,
    "transformers": transformers_engine,
    "llama.cpp": llama_engine,
}


def prompts(requests: int, tokens: int, seed: int) -> list[list[int]]:
    """Random ids, the same in every engine."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 30000) for _ in range(tokens)] for _ in range(requests)]


def room(requests: int, tokens: int, steps: int) -> int:
    """Tokens a request may have: some decode while the prompts of others are computed, at most 512
    tokens of them a step.
    """
    return steps + 8 + (requests * tokens // 512 if requests > 1 else 0)


def work(name: str, model: str, threads: int) -> None:
    """One line for every line: how the engine was started, then what each run found or the error it
    ended with.
    """
    # Whatever an engine prints goes elsewhere.
    answers, sys.stdout = sys.stdout, sys.stderr

    def say(**what: Any) -> None:
        print(json.dumps(what), file=answers, flush=True)

    engine = ENGINES[name](model, threads)
    say(version=engine.version, detail=engine.detail)
    for line in sys.stdin:
        case = json.loads(line)
        requests, tokens, steps = case["requests"], case["tokens"], case["steps"]
        given = prompts(requests, tokens, case["seed"])
        try:
            stamps = Stamps(requests, steps, room(requests, tokens, steps))
            engine.run(given, stamps)
            # An engine that was told to stop may still end the step it is in, which is no business
            # of the next engine.
            time.sleep(0.5)
            say(**stamps.found())
        except Exception as error:
            say(error=f"{type(error).__name__}: {error}")


def main(arguments: Sequence[str]) -> None:
    """NAME MODEL THREADS."""
    name, model, threads = arguments
    work(name, model, int(threads))


if __name__ == "__main__":
    main(sys.argv[1:])
