"""What is right for octavo's own family ``linear_transformer``: a dense model in Transformers'
shape.

Owns the oracle: every query against every earlier key, no cache, no state. Shares no code with
octavo.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class LinearTransformerConfig(PreTrainedConfig):
    model_type = "linear_transformer"

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    head_dim: int | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False


class Attention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.heads, size = config.num_attention_heads, config.hidden_size
        inner = self.heads * config.head_dim
        self.q_proj, self.k_proj = (
            nn.Linear(size, inner, bias=False),
            nn.Linear(size, inner, bias=False),
        )
        self.v_proj, self.o_proj = (
            nn.Linear(size, inner, bias=False),
            nn.Linear(inner, size, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        scores = ((nn.functional.elu(q) + 1) @ (nn.functional.elu(k) + 1).mT).tril()
        mixed = (scores @ v) / (scores.sum(-1, keepdim=True) + 1e-6)
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.intermediate_size
        self.gate_proj, self.up_proj = (
            nn.Linear(size, inner, bias=False),
            nn.Linear(size, inner, bias=False),
        )
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


class LinearTransformer(PreTrainedModel):
    config_class = LinearTransformerConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = Trunk(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> CausalLMOutput:
        assert not use_cache, "the oracle keeps nothing"
        x = self.model.embed_tokens(input_ids)
        for layer in self.model.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.lm_head(self.model.norm(x)))


def register() -> None:
    """Let Transformers make such models by their type; more than once does no harm."""
    AutoConfig.register(LinearTransformerConfig.model_type, LinearTransformerConfig, exist_ok=True)
    AutoModelForCausalLM.register(LinearTransformerConfig, LinearTransformer, exist_ok=True)
