"""Sparse mixture of experts: routers, experts over the tokens that chose them, a shared expert.

Owns ``MoE`` as ``MoEOptions`` describe it. The order of operations is Transformers', so that
float32 results agree, but every
layout of weights is turned into one when they are read: an expert's gate rows, if any, then its up
rows, as of ``nn.Linear``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from octavo.nn.linear import Linear
from octavo.nn.mlp import MLP, PlainMLP
from octavo.nn.module import Module
from octavo.ops import table
from octavo.ops.activation import Gating
from octavo.spec.moe import MoEOptions


def _weight(*shape: int, dtype: torch.dtype, device: torch.device | str) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def _scores(logits: Tensor, scoring: str) -> Tensor:
    if scoring == "sqrtsoftplus":
        return F.softplus(logits).sqrt()
    return logits.sigmoid() if scoring == "sigmoid" else torch.softmax(logits, dim=-1)


class Router(Module):
    """Which experts a token takes, and how much each counts."""

    product: table.Product | None = None

    def __init__(
        self, size: int, options: MoEOptions, *, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()
        self.options = options
        wide = torch.float32 if options.wide_router else dtype
        self.weight = _weight(options.experts, size, dtype=wide, device=device)
        self.bias = (
            _weight(options.experts, dtype=wide, device=device) if options.router_bias else None
        )
        if options.correction:
            self.e_score_correction_bias = _weight(
                options.experts, dtype=torch.float32, device=device
            )
        if options.table:
            self.tid2eid = _weight(options.table, options.active, dtype=torch.int64, device=device)

    def prepare(self) -> None:
        """Make the product that gives logits."""
        self.product = self.ops.project(self.weight, self.bias)

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """[T, size] -> scores in x's dtype, and experts int64, both [T, active]. token_ids [T]: for
        a router with a table.
        """
        options = self.options
        product = self.product or self.ops.project(self.weight, self.bias)
        logits = product(x.to(self.weight.dtype)).float()
        scores = _scores(logits, options.scoring)
        if options.table:
            assert token_ids is not None, "a table is looked up by token"
            chosen = self.tid2eid[token_ids]
        else:
            chosen = self._choose(logits, scores)
        taken = scores.gather(1, chosen)
        if options.normalise:
            taken = taken / (taken.sum(dim=-1, keepdim=True) + 1e-20)
        return (taken * options.scale).to(x.dtype), chosen

    def _choose(self, logits: Tensor, scores: Tensor) -> Tensor:
        """[T, experts] -> int64 [T, active]."""
        options = self.options
        # Logits are in the order of their scores, and differ where scores round to the same.
        ranks = scores + self.e_score_correction_bias if options.correction else logits
        if options.groups > 1:
            grouped = (ranks if options.correction else scores).unflatten(-1, (options.groups, -1))
            best = (
                grouped.topk(options.group_best, dim=-1)
                .values.sum(dim=-1)
                .topk(options.active_groups, dim=-1)
                .indices
            )
            closed = torch.ones(grouped.shape[:2], dtype=torch.bool, device=ranks.device).scatter_(
                1, best, False
            )
            ranks = ranks.masked_fill(
                closed.repeat_interleave(grouped.shape[2], dim=1), float("-inf")
            )
        return ranks.topk(options.active, dim=-1).indices


class Experts(Module):
    """MLPs of one shape, each over the tokens that took it. Without gates, ``gate_up_proj`` is up
    alone.
    """

    product: table.Experts | None = None

    def __init__(
        self,
        size: int,
        activation: str,
        options: MoEOptions,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        count, inner = options.experts, options.inner_size
        self.scores_inputs = options.scores_inputs
        self.gating = (
            Gating(activation=activation, limit=options.limit, clamp=options.clamp)
            if options.gated
            else activation
        )
        rows = 2 * inner if options.gated else inner
        self.gate_up_proj = _weight(count, rows, size, dtype=dtype, device=device)
        self.down_proj = _weight(count, size, inner, dtype=dtype, device=device)
        self.gate_up_proj_bias = (
            _weight(count, rows, dtype=dtype, device=device) if options.bias else None
        )
        self.down_proj_bias = (
            _weight(count, size, dtype=dtype, device=device) if options.bias else None
        )

    def prepare(self) -> None:
        """Make what runs them."""
        self.product = self._product()

    def _product(self) -> table.Experts:
        return self.ops.experts(
            table.ExpertWeights(
                first=self.gate_up_proj,
                last=self.down_proj,
                gating=self.gating,
                first_bias=self.gate_up_proj_bias,
                last_bias=self.down_proj_bias,
                scores_inputs=self.scores_inputs,
            )
        )

    def forward(self, x: Tensor, scores: Tensor, chosen: Tensor) -> Tensor:
        """x [T, size], scores and chosen [T, active] -> [T, size]."""
        return (self.product or self._product())(x, scores, chosen)


class MoE(Module):
    """What a layer has in place of its MLP."""

    def __init__(
        self,
        size: int,
        activation: str,
        options: MoEOptions,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        latent = options.latent_size
        self.gate = Router(size, options, dtype=dtype, device=device)
        self.experts = Experts(latent or size, activation, options, dtype=dtype, device=device)
        self.fc1_latent_proj = (
            Linear(size, latent, bias=False, dtype=dtype, device=device) if latent else None
        )
        self.fc2_latent_proj = (
            Linear(latent, size, bias=False, dtype=dtype, device=device) if latent else None
        )
        self.shared_experts: MLP | PlainMLP | None = None
        if options.shared_size and options.gated:
            shared, limit = options.shared_size, options.limit
            self.shared_experts = MLP(
                size, shared, activation, bias=False, limit=limit, dtype=dtype, device=device
            )
        elif options.shared_size:
            self.shared_experts = PlainMLP(
                size, options.shared_size, activation, bias=False, dtype=dtype, device=device
            )
        self.shared_expert_gate: Linear | None = None
        if options.shared_gate:
            self.shared_expert_gate = Linear(size, 1, bias=False, dtype=dtype, device=device)

    def forward(self, x: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """[T, size] -> [T, size]. token_ids: int64 [T], for a router with a table."""
        scores, chosen = self.gate(x, token_ids)
        mixed = self.experts(
            x if self.fc1_latent_proj is None else self.fc1_latent_proj(x), scores, chosen
        )
        mixed = mixed if self.fc2_latent_proj is None else self.fc2_latent_proj(mixed)
        if self.shared_experts is None:
            return mixed
        shared = self.shared_experts(x)
        return mixed + (
            shared
            if self.shared_expert_gate is None
            else self.shared_expert_gate(x).sigmoid() * shared
        )
