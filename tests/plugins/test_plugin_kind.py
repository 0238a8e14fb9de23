"""A layer kind from outside: one folder and one family file, and nothing of octavo is edited.

Owns the proof for the sample kind ``echo``: generation, prefix hits, preemption, planner and
simulator, and that the conformance suite runs for it. What the kind computes is checked by its own
slow reference over whole sequences.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from octavo import LLM, RequestOutput, SamplingParams
from octavo.base import CapacityError, UnsupportedError
from octavo.cache.layout import (
    CPU,
    CacheLayout,
    ideal_bytes,
    request_bytes,
    request_pages,
    solve_layout,
)
from octavo.nn.decoder import Decoder, resolve
from octavo.nn.step import Step
from octavo.ops.codec import Entry
from octavo.sched.request import Request
from octavo.sched.scheduler import Scheduler
from octavo.sched.step import StepResult
from octavo.sim.clients import Clients
from octavo.sim.fake import FakeRunner
from octavo.sim.model import ToyGroup, toy_layout
from octavo.sim.world import World, make_scheduler
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, read_spec
from octavo.spec.kind import ModelSpec
from octavo.spec.stream import FP8, CacheDtypes
from tests.plugins import tiny_echo

ROOT = Path(__file__).resolve().parents[2]
SINKS, WINDOW, VOCAB = 5, 24, 256
ENTRY_BYTES = 2 * 2 * 16 * 4
"""Keys and values of one token of one layer: two K/V heads of 16 elements in float32."""

CONFIG = (
    ("model_type", "tiny_echo"),
    ("vocab_size", VOCAB),
    ("hidden_size", 64),
    ("intermediate_size", 96),
    ("num_attention_heads", 4),
    ("num_key_value_heads", 2),
    ("layer_types", ["echo_attention", "echo_attention", "full_attention", "echo_attention"]),
    ("echo_sinks", SINKS),
    ("echo_window", WINDOW),
    ("eos_token_id", 1),
)
LENGTHS = (1, 4, 6, 23, 40, 70, 129)
COUNT = 40
GREEDY = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
TIE = 1e-4


def model_spec(**changes: object) -> ModelSpec:
    return read_spec({**dict(CONFIG), **changes}, families=find_families([tiny_echo]))


@cache
@torch.no_grad()
def decoder() -> Decoder:
    """The model in float32 with weights large enough that logits differ."""
    model = Decoder(model_spec(), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(5)
    for name, weight in sorted(model.named_parameters()):
        noise = torch.randn(weight.shape, generator=generator)
        if weight.dim() == 1:
            weight.add_(noise * 0.1)
        else:
            weight.copy_(noise * (1.0 if "embed" in name else 1.2 / weight.shape[-1] ** 0.5))
    return model


@torch.no_grad()
def dense_logits(ids: list[int], model: Decoder | None = None) -> torch.Tensor:
    """[len(ids), vocab] from the kinds' references over the whole sequence: no cache, no pages, no
    engine.
    """
    model = decoder() if model is None else model
    hidden = model.model.embed_tokens(torch.tensor(ids))
    for block, layer in zip(model.model.layers, model_spec().layers, strict=False):
        ((mixer, kind),) = layer.mixers
        hidden = hidden + resolve(kind.reference)(
            getattr(block, mixer), block.input_layernorm(hidden)
        )
        hidden = hidden + block.mlp(block.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden))


@cache
def greedy_after(prompt: tuple[int, ...], output: tuple[int, ...]) -> tuple[int, ...]:
    """The dense computation's most likely token after every prefix of ``output``. No rival is near
    enough to matter.
    """
    best = dense_logits([*prompt, *output])[len(prompt) - 1 : -1].topk(2)
    assert (best.values[:, 0] - best.values[:, 1]).min() > TIE, (
        "a tie says nothing; choose another prompt"
    )
    return tuple(best.indices[:, 0].tolist())


@cache
def prompts() -> tuple[list[int], ...]:
    generator = torch.Generator().manual_seed(11)
    return tuple(
        torch.randint(2, VOCAB, (length,), generator=generator).tolist() for length in LENGTHS
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("echo")
    (directory / "config.json").write_text(json.dumps(dict(CONFIG)), encoding="utf-8")
    save_file(
        {name: weight.data for name, weight in decoder().named_parameters()},
        directory / "model.safetensors",
    )
    return directory


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Callable[..., LLM]:
    def make(**options: object) -> LLM:
        given: dict[str, object] = {
            "kv_memory": "16MiB",
            "max_model_len": 256,
            "device": "cpu",
            "skip_tokenizer_init": True,
        }
        return LLM(checkpoint, dtype="float32", plugins=[tiny_echo], **{**given, **options})  # type: ignore[arg-type]

    return make


def generate(llm: LLM, many: tuple[list[int], ...]) -> list[RequestOutput]:
    """Run prompts together and check every token of every output."""
    outputs = llm.generate(list(many), GREEDY, progress=False)
    for prompt, output in zip(many, outputs, strict=True):
        made = tuple(output.outputs[0].token_ids)
        assert len(made) == COUNT
        assert made == greedy_after(tuple(prompt), made)
    return outputs


# -- generation ------------------------------------------------------------------------------------


def test_the_reference_hears_the_opening_and_the_window_only() -> None:
    """Else equality with it would prove nothing: in a model of echo layers alone, what lies between
    must not matter.
    """
    layer, kind = decoder().model.layers[0].self_attn, model_spec().layers[0].mixers[0][1]
    hidden = torch.randn(60, 64, generator=torch.Generator().manual_seed(3))
    changed = hidden.clone()
    changed[SINKS : 60 - WINDOW] = 9.0
    before, after = (resolve(kind.reference)(layer, x)[-1] for x in (hidden, changed))
    torch.testing.assert_close(before, after, rtol=0, atol=0)
    for heard in (SINKS - 1, 60 - WINDOW):
        changed = hidden.clone()
        changed[heard] = 9.0
        assert not torch.allclose(before, resolve(kind.reference)(layer, changed)[-1])


def test_one_by_one(engine: Callable[..., LLM]) -> None:
    llm = engine(enable_prefix_caching=False)
    for prompt in prompts():
        generate(llm, (prompt,))


@pytest.mark.parametrize("budget", [1, 7, 16, 50])
def test_chunked_and_batched(engine: Callable[..., LLM], budget: int) -> None:
    generate(engine(max_num_batched_tokens=budget, enable_prefix_caching=False), prompts())


@pytest.mark.parametrize("budget", [19, 2048])
def test_prefix_hits(engine: Callable[..., LLM], budget: int) -> None:
    llm = engine(max_num_batched_tokens=budget)
    cold, warm = generate(llm, prompts()), generate(llm, prompts())
    assert [output.num_cached_tokens for output in cold] == [0] * len(LENGTHS)
    assert [output.num_cached_tokens for output in warm] == [
        (length - 1) // 16 * 16 for length in LENGTHS
    ]


def test_the_next_turn_goes_on_from_the_last(engine: Callable[..., LLM]) -> None:
    llm = engine()
    prompt = prompts()[5][:41]
    (first,) = generate(llm, (prompt,))
    longer = [*prompt, *first.outputs[0].token_ids, *prompts()[3]]
    (second,) = generate(llm, (longer,))
    # All but the last token of the output were computed; here they end with a hash unit.
    assert second.num_cached_tokens == 41 + COUNT - 1


@pytest.mark.parametrize("caching", [True, False])
def test_preempted(engine: Callable[..., LLM], caching: bool) -> None:
    (alone,) = generate(engine(), prompts()[-1:])
    llm = engine(kv_memory=int(alone.cache_report.peak_bytes * 1.5), enable_prefix_caching=caching)
    generate(llm, prompts())
    assert llm.core.scheduler.num_preemptions > 0


# -- in eight bits ---------------------------------------------------------------------------------

ECHOES = ["echo_attention"] * 3


@cache
@torch.no_grad()
def quantised_decoder() -> Decoder:
    """A model of echo layers alone whose keys and values pass through the kind's codec."""
    spec = model_spec(layer_types=ECHOES)
    model = Decoder(spec, dtype=torch.float32, device="cpu")
    model.load_state_dict(
        {name: weight for name, weight in decoder().state_dict().items() if "layers.3" not in name}
    )
    for layer, block in zip(spec.layers, model.model.layers, strict=True):
        ((_, kind),) = layer.mixers
        entry, made = Entry(kind.streams(CacheDtypes(kv=FP8))[0]), block.self_attn.keys_values

        def passed(
            hidden: torch.Tensor, step: Step, entry: Entry = entry, made: Any = made
        ) -> tuple[torch.Tensor, torch.Tensor]:
            k, v = made(hidden, step)
            kept = entry.decode(entry.encode({"k": k, "v": v}), torch.float32)
            return kept["k"], kept["v"]

        block.self_attn.keys_values = passed
    return model


