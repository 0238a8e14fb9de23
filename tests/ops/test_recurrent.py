"""Chunked recurrences against the naive ones in float64: ragged requests, emit points, decays of
any strength, cuts.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from octavo.ops.oracles import recurrent
from octavo.ops.ragged import Ragged
from octavo.ops.torch import conv, delta, linear, ssm

# Outputs, and the emitted states, one tensor per state.
Result = tuple[Tensor, list[Tensor]]
LENGTHS = (1, 2, 63, 64, 65, 130)
DECAYS = {"weak": 1e-3, "middling": 0.3, "strong": 20.0}


class Case:
    """One recurrence, with inputs of a seed."""

    def __init__(self, name: str, strength: float, seed: int = 0) -> None:
        self.name, self.strength = name, strength
        self.draw = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.draw, dtype=torch.float64)

    def decay(self, *shape: int) -> Tensor:
        """Log decays, some of them weak among the strong."""
        draws = torch.rand(shape, generator=self.draw, dtype=torch.float64)
        return (
            -self.strength
            * draws
            * (torch.rand(shape, generator=self.draw, dtype=torch.float64) < 0.7)
        )

    def unit(self, *shape: int) -> Tensor:
        return functional.normalize(self.normal(*shape), dim=-1)

    def build(
        self, tokens: int, requests: int
    ) -> tuple[dict[str, Tensor], dict[str, Tensor], tuple[Tensor, ...]]:
        """Per-token inputs, fixed inputs, initial states."""
        t, r, beta = (
            tokens,
            requests,
            torch.rand((tokens, 4), generator=self.draw, dtype=torch.float64),
        )
        match self.name:
            case "causal_conv":
                return (
                    {"x": self.normal(t, 6)},
                    {"weight": self.normal(6, 4), "bias": self.normal(6)},
                    (self.normal(r, 6, 3),),
                )
            case "selective":
                moving = {
                    "u": self.normal(t, 6),
                    "dt": -self.decay(t, 6),
                    "b": self.normal(t, 5),
                    "c": self.normal(t, 5),
                }
                return (
                    moving,
                    {"a": -torch.rand((6, 5), generator=self.draw, dtype=torch.float64)},
                    (self.normal(r, 6, 5),),
                )
            case "state_space_duality":
                moving = {
                    "x": self.normal(t, 4, 3),
                    "dt": -self.decay(t, 4),
                    "b": self.normal(t, 2, 5),
                    "c": self.normal(t, 2, 5),
                }
                return moving, {"a": torch.tensor([-0.5, -1, -1, -1])}, (self.normal(r, 4, 3, 5),)
            case "gated_delta":
                moving = {
                    "q": self.unit(t, 2, 6),
                    "k": self.unit(t, 2, 6),
                    "v": self.normal(t, 4, 5),
                }
                return (
                    {**moving, "log_decay": self.decay(t, 4), "beta": beta},
                    {},
                    (self.normal(r, 4, 6, 5),),
                )
            case "channel_delta":
                moving = {
                    "q": self.unit(t, 4, 6),
                    "k": self.unit(t, 4, 6),
                    "v": self.normal(t, 4, 5),
                }
                return (
                    {**moving, "log_decay": self.decay(t, 4, 6), "beta": 2 * beta},
                    {},
                    (self.normal(r, 4, 6, 5),),
                )
            case "decayed_attention":
                moving = {
                    "q": self.unit(t, 4, 6),
                    "k": self.unit(t, 4, 6),
                    "v": self.normal(t, 4, 5),
                }
                return (
                    moving,
                    {"log_decay": self.strength * torch.tensor([-0.1, -0.5, -1, -1])},
                    (self.normal(r, 4, 6, 5),),
                )
            case "feature_attention":
                moving = {
                    "q": self.normal(t, 4, 6),
                    "k": self.normal(t, 4, 6),
                    "v": self.normal(t, 4, 5),
                }
                return moving, {}, (self.normal(r, 4, 6, 5), self.normal(r, 4, 6).abs())
            case "linear_recurrence":
                return (
                    {"a": self.decay(t, 9).exp(), "b": self.normal(t, 9)},
                    {},
                    (self.normal(r, 9),),
                )
        raise AssertionError(self.name)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv": conv.causal_conv,
    "selective": ssm.selective,
    "state_space_duality": ssm.state_space_duality,
    "gated_delta": delta.gated_delta,
    "channel_delta": delta.gated_delta,
    "decayed_attention": linear.decayed_attention,
    "feature_attention": linear.feature_attention,
    "linear_recurrence": linear.linear_recurrence,
}


def call(
    function: Callable[..., Any],
    inputs: dict[str, Tensor],
    states: Sequence[Tensor],
    ragged: Ragged,
) -> Result:
    name = "past" if function.__name__ == "causal_conv" else "state"
    out, emitted = function(
        **inputs, **{name: tuple(states) if len(states) > 1 else states[0]}, ragged=ragged
    )
    return out, [emitted] if isinstance(emitted, Tensor) else list(emitted)


def fast(name: str, inputs: dict[str, Tensor], states: Sequence[Tensor], ragged: Ragged) -> Result:
    return call(FUNCTIONS[name], inputs, states, ragged)


def naive(name: str, inputs: dict[str, Tensor], states: Sequence[Tensor], ragged: Ragged) -> Result:
    return call(getattr(recurrent, FUNCTIONS[name].__name__), inputs, states, ragged)


def layout(lengths: Sequence[int], rng: random.Random) -> Ragged:
    """Emit points anywhere, mostly also at the end."""
    emits = [
        sorted(
            {rng.randint(1, n) for _ in range(rng.randint(0, 3))}
            | ({n} if rng.random() < 0.8 else set())
        )
        for n in lengths
    ]
    return Ragged(starts=(0, *accumulate(lengths)), emits=emits)


def assert_close(got: Result, want: Result, tolerance: float) -> None:
    for a, b in zip((got[0], *got[1]), (want[0], *want[1]), strict=True):
        assert a.shape == b.shape
        assert torch.isfinite(a).all()
        torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("strength", DECAYS.values(), ids=DECAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_chunked_is_naive(name: str, dtype: torch.dtype, strength: float) -> None:
    lengths = (*LENGTHS, 1, 1)
    ragged = layout(lengths, random.Random(f"{name}{strength}"))
    moving, fixed, states = Case(name, strength).build(sum(lengths), len(lengths))
    inputs = {key: value.to(dtype) for key, value in (moving | fixed).items()}
    got = fast(name, inputs, [s.to(dtype) for s in states], ragged)
    assert got[0].dtype == dtype
    assert_close(
        got,
        naive(name, inputs, [s.to(dtype) for s in states], ragged),
        2e-5 if dtype == torch.float32 else 1e-10,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("wanted", [True, False], ids=["emitted", "not emitted"])
def test_decodes_alone_are_one_update(name: str, wanted: bool) -> None:
    ragged = Ragged(starts=range(6), emits=[(1,) if wanted or i == 2 else () for i in range(5)])
    moving, fixed, states = Case(name, 0.3).build(5, 5)
    assert_close(
        fast(name, moving | fixed, states, ragged),
        naive(name, moving | fixed, states, ragged),
        1e-10,
    )


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("cut", [1, 50, 64, 128, 149])
def test_two_parts_are_one(name: str, cut: int) -> None:
    """And the state at the cut does not depend on whether the part ends there."""
    moving, fixed, states = Case(name, 0.1).build(150, 1)
    whole_out, whole = fast(
        name, moving | fixed, states, Ragged(starts=(0, 150), emits=[(cut, 150)])
    )
    first = {key: value[:cut] for key, value in moving.items()}
    second = {key: value[cut:] for key, value in moving.items()}
    out_1, between = fast(name, first | fixed, states, Ragged(starts=(0, cut), emits=[(cut,)]))
    out_2, end = fast(
        name, second | fixed, between, Ragged(starts=(0, 150 - cut), emits=[(150 - cut,)])
    )
    stacked = [torch.cat([a, b]) for a, b in zip(between, end, strict=True)]
    assert_close((torch.cat([out_1, out_2]), stacked), (whole_out, whole), 1e-10)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_given_tensors_stay_as_they_are(name: str) -> None:
    ragged = layout((1, 70, 1), random.Random(1))
    moving, fixed, states = Case(name, 0.3).build(72, 3)
    before = [t.clone() for t in (*moving.values(), *states)]
    fast(name, moving | fixed, states, ragged)
    assert all(torch.equal(a, b) for a, b in zip(before, (*moving.values(), *states), strict=True))


@pytest.mark.parametrize(
    "name", ["selective", "state_space_duality", "gated_delta", "channel_delta"]
)
def test_decay_beyond_any_float_forgets(name: str) -> None:
    """A log decay of -inf for one token, and -20 for all the others of a chunk: zeros, and no
    NaN.
    """
    moving, fixed, states = Case(name, 0.3, seed=3).build(64, 1)
    if "dt" in moving:
        moving["dt"] = torch.full_like(moving["dt"], 20.0)
    else:
        moving["log_decay"] = torch.full_like(moving["log_decay"], -20.0)
        moving["log_decay"][10] = -torch.inf
    inputs = {key: value.float() for key, value in (moving | fixed).items()}
    ragged = Ragged(starts=(0, 64), emits=[(11, 64)])
    assert_close(
        fast(name, inputs, [s.float() for s in states], ragged),
        naive(name, inputs, states, ragged),
        1e-5,
    )


@pytest.mark.parametrize(
    "emits",
    [[(0,)], [(3, 2)], [(5,)], [(1,), (1,)]],
    ids=["zero", "descending", "behind", "too many"],
)
def test_emit_points_are_checked(emits: list[tuple[int, ...]]) -> None:
    with pytest.raises(AssertionError):
        Ragged(starts=(0, 4), emits=emits)
