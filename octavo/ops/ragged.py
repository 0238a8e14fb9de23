"""Running a recurrence over the tokens of several requests, laid out one request after another.

Owns how a step is cut: requests with one token are updated together, longer ones in pieces that end
at chunk borders and
wherever a state is wanted. Knows no recurrence: a kernel brings its chunk form and its single step.
Memory is bounded by one piece; nothing of size tokens times state is ever made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import torch
from torch import Tensor

Inputs = tuple[Tensor, ...]
Step = Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
"""One token of each of n requests: inputs [n, ...], state [n, ...] -> outputs, and states behind
them.
"""

# Below it, exp gives 0 in float64 too. Floors log decays, so that differences of their sums are
# never inf - inf.
LOG_ZERO = -1000.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Ragged:
    """The requests of one step, and after which of their tokens the state is wanted.

    ``starts``: where each request's tokens begin, and the total behind them [R + 1]. ``emits``: for
    each request, ascending, counts of its own tokens in this step (1..n) after which the state is
    emitted; the last one is normally n.
    """

    starts: Sequence[int]
    emits: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        assert len(self.emits) == len(self.starts) - 1 and self.starts[0] == 0, (
            "one list of emit points per request"
        )
        for tokens, points in zip(self.lengths, self.emits, strict=True):
            assert all(a < b for a, b in zip((0, *points), (*points, tokens + 1), strict=True)), (
                f"emit points {list(points)} are not ascending counts of {tokens} tokens"
            )

    @property
    def num_requests(self) -> int:
        """R."""
        return len(self.emits)

    @property
    def num_tokens(self) -> int:
        """T, of all requests together."""
        return self.starts[-1]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each request."""
        return tuple(
            stop - start for start, stop in zip(self.starts[:-1], self.starts[1:], strict=True)
        )

    @cached_property
    def emit_starts(self) -> tuple[int, ...]:
        """Where each request's emitted states begin among all, and the total E behind them [R +
        1].
        """
        return reduce(lambda sums, points: (*sums, sums[-1] + len(points)), self.emits, (0,))

    @cached_property
    def singles(self) -> tuple[int, ...]:
        """Requests with one token."""
        return tuple(i for i, tokens in enumerate(self.lengths) if tokens == 1)

    @cached_property
    def only_singles(self) -> bool:
        """Whether every request has one token, and its state is wanted: decoding."""
        return len(self.singles) == self.num_requests == self.emit_starts[-1]

    @cached_property
    def longs(self) -> tuple[int, ...]:
        """Requests with several tokens."""
        return tuple(i for i, tokens in enumerate(self.lengths) if tokens > 1)

    def pieces(self, request: int, size: int) -> Iterator[tuple[int, int, int | None]]:
        """A request's tokens in pieces of at most ``size`` that end at its emit points: begin and
        end among the step's tokens, and which emitted state is the one after the piece, if any.
        """
        begin, row = self.starts[request], self.emit_starts[request]
        points = [*self.emits[request]]
        for target in (*points, self.lengths[request]):
            stop = self.starts[request] + target
            while begin < stop:
                end = min(begin + size, stop)
                emit = row if end == stop and row < self.emit_starts[request + 1] else None
                yield begin, end, emit
                row, begin = row + (emit is not None), end


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One recurrence. Both functions leave what they are given as it is.

    ``chunk(inputs [L, ...], state [...])`` and ``step(inputs [n, ...], state [n, ...])``, the
    latter for one token of each of n requests, return outputs and the states behind them. ``size``:
    most tokens of a chunk.
    """

    chunk: Callable[[Inputs, Tensor], tuple[Tensor, Tensor]]
    step: Step
    size: int


def work_dtype(*tensors: Tensor) -> torch.dtype:
    """What states are computed in: float32, or float64 where anything given is."""
    return reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)


def scan(
    kernel: Kernel,
    inputs: Inputs,
    state: Tensor,
    ragged: Ragged,
    *,
    out_shape: Sequence[int],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Outputs [T, *out_shape] of all tokens and the wanted states [E, ...], request by request,
    both in ``dtype``.

    ``inputs`` are [T, ...] each, ``state`` is what every request begins with [R, ...].
    """
    assert len(state) == ragged.num_requests and all(len(x) == ragged.num_tokens for x in inputs)
    if ragged.only_singles:
        return kernel.step(tuple(x.to(dtype) for x in inputs), state.to(dtype))
    out = state.new_empty((ragged.num_tokens, *out_shape), dtype=dtype)
    emitted = state.new_empty((ragged.emit_starts[-1], *state.shape[1:]), dtype=dtype)
    if ragged.singles:
        _scan_singles(kernel, inputs, state, ragged, out, emitted)
    for request in ragged.longs:
        now = state[request].to(dtype)
        for begin, end, emit in ragged.pieces(request, kernel.size):
            out[begin:end], now = kernel.chunk(tuple(x[begin:end].to(dtype) for x in inputs), now)
            if emit is not None:
                emitted[emit] = now
    return out, emitted


def _scan_singles(
    kernel: Kernel, inputs: Inputs, state: Tensor, ragged: Ragged, out: Tensor, emitted: Tensor
) -> None:
    """One step for all requests with one token, into their rows of ``out`` and ``emitted``."""
    rows = torch.tensor(ragged.singles, device=state.device)
    tokens = torch.tensor([ragged.starts[i] for i in ragged.singles], device=state.device)
    y, after = kernel.step(
        tuple(x[tokens].to(out.dtype) for x in inputs), state[rows].to(out.dtype)
    )
    out[tokens] = y
    wanted = [j for j, i in enumerate(ragged.singles) if ragged.emits[i]]
    places = [ragged.emit_starts[ragged.singles[j]] for j in wanted]
    emitted[torch.tensor(places, dtype=torch.long, device=state.device)] = after[wanted]
