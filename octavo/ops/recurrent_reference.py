"""Naive recurrences, token by token in float64: what the chunked forms of ``ops`` are tested
against.

Owns nothing the engine runs and shares no code with the fast path but the description of a step.
Arguments and results are those of the function of the same name.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from octavo.ops.ragged import Ragged

Update = Callable[[int, Tensor], tuple[Tensor, Tensor]]


def _walk(update: Update, state: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """``update(token, state [...]) -> (output, state)`` over every request's tokens in turn."""
    outs, emitted = [], []
    for request, points in enumerate(ragged.emits):
        now = state[request].double()
        for token in range(ragged.starts[request], ragged.starts[request + 1]):
            out, now = update(token, now)
            outs.append(out)
            if token - ragged.starts[request] + 1 in points:
                emitted.append(now)
    return torch.stack(outs), torch.stack(emitted) if emitted else state.double()[:0]


def causal_conv(
    x: Tensor, past: Tensor, weight: Tensor, bias: Tensor | None, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """See ``ops.conv``."""

    def update(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        line = torch.cat([state, x[token].double()[:, None]], dim=1)
        y = (line * weight.double()).sum(1)
        return (y if bias is None else y + bias.double()), line[:, 1:]

    return _walk(update, past, ragged)


def selective_scan(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """See ``ops.ssm``."""
    u, dt, a, b, c = (t.double() for t in (u, dt, a, b, c))

    def update(token: int, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.exp(torch.einsum("i,in->in", dt[token], a)) * h + torch.outer(
            dt[token] * u[token], b[token]
        )
        return h @ c[token], h

    return _walk(update, state, ragged)


def ssd_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """See ``ops.ssm``."""
    x, dt, a, b, c = (t.double() for t in (x, dt, a, b, c))
    heads, groups = x.shape[1], b.shape[1]

    def update(token: int, h: Tensor) -> tuple[Tensor, Tensor]:
        h = h.clone()
        y = torch.empty_like(x[0])
        for head in range(heads):
            group = head * groups // heads
            h[head] = torch.exp(dt[token, head] * a[head]) * h[head]
            h[head] += dt[token, head] * torch.outer(x[token, head], b[token, group])
            y[head] = h[head] @ c[token, group]
        return y, h

    return _walk(update, state, ragged)


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """See ``ops.delta``."""
    q, k, v, log_decay, beta = (t.double() for t in (q, k, v, log_decay, beta))
    heads, key_heads = v.shape[1], k.shape[1]

    def update(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        state = state.clone()
        out = torch.empty_like(v[0])
        for head in range(heads):
            key = head * key_heads // heads
            kept = torch.exp(log_decay[token, head]).reshape(-1, 1) * state[head]
            missing = v[token, head] - kept.T @ k[token, key]
            state[head] = kept + torch.outer(k[token, key], beta[token, head] * missing)
            out[head] = state[head].T @ q[token, key]
        return out, state

    return _walk(update, state, ragged)


def decayed_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """See ``ops.linear``."""
    q, k, v, log_decay = (t.double() for t in (q, k, v, log_decay))

    def update(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        heads = range(len(log_decay))
        after = [
            torch.exp(log_decay[h]) * state[h] + torch.outer(k[token, h], v[token, h])
            for h in heads
        ]
        return torch.stack([after[h].T @ q[token, h] for h in heads]), torch.stack(after)

    return _walk(update, state, ragged)


def feature_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor],
    ragged: Ragged,
    *,
    eps: float = 1e-6,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """See ``ops.linear``."""
    q, k, v = (t.double() for t in (q, k, v))
    width = v.shape[2]

    def feature(x: Tensor) -> Tensor:
        return torch.where(x > 0, x + 1, torch.exp(x))

    def update(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        after, outs = state.clone(), []
        for head in range(len(state)):
            key, query = feature(k[token, head]), feature(q[token, head])
            after[head, :, :width] += torch.outer(key, v[token, head])
            after[head, :, width] += key
            outs.append(after[head, :, :width].T @ query / (after[head, :, width] @ query + eps))
        return torch.stack(outs), after

    out, emitted = _walk(update, torch.cat([state[0], state[1][..., None]], dim=-1), ragged)
    return out, (emitted[..., :width], emitted[..., width])


def linear_recurrence(a: Tensor, b: Tensor, state: Tensor, ragged: Ragged) -> tuple[Tensor, Tensor]:
    """See ``ops.linear``."""

    def update(token: int, h: Tensor) -> tuple[Tensor, Tensor]:
        h = a[token].double() * h + b[token].double()
        return h, h

    return _walk(update, state, ragged)
