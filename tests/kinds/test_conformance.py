"""What every kind must keep, run for every kind that ``find_families`` knows: its own, plugins' and
those of tests/plugins.

Owns the properties. Knows no kind: a new one needs no line here, only ``examples()``.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import FrozenInstanceError
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from octavo.base import UnsupportedError
from octavo.kinds.full.spec import FullAttention
from octavo.nn.decoder import build_mixer, resolve
from octavo.ops.codec import Entry
from octavo.runner.arena import Arena
from octavo.spec.hf import find_families
from octavo.spec.kind import Kind, LayerSpec, ModelSpec
from octavo.spec.law import Law
from octavo.spec.stream import DTYPE_BYTES, CacheDtypes
from tests.kinds.harness import Bench, make_layer
from tests.runner.plans import hand_layout

PLUGINS = Path(__file__).resolve().parent.parent / "plugins"


def all_kinds() -> tuple[type[Kind], ...]:
    names = sorted(f"tests.plugins.{info.name}" for info in pkgutil.iter_modules([str(PLUGINS)]))
    modules = [importlib.import_module(name) for name in names]
    return find_families([module for module in modules if hasattr(module, "KINDS")]).kinds


PLANNED_ONLY = "the kind can be planned for but not run yet: it has no layer and no reference"
EXAMPLES = [
    pytest.param(kind, id=f"{kind.name}-{number}")
    for cls in all_kinds()
    for number, kind in enumerate(cls.examples())
]
LENGTH = 45
FLOAT32 = CacheDtypes(kv="float32")
every_example = pytest.mark.parametrize("kind", EXAMPLES)
every_runnable_example = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            *example.values,
            id=example.id,
            marks=pytest.mark.skipif(example.values[0].layer is None, reason=PLANNED_ONLY),
        )
        for example in EXAMPLES
    ],
)
QUANTISED = CacheDtypes(kv="float8_e4m3fn", indexer="float4_e2m1fn_x2", state="bfloat16")


def streams_stride(kind: Kind) -> int:
    return int(np.lcm.reduce([stream.stride for stream in kind.streams(FLOAT32)] or [1]))


def hidden_of(layer: torch.nn.Module, length: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(length, layer.hidden_size, generator=generator, dtype=torch.float64)


def oracle(kind: Kind, layer: torch.nn.Module, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        return resolve(kind.reference)(layer, hidden)


def close(actual: Tensor, expected: Tensor) -> None:
    # The cache holds float32, the oracle keeps float64.
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


@every_example
def test_is_frozen_hashable_data_with_equal_streams(kind: Kind) -> None:
    assert isinstance(hash(kind), int)
    assert kind.streams(FLOAT32) == kind.streams(FLOAT32)
    assert len({stream.name for stream in kind.streams(FLOAT32)}) == len(kind.streams(FLOAT32))
    with pytest.raises((FrozenInstanceError, AttributeError)):
        kind.name_of_nothing = 1  # type: ignore[attr-defined]


@every_example
def test_quantised_caches_are_no_larger_and_keep_what_they_keep(kind: Kind) -> None:
    """Dtypes change the layout of entries, never which there are nor for how long."""
    wide, narrow = kind.streams(CacheDtypes()), kind.streams(QUANTISED)
    assert [(s.name, s.law, s.stride) for s in wide] == [(s.name, s.law, s.stride) for s in narrow]
    assert all(
        w.law.reads_before_writing or n.entry_bytes < w.entry_bytes
        for w, n in zip(wide, narrow, strict=True)
    )


def can_be_filled(kind: Kind) -> bool:
    """Whether the kind quantises anything, and in dtypes that it has a codec for."""
    try:
        entries = [Entry(stream) for stream in kind.streams(QUANTISED)]
    except UnsupportedError:
        return False
    return not all(entry.plain for entry in entries)


every_quantised_example = pytest.mark.parametrize(
    "kind",
    [
        pytest.param(*example.values, id=example.id)
        for example in EXAMPLES
        if example.values[0].layer is not None and can_be_filled(example.values[0])
    ],
)


@every_quantised_example
def test_encoding_what_was_decoded_changes_nothing(kind: Kind) -> None:
    """Else what is read twice, from pages and as the step's own, would be two things."""
    generator = torch.Generator().manual_seed(0)
    for stream in kind.streams(QUANTISED):
        entry, headed = Entry(stream), {f.shape[0] for f in stream.fields if f.shard == "heads"}
        sizes = {part: sum(piece.size for piece in pieces) for part, pieces in entry.parts.items()}
        given = {
            part: torch.randn(9, *headed, size, generator=generator)
            * torch.exp(3 * torch.randn(9, *headed, 1, generator=generator))
            for part, size in sizes.items()
        }
        stored = entry.encode(given)
        back = entry.decode(stored, torch.float32)
        # What is kept rotated is rotated back.
        again = entry.encode({part: entry.match(part, kept) for part, kept in back.items()})
        assert stored.keys() == again.keys() == {field.name for field in stream.fields}
        for name, kept in stored.items():
            assert torch.equal(kept.view(torch.uint8), again[name].view(torch.uint8)), name


