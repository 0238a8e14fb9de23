"""Entries in pages for tests of kernels: every format, tables out of order, rubbish wherever
nothing is to be read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.kernels.entries import Paged, Part
from octavo.ops.codec import decode, encode
from octavo.ops.paged import FieldView
from octavo.spec.latent import (
    COMPRESSED_FP8_BLOCK,
    INDEX_FP4_BLOCK,
    INDEX_FP8_BLOCK,
    SPARSE_FP8_BLOCK,
)

FORMATS = {
    "key_float32": (("key", torch.float32),),
    "key_bfloat16": (("key", torch.bfloat16),),
    "key_fp8": (("key", torch.float8_e4m3fn), ("scale", torch.float32)),
    "key_fp4": (("key", torch.float4_e2m1fn_x2), ("scale", torch.float8_e8m0fnu)),
    "latent_float32": (("latent", torch.float32), ("rope", torch.float32)),
    "latent_bfloat16": (("latent", torch.bfloat16), ("rope", torch.bfloat16)),
    "latent_plain_fp8": (("latent", torch.float8_e4m3fn), ("rope", torch.float8_e4m3fn)),
    "latent_fp8": (
        ("latent", torch.float8_e4m3fn),
        ("scale", torch.float32),
        ("rope", torch.bfloat16),
    ),
    "kv_float32": (("kv", torch.float32),),
    "kv_bfloat16": (("kv", torch.bfloat16),),
    "kv_fp8": (
        ("kv", torch.float8_e4m3fn),
        ("rope", torch.bfloat16),
        ("scale", torch.float8_e8m0fnu),
    ),
}
"""Fields of an entry and their dtypes."""

BLOCKS = {
    "key_fp8": INDEX_FP8_BLOCK,
    "key_fp4": INDEX_FP4_BLOCK,
    "latent_fp8": SPARSE_FP8_BLOCK,
    "kv_fp8": COMPRESSED_FP8_BLOCK,
}


def _widths(form: str, dim: int, rope: int) -> dict[str, int]:
    """Elements of each field as it is stored."""
    names = [name for name, _ in FORMATS[form]]
    widths = {"key": dim, "kv": dim, "latent": dim - rope, "rope": rope}
    if form == "key_fp4":
        widths["key"] = dim // 2
    if form == "kv_fp8":
        widths["kv"] = dim - rope
    scaled = dim if form.startswith("key") else dim - rope
    widths["scale"] = -(-scaled // BLOCKS.get(form, 1))
    return {name: widths[name] for name in names}


def pages(
    form: str, dim: int, *, per_block: int, lengths: Sequence[int], seed: int, rope: int = 4
) -> tuple[Paged, Tensor, list[Tensor]]:
    """(entries in pages, rows of the table by request, what each request's entries decode to: [L,
    dim] in float32).
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    columns = max(lengths, default=0) // per_block + 1
    table = (
        rng.permutation(len(lengths) * columns * 2)[: len(lengths) * columns]
        .reshape(-1, columns)
        .astype(np.int32)
    )
    rows = rng.permutation(len(lengths))
    unit = 64
    fields = {}
    for (name, width), (_, dtype) in zip(
        _widths(form, dim, rope).items(), FORMATS[form], strict=True
    ):
        size = per_block * width * dtype.itemsize
        page = -(-size // unit) * unit
        # All ones are NaN in every format that has one.
        arena = torch.full((table.size * 2 * page,), 255, dtype=torch.uint8)
        data = arena.view(dtype).as_strided(
            (table.size * 2, 1, per_block, width),
            (page // dtype.itemsize, per_block * width, width, 1),
        )
        fields[name] = FieldView(data, headed=False)
    entries = []
    for request, length in enumerate(lengths):
        made = torch.randn(length, dim, generator=generator) * torch.exp(
            torch.randn(length, 1, generator=generator)
        )
        whole = (
            {"latent": made[:, : dim - rope], "rope": made[:, dim - rope :]}
            if "latent" in form
            else {form.split("_")[0]: made}
        )
        stored = encode(whole, fields)
        numbers = torch.arange(length)
        where = torch.from_numpy(table[rows[request]]).long()[numbers // per_block]
        for name, values in stored.items():
            fields[name].write(where, numbers % per_block, values[:, None])
        decoded = decode(stored, dtype=torch.float32)
        entries.append(torch.cat([decoded[name] for name in whole], dim=-1))
    names = [name for name in fields if name != "scale"]
    scale = fields["scale"].data if "scale" in fields else None
    parts = tuple(
        Part(data=fields[name].data, scale=scale, block=BLOCKS[form])
        if scale is not None and name == names[0]
        else Part(data=fields[name].data)
        for name in names
    )
    return (
        Paged(table=torch.from_numpy(table), per_block=per_block, parts=parts),
        torch.from_numpy(rows),
        entries,
    )
