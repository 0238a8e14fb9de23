"""From a configuration to an engine that can run: files, spec, layout, weights, scheduler.

Owns the defaults that need a device to be known: dtype and arena size. Knows the parts'
constructors; knows no kind.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import xxhash

from octavo.base import CapacityError, ConfigError, UnsupportedError
from octavo.cache.layout import PROFILES, CacheLayout, solve_layout
from octavo.config import EngineConfig
from octavo.engine.core import EngineCore
from octavo.engine.recovery import Recovery
from octavo.engine.source import ModelSource, dump_folder
from octavo.nn.decoder import resolve
from octavo.ops.backends import find_backends, ops_for
from octavo.ops.codec import Entry
from octavo.runner.gguf import GGUFModel
from octavo.runner.runner import Runner
from octavo.runner.weights import Progress, no_progress, safetensors_weights
from octavo.sched.scheduler import Scheduler
from octavo.spec.family import Families, Family
from octavo.spec.group import Group, make_groups
from octavo.spec.hf import family_of, find_families, load_config, read_spec, weight_block
from octavo.spec.kind import ModelSpec
from octavo.spec.stream import CacheDtypes, full_dtype

CPU_SHARE, GPU_SHARE = 0.25, 0.85
"""Share of the memory left beside the weights that the arena takes unless told: a CPU's is shared
with everybody else.
"""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What the files say. ``weights(dtype)`` reads them, one tensor at a time; ``digest`` names
    their content.
    """

    spec: ModelSpec
    family: Family
    eos_token_ids: frozenset[int]
    digest: bytes
    weights: Callable[[torch.dtype], Iterable[tuple[str, torch.Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Built:
    """A running engine and what it was made for.

    max_model_len: most tokens that a request can have, by the options, the model and the arena.
    """

    core: EngineCore
    layout: CacheLayout
    spec: ModelSpec
    eos_token_ids: frozenset[int]
    max_model_len: int
    dtype: str
    device: torch.device


def build(config: EngineConfig, source: ModelSource, *, progress: Progress = no_progress) -> Built:
    """Load a model and put scheduler and runner around it.

    Raises ConfigError for a wrong option or file, UnsupportedError for a model that octavo cannot
    run, CapacityError where the arena would not hold a single request.
    """
    device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    checkpoint = open_checkpoint(source, find_families(config.plugins), progress)
    spec = checkpoint.spec
    max_model_len = pick_max_model_len(config.max_model_len, spec)
    layout = solve_layout(
        pick_groups(config, spec, dtype),
        arena_bytes=config.kv_memory or free_share(weight_bytes(checkpoint, dtype), device),
        profile=PROFILES["cpu" if device.type == "cpu" else "gpu"],
        hash_unit=spec.hash_unit,
        max_model_len=max_model_len,
    )
    scheduler = Scheduler(
        layout,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=max_model_len,
        enable_prefix_caching=config.enable_prefix_caching,
        checkpoint_interval=config.checkpoint_interval,
        eviction=config.eviction,
        # Secret, so that nobody can make prompts whose hashes meet another's.
        hash_seed=secrets.randbits(64),
        model_digest=checkpoint.digest,
    )
    # One token in and one out: an engine that cannot do even that is refused before the weights are
    # read.
    scheduler.cache.check_capacity(2)
    torch_dtype = getattr(torch, dtype)
    ops = ops_for(device, torch_dtype, backends=find_backends(config.plugins))
    runner = Runner(
        spec=spec,
        family=checkpoint.family,
        layout=layout,
        weights=checkpoint.weights(torch_dtype),
        dtype=torch_dtype,
        device=device,
        # Of requests that nobody gave a seed.
        seed=secrets.randbits(63),
        ops=ops,
    )
    return Built(
        core=EngineCore(scheduler, runner, recovery=Recovery(dumps=dump_folder(config.dump_dir))),
        layout=layout,
        spec=spec,
        eos_token_ids=checkpoint.eos_token_ids,
        max_model_len=scheduler.max_model_len,
        dtype=dtype,
        device=device,
    )


def pick_device(device: str) -> torch.device:
    """The device asked for; ``auto`` is the first GPU, else the CPU. Raises ConfigError for one
    that is not there.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    picked = torch.device(device)
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            f"device {device!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA devices"
        )
    return picked


def pick_dtype(dtype: str, device: torch.device) -> str:
    """The dtype asked for; ``auto`` is float32 on a CPU, bfloat16 elsewhere."""
    if dtype != "auto":
        return dtype
    return "float32" if device.type == "cpu" else "bfloat16"


def pick_groups(config: EngineConfig, spec: ModelSpec, dtype: str) -> tuple[Group, ...]:
    """What the layers keep, in the cache dtypes asked for; what is no key, value or entry of an
    indexer stays in ``dtype``.

    Raises UnsupportedError where layers cannot keep it so, or have nothing of the kind.
    """
    kv = dtype if config.kv_cache_dtype == "auto" else full_dtype(config.kv_cache_dtype)
    index = None if config.indexer_cache_dtype == "auto" else full_dtype(config.indexer_cache_dtype)
    groups = make_groups(spec, CacheDtypes(kv=kv, indexer=index, conv=dtype))
    for member in (member for group in groups for member in group.members):
        try:
            Entry(member.stream)
        except UnsupportedError as error:
            kind = dict(spec.layers[member.layer].mixers)[member.mixer].name
            asked = (
                f"kv_cache_dtype {config.kv_cache_dtype}, indexer_cache_dtype"
                f" {config.indexer_cache_dtype}"
            )
            raise UnsupportedError(f"{asked}: layer {member.layer} ({kind}): {error}") from None
    if index not in (None, kv) and groups == make_groups(spec, CacheDtypes(kv=kv, conv=dtype)):
        raise UnsupportedError(
            f"indexer_cache_dtype {config.indexer_cache_dtype}: the model keeps no index keys;"
            " leave it out"
        )
    return groups


def pick_max_model_len(wanted: int | None, spec: ModelSpec) -> int:
    """The length asked for, or the model's own limit. Raises ConfigError beyond it."""
    if wanted is not None and wanted > spec.max_model_len:
        raise ConfigError(
            f"max_model_len {wanted} is beyond the model's own limit of {spec.max_model_len} tokens"
        )
    return wanted or spec.max_model_len


def weight_bytes(checkpoint: Checkpoint, dtype: str) -> int:
    """Bytes of the model's weights in ``dtype``."""
    model = resolve(checkpoint.family.module)(
        checkpoint.spec, dtype=getattr(torch, dtype), device="meta"
    )
    return sum(prod(weight.shape) * weight.element_size() for weight in model.parameters())


def free_share(weights: int, device: torch.device) -> int:
    """Bytes the arena takes where nobody said. Raises CapacityError where the weights alone do not
    fit.
    """
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    share = CPU_SHARE if device.type == "cpu" else GPU_SHARE
    if free <= weights:
        raise CapacityError(
            f"the weights need {weights / 2**30:.1f} GiB, {device} has {free / 2**30:.1f} GiB free"
        )
    return int((free - weights) * share)


def available_memory(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes that a new process may take without swapping. Raises ConfigError where the system does
    not say.
    """
    if not meminfo.is_file():
        raise ConfigError(
            "this system does not say how much memory is free; give kv_memory, such as 2GiB"
        )
    fields = dict(
        line.split(":", 1)
        for line in meminfo.read_text(encoding="ascii").splitlines()
        if ":" in line
    )
    return int(fields["MemAvailable"].split()[0]) * 1024


def open_checkpoint(
    source: ModelSource, families: Families, progress: Progress = no_progress
) -> Checkpoint:
    """Read config and names, no weights yet."""
    if source.gguf:
        model = GGUFModel(source.path, families)
        config = model.config()
        return Checkpoint(
            spec=read_spec(config, families=families),
            family=model.family,
            eos_token_ids=ids_of(config.get("eos_token_id")),
            digest=digest_of(config, [source.path]),
            weights=lambda dtype: model.weights(dtype=dtype, progress=progress),
        )
    config = load_config(source.path)
    family = family_of(config, families)
    return Checkpoint(
        spec=read_spec(config, families=families),
        family=family,
        eos_token_ids=_eos(source.path, config),
        digest=digest_of(config, sorted(source.path.glob("*.safetensors"))),
        weights=lambda _: safetensors_weights(
            source.path, family, block=weight_block(config), progress=progress
        ),
    )


def _eos(directory: Path, config: dict[str, Any]) -> frozenset[int]:
    """Ids that end a generation: what generation_config.json says, else the config."""
    file = directory / "generation_config.json"
    generation = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    text = config.get("text_config") or {}
    for said in (
        generation.get("eos_token_id"),
        config.get("eos_token_id"),
        text.get("eos_token_id"),
    ):
        if said is not None:
            return ids_of(said)
    return frozenset()


def ids_of(said: int | list[int] | None) -> frozenset[int]:
    """One id, several, or none, as a set."""
    if said is None:
        return frozenset()
    return frozenset([said] if isinstance(said, int) else said)


def digest_of(config: dict[str, Any], files: list[Path]) -> bytes:
    """Names a checkpoint: its config, and size and time of every file. Caches of different ones
    never meet.
    """
    return xxhash.xxh3_128_digest("\n".join(_identity(config, files)).encode())


def _identity(config: dict[str, Any], files: list[Path]) -> Iterator[str]:
    yield json.dumps(config, sort_keys=True, default=str)
    for file in files:
        stat = file.stat()
        yield f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns}"
