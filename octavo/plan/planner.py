"""``octavo.plan``: from a config and what is asked to a ``Plan``.

Owns the options, their checks, and the order of the work: config -> spec -> groups of one device ->
layout -> numbers. Knows no kind, prints nothing, and reads no file but the config (and the sizes of
weights beside it).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from octavo.base import CapacityError, ConfigError, UnsupportedError
from octavo.cache.layout import PROFILES, CacheLayout, bound_bytes, slope_bytes, solve_layout
from octavo.config import parse_size
from octavo.plan import capacity, gpus, uniform, vllm
from octavo.plan.layers import plan_layers
from octavo.plan.report import ArenaPlan, GroupPlan, Memory, Plan
from octavo.plan.shards import shard_groups
from octavo.spec.group import Group, make_groups
from octavo.spec.hf import family_of, find_families, load_config, read_spec, text_config
from octavo.spec.kind import PLANNING, Config, ModelSpec
from octavo.spec.stream import CacheDtypes, full_dtype

ASSUMED_MEMORY = 80 * 2**30
"""Bytes of cache where neither memory nor a GPU is given: those of the usual comparisons."""

LENGTHS = (4096, 32768, 131072, 1048576)
"""Lengths that are shown beside the context, as far as the model goes."""

COMPARISONS = ("uniform", "vllm")

Source = str | Path | Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A config read for planning, and one device's share of its streams, all dtypes decided."""

    name: str
    given: Config
    normal: Config
    spec: ModelSpec
    groups: tuple[Group, ...]
    dtypes: CacheDtypes


def plan(
    config: Source,
    *,
    context: int | None = None,
    max_model_len: int | None = None,
    memory: int | str | None = None,
    gpu: str | None = None,
    count: int = 1,
    tp: int | None = None,
    weights: int | str | None = None,
    kv_dtype: str = "bfloat16",
    indexer_dtype: str | None = None,
    state_dtype: str = "float32",
    profile: str = "gpu",
    requests: int = 1,
    lengths: Sequence[int] | None = None,
    mix: Mapping[int, float] | None = None,
    chunk: int = 8192,
    vs: Iterable[str] = (),
    name: str | None = None,
    plugins: Iterable[ModuleType | str] = (),
) -> Plan:
    """Plan a model's caches.

    config: a ``config.json``, its directory, or its content. context: tokens of one request; the
        model's limit unless given.
    max_model_len: plan as if that were the limit, to compare models beyond theirs.
    memory: bytes for the cache of one device, or a size such as ``80GiB``; or gpu, with count of
    them: a device's share of what ``weights`` leave free, which follow from the config unless
        given. tp: devices that hold one copy of the model; all of them
    unless given. kv_dtype, indexer_dtype, state_dtype: torch's names, or bf16, fp8, fp4 and so on.
    lengths: to show besides the
    context. mix: length -> share of requests. requests: for ``max_context``. chunk: tokens of a
    prompt computed in one step.
    vs: of ``uniform`` and ``vllm``.

    Raises ConfigError for a wrong option or config field, UnsupportedError for a model that is not
    known, CapacityError where weights do not fit or the memory is too small for any cache; the
    message is one line and names the field.
    """
    _check(
        tp=tp,
        context=context,
        max_model_len=max_model_len,
        requests=requests,
        chunk=chunk,
        vs=tuple(vs),
        profile=profile,
    )
    tp, replicas = _parallel(count, tp, gpu)
    dtypes = CacheDtypes(
        kv=full_dtype(kv_dtype),
        indexer=full_dtype(indexer_dtype) if indexer_dtype else None,
        state=full_dtype(state_dtype),
    )
    model = read_model(
        config, dtypes=dtypes, tp=tp, max_model_len=max_model_len, name=name, plugins=plugins
    )
    context = _context(context, model.spec)
    device = _memory(
        model, config, memory=memory, gpu=gpu, weights=weights, tp=tp, replicas=replicas
    )
    layout = solve_layout(
        model.groups,
        arena_bytes=device.cache,
        profile=PROFILES[profile],
        hash_unit=model.spec.hash_unit,
        max_model_len=model.spec.max_model_len,
    )
    shown = sorted({context, *(n for n in lengths or LENGTHS if n <= model.spec.max_model_len)})
    return _report(model, layout, device, context, shown, profile, requests, mix, chunk, tuple(vs))


