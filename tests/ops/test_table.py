"""The table of ops: every implementation against the op's oracle, and who is bound to what."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.base import ConfigError
from octavo.ops.backends import find_backends, ops_for, read_choice
from octavo.ops.table import ORACLES, Backend, Place, bind_ops
from tests.ops.cases import CASES, Case, Numbers

CPU = torch.device("cpu")
TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 2e-2}


def offered() -> list[Any]:
    """Every (backend, op, dtype) that can be bound on this machine's CPU."""
    return [
        pytest.param(backend.ops[name], name, dtype, id=f"{backend.name}-{name}-{dtype}")
        for backend in find_backends()
        for dtype in TOLERANCE
        if backend.takes(Place(device=CPU, dtype=dtype))
        for name in backend.ops
    ]


def oracle(name: str) -> Any:
    module, _, function = ORACLES[name].partition(":")
    return getattr(importlib.import_module(module), function)


def tensors(result: Any) -> Sequence[Tensor]:
    if result is None:
        return ()
    return (result,) if isinstance(result, Tensor) else result


def run(op: Any, case: Case) -> tuple[Sequence[Tensor], list[Tensor]]:
    """What the op gives, and what it leaves in the tensors that it changes."""
    case = copy.deepcopy(case)
    made = op(*case.given, **case.more)
    made = made if case.then is None else made(*case.then)
    return tensors(made), case.changes(case)


def expect(name: str, case: Case) -> tuple[Sequence[Tensor], list[Tensor]]:
    case = copy.deepcopy(case)
    arguments = (*case.given, *case.more.values()) if case.then is not None else case.given
    more = case.more if case.then is None else {}
    made = oracle(name)(*arguments, *(case.then or ()), **more)
    return tensors(made), case.changes(case)


@pytest.mark.parametrize(("op", "name", "dtype"), offered())
@torch.inference_mode()
def test_every_implementation_equals_the_oracle(op: Any, name: str, dtype: torch.dtype) -> None:
    for seed in range(2):
        for case in CASES[name](Numbers(seed, dtype)):
            (made, left), (wanted, right) = run(op, case), expect(name, case)
            assert len(made) == len(wanted)
            for fast, slow in zip(made, wanted, strict=True):
                assert fast.shape == slow.shape
                if slow.dtype == torch.int64:
                    assert torch.equal(fast, slow)
                    continue
                close = TOLERANCE[dtype]
                torch.testing.assert_close(fast.double(), slow.double(), atol=close, rtol=close)
            for fast, slow in zip(left, right, strict=True):
                # Caches keep float32 at most.
                close = max(TOLERANCE[dtype], TOLERANCE[torch.float32])
                torch.testing.assert_close(fast, slow, atol=close, rtol=close, equal_nan=True)


def test_every_op_has_cases_and_an_oracle() -> None:
    assert CASES.keys() == ORACLES.keys()
    assert all(callable(oracle(name)) for name in ORACLES)


# -- binding ---------------------------------------------------------------------------------------

NEVER = Backend(name="never", takes=lambda place: False, ops={"norm": None})
LATE = Backend(name="late", takes=lambda place: place.device == CPU, ops={"norm": "late"})


def test_the_last_backend_that_takes_the_place_has_the_op() -> None:
    place = Place(device=CPU, dtype=torch.float64)
    bound = bind_ops(place, [*find_backends(), LATE, NEVER])
    assert bound.norm == "late" and bound.chosen["norm"] == "late"
    assert bound.chosen["rotate"] == "torch", "kernels know no float64"


def test_somebody_may_choose() -> None:
    asked = {"OCTAVO_OPS": "norm=torch, greedy=torch"}
    bound = ops_for(CPU, torch.float32, environment=asked)
    assert bound.chosen["norm"] == bound.chosen["greedy"] == "torch"
    everything = ops_for(CPU, torch.float32, environment={}).chosen
    assert {name: bound.chosen[name] for name in ("rotate", "project")} == {
        name: everything[name] for name in ("rotate", "project")
    }


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ("norm", "write op=backend"),
        ("norm=", "write op=backend"),
        ("normal=torch", "'normal' is no op; there are norm"),
        ("norm=gpu", "'norm' is not in backend 'gpu' for cpu and torch.float32"),
    ],
)
def test_a_wrong_choice_is_refused(choice: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ops_for(CPU, torch.float32, environment={"OCTAVO_OPS": choice})


def test_a_choice_is_pairs() -> None:
    assert read_choice("") == {} and read_choice("a=b,c=d") == {"a": "b", "c": "d"}


def test_a_backend_offers_ops_only() -> None:
    with pytest.raises(ConfigError, match="backend 'x' offers attendance, which is no op"):
        Backend(name="x", takes=lambda place: True, ops={"attendance": None})


def test_an_op_that_nobody_has_is_named() -> None:
    with pytest.raises(ConfigError, match="is not in any backend"):
        bind_ops(Place(device=CPU, dtype=torch.float32), [LATE])
