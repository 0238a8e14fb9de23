"""How many weights the usual parts of a model have. Torch-free.

Owns counting. What is counted is what Transformers makes a parameter of: norms, biases and routers
are included, tables that follow from the config are not. All sizes come from the kinds' own
parameters where a kind has them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.kinds.dsa.spec import SparseLatent
from octavo.kinds.gated_delta_net.spec import GatedDeltaNet
from octavo.kinds.kda.spec import KimiDelta
from octavo.kinds.mamba.spec import Mamba
from octavo.kinds.mamba2.spec import Mamba2
from octavo.models.common import typed_layers
from octavo.spec.attention import AttentionParams
from octavo.spec.kind import Config, Kind, LayerSpec, count
from octavo.spec.latent import LatentParams


def embeddings(config: Config, *, tied: bool | None = None) -> int:
    """Embedding, head unless tied to it, and the final norm."""
    hidden = count(config, "hidden_size")
    shared = bool(config.get("tie_word_embeddings", False)) if tied is None else tied
    return count(config, "vocab_size") * hidden * (1 if shared else 2) + hidden


def mixers(layers: tuple[LayerSpec, ...]) -> list[Kind]:
    """Every kind of every layer, one after another."""
    return [kind for layer in layers for _, kind in layer.mixers]


def attention(
    params: AttentionParams,
    *,
    bias: bool = False,
    out_bias: bool = False,
    gate: bool = False,
    norms: int = 0,
) -> int:
    """Projections of queries (and of a gate as large), keys, values and output. norms: weights of
    their norms.
    """
    queries, keys = params.num_heads * params.head_dim, params.num_kv_heads * params.head_dim
    size = params.hidden_size
    made = size * (queries * (2 if gate else 1) + 2 * keys) + queries * size + norms
    return made + (queries + 2 * keys if bias else 0) + (size if out_bias else 0)


def dense(
    *,
    layer_norms: int = 2,
    mlp_bias: str = "",
    **beside: Callable[[AttentionParams, Config], int | bool],
) -> Callable[[Config], int]:
    """A function that counts the weights of a plain decoder.

    layer_norms: per layer, of the hidden size. mlp_bias: the config key that says so. beside:
    options of ``attention``, each from its parameters and the config.
    """

    def parameters(config: Config) -> int:
        hidden, inner = count(config, "hidden_size"), count(config, "intermediate_size")
        made = embeddings(config)
        for kind in mixers(typed_layers(config)):
            params: AttentionParams = kind.attention  # type: ignore[attr-defined]
            options: dict[str, Any] = {
                name: value(params, config) for name, value in beside.items()
            }
            made += attention(params, **options) + layer_norms * hidden
            made += gated_mlp(hidden, inner, bias=bool(config.get(mlp_bias, False)))
        return made

    return parameters


def always(_: AttentionParams, __: Config) -> bool:
    """The part is there whatever the config says."""
    return True


def biased(_: AttentionParams, config: Config) -> bool:
    """The part is there if ``attention_bias`` says so."""
    return bool(config.get("attention_bias", False))


def head_norms(params: AttentionParams, _: Config) -> int:
    """Norms over one head of q and one of k."""
    return 2 * params.head_dim


def whole_norms(params: AttentionParams, _: Config) -> int:
    """Norms over all heads of q and all of k."""
    return (params.num_heads + params.num_kv_heads) * params.head_dim


def latent_attention(params: LatentParams) -> int:
    """Multi-head latent attention: both low-rank paths with their norms, and the output."""
    size, heads, rank = params.hidden_size, params.num_heads, params.kv_lora_rank
    queries = heads * (params.nope_dim + params.rope_dim)
    if params.q_lora_rank is None:
        made = size * queries
    else:
        made = size * params.q_lora_rank + params.q_lora_rank + params.q_lora_rank * queries
    if params.bias:
        made += (params.q_lora_rank or 0) + rank + params.rope_dim + size
    made += (
        size * (rank + params.rope_dim) + rank + rank * heads * (params.nope_dim + params.value_dim)
    )
    return made + heads * params.value_dim * size


def indexer(kind: SparseLatent) -> int:
    """The indexer of sparse latent attention: queries from the query latent, one key with its norm,
    weights of its heads.
    """
    if kind.shares_index:
        return 0
    source = kind.latent.q_lora_rank or kind.latent.hidden_size
    size = kind.latent.hidden_size
    return (
        source * kind.index_heads * kind.index_dim
        + size * kind.index_dim
        + 2 * kind.index_dim
        + size * kind.index_heads
    )


def gated_mlp(hidden: int, inner: int, *, bias: bool = False) -> int:
    """Gate, up and down."""
    return 3 * hidden * inner + (2 * inner + hidden if bias else 0)


def experts(hidden: int, inner: int, number: int) -> int:
    """A router and gated experts."""
    return number * gated_mlp(hidden, inner) + hidden * number


def mamba(
    kind: Mamba, *, rank: int, conv_bias: bool = True, bias: bool = False, norms: bool = False
) -> int:
    """A Mamba mixer whose time steps have ``rank``; norms: over time step, B and C (Jamba)."""
    size, inner, state = kind.hidden_size, kind.inner_size, kind.state_size
    made = (
        3 * size * inner
        + inner * kind.kernel
        + inner * (rank + 2 * state)
        + rank * inner
        + inner
        + inner * state
        + inner
    )
    made += inner if conv_bias else 0
    made += 2 * inner + size if bias else 0
    return made + (rank + 2 * state if norms else 0)


def mamba2(
    kind: Mamba2,
    *,
    conv_bias: bool = True,
    bias: bool = False,
    out_bias: bool = False,
    norm: bool = True,
) -> int:
    """A Mamba-2 mixer; norm: the gated one before its output."""
    size, inner = kind.hidden_size, kind.num_heads * kind.head_dim
    conv = inner + 2 * kind.num_groups * kind.state_size
    project = inner + conv + kind.num_heads
    made = size * project + conv * kind.kernel + 3 * kind.num_heads + inner * size
    made += conv if conv_bias else 0
    made += (project if bias else 0) + (size if out_bias else 0)
    return made + (inner if norm else 0)


def gated_delta_net(kind: GatedDeltaNet) -> int:
    """A gated delta net: q, k, v, output gate, two gates per head, convolution, norm, output."""
    keys, values = kind.key_heads * kind.key_dim, kind.value_heads * kind.value_dim
    project = 2 * keys + 2 * values + 2 * kind.value_heads
    return (
        kind.hidden_size * (project + values)
        + (2 * keys + values) * kind.kernel
        + 2 * kind.value_heads
        + kind.value_dim
    )


def kimi_delta(kind: KimiDelta) -> int:
    """Kimi delta attention: q, k, v, output, low-rank decay and output gates, convolutions,
    norm.
    """
    size, heads, dim = kind.hidden_size, kind.num_heads, kind.head_dim
    inner = heads * dim
    gates = 2 * (size * dim + dim * inner) + inner + heads + size * heads
    return 4 * size * inner + 3 * inner * kind.kernel + gates + dim
