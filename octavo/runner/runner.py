"""Executes step plans: copies, model, logits, tokens.

Owns the model and its arena. Knows plans and layouts; knows no requests beyond a plan's and no
scheduler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from octavo.base import ConfigError
from octavo.cache.layout import CacheLayout
from octavo.nn.decoder import Decoder, LayerCaches, resolve
from octavo.nn.module import bind
from octavo.nn.step import Step
from octavo.ops.backends import ops_for
from octavo.ops.paged import CacheView, FieldView, StreamView
from octavo.ops.table import Ops
from octavo.runner.arena import Arena
from octavo.runner.batch import make_reads, make_step
from octavo.runner.logits import adjust, slices
from octavo.runner.logprobs import token_logprobs
from octavo.runner.masks import Masks, forbid
from octavo.runner.sampler import Choice, sample
from octavo.runner.weights import Weights, fill
from octavo.sched.step import StepPlan, StepResult, TokenLogprobs
from octavo.spec.family import Family
from octavo.spec.group import Member
from octavo.spec.kind import ModelSpec

T = TypeVar("T")

Streams = dict[tuple[int, str], dict[str, tuple[int, StreamView]]]
"""(layer, mixer) -> stream name -> (group, the stream over the arena)."""


class Runner:
    """A model on a device with its arena.

    seed: what requests without a seed of their own draw from. ops: what it computes with; those of
        ``find_backends`` unless given.
    """

    def __init__(
        self,
        *,
        spec: ModelSpec,
        family: Family,
        layout: CacheLayout,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        seed: int = 0,
        arena: Arena | None = None,
        ops: Ops | None = None,
    ) -> None:
        self.spec, self.layout, self.seed = spec, layout, seed
        self.device = torch.device(device)
        self.model: Decoder = resolve(family.module)(spec, dtype=dtype, device="meta")
        fill(self.model, weights, family=family, device=self.device)
        self.ops = ops_for(self.device, dtype) if ops is None else ops
        bind(self.model, self.ops)
        self.arena = Arena(layout, self.device) if arena is None else arena
        self._masks = Masks()
        self._streams = self._cut()
        self._sources = {
            (layer.index, mixer): (layer.index if layer.shares is None else layer.shares, mixer)
            for layer in spec.layers
            for mixer, _ in layer.mixers
        }
        # Layers run in order, so the last that names a source is the last to read it.
        self._readers = {source: where for where, source in self._sources.items()}

    def _cut(self) -> Streams:
        """Views of every stream, also for layers that read another's."""
        streams: Streams = {}
        for number, group in enumerate(self.layout.groups):
            fields: dict[Member, dict[str, FieldView]] = {}
            for slot in group.format.slots:
                fields.setdefault(slot.member, {})[slot.field.name] = self.arena.view(slot)
            for member, views in fields.items():
                made = (number, StreamView(member.stream, views))
                streams.setdefault((member.layer, member.mixer), {})[member.stream.name] = made
        for layer in self.spec.layers:
            for mixer, _ in layer.mixers:
                source = layer.index if layer.shares is None else layer.shares
                if (source, mixer) not in streams and layer.shares is not None:
                    raise ConfigError(
                        f"layer {layer.index} shares the cache of layer {source}, which keeps none"
                    )
                streams[layer.index, mixer] = streams.get((source, mixer), {})
        return streams

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: copies first and in order, then the model, then a token for every request
        that samples and its forks.

        Requests that neither sample nor want logprobs of their prompt cost no head. Those for which
        the model computes NaN or infinity get nothing and are named ``invalid``.
        """
        # What may come next is known before the model has run, so both go on at once.
        masks = self._masks.start(plan.constrained) if plan.constrained else None
        hidden, step = self._run(plan)
        # A sum is finite where all of its numbers are, and only there.
        sums = hidden.flatten(1).sum(dim=1, dtype=torch.float32)
        scored = self._score(plan, hidden)
        rows = np.flatnonzero(plan.samples).tolist()
        if not rows:
            return _valid(StepResult(step=plan.step, tokens={}, scored=scored), plan, sums)
        choices, sampling = _choices(plan, rows), [plan.sampling[i] for i in rows]
        compared = not (plan.barred or masks) and all(params.plain for params in sampling)
        logits = self.model.head(hidden.index_select(0, step.last), wide=not compared)
        reported = [choice for choice in choices if choice.params.logprobs is not None]
        # Before anything changes the logits, and of the rows that ask only.
        raw = (
            torch.log_softmax(logits[[choice.row for choice in reported]], dim=1)
            if reported
            else None
        )
        # Of the model's own logits: what a request bars is infinite by its own wish.
        sampled = logits.sum(dim=1, dtype=torch.float32)
        row_of = {i: row for row, i in enumerate(rows)}
        if masks is not None:
            forbid(logits, [row_of[i] for i in plan.constrained], masks.result())
        adjust(
            logits,
            sampling,
            history={row_of[i]: tokens for i, tokens in plan.history.items()},
            barred={row_of[i]: tokens for i, tokens in plan.barred.items()},
        )
        made = sample(logits, choices, seed=self.seed, ops=self.ops)
        tokens = {choice.request_id: token for choice, token in zip(choices, made, strict=True)}
        logprobs = _report(raw, reported, tokens)
        result = StepResult(step=plan.step, tokens=tokens, logprobs=logprobs, scored=scored)
        return _valid(result, plan, sums, sampled)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run one step without sampling: float32 [requests that sample, vocab]."""
        hidden, step = self._run(plan)
        return self.model.head(hidden.index_select(0, step.last))

    def _run(self, plan: StepPlan) -> tuple[Tensor, Step]:
        """Copies and layers: hidden states [T, d] of all tokens."""
        assert len(plan.groups) == len(self.layout.groups), (
            "a plan speaks of the layout's groups, in order"
        )
        self.arena.copy(plan.copies)
        step = make_step(plan, self.device)
        return self.model(step, self._caches(plan, step)), step

    def _score(self, plan: StepPlan, hidden: Tensor) -> dict[str, list[TokenLogprobs]]:
        """``plan.scored`` by request id. Logits exist for a slice of positions at a time, whatever
        requests these are of.
        """
        if not plan.scored:
            return {}
        lengths = [len(tokens) for tokens in plan.scored.values()]
        places = np.concatenate(
            [plan.query_start[i] + np.arange(len(tokens)) for i, tokens in plan.scored.items()]
        )
        wanted = np.concatenate(list(plan.scored.values())).tolist()
        counts = np.repeat(
            [plan.sampling[i].prompt_logprobs or 0 for i in plan.scored], lengths
        ).tolist()
        index = torch.from_numpy(places.astype(np.int64)).to(self.device)
        found: list[TokenLogprobs] = []
        for part in slices(len(wanted), self.spec.vocab_size):
            logits = self.model.head(hidden.index_select(0, index[part]))
            found += token_logprobs(torch.log_softmax(logits, dim=1), wanted[part], counts[part])
        ends = np.cumsum(lengths).tolist()
        return {
            plan.request_ids[i]: found[stop - length : stop]
            for i, stop, length in zip(plan.scored, ends, lengths, strict=True)
        }

    def _caches(self, plan: StepPlan, step: Step) -> LayerCaches:
        reads = [
            make_reads(step.parts, group, layout.group.law)
            for group, layout in zip(plan.groups, self.layout.groups, strict=True)
        ]
        made: dict[tuple[int, str], dict[str, dict[str, Tensor]]] = {}
        return {
            where: {
                name: CacheView(
                    over=over,
                    reads=reads[group],
                    ops=self.ops,
                    fresh=made.setdefault(self._sources[where], {}).setdefault(name, {}),
                    first=where == self._sources[where],
                    last=where == self._readers[self._sources[where]],
                )
                for name, (group, over) in streams.items()
            }
            for where, streams in self._streams.items()
        }


