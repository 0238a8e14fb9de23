"""Entries in pages for tests of kernels: every format, tables out of order, rubbish wherever
nothing is to be read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Final

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.entries import Paged
from octavo.ops.cpu.entries import paged
from octavo.ops.paged import CacheView
from octavo.ops.reads import Parts, Reads
from octavo.ops.torch.backend import TORCH
from octavo.spec.codec import Scaled
from octavo.spec.law import Everything
from octavo.spec.stream import FP4, FP8, Field, Stream
from tests.ops.worlds import over_nothing

FORMATS: Final = MappingProxyType(
    {
        "key_float32": ("float32",),
        "key_bfloat16": ("bfloat16",),
        "key_fp8": (FP8, "float32", 128),
        "key_fp4": (FP4, "float8_e8m0fnu", 32),
        "latent_float32": ("float32",),
        "latent_bfloat16": ("bfloat16",),
        "latent_plain_fp8": (FP8,),
        "latent_fp8": (FP8, "float32", 128),
        "kv_float32": ("float32",),
        "kv_bfloat16": ("bfloat16",),
        "kv_fp8": (FP8, "float8_e8m0fnu", 64),
    }
)
"""Dtype of an entry's elements and, where they have scales, of these, and how many share one."""


def stream_of(form: str, dim: int, rope: int) -> Stream:
    """Entries of ``dim`` elements in a format; the last ``rope`` of latents and of those that are
    key and value lie in a field of their own where the others are quantised.
    """
    name, (dtype, *scales) = form.split("_")[0], FORMATS[form]
    cut = name == "latent" or (name == "kv" and bool(scales))
    size = dim - rope if cut else dim
    main = Field(name=name, shape=(size // (2 if dtype == FP4 else 1),), dtype=dtype)
    fields: tuple[Field, ...] = (main,)
    if scales:
        codec = Scaled(scale="scale", block=scales[1], turned=name == "key")
        width = (-(-size // scales[1]),)
        fields = (replace(main, codec=codec), Field(name="scale", shape=width, dtype=scales[0]))
    if cut:
        part = "rope" if name == "latent" else "kv"
        wide = "bfloat16" if scales else dtype
        fields = (*fields, Field(name="rope", shape=(rope,), dtype=wide, part=part))
    return Stream(name=name, law=Everything(), fields=fields)


def pages(
    form: str, dim: int, *, per_block: int, lengths: Sequence[int], seed: int, rope: int = 4
) -> tuple[Paged, Tensor, list[Tensor]]:
    """(entries in pages, rows of the table by request, what each request's entries decode to: [L,
    dim] in float32).
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    columns, count = max(lengths, default=0) // per_block + 1, len(lengths)
    drawn = rng.permutation(count * columns * 2)[: count * columns]
    table, rows = drawn.reshape(-1, columns).astype(np.int32), rng.permutation(count)
    over = over_nothing(stream_of(form, dim, rope), count * columns * 2, per_block)
    entries = []
    for request, length in enumerate(lengths):
        made = torch.randn(length, dim, generator=generator) * torch.exp(
            torch.randn(length, 1, generator=generator)
        )
        whole = {next(iter(over.entry.parts)): made}
        if len(over.entry.parts) == 2:
            whole = {"latent": made[:, : dim - rope], "rope": made[:, dim - rope :]}
        stored = over.entry.encode(whole)
        numbers = torch.arange(length)
        where = torch.from_numpy(table[rows[request]]).long()[numbers // per_block]
        for name, values in stored.items():
            data = over.fields[name].data
            TORCH.store([data], where, numbers % per_block, [values[:, None]], numbers)
        decoded = over.entry.decode(stored, torch.float32)
        entries.append(torch.cat(list(decoded.values()), dim=-1))
    nothing = np.zeros(0, dtype=np.int64)
    reads = Reads(
        parts=Parts.of(nothing, np.zeros(1, dtype=np.int64), "cpu"),
        law=Everything(),
        table=table,
        rows=rows.astype(np.int64),
        fixed=None,
        turning=0,
        block_tokens=per_block,
        pages=nothing,
        page_rows=nothing,
        fresh=nothing.astype(np.bool_),
    )
    return paged(CacheView(over=over, reads=reads, ops=TORCH)), torch.from_numpy(rows), entries
