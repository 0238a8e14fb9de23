"""Names of prefixes.

Protects: whatever changes cached bytes changes the key, and nothing else does.
"""

from __future__ import annotations

from itertools import combinations, permutations
from typing import Any

import numpy as np
import pytest

from octavo.cache.hashing import NO_KEYS, PrefixHasher, root_key
from tests.faults.toy import Toy, full, layout_of, state, window

PROMPT = list(range(100, 117))


ROOT = root_key(seed=0)


def keys_of(tokens: list[int], root: bytes = ROOT, *, unit: int = 4, seed: int = 0) -> list[bytes]:
    return (
        PrefixHasher(unit=unit, seed=seed)
        .extend(NO_KEYS, np.array(tokens, np.int32), root=root)
        .tolist()
    )


def first_keys(salt: str = "", **options: Any) -> list[bytes]:
    toy = Toy(layout_of(full(), window(8)), **options)
    return list(toy.cache.keys(toy.add("r", PROMPT, cache_salt=salt), len(PROMPT)).tolist())


@pytest.mark.parametrize(
    "change", [{"salt": "b"}, {"hash_seed": 7}, {"model_digest": b"other weights, dtype or layout"}]
)
def test_each_ingredient_changes_every_key(change: dict[str, Any]) -> None:
    """Tenant, server secret, and the digest of model, cache dtype and layout: no key of one world
    exists in another.
    """
    assert not set(first_keys()) & set(first_keys(**change))


@pytest.mark.parametrize("groups", [(full(),), (full(), window(8)), (full(), state())])
def test_tenants_share_nothing_and_find_their_own(groups: tuple[Any, ...]) -> None:
    """The same tokens under another salt miss in every group, and under the same salt hit."""
    toy = Toy(layout_of(*groups))
    toy.serve("a", PROMPT, cache_salt="a")
    assert toy.hit(PROMPT[:16]) == 0 and toy.hit(PROMPT[:16], cache_salt="b") == 0
    assert toy.hit(PROMPT[:16], cache_salt="a") == 16
    assert toy.serve("b", PROMPT, cache_salt="b").num_cached_tokens == 0


def test_salts_do_not_run_into_each_other() -> None:
    """("ab", "c") is not ("a", "bc"), and an absent salt is not an empty neighbour's."""
    roots = [
        root_key(*salts, seed=0)
        for salts in ((b"ab", b"c"), (b"a", b"bc"), (b"abc",), (b"abc", b""), (b"", b"abc"), ())
    ]
    assert len(set(roots)) == len(roots)


def test_keys_use_all_bits_of_a_token_and_of_the_digest() -> None:
    """Tokens that agree in their low 16 bits differ, digests are 128 bits and no part of them is
    cut off.
    """
    small, large = keys_of([1, 2, 3, 4]), keys_of([1, 2, 3, 4 + (1 << 16)])
    assert small != large and len(small[0]) == 16
    many = [keys_of([i, 0, 0, 0])[0] for i in range(3000)]
    assert len(set(many)) == 3000
    for a, b in combinations(range(0, 16, 2), 2):
        assert len({key[a : a + 2] + key[b : b + 2] for key in many}) > 2990


def test_a_key_names_the_whole_prefix() -> None:
    """Equal units behind different beginnings, swapped units, and shifted units all have different
    names.
    """
    one, two = [1, 2, 3, 4], [5, 6, 7, 8]
    chains = [
        keys_of([*one, *two]),
        keys_of([*two, *one]),
        keys_of([*two, *two]),
        keys_of([0, *one, *two][:8]),
    ]
    assert len({key for chain in chains for key in chain}) == 7, (
        "only the first unit of the second and third chain is shared"
    )


def test_keys_made_piece_by_piece_are_the_same() -> None:
    """A growing request names its prefixes as one that comes whole, and never names a unit that is
    not full.
    """
    whole = keys_of(PROMPT)
    grown, hasher = NO_KEYS, PrefixHasher(unit=4, seed=0)
    for stop in range(len(PROMPT) + 1):
        grown = hasher.extend(grown, np.array(PROMPT[:stop], np.int32), root=ROOT)
        assert grown.tolist() == whole[: stop // 4]


def test_keys_tell_prefixes_of_one_token_again_and_again_apart() -> None:
    """Token 0 counts, and so does how often; positions count where tokens change places."""
    assert len(set(keys_of([0] * 64) + keys_of([1] * 64))) == 32
    assert len({keys_of(tokens)[0] for tokens in permutations(range(4))}) == 24


def test_keys_are_the_sums_that_they_are_said_to_be() -> None:
    """By whole numbers, without arrays, for prompts that outgrow the secret numbers drawn at
    first.
    """
    tokens, unit = [int(token) for token in np.random.default_rng(1).integers(0, 2**31, 40)], 4
    streams = [
        np.random.Philox(key=[7, lane]).random_raw(len(tokens)).tolist() for lane in range(2)
    ]
    sums = [int.from_bytes(ROOT[:8], "little"), int.from_bytes(ROOT[8:], "little")]
    expected = []
    for place, token in enumerate(tokens, 1):
        sums = [
            (total + (token + 1) * stream[place - 1]) % 2**64
            for total, stream in zip(sums, streams, strict=True)
        ]
        if place % unit == 0:
            expected.append(b"".join(total.to_bytes(8, "little") for total in sums))
    assert keys_of(tokens, unit=unit, seed=7) == expected
    long = list(range(3000))
    assert keys_of(long)[: len(PROMPT)] == keys_of(long[: 4 * len(PROMPT)])