def read_model(
    config: Source,
    *,
    dtypes: CacheDtypes,
    tp: int = 1,
    max_model_len: int | None = None,
    name: str | None = None,
    plugins: Iterable[ModuleType | str] = (),
) -> Model:
    """Read a config for planning. Raises as ``plan`` does."""
    content = config if isinstance(config, Mapping) else load_config(config)
    families = find_families(plugins)
    family = family_of(content, families)
    spec = read_spec(content, families=families, planning=True)
    spec = spec if max_model_len is None else replace(spec, max_model_len=max_model_len)
    given = text_config(content)
    heads = given.get("num_attention_heads")
    if isinstance(heads, int) and heads % tp:
        raise ConfigError(f"tp {tp} does not divide num_attention_heads {heads}")
    groups = shard_groups(make_groups(spec, dtypes), tp)
    if not groups:
        raise UnsupportedError("no layer of this model keeps a cache: there is nothing to plan")
    return Model(
        name=name or _name(config, content, spec),
        given=given,
        normal=family.normalize({**given, PLANNING: True}),
        spec=spec,
        groups=groups,
        dtypes=dtypes,
    )


def _name(config: Source, content: Config, spec: ModelSpec) -> str:
    if isinstance(config, Mapping):
        return str(content.get("_name_or_path") or spec.family)
    path = Path(config)
    return (
        path.resolve().name
        if path.is_dir()
        else path.resolve().parent.name
        if path.name == "config.json"
        else path.stem
    )


def _check(*, vs: tuple[str, ...], profile: str, **counts: int | None) -> None:
    for what, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{what} must be at least 1, not {value}")
    if unknown := [each for each in vs if each not in COMPARISONS]:
        raise ConfigError(f"vs {unknown[0]!r} is not known; known: {', '.join(COMPARISONS)}")
    if profile not in PROFILES:
        raise ConfigError(f"profile {profile!r} is not known; known: {', '.join(PROFILES)}")


def _parallel(count: int, tp: int | None, gpu: str | None) -> tuple[int, int]:
    """(devices per copy of the model, copies)."""
    if gpu is None and count != 1:
        raise ConfigError(f"count {count} counts GPUs: give gpu as well, or tp beside memory")
    if gpu is None:
        return 1 if tp is None else tp, 1
    tp = count if tp is None else tp
    gpus.check_parallel(count, tp)
    return tp, count // tp


def _context(context: int | None, spec: ModelSpec) -> int:
    if context is not None and context > spec.max_model_len:
        raise ConfigError(
            f"context {context:,} is beyond the model's limit of {spec.max_model_len:,} tokens; "
            "give max_model_len to plan so far"
        )
    return context or spec.max_model_len


def _memory(
    model: Model,
    config: Source,
    *,
    memory: int | str | None,
    gpu: str | None,
    weights: int | str | None,
    tp: int,
    replicas: int,
) -> Memory:
    if memory is not None and gpu is not None:
        raise ConfigError("give memory (of the cache) or gpu, not both")
    if gpu is None and weights is not None:
        raise ConfigError(
            "weights are taken from the memory of a gpu: give gpu, or leave weights out"
        )
    device = weighing = None
    cache = ASSUMED_MEMORY if memory is None else parse_size(memory, "memory")
    if gpu is not None:
        device = gpus.gpu_memory(gpu)
        weighing = (
            parse_size(weights, "weights") if weights is not None else _weights(model, config)
        )
        cache = gpus.cache_bytes(device, weighing, tp)
    return Memory(
        cache=cache,
        assumed=memory is None and gpu is None,
        gpu=gpu,
        device=device,
        tp=tp,
        replicas=replicas,
        parameters=model.spec.parameters,
        weights=weighing,
        scratch=0,
    )


def _weights(model: Model, config: Source) -> int:
    """Bytes of one copy: of the files beside the config where there are any, else by parameter
    count and quantisation.
    """
    if not isinstance(config, Mapping):
        path = Path(config)
        files = sorted((path if path.is_dir() else path.parent).glob("*.safetensors"))
        if files and (path.is_dir() or path.name == "config.json"):
            return sum(file.stat().st_size for file in files)
    if model.spec.parameters is None:
        raise UnsupportedError(
            f"family {model.spec.family!r} does not say how many weights it has; give weights"
        )
    return int(model.spec.parameters * gpus.weight_bits(model.given) / 8)


