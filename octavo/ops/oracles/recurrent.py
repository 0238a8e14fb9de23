"""Recurrences, slowly: token by token in float64.

What is named like an op takes what the op takes, and stores what the op stores. The others have
their states as tensors, and share no code with what they are compared with but the description of a
step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.ops.ragged import Ragged
from octavo.ops.states import State

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
    """``ConvOp`` over the joined past of all channels, [R, C, K - 1]."""

    def update(token: int, state: Tensor) -> tuple[Tensor, Tensor]:
        line = torch.cat([state, x[token].double()[:, None]], dim=1)
        y = (line * weight.double()).sum(1)
        return (y if bias is None else y + bias.double()), line[:, 1:]

    return _walk(update, past, ragged)


def selective(
    u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """``SelectiveScanOp``."""
    u, dt, a, b, c = (t.double() for t in (u, dt, a, b, c))

    def update(token: int, h: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.exp(torch.einsum("i,in->in", dt[token], a)) * h + torch.outer(
            dt[token] * u[token], b[token]
        )
        return h @ c[token], h

    return _walk(update, state, ragged)


def state_space_duality(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor, ragged: Ragged
) -> tuple[Tensor, Tensor]:
    """``SsdScanOp``."""
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
    """``DeltaScanOp``."""
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
    """``DecayedScanOp``."""
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
    """``FeatureScanOp``."""
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
    """``LinearScanOp``."""

    def update(token: int, h: Tensor) -> tuple[Tensor, Tensor]:
        h = a[token].double() * h + b[token].double()
        return h, h

    return _walk(update, state, ragged)


# -- in pages --------------------------------------------------------------------------------------


def _before(state: State) -> Tensor:
    """[R, *entry] in float64: the entry of the token before each request's part, or zeros."""
    reads, view = state.view.reads, state.field
    rows = []
    for i, start in enumerate(reads.parts.start.tolist()):
        if start == 0:
            rows.append(torch.zeros_like(view.data[0, :, 0]))
            continue
        block, row = divmod(start - 1, reads.block_tokens)
        if reads.fixed is not None and block >= reads.fixed:
            block = reads.fixed + (block - reads.fixed) % reads.turning
        rows.append(view.data[int(reads.table[reads.rows[i], block]), :, row])
    whole = torch.stack(rows).double()
    return whole if view.headed else whole[:, 0]


def _wanted(state: State) -> Ragged:
    """Behind which tokens of each request its state is stored."""
    reads = state.view.reads
    cuts = reads.parts.entry_start_loc.tolist()
    emits = [
        [entry - low + 1 for entry in range(low, high) if reads.pages[entry] >= 0]
        for low, high in zip(cuts[:-1], cuts[1:], strict=True)
    ]
    return Ragged(starts=cuts, emits=emits)


def _store(state: State, after: Tensor) -> None:
    reads, data = state.view.reads, state.field.data
    stored = [entry for entry in range(len(reads.pages)) if reads.pages[entry] >= 0]
    for row, entry in enumerate(stored):
        page, place = int(reads.pages[entry]), int(reads.page_rows[entry])
        data[page, :, place] = after[row].to(data.dtype).view_as(data[page, :, place])


def conv(x: Tensor, weight: Tensor, bias: Tensor | None, past: Sequence[State]) -> Tensor:
    """``ConvOp``."""
    before = [_before(state).flatten(1, -2) for state in past]
    y, kept = causal_conv(x, torch.cat(before, dim=1), weight, bias, _wanted(past[0]))
    low = 0
    for state, part in zip(past, before, strict=True):
        _store(state, kept[:, low : low + part.shape[1]])
        low += part.shape[1]
    return y


def selective_scan(u: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: State) -> Tensor:
    """``SelectiveScanOp``."""
    y, after = selective(u, dt, a, b, c, _before(state), _wanted(state))
    _store(state, after)
    return y


def ssd_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: State) -> Tensor:
    """``SsdScanOp``."""
    y, after = state_space_duality(x, dt, a, b, c, _before(state), _wanted(state))
    _store(state, after)
    return y


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: State
) -> Tensor:
    """``DeltaScanOp``."""
    out, after = gated_delta(q, k, v, log_decay, beta, _before(state), _wanted(state))
    _store(state, after)
    return out


def decayed_scan(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, state: State) -> Tensor:
    """``DecayedScanOp``, whose decay is the same for all tokens."""
    out, after = decayed_attention(q, k, v, log_decay, _before(state), _wanted(state))
    _store(state, after)
    return out


def feature_scan(q: Tensor, k: Tensor, v: Tensor, sums: State, keys: State) -> Tensor:
    """``FeatureScanOp``."""
    before = _before(sums), _before(keys)
    out, (after, normaliser) = feature_attention(q, k, v, before, _wanted(sums))
    _store(sums, after)
    _store(keys, normaliser)
    return out


def linear_scan(a: Tensor, b: Tensor, state: State) -> Tensor:
    """``LinearScanOp``."""
    out, after = linear_recurrence(a, b, _before(state), _wanted(state))
    _store(state, after)
    return out
