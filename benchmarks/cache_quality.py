"""What quantised caches cost in quality: one layer of each layout, real entry sizes, random
weights, against bfloat16 caches.

Owns the layers, the inputs and the two measures: relative error of the attention output, and
overlap of the tokens or entries that an indexer chooses. All layers compute in float32 through the
engine's own runner, so that only the cache differs. Random weights give keys without structure,
whose scores lie close together: of choices that is the hard case.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from octavo.cache.layout import CPU, solve_layout
from octavo.nn.decoder import resolve
from octavo.runner.runner import Runner
from octavo.sched.request import Request
from octavo.sched.sampling import SamplingParams
from octavo.sched.scheduler import Scheduler
from octavo.spec.group import make_groups
from octavo.spec.hf import find_families, read_spec
from octavo.spec.stream import CacheDtypes, full_dtype

VOCAB = 4096
CHUNK = 512
LAST = 256
"""Tokens at a prompt's end over which choices are compared."""

SHARED: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCAB,
        "hidden_size": 1024,
        "intermediate_size": 64,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 16,
        "q_lora_rank": 512,
        "n_routed_experts": 4,
        "num_experts_per_tok": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "max_position_embeddings": 65536,
    }
)
LATENT: Mapping[str, Any] = MappingProxyType(
    {
        **SHARED,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "num_key_value_heads": 16,
        "first_k_dense_replace": 1,
        "n_group": 1,
        "topk_group": 1,
    }
)
COMPRESSED: Mapping[str, Any] = MappingProxyType(
    {
        **SHARED,
        "model_type": "deepseek_v4",
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "num_key_value_heads": 1,
        "o_groups": 4,
        "o_lora_rank": 256,
        "sliding_window": 128,
        "mlp_layer_types": ["moe"],
    }
)
ENTRIES = (("fp8", "bf16"),)
ALL = (("fp8", "bf16"), ("bf16", "fp8"), ("bf16", "fp4"), ("fp8", "fp8"), ("fp8", "fp4"))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One layer. ratio: tokens per entry that an indexer chooses among, or None without one.
    dtypes: of entries, index keys.
    """

    name: str
    config: Mapping[str, Any]
    dtypes: tuple[tuple[str, str], ...]
    ratio: int | None = None


CASES = (
    Case(name="MLA (V3)", config={**LATENT, "model_type": "deepseek_v3"}, dtypes=ENTRIES),
    Case(name="DSA (V3.2)", config={**LATENT, "model_type": "deepseek_v32"}, dtypes=ALL, ratio=1),
    Case(
        name="V4, by 4",
        config={**COMPRESSED, "layer_types": ["compressed_sparse_attention"]},
        dtypes=ALL,
        ratio=4,
    ),
    Case(
        name="V4, by 128",
        config={**COMPRESSED, "layer_types": ["heavily_compressed_attention"]},
        dtypes=ENTRIES,
    ),
)


@dataclass(frozen=True, kw_only=True)
class Quality:
    """One layer with one pair of cache dtypes. error: of attention outputs, relative, mean over
    tokens; worst: of any token.

    overlap: mean share of the choice that is the choice of bfloat16 caches, over tokens that
        choose; None without an indexer.
    """

    layer: str
    entries: str
    index_keys: str
    error: float
    worst: float
    overlap: float | None


@dataclass(kw_only=True)
class Seen:
    """What one layer put out for every token, and chose."""

    outputs: list[Tensor] = field(default_factory=list)
    choices: list[Tensor] = field(default_factory=list)


def random_weights(model: nn.Module, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Weights that keep the size of what they multiply; norms of 1, biases and sinks of 0."""
    rng = torch.Generator().manual_seed(seed)
    for name, weight in model.named_parameters():
        if weight.dim() == 1:
            yield (
                name,
                torch.full(weight.shape, 0.0 if name.endswith(("bias", "sinks", "base")) else 1.0),
            )
        else:
            scale = 1.0 if "embed" in name else weight.shape[-1] ** -0.5
            yield name, torch.randn(weight.shape, generator=rng) * scale