def _report(
    model: Model,
    layout: CacheLayout,
    device: Memory,
    context: int,
    shown: Sequence[int],
    profile: str,
    requests: int,
    mix: Mapping[int, float] | None,
    chunk: int,
    vs: tuple[str, ...],
) -> Plan:
    arena, slope = layout.arena, capacity.allocated_line(layout)
    unit, curve = arena.unit_bytes, _log_lengths(layout.max_model_len)
    if mix and max(mix) > layout.max_model_len:
        raise ConfigError(
            f"mix names {max(mix):,} tokens; the model's own limit is {layout.max_model_len:,}"
        )
    if not capacity.requests_that_fit(layout, 1):
        raise CapacityError(
            f"memory of {device.cache:,} bytes does not hold a single token's pages; give more"
        )
    return Plan(
        model=model.name,
        family=model.spec.family,
        max_model_len=layout.max_model_len,
        context=context,
        profile=profile,
        dtypes={
            "kv": model.dtypes.kv,
            "indexer": model.dtypes.index_keys,
            "conv": model.dtypes.conv_inputs,
            "state": model.dtypes.state,
        },
        memory=Memory(**{**vars(device), "scratch": arena.total_bytes - arena.scratch_unit * unit}),
        arena=ArenaPlan(
            slab_bytes=arena.slab_units * unit,
            num_slabs=arena.num_slabs,
            bucket_bytes=tuple(units * unit for units in arena.page_units),
        ),
        layers=plan_layers(
            model.spec,
            model.groups,
            context,
            given=model.given,
            normal=model.normal,
            dtypes=model.dtypes,
        ),
        groups=plan_groups(layout),
        slope_bytes_per_token=slope_bytes(layout),
        fixed_bytes_per_request=bound_bytes(layout),
        allocated_slope_bytes_per_token=slope[0],
        allocated_fixed_bytes_per_request=slope[1],
        bytes_at={n: capacity.bytes_at(layout, n) for n in shown},
        requests_that_fit=device.replicas * capacity.requests_that_fit(layout, context),
        capacity=tuple(
            capacity.capacity_at(layout, n, memory=device.cache, replicas=device.replicas)
            for n in shown
        ),
        mix=capacity.mix_that_fits(layout, mix, replicas=device.replicas) if mix else None,
        requests=requests,
        max_context=capacity.longest_context(layout, -(-requests // device.replicas)),
        min_hit_tokens=layout.hash_unit,
        resume_point_bytes=capacity.resume_point_bytes(layout, context),
        step=capacity.step_transient(layout, chunk),
        waste=capacity.waste_at(layout, context, memory=device.cache),
        assumed=dict(model.spec.assumed),
        curve_lengths=curve,
        curves=plan_curves(model, curve),
        uniform=uniform.compare(model, context, memory=device.cache) if "uniform" in vs else None,
        vllm=vllm.compare(model, context, memory=device.cache) if "vllm" in vs else None,
    )


def _log_lengths(most: int, points: int = 64) -> tuple[int, ...]:
    """Lengths up to ``most`` at equal factors."""
    least = min(256, most)
    return tuple(
        dict.fromkeys(
            round(least * (most / least) ** (point / (points - 1))) for point in range(points)
        )
    )


def plan_curves(model: Model, lengths: Sequence[int]) -> dict[str, tuple[int, ...]]:
    """Bytes of entries after each of ``lengths`` tokens, by kind and stream in order of
    appearance.
    """
    kinds = {
        (layer.index, mixer): kind.name
        for layer in model.spec.layers
        for mixer, kind in layer.mixers
    }
    streams = Counter(
        (f"{kinds[member.layer, member.mixer]} {member.stream.name}", member.stream)
        for group in model.groups
        for member in group.members
    )
    curves: dict[str, tuple[int, ...]] = {}
    for (name, stream), times in streams.items():
        more = [times * stream.bytes_needed(n) for n in lengths]
        curves[name] = tuple(map(sum, zip(curves.get(name, [0] * len(more)), more, strict=True)))
    return curves


def plan_groups(layout: CacheLayout) -> tuple[GroupPlan, ...]:
    """The groups of a layout as the plan shows them."""
    return tuple(
        GroupPlan(
            law=group.group.law.describe(),
            grows=group.fixed is None,
            block_tokens=group.block_tokens,
            page_bytes=group.format.page_bytes,
            bucket=group.bucket,
            bucket_bytes=group.page_units * layout.arena.unit_bytes,
            pages_at_most=None if group.fixed is None else group.fixed + group.turning,
            layers=group.group.layers,
            streams=tuple(sorted({member.stream.name for member in group.group.members})),
        )
        for group in layout.groups
    )
