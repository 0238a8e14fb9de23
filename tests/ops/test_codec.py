"""Entries in every stored form, against formats written out as lists of numbers, one element at a
time.

Owns that slow reference: exact fractions, every code of fp8 and fp4 by name, nearest by search.
Layouts come from the kinds' streams, so a field that moved would show.
"""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from math import isnan

import pytest
import torch
from torch import Tensor

from octavo.base import UnsupportedError
from octavo.ops.codec import Entry, hadamard
from octavo.ops.torch.backend import TORCH
from octavo.spec.latent import (
    CompressedParams,
    LatentParams,
    compressor_stream,
    entry_stream,
    index_stream,
    latent_stream,
    sparse_latent_stream,
)
from octavo.spec.law import Everything, Tail
from octavo.spec.stream import FP4, FP8, CacheDtypes, Stream
from tests.ops.worlds import over_nothing

LATENT = LatentParams(
    hidden_size=64, num_heads=2, kv_lora_rank=512, rope_dim=64, nope_dim=32, value_dim=32
)
ENTRY = CompressedParams(
    hidden_size=64,
    num_heads=2,
    head_dim=512,
    rope_dim=64,
    window=8,
    q_lora_rank=8,
    o_groups=1,
    o_lora_rank=8,
)
SMALL = CompressedParams(
    hidden_size=64,
    num_heads=2,
    head_dim=120,
    rope_dim=20,
    window=8,
    q_lora_rank=8,
    o_groups=1,
    o_lora_rank=8,
)
"""Blocks of 64 do not divide its 100 elements without position."""

STREAMS = {
    "latent 656": (
        sparse_latent_stream(LATENT, CacheDtypes(kv=FP8)),
        {"latent": 512, "rope": 64},
        656,
    ),
    "latent 576": (latent_stream(LATENT, CacheDtypes(kv=FP8)), {"latent": 512, "rope": 64}, 576),
    "latent bf16": (sparse_latent_stream(LATENT, CacheDtypes()), {"latent": 512, "rope": 64}, 1152),
    "entry 584": (
        entry_stream("c", ENTRY, Everything(), CacheDtypes(kv=FP8), stride=4),
        {"kv": 512},
        584,
    ),
    "entry small": (
        entry_stream("c", SMALL, Everything(), CacheDtypes(kv=FP8)),
        {"kv": 120},
        100 + 2 * 20 + 8,
    ),
    "entry bf16": (entry_stream("c", ENTRY, Everything(), CacheDtypes()), {"kv": 512}, 1024),
    "index 132": (index_stream(128, CacheDtypes(indexer=FP8)), {"key": 128}, 132),
    "index 68": (index_stream(128, CacheDtypes(indexer=FP4)), {"key": 128}, 68),
    "index 256": (index_stream(256, CacheDtypes(indexer=FP8)), {"key": 256}, 256 + 8),
    "index bf16": (index_stream(128, CacheDtypes()), {"key": 128}, 256),
    "compressor": (
        compressor_stream("s", 32, Tail(ratio=4, overlap=4), CacheDtypes(kv=FP8)),
        {"kv": 64, "gate": 64},
        512,
    ),
}
QUANTISED = [
    name
    for name, (stream, _, _) in STREAMS.items()
    if any(f.name == "scale" for f in stream.fields)
]


def encode(entry: dict[str, Tensor], stream: Stream) -> dict[str, Tensor]:
    return Entry(stream).encode(entry)


def decode(stored: dict[str, Tensor], stream: Stream, dtype: torch.dtype) -> dict[str, Tensor]:
    return Entry(stream).decode(stored, dtype)


