"""What families with experts have in common: how checkpoints hold experts, and how many weights
they are. Torch-free.

Owns no family.
"""

from __future__ import annotations

from typing import Any, Final

from octavo.models.weights import attention, biased, experts, gated_mlp, mixers
from octavo.spec.attention import AttentionParams
from octavo.spec.family import Rename, Repack
from octavo.spec.kind import Config, LayerSpec, count
from octavo.spec.moe import MoEOptions

WHERE: Final = r"(model\.layers\.\d+\.mlp\.experts)"

ONE_BY_ONE: Final = (
    Repack(
        pattern=rf"{WHERE}\.(\d+)\.gate_proj\.weight",
        into=(r"\1.gate_up_proj",),
        index=r"\2",
        half=0,
    ),
    Repack(
        pattern=rf"{WHERE}\.(\d+)\.up_proj\.weight", into=(r"\1.gate_up_proj",), index=r"\2", half=1
    ),
    Repack(pattern=rf"{WHERE}\.(\d+)\.down_proj\.weight", into=(r"\1.down_proj",), index=r"\2"),
)
"""Checkpoints with three tensors for every expert. The stacks that Transformers makes of them are
octavo's own.
"""

W_ONE_BY_ONE: Final = (
    Repack(pattern=rf"{WHERE}\.(\d+)\.w1\.weight", into=(r"\1.gate_up_proj",), index=r"\2", half=0),
    Repack(pattern=rf"{WHERE}\.(\d+)\.w3\.weight", into=(r"\1.gate_up_proj",), index=r"\2", half=1),
    Repack(pattern=rf"{WHERE}\.(\d+)\.w2\.weight", into=(r"\1.down_proj",), index=r"\2"),
)
"""The same by Mixtral's names."""

MIXTRAL_NAMES: Final[tuple[Rename, ...]] = ((r"(.*)\.block_sparse_moe\.(.*)", r"\1.mlp.\2"),)
"""Where Mixtral's descendants have their experts."""


def transposed(*, interleaved: bool) -> tuple[Repack, ...]:
    """Checkpoints with stacks [experts, inputs, outputs]; interleaved: rows of gate and up
    alternate, also in the bias.
    """
    return (
        Repack(
            pattern=rf"{WHERE}\.gate_up_proj",
            into=(r"\1.gate_up_proj",),
            axis=1,
            transposed=True,
            interleaved=interleaved,
        ),
        Repack(
            pattern=rf"{WHERE}\.gate_up_proj_bias",
            into=(r"\1.gate_up_proj_bias",),
            axis=1,
            interleaved=interleaved,
        ),
        Repack(pattern=rf"{WHERE}\.down_proj", into=(r"\1.down_proj",), transposed=True),
    )


def behind_dense(config: Config) -> tuple[int, ...]:
    """All layers but the first ``first_k_dense_replace``."""
    return tuple(
        range(count(config, "first_k_dense_replace", 0), count(config, "num_hidden_layers"))
    )


def corrected(config: Config, sparse: tuple[int, ...], **changes: Any) -> MoEOptions | None:
    """Experts of the layers ``sparse``, by DeepSeek's key names; None without any. changes: of
    ``MoEOptions``.

    They are chosen by DeepSeek-V3's rule (section 2.1.2): sigmoid scores, corrected for choosing,
    from the best groups.
    """
    if not sparse:
        return None
    inner = count(config, "moe_intermediate_size")
    usual: dict[str, Any] = {
        "experts": count(config, "n_routed_experts"),
        "active": count(config, "num_experts_per_tok"),
        "inner_size": inner,
        "shared_size": inner * count({"n_shared_experts": 0, **config}, "n_shared_experts", 0),
        "scoring": "sigmoid",
        "normalise": bool(config["norm_topk_prob"]),
        "scale": float(config["routed_scaling_factor"]),
        "correction": True,
        "groups": count(config, "n_group"),
        "active_groups": count(config, "topk_group"),
        "wide_router": True,
    }
    return MoEOptions(layers=sparse, **{**usual, **changes})


def heads(config: Config, layers: tuple[LayerSpec, ...], **options: Any) -> int:
    """Weights of all attention, biased as ``attention_bias`` says, and two norms per layer."""
    hidden, made = count(config, "hidden_size"), 0
    for kind in mixers(layers):
        params: AttentionParams = kind.attention  # type: ignore[attr-defined]
        made += attention(params, bias=biased(params, config), **options) + 2 * hidden
    return made


def routed(config: Config, layers: int) -> int:
    """Weights of all MLPs by DeepSeek's key names: dense in the first layers, then routed and
    shared experts.
    """
    hidden, inner = count(config, "hidden_size"), count(config, "moe_intermediate_size")
    shared, number = (
        count({"n_shared_experts": 0, **config}, "n_shared_experts", 0),
        count(config, "n_routed_experts"),
    )
    dense = min(count(config, "first_k_dense_replace", 0), layers)
    sparse = experts(hidden, inner, number) + gated_mlp(hidden, inner * shared)
    made = (layers - dense) * sparse
    return made + (dense * gated_mlp(hidden, count(config, "intermediate_size")) if dense else 0)