@every_quantised_example
def test_quantised_any_chunking_gives_the_same(kind: Kind) -> None:
    """The codec says what is computed, and not how the work is cut; and it stays near."""
    stride, outs = streams_stride(kind), []
    for cut in (LENGTH, 1, 7):
        bench = Bench(kind, (stride * 3, stride * 2), requests=1, shuffle=cut, dtypes=QUANTISED)
        hidden = hidden_of(bench.layer, LENGTH, 5)
        outs.append(torch.cat([bench.run([(0, part)])[0] for part in hidden.split(cut)]))
        torch.testing.assert_close(outs[-1], outs[0], rtol=1e-9, atol=1e-9)
    wanted = oracle(kind, bench.layer, hidden)
    error = (outs[0] - wanted).norm() / wanted.norm()
    assert 1e-6 < error < 0.5


@every_example
def test_fields_have_names_of_their_own_and_one_dtype_where_nothing_is_quantised(
    kind: Kind,
) -> None:
    for stream in kind.streams(FLOAT32):
        assert len({field.name for field in stream.fields}) == len(stream.fields) > 0
        assert {field.dtype for field in stream.fields} == {"float32"}


@every_example
def test_law_never_asks_again_for_what_it_let_go(kind: Kind) -> None:
    for law in {stream.law for stream in kind.streams(FLOAT32)}:
        check_law(law)


def check_law(law: Law) -> None:
    before: set[int] = set()
    for n in range(120):
        needed = {token for a, b in law.needs(n) for token in range(a, b)}
        assert all(0 <= token < n for token in needed)
        assert needed <= before | {n - 1}, f"{law} at {n}"
        before = needed


@every_example
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_fields_equal_strides_of_views(kind: Kind, dtype: str) -> None:
    spec = ModelSpec(
        family="x",
        layers=(LayerSpec(index=0, mixers=(("mixer", kind),)),),
        vocab_size=1,
        max_model_len=64,
    )
    layout = hand_layout(spec, (streams_stride(kind) * 3,), dtype=dtype, num_pages=4)
    arena = Arena(layout)
    for group in layout.groups:
        end = 0
        for slot in group.format.slots:
            data = arena.view(slot).data
            size = DTYPE_BYTES[slot.field.dtype]
            first, last = data[0].flatten()[0], data[0].flatten()[-1]
            assert data.stride(0) * size == layout.arena.unit_bytes
            assert data[0].is_contiguous()
            assert data[0].numel() * size == slot.entries * slot.field.entry_bytes
            assert data.shape[3:] == (
                slot.field.shape[1:] if slot.field.shard == "heads" else slot.field.shape
            )
            assert prod(data.shape[1:2] + data.shape[3:]) * size == slot.field.entry_bytes
            assert first.data_ptr() >= 0
            assert data.storage_offset() * size == slot.offset >= end
            assert last.numel() == 1
            end = slot.offset + slot.entries * slot.field.entry_bytes
            assert end <= group.format.page_bytes <= group.page_units * layout.arena.unit_bytes


