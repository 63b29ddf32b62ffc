"""The shape of a model that is trained from scratch."""

import math
from dataclasses import dataclass
from typing import Literal

from app.errors import UserError


@dataclass
class Scratch:
    """The shape of a model that is trained from scratch."""

    layers: int = 2
    """Transformer layers."""
    width: int = 128
    """Width of the hidden states."""
    heads: int = 2
    """Attention heads; they divide the width."""
    vocab: int = 8192
    """Tokens of the tokenizer, which is trained on the training texts."""
    dropout: float = 0.1
    """Dropout of hidden states and attention."""


@dataclass
class DecoderScratch(Scratch):
    """The shape of a language model that is trained from scratch."""

    shape: Literal["llama", "gpt2"] = "llama"
    """llama: rotary positions, RMSNorm, gated feed-forward. gpt2: learnt positions, LayerNorm, GELU."""
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 0
    """Heads of keys and values, of a llama; they divide the heads. 0: as many."""
    tokenizer: Literal["bpe", "char", "byte"] = "bpe"
    """bpe: byte pairs, trained on the training texts, --scratch.vocab tokens. char: each character of the training
    texts is a token. byte: each byte is one."""
    vocab: int = 4096
    tied: bool = True
    """One matrix embeds tokens and predicts them."""
    bias: bool = True
    """Biases of a gpt2's layers and norms; a llama has none."""
    dropout: float = 0.0
    """Dropout; of a llama, of attention alone."""


def decoder(size: DecoderScratch, tokenizer, block: int):
    """Build a language model of this shape for blocks of so many tokens, with weights drawn at random."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    names = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": size.tied,
    }
    if size.shape == "llama":
        shape = LlamaConfig(
            hidden_size=size.width,
            # Three matrices of 8/3 of the width have the weights of two of four times the width.
            intermediate_size=64 * math.ceil(size.width / 24),
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads or size.heads,
            max_position_embeddings=block,
            attention_dropout=size.dropout,
            **names,
        )
        return LlamaForCausalLM(shape)
    shape = GPT2Config(
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=block,
        activation_function="gelu",  # on CPU twice as fast as its approximation by tanh
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        resid_pdrop=size.dropout,
        **names,
    )
    model = GPT2LMHeadModel(shape)
    if not size.bias:
        _leave_out_biases(model)
    return model


def _leave_out_biases(model) -> None:
    """Freeze a GPT-2's biases at 0, where they begin, and add none: transformers has it only with biases."""
    from transformers.pytorch_utils import Conv1D

    class Unbiased(Conv1D):
        def forward(self, x):
            return x @ self.weight

    for module in model.modules():
        if type(module) is Conv1D:
            module.__class__ = Unbiased
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.requires_grad_(False)


@dataclass
class VisionScratch:
    """The shape of an image model that is trained from scratch."""

    kind: Literal["resnet", "vit"] = "resnet"
    """resnet: three stages, each of half the resolution of the one before; vit: a transformer over patches."""
    layers: int = 2
    """Blocks of each stage of a resnet; layers of a vit."""
    width: int = 32
    """Channels of a resnet's first stage (each other has twice those of the one before); hidden states of a vit."""
    norm: Literal["group", "batch"] = "group"
    """Of a resnet. group: GroupNorm, the same on any layout. batch: BatchNorm, whose statistics are of one process's
    micro-batches, or with --run.sync-bn of those that all processes compute at a time."""
    heads: int = 4
    """Attention heads of a vit; they divide the width."""
    patches: int = 8
    """Patches of a vit along each side; they divide the size of the images."""
    dropout: float = 0.0
    """Dropout of a vit's hidden states and attention."""


def check_vision(shape: VisionScratch, size: int) -> None:
    """Refuse numbers that no model of images of this size can have."""
    for name in ("layers", "width", "heads", "patches"):
        if (value := getattr(shape, name)) < 1:
            raise UserError(f"--scratch.{name} {value}: must be at least 1")
    if shape.kind == "resnet" and shape.width % 8:
        raise UserError(f"--scratch.width {shape.width}: must be a multiple of 8 for a resnet")
    if shape.kind == "vit":
        for whole, part in (("width", "heads"), ("size", "patches")):
            number, divisor = size if whole == "size" else shape.width, getattr(shape, part)
            if number % divisor:
                flag = "--data.size" if whole == "size" else "--scratch.width"
                raise UserError(f"--scratch.{part} {divisor} does not divide {flag} {number}: give one that does")
    _check_dropout(shape.dropout)


def _check_dropout(dropout: float) -> None:
    if not 0 <= dropout < 1:
        raise UserError(f"--scratch.dropout {dropout}: must be at least 0 and below 1")


def check_shape(size: Scratch) -> None:
    """Refuse numbers that no model can have; what the vocabulary must hold is known where it is made."""
    for name in ("layers", "width", "heads"):
        if (value := getattr(size, name)) < 1:
            raise UserError(f"--scratch.{name} {value}: must be at least 1")
    if size.width % size.heads:
        raise UserError(
            f"--scratch.heads {size.heads} does not divide --scratch.width {size.width}: give one that does"
        )
    kv_heads = getattr(size, "kv_heads", 0)
    if kv_heads < 0 or (kv_heads and size.heads % kv_heads):
        raise UserError(
            f"--scratch.kv-heads {kv_heads} does not divide --scratch.heads {size.heads}: give one that does"
        )
    _check_dropout(size.dropout)


@dataclass
class UNetScratch:
    """The shape of a U-Net that is trained from scratch."""

    channels: tuple[int, ...] = (16, 32, 64)
    """Channels of each level, from the top; each level has half the resolution of the one above."""
    units: int = 1
    """Convolutions of each residual unit; 0: one plain convolution a level."""
    norm: Literal["instance", "group", "batch"] = "instance"
    """instance, and group (GroupNorm of one group), are the same on any layout. batch: BatchNorm, whose statistics are
    of one process's micro-batches, or with --run.sync-bn of those that all processes compute at a time."""
    dropout: float = 0.0
    """Dropout behind each convolution."""


def check_unet(shape: UNetScratch, patch: tuple[int, ...]) -> None:
    """Refuse numbers that no U-Net for patches of these sides can have."""
    given = " ".join(map(str, shape.channels))
    if len(shape.channels) < 2 or min(shape.channels) < 1:
        raise UserError(f"--scratch.channels {given}: give two levels or more, each of at least one channel")
    if shape.units < 0:
        raise UserError(f"--scratch.units {shape.units}: must be at least 0")
    _check_dropout(shape.dropout)
    halvings = len(shape.channels) - 1
    factor = 2**halvings
    if odd := [side for side in patch if side % factor]:
        raise UserError(
            f"--data.patch {odd[0]}: {halvings + 1} levels (--scratch.channels) halve it {halvings} times, so it must "
            f"be a multiple of {factor}"
        )
    if shape.norm == "instance" and all(side == factor for side in patch):
        raise UserError(
            f"--data.patch {patch[0]}: the lowest level would have a single voxel, which --scratch.norm instance makes "
            "0: use larger patches or fewer --scratch.channels"
        )