@pytest.mark.parametrize("budget", [1, 19, 2048])
def test_quantised_entries_of_its_own(tmp_path: Path, budget: int) -> None:
    """Greedy output, in chunks and from prefix hits, is that of a dense computation whose keys and
    values passed through the codec; a token costs what the kind says.
    """
    config = {**dict(CONFIG), "layer_types": ECHOES}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = {name: weight.data for name, weight in quantised_decoder().named_parameters()}
    save_file(weights, tmp_path / "model.safetensors")
    llm = LLM(
        tmp_path,
        dtype="float32",
        kv_cache_dtype="fp8",
        kv_memory="4MiB",
        max_model_len=256,
        max_num_batched_tokens=budget,
        device="cpu",
        skip_tokenizer_init=True,
        plugins=[tiny_echo],
    )
    ((member, *_),) = (group.group.members for group in llm.core.scheduler.cache.layout.groups)
    assert member.stream.entry_bytes == 2 * 2 * (16 + 4)
    some = prompts()[2:6]
    for _ in range(2):
        outputs = llm.generate(list(some), GREEDY, progress=False)
        for prompt, output in zip(some, outputs, strict=True):
            made = output.outputs[0].token_ids
            best = dense_logits([*prompt, *made], quantised_decoder())[len(prompt) - 1 : -1].topk(2)
            assert (best.values[:, 0] - best.values[:, 1]).min() > TIE
            assert list(made) == best.indices[:, 0].tolist()
    assert all(
        output.num_cached_tokens > 0 for output in outputs if len(output.prompt_token_ids) > 16
    )


