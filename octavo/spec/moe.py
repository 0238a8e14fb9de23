"""Which experts a layer has, and how its tokens choose among them. Torch-free.

Owns ``MoEOptions``, which ``octavo.nn.moe`` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from octavo.base import ConfigError


@dataclass(frozen=True, kw_only=True)
class MoEOptions:
    """Sparse layers of a decoder: a router, gated experts, and possibly a shared one that every
    token takes.

    layers: indices of the layers that have experts in place of an MLP.
    experts, active: how many there are, and how many a token takes. inner_size, shared_size: inner
        sizes of one expert and of the shared one, 0 where there is none.
    shared_gate: what the shared one gives is multiplied by the sigmoid of a projection of its
        input.
    scoring: how the router's logits become scores. normalise: a token's scores are divided by their
        sum. scale: their factor.
    router_bias: of the logits. correction: a bias of the scores, which counts for choosing only
        (DeepSeek-V3, section 2.1.2).
    groups, active_groups: neighbouring experts form groups; a token takes from those whose
        ``group_best`` best scores sum to
        most: two in DeepSeek-V3, one in V2.
    wide_router: the router computes in float32 whatever the model's dtype.
    scores_inputs: an expert's input is multiplied by its score (Llama 4), not its output.
    table: rows of a table of the experts that each token id takes (DeepSeek-V4's hash routing); 0
        where the router chooses.
    limit: the gate is at most and up within it ahead of the decoder's activation, in the shared
        expert too.
    bias: experts have biases. clamp: (limit, alpha) of gpt-oss's ``(up + 1) * gate * sigmoid(alpha
        * gate)`` with the gate at most and up within limit; None for the decoder's activation.
          gated: experts, and the shared one, have a gate.
    latent_size: experts work on a projection of their input to this size, and what they make is
        projected back; 0 for none (Nemotron 3).
    """

    layers: tuple[int, ...]
    experts: int
    active: int
    inner_size: int
    shared_size: int = 0
    shared_gate: bool = False
    scoring: Literal["softmax", "sigmoid", "sqrtsoftplus"] = "softmax"
    normalise: bool = False
    scale: float = 1.0
    router_bias: bool = False
    correction: bool = False
    groups: int = 1
    active_groups: int = 1
    group_best: int = 2
    wide_router: bool = False
    scores_inputs: bool = False
    table: int = 0
    limit: float | None = None
    bias: bool = False
    clamp: tuple[float, float] | None = None
    gated: bool = True
    latent_size: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.active <= self.experts:
            raise ConfigError(
                f"num_experts_per_tok {self.active} must be between 1 and the {self.experts}"
                " experts"
            )
        if self.experts % self.groups or not 1 <= self.active_groups <= self.groups:
            raise ConfigError(
                f"{self.experts} experts in n_group {self.groups} of which topk_group"
                f" {self.active_groups} are taken: groups must be of one size, and no more be taken"
                " than there are"
            )
        size = self.experts // self.groups
        if self.groups > 1 and (size < self.group_best or size * self.active_groups < self.active):
            raise ConfigError(
                f"n_group {self.groups} makes groups of {size} experts; they must have"
                f" {self.group_best}, and topk_group {self.active_groups} of them"
                f" num_experts_per_tok {self.active}"
            )