def entries(
    parts: dict[str, int], *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Normal numbers whose sizes differ a lot from entry to entry and a little within one."""
    rng = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn((*shape, 1), generator=rng))
    return {
        n: (sizes * torch.randn((*shape, s), generator=rng)).to(dtype) for n, s in parts.items()
    }


def raw(stored: dict[str, Tensor]) -> dict[str, list[int]]:
    return {
        name: kept.contiguous().view(torch.uint8).flatten().tolist()
        for name, kept in stored.items()
    }


# The slow reference
# --------------------------------------------------------------------------------------------------


def grid(exponents: int, mantissas: int, bias: int) -> list[Fraction]:
    """Every non-negative value of a float format, by code, as if none of the codes were special."""
    values = []
    for code in range(1 << exponents + mantissas):
        exponent, mantissa = divmod(code, 1 << mantissas)
        fraction = Fraction(mantissa, 1 << mantissas)
        values.append(
            (fraction * 2 if exponent == 0 else 1 + fraction) * Fraction(2) ** (exponent - bias)
        )
    return values


def nearest(value: Fraction, values: list[Fraction]) -> int:
    """The code nearest to a non-negative value, an even one where two are; the last is 'more than
    that'.
    """
    place = bisect_left(values, value)
    if place == 0 or place == len(values):
        return min(place, len(values) - 1)
    below, above = value - values[place - 1], values[place] - value
    return place - 1 if below < above or (below == above and place % 2) else place


FP8_GRID = grid(4, 3, 7)
FP4_GRID = [*grid(2, 1, 1), Fraction(8)]
CASES = {FP8: (FP8_GRID, 126, 0x80), FP4: (FP4_GRID, 7, 8)}
"""Values by code, the largest code that is a number, the sign's bit. One more code stands for what
is too large.
"""


def slow_block(block: list[float], dtype: str) -> tuple[list[int], int]:
    """Codes of one block and its scale's exponent: the smallest with which no element rounds to
    more than there is.
    """
    values, last, sign = CASES[dtype]
    exact = [Fraction(value) for value in block]
    largest = max(map(abs, exact))
    exponent = -126
    while nearest(largest / Fraction(2) ** exponent, values) > last:
        exponent += 1
    codes = []
    for value in exact:
        code = min(nearest(abs(value) / Fraction(2) ** exponent, values), last)
        codes.append(code | (sign if value < 0 and code else 0))
    return codes, exponent


def slow_values(codes: list[int], exponent: int, dtype: str) -> list[float]:
    values, _, sign = CASES[dtype]
    return [
        float((-1 if code & sign else 1) * values[code & (sign - 1)] * Fraction(2) ** exponent)
        for code in codes
    ]


# Formats
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMS)
def test_entries_have_the_bytes_that_their_layout_says(name: str) -> None:
    stream, parts, size = STREAMS[name]
    fields = {field.name: field for field in stream.fields}
    stored = encode(entries(parts, 2, 3), stream)
    assert stored.keys() == fields.keys()
    assert all(
        kept.dtype == getattr(torch, fields[n].dtype) and kept.shape == (2, 3, *fields[n].shape)
        for n, kept in stored.items()
    )
    assert (
        sum(kept[0, 0].numel() * kept.element_size() for kept in stored.values())
        == size
        == stream.entry_bytes
    )


@pytest.mark.parametrize(
    ("name", "part", "dtype", "block", "float_scales"),
    [
        ("latent 656", "latent", FP8, 128, True),
        ("entry 584", "kv", FP8, 64, False),
        ("entry small", "kv", FP8, 64, False),
        ("index 132", "key", FP8, 128, True),
        ("index 256", "key", FP8, 128, True),
        ("index 68", "key", FP4, 32, False),
    ],
)
def test_codes_and_scales_are_those_of_the_slow_reference(
    name: str, part: str, dtype: str, block: int, *, float_scales: bool
) -> None:
    stream, parts, _ = STREAMS[name]
    entry = entries(parts, 40, seed=3)
    stored = encode(entry, stream)
    whole = hadamard(entry[part]) if part == "key" else entry[part]
    kept = whole[
        :,
        : stream.fields[[f.name for f in stream.fields].index(part)].shape[0]
        * (2 if dtype == FP4 else 1),
    ]
    found = stored[part].view(torch.uint8)
    codes = torch.stack((found & 15, found >> 4), -1).flatten(-2) if dtype == FP4 else found
    back = decode(stored, stream, torch.float32)[part]
    for row in range(40):
        for number, start in enumerate(range(0, kept.shape[1], block)):
            cells = slice(start, min(start + block, kept.shape[1]))
            expected, exponent = slow_block(kept[row, cells].tolist(), dtype)
            assert codes[row, cells].tolist() == expected
            assert stored["scale"][row, number].float() == 2.0**exponent
            if not float_scales:
                assert stored["scale"].view(torch.uint8)[row, number] == exponent + 127
            assert back[row, cells].tolist() == slow_values(expected, exponent, dtype)


@pytest.mark.parametrize("dtype", [FP8, FP4])
def test_every_number_between_codes_rounds_to_the_nearest(dtype: str) -> None:
    values, last, _ = CASES[dtype]
    middles = [(a + b) / 2 for a, b in zip(values[:last], values[1 : last + 1], strict=True)]
    tried = [
        float(v) * (1 + nudge)
        for v in (*values[: last + 1], *middles)
        for nudge in (0, 2**-20, -(2**-20))
    ]
    tried = [*tried, *(-value for value in tried)]
    limit = float(values[last])
    # Every block begins with the largest value, so that its scale is 1.
    width = 31 if dtype == FP4 else 127
    rows = [[limit, *tried[start : start + width]] for start in range(0, len(tried), width)]
    rows = [row + [0.0] * (width + 1 - len(row)) for row in rows]
    stream, _, _ = STREAMS["index 68" if dtype == FP4 else "latent 656"]
    for row in rows:
        if dtype == FP4:
            entry = {"key": hadamard(torch.tensor(row, dtype=torch.float64).repeat(4).float())}
            given = hadamard(entry["key"]).tolist()[: width + 1]
        else:
            entry = {"latent": torch.tensor(row).repeat(4), "rope": torch.zeros(64)}
            given = entry["latent"].tolist()[: width + 1]
        back = next(iter(decode(encode(entry, stream), stream, torch.float32).values())).tolist()
        assert back[: width + 1] == slow_values(*slow_block(given, dtype), dtype)


def test_what_is_rotated_and_plain_parts_are_casts() -> None:
    entry = entries({"kv": 512}, 7)
    back = decode(encode(entry, STREAMS["entry 584"][0]), STREAMS["entry 584"][0], torch.float32)[
        "kv"
    ]
    assert torch.equal(back[:, 448:], entry["kv"][:, 448:].bfloat16().float())
    state = entries({"kv": 64, "gate": 64}, 7)
    stored = encode(state, STREAMS["compressor"][0])
    assert all(torch.equal(stored[name], state[name]) for name in state)


def test_fp8_without_scales_saturates() -> None:
    stored = encode(
        {"latent": torch.full((512,), 1e4), "rope": torch.full((64,), -1e4)},
        STREAMS["latent 576"][0],
    )
    assert stored["latent"].float().unique().tolist() == [448.0]
    assert stored["rope"].float().unique().tolist() == [-448.0]


# What codecs promise
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", STREAMS)
def test_encoding_what_was_decoded_changes_no_bit(name: str, dtype: torch.dtype) -> None:
    stream, parts, _ = STREAMS[name]
    entry = entries(parts, 300, seed=1, dtype=dtype)
    if name == "compressor":
        dtype = torch.float32
    stored = encode(entry, stream)
    again = decode(stored, stream, dtype)
    if "key" in again and "scale" in stored:
        again["key"] = hadamard(again["key"].float())
    assert raw(encode(again, stream)) == raw(stored)


@pytest.mark.parametrize("name", QUANTISED)
def test_errors_are_those_of_the_element_format(name: str) -> None:
    stream, parts, _ = STREAMS[name]
    entry = {part: values.clamp(-400, 400) for part, values in entries(parts, 200, seed=2).items()}
    back = decode(encode(entry, stream), stream, torch.float32)
    for part, values in entry.items():
        wanted = Entry(stream).match("key", values) if part == "key" else values
        error = (back[part] - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max() < (0.16 if name == "index 68" else 0.04)


@pytest.mark.parametrize("name", STREAMS)
def test_an_entry_does_not_depend_on_its_neighbours(name: str) -> None:
    stream, parts, _ = STREAMS[name]
    entry = entries(parts, 9)
    alone = [encode({part: values[i] for part, values in entry.items()}, stream) for i in range(9)]
    together = encode(entry, stream)
    assert all(raw({n: kept[i] for n, kept in together.items()}) == raw(alone[i]) for i in range(9))


@pytest.mark.parametrize("name", QUANTISED)
@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-30, 1e30, 3e38])
def test_no_size_is_too_small_or_too_large(name: str, size: float) -> None:
    stream, parts, _ = STREAMS[name]
    # A rotation adds all elements up.
    entry = {
        part: torch.full((2, width), size / (width if part == "key" else 1))
        for part, width in parts.items()
    }
    back = decode(encode(entry, stream), stream, torch.float32)
    assert all(torch.isfinite(values).all() for part, values in back.items() if part != "rope")
    if size == 0.0:
        assert all(not values.any() for values in back.values())


@pytest.mark.parametrize("name", ["latent 656", "entry 584"])
def test_nan_stays_where_it_is(name: str) -> None:
    stream, parts, _ = STREAMS[name]
    entry = entries(parts, 2)
    part = next(iter(parts))
    entry[part][0, 5] = torch.nan
    back = decode(encode(entry, stream), stream, torch.float32)[part]
    assert isnan(back[0, 5])
    assert back.isnan().sum() == 1


def test_nan_spoils_its_key_only() -> None:
    entry = entries({"key": 128}, 2)
    entry["key"][0, 5] = torch.nan
    back = decode(encode(entry, STREAMS["index 68"][0]), STREAMS["index 68"][0], torch.float32)[
        "key"
    ]
    assert back[0].isnan().all()
    assert not back[1].isnan().any()


@pytest.mark.parametrize("name", STREAMS)
def test_fields_in_pages_give_back_what_was_written(name: str) -> None:
    stream, parts, _ = STREAMS[name]
    over = over_nothing(stream, 3, 5)
    stored = over.entry.encode(entries(parts, 4))
    entry = over.entry.decode(stored, torch.float32)
    pages, rows = torch.tensor([0, 2, 1, 2]), torch.tensor([4, 0, 3, 1])
    for field, kept in stored.items():
        data = over.fields[field].data
        TORCH.store([data], pages, rows, [kept[:, None]], torch.arange(4))
    taken = {field: view.take(pages, rows, TORCH) for field, view in over.fields.items()}
    assert raw(taken) == raw(stored)
    places = pages.view(2, 2), rows.view(2, 2)
    found = {field: view.take(*places, TORCH) for field, view in over.fields.items()}
    again = over.entry.decode(found, torch.float32)
    assert all(torch.equal(again[part].flatten(0, 1), entry[part]) for part in entry)


# Rotation
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 16, 128])
def test_the_rotation_is_sylvesters_matrix(size: int) -> None:
    matrix = torch.tensor(
        [[(-1.0) ** (row & column).bit_count() for column in range(size)] for row in range(size)]
    )
    values = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(hadamard(values), values @ matrix / size**0.5, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(hadamard(hadamard(values)), values, rtol=1e-5, atol=1e-6)


def test_scores_survive_the_rotation_of_both_sides() -> None:
    rng = torch.Generator().manual_seed(0)
    queries, keys = torch.randn(6, 128, generator=rng), torch.randn(9, 128, generator=rng)
    for name, bound in (("index bf16", 0.02), ("index 132", 0.05), ("index 68", 0.2)):
        entry = Entry(STREAMS[name][0])
        kept = entry.decode(entry.encode({"key": keys}), torch.float32)["key"]
        scores = entry.match("key", queries) @ kept.T
        assert (scores - queries @ keys.T).norm() < bound * (queries @ keys.T).norm()


def test_sizes_that_cannot_be_rotated_are_named() -> None:
    with pytest.raises(UnsupportedError, match="index keys of 96 elements, not a power of two"):
        encode({"key": torch.zeros(96)}, index_stream(96, CacheDtypes(indexer=FP8)))
