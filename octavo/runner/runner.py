"""Executes step plans: copies, model, logits, tokens.

Owns the model and its arena. Knows plans and layouts; knows no requests beyond a plan's and no scheduler.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.base import ConfigError
from octavo.cache.layout import CacheLayout
from octavo.nn.decoder import Decoder, LayerCaches, resolve
from octavo.nn.step import Step
from octavo.ops.paged import CacheView, FieldView
from octavo.runner.arena import Arena
from octavo.runner.batch import make_group, make_step
from octavo.runner.sampler import sample
from octavo.runner.weights import Weights, fill
from octavo.sched.step import StepPlan, StepResult
from octavo.spec.family import Family
from octavo.spec.kind import ModelSpec

Streams = dict[tuple[int, str], dict[str, tuple[int, dict[str, FieldView]]]]
"""(layer, mixer) -> stream name -> (group, fields by name)."""


class Runner:
    """A model on a device with its arena. seed: what requests without a seed of their own draw from."""

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
    ) -> None:
        self.spec, self.layout, self.seed = spec, layout, seed
        self.device = torch.device(device)
        self.model: Decoder = resolve(family.module)(spec, dtype=dtype, device="meta")
        fill(self.model, weights, dtype=dtype, device=self.device)
        self.arena = Arena(layout, self.device) if arena is None else arena
        self._streams = self._cut()

    def _cut(self) -> Streams:
        """Views of every stream, also for layers that read another's."""
        streams: Streams = {}
        for number, group in enumerate(self.layout.groups):
            for slot in group.format.slots:
                member = slot.member
                stream = streams.setdefault((member.layer, member.mixer), {})
                _, fields = stream.setdefault(member.stream.name, (number, {}))
                fields[slot.field.name] = self.arena.view(slot)
        for layer in self.spec.layers:
            for mixer, _ in layer.mixers:
                source = layer.index if layer.shares is None else layer.shares
                if (source, mixer) not in streams and layer.shares is not None:
                    raise ConfigError(f"layer {layer.index} shares the cache of layer {source}, which keeps none")
                streams[layer.index, mixer] = streams.get((source, mixer), {})
        return streams

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: copies first and in order, then the model, then a token for every request that samples."""
        logits = self.logits(plan)
        rows = [i for i, wanted in enumerate(plan.samples) if wanted]
        tokens = sample(
            logits,
            [plan.sampling[i] for i in rows],
            [plan.request_ids[i] for i in rows],
            [int(plan.output_len[i]) for i in rows],
            seed=self.seed,
        )
        return StepResult(step=plan.step, tokens={plan.request_ids[i]: token for i, token in zip(rows, tokens, strict=True)})

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run one step without sampling: float32 [requests that sample, vocab]."""
        assert len(plan.groups) == len(self.layout.groups), "a plan speaks of the layout's groups, in order"
        self.arena.copy(plan.copies)
        token_ids, step = make_step(plan, self.device)
        return self.model(token_ids, step, self._caches(plan, step))

    def _caches(self, plan: StepPlan, step: Step) -> LayerCaches:
        batches = [
            make_group(plan, group, layout.group.law, self.device)
            for group, layout in zip(plan.groups, self.layout.groups, strict=True)
        ]
        return {
            where: {name: CacheView(fields=fields, batch=batches[group]) for name, (group, fields) in streams.items()}
            for where, streams in self._streams.items()
        }
