"""How an adapted linear layer runs: as peft's, but its matrices are cast to the type of the input, as a sharding policy does.

peft casts the input to the type of the matrices instead, which are kept in fp32: every adapted layer would keep an fp32 copy of
its input for the backward pass.
"""

from typing import Any

import torch.nn.functional as F
from peft.tuners.lora import layer as peft_lora
from torch import Tensor, nn

from swiftlite.models.packed import PackedLinear


class LoRALinear(peft_lora.Linear):
    """peft's layer with another forward pass; `cast_in_layers` makes such layers of peft's."""

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self._disable_adapters or self.merged or args or kwargs:
            plain: Tensor = super().forward(x, *args, **kwargs)
            return plain
        (name,) = self.lora_A
        a, b = self.lora_A[name].weight.to(x.dtype), self.lora_B[name].weight.to(x.dtype)
        base: Tensor = self.base_layer(x)
        return base + F.linear(F.linear(self.lora_dropout[name](x), a) * self.scaling[name], b)


def cast_in_layers(root: nn.Module) -> None:
    """Lets plain LoRA layers on linear layers run as `LoRALinear`; variants, and layers of other classes, stay peft's."""
    for module in root.modules():
        if type(module) is peft_lora.Linear and type(module.base_layer) in (nn.Linear, PackedLinear):
            if len(module.lora_A) == 1 and not module.lora_variant and not any(module.lora_bias.values()):
                module.__class__ = LoRALinear


def cast_where_used(root: nn.Module) -> set[nn.Parameter]:
    """Weights that their layers cast to the compute type themselves."""
    layers = [m for m in root.modules() if isinstance(m, LoRALinear)]
    return {p for layer in layers for table in (layer.lora_A, layer.lora_B) for p in table.parameters()}