# -- planner ---------------------------------------------------------------------------------------


def layout_for(arena_bytes: int = 4 << 20) -> CacheLayout:
    groups = make_groups(model_spec(), "float32")
    return solve_layout(
        groups, arena_bytes=arena_bytes, profile=CPU, hash_unit=16, max_model_len=512
    )


def held_at_most(
    scheduler: Scheduler, prompt: list[int], max_tokens: int
) -> tuple[Request, list[int]]:
    """Run one synthetic request; returns it and the most pages of every bucket that the pool itself
    counted as taken.
    """
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=prompt, params=params)
    scheduler.add(request)
    most = [0] * len(scheduler.cache.layout.arena.page_units)
    while (plan := scheduler.schedule()) is not None:
        counts = [scheduler.cache.coordinator.pool.counts(bucket) for bucket in range(len(most))]
        most = [max(a, b.held + b.limbo) for a, b in zip(most, counts, strict=True)]
        scheduler.commit(StepResult(step=plan.step, tokens={"r": 7} if plan.samples[0] else {}))
        scheduler.check()
    return request, most


def test_the_law_alone_decides_groups_and_bytes() -> None:
    layout = layout_for()
    echo, full = layout.groups
    assert (echo.group.layers, full.group.layers) == ((0, 1, 3), (2,))
    assert echo.group.law.describe() == f"{SINKS} sinks + window {WINDOW}"
    assert echo.fixed is not None and full.fixed is None
    for n in (1, 5, 28, 29, 300, 512):
        heard = min(n, SINKS + WINDOW - 1)
        assert ideal_bytes(layout, n) == (3 * heard + n) * ENTRY_BYTES, n


@pytest.mark.parametrize("length", [1, 17, 64, 300])
@pytest.mark.parametrize("budget", [9, 512])
def test_planner_numbers_are_what_the_manager_holds(length: int, budget: int) -> None:
    layout = layout_for()
    scheduler = Scheduler(
        layout, max_num_batched_tokens=budget, max_num_seqs=1, enable_prefix_caching=False
    )
    request, most = held_at_most(scheduler, [3] * length, 100)
    computed = request.cache_report.tokens
    assert computed == length + 99
    pages = request_pages(layout, computed)
    assert [group.blocks for group in request.cache_report.groups] == list(pages)
    assert request.cache_report.bytes == request_bytes(layout, computed)
    assert request.cache_report.peak_bytes == request_bytes(layout, computed)
    assert [most[group.bucket] for group in layout.groups] == list(pages), (
        "the pool counts the same"
    )
    assert ideal_bytes(layout, computed) <= request_bytes(layout, computed)