@every_runnable_example
@pytest.mark.parametrize("seed", range(4))
def test_any_chunking_equals_the_reference(kind: Kind, seed: int) -> None:
    rng = np.random.default_rng(seed)
    block = streams_stride(kind) * int(rng.integers(1, 9))
    bench = Bench(kind, (block, block + streams_stride(kind)), requests=1, shuffle=seed)
    hidden = hidden_of(bench.layer, LENGTH, seed)
    expected = oracle(kind, bench.layer, hidden)
    done = 0
    while done < LENGTH:
        length = LENGTH if seed == 0 else min(1 + int(rng.integers(0, 4 * seed + 1)), LENGTH - done)
        (out,) = bench.run([(0, hidden[done : done + length])])
        close(out, expected[done : done + length])
        done += length


@every_runnable_example
def test_decoding_token_by_token_equals_the_reference(kind: Kind) -> None:
    bench = Bench(kind, (streams_stride(kind) * 4,), requests=1)
    hidden = hidden_of(bench.layer, LENGTH, 9)
    outs = [bench.run([(0, hidden[token : token + 1])])[0] for token in range(LENGTH)]
    close(torch.cat(outs), oracle(kind, bench.layer, hidden))


@every_runnable_example
@pytest.mark.parametrize("seed", range(3))
def test_mixed_batches_equal_the_reference(kind: Kind, seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    stride = streams_stride(kind)
    bench = Bench(kind, (stride * int(rng.integers(1, 7)), stride * 2), requests=5, shuffle=seed)
    hidden = [
        hidden_of(bench.layer, int(length), seed * 10 + i)
        for i, length in enumerate(rng.integers(3, LENGTH, 5))
    ]
    expected = [oracle(kind, bench.layer, part) for part in hidden]
    while any(
        done < part.shape[0] for done, part in zip(bench.maker.computed, hidden, strict=True)
    ):
        parts, places = [], []
        for i in rng.permutation(5):
            done = bench.maker.computed[i]
            length = min(
                1 if rng.random() < 0.6 else int(rng.integers(1, 20)), hidden[i].shape[0] - done
            )
            if length > 0 and rng.random() < 0.8:
                parts.append((int(i), hidden[i][done : done + length]))
                places.append(expected[i][done : done + length])
        if parts:
            for out, want in zip(bench.run(parts), places, strict=True):
                close(out, want)


@every_runnable_example
def test_the_bench_notices_a_lost_entry(kind: Kind) -> None:
    if not kind.streams(FLOAT32) or not any(stream.needs(20) for stream in kind.streams(FLOAT32)):
        pytest.skip("this example remembers nothing at token 20, so nothing can be lost")
    bench = Bench(kind, (streams_stride(kind) * 4,), requests=1)
    hidden = hidden_of(bench.layer, 21, 3)
    bench.run([(0, hidden[:20])])
    bench.maker.computed[0] = 0
    bench.poison()
    bench.maker.computed[0] = 20
    assert bench.run([(0, hidden[20:])])[0].isnan().any()


def test_kinds_have_examples_that_differ() -> None:
    assert len(EXAMPLES) >= 2
    for cls in all_kinds():
        examples = cls.examples()
        assert len(set(examples)) == len(examples) > 0
        assert cls.layer is None or all(make_layer(kind).hidden_size > 0 for kind in examples)


def test_a_kind_has_both_layer_and_reference_or_neither() -> None:
    for cls in all_kinds():
        assert (cls.layer is None) == (cls.reference is None), cls.name


def test_a_kind_without_a_layer_is_not_built() -> None:
    class Unbuilt(FullAttention):
        name = "unbuilt"
        layer = None

    with pytest.raises(UnsupportedError, match="kind 'unbuilt' can be planned but not run yet"):
        build_mixer(Unbuilt.examples()[0], torch.float32, "cpu")
