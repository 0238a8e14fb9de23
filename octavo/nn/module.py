"""What every torch module of octavo is: weights under a checkpoint's names, and the ops that it
computes with.

Owns ``Module`` and ``bind``. Knows no layer.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from octavo.ops.table import Ops
from octavo.ops.torch.backend import TORCH


class Module(nn.Module):
    """An ``nn.Module`` that is called as its ``forward`` is, without hooks.

    ops: what it computes with. Plain PyTorch until the model is bound, so that a module by itself
        runs anywhere, in any dtype, and follows its weights wherever they go.
    """

    ops: Ops = TORCH

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "forward" in cls.__dict__:
            cls.__call__ = cls.forward  # type: ignore[method-assign]

    def prepare(self) -> None:
        """Make what ops want made of weights once. Called by ``bind``; weights stay where they are
        from then on.
        """


def bind(model: nn.Module, ops: Ops) -> None:
    """Have all modules of a loaded model compute with ``ops``.

    Weights may still change in place; a module that is given other ones has to be bound again.
    """
    for module in model.modules():
        if isinstance(module, Module):
            module.ops = ops
            module.prepare()
        # Where Python looks first: nn.Module's own lookup takes a microsecond, hundreds of times in
        # a step.
        module.__dict__.update(module._parameters, **module._modules)