def test_what_cannot_fit_is_refused_with_the_arithmetic() -> None:
    scheduler = Scheduler(layout_for(96 << 10), max_num_batched_tokens=64, max_num_seqs=1)
    params = SamplingParams(max_tokens=100)
    with pytest.raises(CapacityError, match=f"{SINKS} sinks \\+ window {WINDOW}"):
        scheduler.add(Request(request_id="r", prompt_token_ids=[3] * 400, params=params))


# -- simulator -------------------------------------------------------------------------------------


def echo_world(seed: int) -> World:
    """A simulated server whose groups have the laws of the sample model, at sizes that a toy arena
    is in trouble with.
    """
    rng = Random(f"echo/{seed}")
    unit = rng.choice((1, 2, 4))
    laws = [group.law for group in make_groups(model_spec(echo_sinks=3, echo_window=6), "float32")]
    toys = [
        ToyGroup(
            law=law, block_tokens=unit * rng.choice((1, 2, 3)), entry_bytes=64 * rng.choice((1, 2))
        )
        for law in laws
    ]
    world = World(seed=seed, config="sinks-everything")
    world.layout = toy_layout(
        toys, hash_unit=unit, slab_pages=2, num_slabs=rng.choice((24, 60)), max_model_len=48
    )
    world.scheduler = make_scheduler(world.layout, rng)
    world.runner = FakeRunner(world.layout)
    world.clients = Clients(rng, vocab_size=2, max_model_len=48)
    return world


@pytest.mark.parametrize("seed", range(1, 7))
def test_simulated_trouble_is_survived(seed: int) -> None:
    world = echo_world(seed)
    world.safety(120)
    world.liveness()
    report = world.report()
    assert report.finished > 0 and report.entries_read > 0


# -- the contract ----------------------------------------------------------------------------------


def test_the_conformance_suite_runs_for_it() -> None:
    # Imported here because that module, looking for plugins, imports this one.
    from tests.kinds.test_conformance import EXAMPLES

    assert {str(example.id) for example in EXAMPLES} >= {
        f"echo-{n}" for n in range(len(tiny_echo.Echo.examples()))
    }


def test_planning_such_a_model_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from octavo.spec.hf import find_families; "
    code += "print([kind.name for kind in find_families(['tests.plugins.tiny_echo']).kinds])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "'echo'" in done.stdout


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"echo_window": 0}, "echo_window 0 of layer 0"),
        ({"layer_types": ["chorus"]}, r"layer_types\[0\] 'chorus'"),
    ],
)
def test_a_wrong_config_is_refused_by_field(change: dict[str, object], field: str) -> None:
    with pytest.raises(UnsupportedError, match=field):
        model_spec(**change)


def test_without_the_plugin_the_model_is_unknown() -> None:
    with pytest.raises(UnsupportedError, match="model_type 'tiny_echo' is not supported"):
        read_spec(dict(CONFIG))


def lines(text: str) -> str:
    """Without indentation, which a formatter of documents takes away, and blank lines."""
    return "\n".join(line.strip() for line in text.splitlines() if line.strip())


def test_the_walk_through_shows_the_real_files() -> None:
    """Every Python block of the document stands line by line in the file named last before it."""
    text = (ROOT / "docs/adding-a-kind.md").read_text(encoding="utf-8")
    shown, file = set(), ""
    for name, block in re.findall(
        r"`(tests/plugins/[\w/]+\.py)`|```python\n(.*?)```", text, flags=re.DOTALL
    ):
        if name:
            file = name
        else:
            assert lines(block) in lines((ROOT / file).read_text(encoding="utf-8")), (
                f"{file} does not contain:\n{block}"
            )
            shown.add(file.rpartition("/")[2])
    assert shown >= {"spec.py", "layer.py", "reference.py", "tiny_echo.py"}
