"""The model under adapters held in 4 bits (QLoRA, Dettmers et al. 2023): NF4, double quantization, by bitsandbytes."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from app.distributed.state import base_model
from app.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_BLOCK = 64  # numbers that share a scale, bitsandbytes' own choice
_SCALES = 256  # scales that share a scale of their own
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_layout(fsdp: bool, cut: bool, deepspeed: bool, compiled: bool) -> None:
    """Refuse layouts under which packed weights have not been seen to work.

    Args:
        cut: whether layers are computed in parts, by processes or in slices.

    Raises:
        UserError: the profile, or a flag, asks for one.
    """
    asked = {"FSDP": fsdp, "tp_size or --run.slices": cut, "DeepSpeed": deepspeed, "torch.compile": compiled}
    for name in (name for name, is_asked in asked.items() if is_asked):
        raise UserError(
            f"--lora.base 4bit: {name} has not been seen to work with packed weights: take one process or DDP "
            "(accelerate_configs/ddp.yaml), without it, or --lora.base whole"
        )


def unseen(models: list[nn.Module]) -> int | None:
    """Return how many more numbers the packed layers of a plan stand for than they hold; None if none are packed."""
    layers = [module for model in models for module in model.modules() if isinstance(module, Counted)]
    return sum(m.in_features * m.out_features - m.weight.numel() for m in layers) if layers else None


def hold(model: "PreTrainedModel", accelerator: Any) -> None:
    """Pack the frozen linear layers under adapters into 4 bits each number, in place, before `run.prepare`.

    The last layer, embeddings and norms stay as they are. Numbers are packed on the CPU, whatever the device, so every
    rank has the same ones. Checkpoints have the digest of the whole weights: an export, which computes nothing, leaves
    them whole, and so can merge them.

    Raises:
        UserError: the model has no such layers.
    """
    last = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    chosen = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear
        and module is not last
        and not any(part in name for part in ("lora_", "modules_to_save"))
    ]
    if not chosen:
        kind = model.config.model_type
        raise UserError(
            f"--lora.base 4bit: this {kind} has no linear layers below its last one (GPT-2 has other ones): take a "
            "model such as a Llama, Qwen or Mistral, or --lora.base whole"
        )
    hollow = chosen[0][1].weight.is_meta  # for a plan
    if not hollow:
        base_model.remember(model)
    for name, module in chosen:
        packed = Counted(module) if hollow else _packed(module, accelerator.mixed_precision)
        parent, _, name_in_parent = name.rpartition(".")
        setattr(model.get_submodule(parent), name_in_parent, packed)


def _packed(layer: nn.Linear, precision: str) -> nn.Module:
    """Return a layer of bitsandbytes with the weights of another one in 4 bits."""
    import bitsandbytes

    packed = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        layer.bias is not None,
        compute_dtype=_TYPES.get(precision, torch.float32),
        compress_statistics=True,
        quant_type="nf4",
        device="meta",
    )
    weight = bitsandbytes.nn.Params4bit(
        layer.weight.detach(), requires_grad=False, compress_statistics=True, quant_type="nf4", module=packed
    )
    packed.weight = weight.to("cpu")
    packed.bias = layer.bias
    # On CPUs that multiply in bf16, an evaluation would pack weights anew, and have other bits than training.
    packed.support_avx512bf16_for_cpu = False
    return packed.train(layer.training)


class Counted(nn.Linear):
    """A layer without contents for a plan: as many bytes as one of bitsandbytes, and as many while it computes."""

    def __init__(self, layer: nn.Linear):
        """Take the place of a layer."""
        super().__init__(layer.in_features, layer.out_features, device="meta", bias=False)
        numbers = layer.weight.numel()
        blocks = -(-numbers // _BLOCK)
        self.weight = nn.Parameter(torch.empty(-(-numbers // 2), 1, dtype=torch.uint8, device="meta"), False)
        self.bias = layer.bias
        self.register_buffer("scales", torch.empty(blocks, dtype=torch.uint8, device="meta"), persistent=False)
        coarse = torch.empty(-(-blocks // _SCALES) + 256 + 16, device="meta")  # with the tables of both codes
        self.register_buffer("coarse_scales", coarse, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute with the whole weight, which exists for the product alone."""
        return _Product.apply(x, self.bias, self.out_features)


class _Product(torch.autograd.Function):
    """A product with a weight that is unpacked for it, and again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        ctx.shape = rows, x.shape[-1]
        return linear(x, x.new_empty(ctx.shape), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad @ grad.new_empty(ctx.shape), None, None