def _valid(
    result: StepResult, plan: StepPlan, sums: Tensor, sampled: Tensor | None = None
) -> StepResult:
    """A receipt without what was made from numbers that are none.

    sums: float32 [T], of every token's hidden state. sampled: float32 [requests that sample], of
    the logits.
    """
    together = sums if sampled is None else torch.cat([sums, sampled])
    unscored = [
        name
        for name, scores in result.scored.items()
        if any(one.logprob != one.logprob for one in scores)
    ]
    if not unscored and bool(together.isfinite().all()):
        return result
    tokens = np.flatnonzero(~sums.isfinite().cpu().numpy())
    found = {*(np.searchsorted(plan.query_start, tokens, side="right") - 1).tolist()}
    if sampled is not None:
        found |= {*np.flatnonzero(plan.samples)[~sampled.isfinite().cpu().numpy()].tolist()}
    invalid = frozenset({*unscored, *(plan.request_ids[i] for i in found)})
    forks = {name for i in found for name in plan.forks.get(i, ())}
    gone = invalid | forks

    def without(given: Mapping[str, T]) -> dict[str, T]:
        return {name: one for name, one in given.items() if name not in gone}

    return StepResult(
        step=result.step,
        tokens=without(result.tokens),
        logprobs=without(result.logprobs),
        scored=without(result.scored),
        invalid=invalid,
    )


def _choices(plan: StepPlan, rows: Sequence[int]) -> list[Choice]:
    """What is to be chosen from the logits of requests ``rows``: a token for each, and for each of
    its forks.
    """
    choices = []
    for row, i in enumerate(rows):
        params, place, forks = plan.sampling[i], int(plan.output_len[i]), plan.forks.get(i, ())
        assert not (forks and plan.branch[i]), "branch 0 forks"
        for branch, name in enumerate((plan.request_ids[i], *forks), int(plan.branch[i])):
            choices.append(
                Choice(row=row, request_id=name, params=params, place=place, branch=branch)
            )
    return choices


def _report(
    raw: Tensor | None, reported: Sequence[Choice], tokens: Mapping[str, int]
) -> dict[str, TokenLogprobs]:
    """Logprobs of chosen tokens by request id. raw: those of all tokens, a row for each of
    ``reported``.
    """
    if raw is None:
        return {}
    names = [choice.request_id for choice in reported]
    found = token_logprobs(
        raw, [tokens[name] for name in names], [choice.params.logprobs or 0 for choice in reported]
    )
    return dict(zip(names, found, strict=True))