def watch(layer: nn.Module, seen: Seen) -> None:
    """Note what a layer puts out, and what its indexer chooses."""
    layer.register_forward_hook(lambda _, __, output: seen.outputs.append(output.clone()))
    for module in layer.modules():
        # An indexer that is called, and one of which a layer asks.
        if type(module).__name__ == "Indexer" and hasattr(module, "chosen"):
            chosen = module.chosen

            def noted(*given: Any, _chosen: Any = chosen) -> Tensor:
                made: Tensor = _chosen(*given)
                seen.choices.append(made)
                return made

            module.chosen = noted  # type: ignore[assignment]
        elif type(module).__name__ == "Indexer":
            module.register_forward_hook(
                lambda _, __, made: None if made is None else seen.choices.append(made)
            )


def run(case: Case, kv: str, index: str, tokens: int, topk: int, seed: int) -> Seen:
    """One prompt of ``tokens`` random tokens through the layer."""
    families = find_families()
    spec = read_spec({**case.config, "index_topk": topk}, families=families)
    family = families.named(spec.family)
    dtypes = CacheDtypes(kv=full_dtype(kv), indexer=full_dtype(index))
    layout = solve_layout(
        make_groups(spec, dtypes),
        arena_bytes=1 << 28,
        profile=CPU,
        hash_unit=spec.hash_unit,
        max_model_len=tokens + 16,
    )
    meta = resolve(family.module)(spec, dtype=torch.float32, device="meta")
    runner = Runner(
        spec=spec,
        family=family,
        layout=layout,
        weights=random_weights(meta, seed),
        dtype=torch.float32,
    )
    seen = Seen()
    watch(runner.model.model.layers[0].get_submodule(spec.layers[0].mixers[0][0]), seen)
    scheduler = Scheduler(
        layout, max_num_batched_tokens=CHUNK, max_num_seqs=1, enable_prefix_caching=False
    )
    prompt = torch.randint(
        0, VOCAB, (tokens,), generator=torch.Generator().manual_seed(seed + 1)
    ).tolist()
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    scheduler.add(Request(request_id="r", prompt_token_ids=prompt, params=params))
    while (plan := scheduler.schedule()) is not None:
        scheduler.commit(runner.execute(plan))
    return seen


def overlap(mine: Seen, other: Seen) -> float | None:
    """Mean share of ``other``'s choices that are also ``mine``'s, over the last ``LAST`` tokens."""
    if not other.choices:
        return None
    shares = []
    for found, wanted in zip(
        mine.choices[-1][-LAST:].tolist(), other.choices[-1][-LAST:].tolist(), strict=True
    ):
        numbers = set(wanted) - {-1}
        shares.append(len(numbers & set(found)) / len(numbers))
    return sum(shares) / len(shares)


def measure(case: Case, tokens: int, topk: int, seed: int) -> Iterator[Quality]:
    """All dtypes of a layer against bfloat16."""
    plain = run(case, "bf16", "bf16", tokens, topk, seed)
    wanted = torch.cat(plain.outputs)
    for kv, index in case.dtypes:
        seen = run(case, kv, index, tokens, topk, seed)
        errors = (torch.cat(seen.outputs) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        yield Quality(
            layer=case.name,
            entries=kv,
            index_keys=index if case.ratio else "",
            error=float(errors.mean()),
            worst=float(errors.max()),
            overlap=overlap(seen, plain),
        )


def main(
    tokens: Annotated[int, typer.Option(help="Tokens of the prompt.")] = 2048,
    share: Annotated[
        int, typer.Option(help="An indexer chooses one of so many, at the end of the prompt.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Of weights and tokens.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure every layer and print a table."""
    found = [
        q
        for case in CASES
        for q in measure(case, tokens, tokens // (case.ratio or 1) // share, seed)
    ]
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in found]))
        return
    table = Table("layer", "entries", "index keys", "error", "worst token", "overlap")
    for each in found:
        shown = "" if each.overlap is None else f"{each.overlap:.1%}"
        table.add_row(
            each.layer,
            each.entries,
            each.index_keys,
            f"{each.error:.2%}",
            f"{each.worst:.2%}",
            shown,
        )
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
