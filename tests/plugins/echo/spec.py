"""What an echo layer remembers: keys and values of the opening and of a window. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from octavo.base import UnsupportedError
from octavo.spec.attention import AttentionParams, kv_stream, read_attention
from octavo.spec.codec import Codec
from octavo.spec.kind import Config, Kind
from octavo.spec.law import SinkWindow
from octavo.spec.rope import RopeParams
from octavo.spec.stream import FP8, CacheDtypes, Field, Stream

LAYER_TYPE = "echo_attention"


@dataclass(frozen=True, kw_only=True)
class Levels(Codec):
    """Numbers as steps of one size for each head of an entry. step: the field that keeps sizes."""

    coder: ClassVar[str] = "tests.plugins.echo.codec:LevelsCoder"

    step: str

    @property
    def beside(self) -> tuple[str, ...]:
        """The sizes of steps."""
        return (self.step,)


@dataclass(frozen=True, kw_only=True)
class Echo(Kind):
    """Causal softmax attention over the first ``sinks`` tokens and the last ``window``, the query's
    own included.
    """

    name: ClassVar[str] = "echo"
    layer: ClassVar[str] = "tests.plugins.echo.layer:EchoLayer"
    reference: ClassVar[str] = "tests.plugins.echo.reference:echo_attention"

    attention: AttentionParams
    sinks: int
    window: int

    @classmethod
    def from_hf(cls, config: Config, index: int) -> Self:
        """Parameters of an ``echo_attention`` layer. Raises UnsupportedError without ``echo_sinks``
        and ``echo_window``.
        """
        for field in ("echo_sinks", "echo_window"):
            if not isinstance(config.get(field), int) or config[field] < 1:
                raise UnsupportedError(
                    f"{field} {config.get(field)!r} of layer {index} must be a positive number of"
                    " tokens"
                )
        attention = read_attention(config, LAYER_TYPE)
        return cls(attention=attention, sinks=config["echo_sinks"], window=config["echo_window"])

    def streams(self, dtypes: CacheDtypes) -> tuple[Stream, ...]:
        """One stream ``kv``, keys and values: the opening for ever, the rest as long as the window
        reaches.
        """
        law = SinkWindow(self.sinks, self.window)
        if dtypes.kv != FP8:
            return (kv_stream(self.attention, law, dtypes),)
        return (Stream(name="kv", law=law, fields=(*self._bytes("k"), *self._bytes("v"))),)

    def _bytes(self, part: str) -> tuple[Field, Field]:
        """A part in eight bits per number, and the size of a step for each head."""
        heads, step = self.attention.num_kv_heads, f"{part}_step"
        shape = (heads, self.attention.head_dim)
        codec = Levels(step=step)
        return (
            Field(name=part, shape=shape, dtype="uint8", shard="heads", codec=codec),
            Field(name=step, shape=(heads, 1), dtype="float32", shard="heads"),
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """The least of both; an opening of no whole number of blocks; a window that is not; several
        blocks of each.
        """
        rope = RopeParams(theta=10000.0)
        plain = AttentionParams(
            hidden_size=48, num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, rope=rope
        )
        normed = AttentionParams(
            hidden_size=32,
            num_heads=3,
            num_kv_heads=1,
            head_dim=8,
            scale=0.3,
            rope=rope,
            qk_norm="scale",
            softcap=5.0,
        )
        return (
            cls(attention=plain, sinks=1, window=1),
            cls(attention=normed, sinks=3, window=4),
            cls(attention=plain, sinks=4, window=7),
            cls(attention=normed, sinks=12, window=16),
        )
