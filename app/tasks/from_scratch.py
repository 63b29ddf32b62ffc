"""The shape of a model that is trained from scratch."""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from app.config import setting
from app.errors import UserError
from app.tasks.hollow import made_where_needed

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import BertConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class Scratch:
    """The shape of a model that is trained from scratch."""

    layers: int = setting(2, at_least=1)
    """Number of transformer layers."""
    width: int = setting(128, at_least=1)
    """Length of the hidden states' vectors."""
    heads: int = setting(2, at_least=1)
    """Number of attention heads; --scratch.width must be a multiple of it."""
    vocab: int = setting(8192, at_least=0)
    """Tokens in the vocabulary of the tokenizer, which is trained on the training texts."""
    dropout: float = 0.1
    """Dropout probability of hidden states and attention weights."""


@dataclass
class LanguageScratch(Scratch):
    """The shape of a language model that is trained from scratch."""

    shape: Literal["auto", "llama", "gpt2", "bert"] = "auto"
    """llama: rotary positions, RMSNorm and gated feed-forward layers. gpt2: learnt positions, LayerNorm and GELU. bert:
    the same, but norms come after layers, and attention goes to both sides, which --mask.rate needs. auto: bert with
    --mask.rate, otherwise llama."""
    layers: int = setting(4, at_least=1)
    width: int = setting(128, at_least=1)
    heads: int = setting(4, at_least=1)
    kv_heads: int = setting(0, at_least=0)
    """Number of heads of keys and values of a llama; --scratch.heads must be a multiple of it. 0: --scratch.heads."""
    tokenizer: Literal["bpe", "char", "byte"] = "bpe"
    """bpe: byte pairs, trained on the training texts, with --scratch.vocab tokens. char: each character of the training
    texts is a token. byte: each byte is a token."""
    vocab: int = setting(4096, at_least=0)
    tied: bool = True
    """Use one matrix both to embed tokens and to predict them."""
    bias: bool = True
    """Give the layers and norms of a gpt2 biases; a llama has none."""
    dropout: float = 0.0
    """Dropout probability of hidden states and attention weights; of a llama, only of attention weights."""


@made_where_needed
def decoder(size: LanguageScratch, tokenizer: "PreTrainedTokenizerBase", block: int) -> "PreTrainedModel":
    """Build a language model of this shape, with random weights, for blocks of `block` tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    names = {
        "vocab_size": len(tokenizer),
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": size.tied,
    }
    if size.shape != "gpt2":
        llama = LlamaConfig(
            hidden_size=size.width,
            # Three matrices of 8/3 times the width have as many weights as two of four times the width.
            intermediate_size=64 * math.ceil(size.width / 24),
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads or size.heads,
            max_position_embeddings=block,
            attention_dropout=size.dropout,
            **names,
        )
        return LlamaForCausalLM(llama)
    shape = GPT2Config(
        n_embd=size.width,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=block,
        activation_function="gelu",  # on CPUs twice as fast as its approximation by tanh
        embd_pdrop=size.dropout,
        attn_pdrop=size.dropout,
        resid_pdrop=size.dropout,
        **names,
    )
    model = GPT2LMHeadModel(shape)
    if not size.bias:
        _leave_out_biases(model)
    return model


@made_where_needed
def encoder(size: LanguageScratch, tokenizer: "PreTrainedTokenizerBase", block: int) -> "PreTrainedModel":
    """Build a BERT of this shape that predicts masked tokens, with random weights, for blocks of `block` tokens."""
    from transformers import BertForMaskedLM

    return BertForMaskedLM(
        bert_config(size, tokenizer, block, tie_word_embeddings=size.tied, pad_token_id=tokenizer.pad_token_id)
    )


def bert_config(size: Scratch, tokenizer: "PreTrainedTokenizerBase", longest: int, **more: Any) -> "BertConfig":
    """Return the config of a BERT of this shape, for texts of up to `longest` tokens."""
    from transformers import BertConfig

    return BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        intermediate_size=4 * size.width,
        max_position_embeddings=longest,
        hidden_dropout_prob=size.dropout,
        attention_probs_dropout_prob=size.dropout,
        **more,
    )


def _leave_out_biases(model: "PreTrainedModel") -> None:
    """Freeze a GPT-2's biases at 0, their first value, and do not add them: transformers has no GPT-2 without."""
    from transformers.pytorch_utils import Conv1D

    class Unbiased(Conv1D):
        def forward(self, x: "Tensor") -> "Tensor":
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
    """resnet: three stages, each with half the resolution of the one before. vit: a transformer over patches."""
    layers: int = setting(2, at_least=1)
    """Number of blocks in each stage of a resnet, or of layers of a vit."""
    width: int = setting(32, at_least=1)
    """Channels of a resnet's first stage, which double in each further stage; or width of a vit's hidden states."""
    norm: Literal["group", "batch"] = "group"
    """Norm of a resnet. group: GroupNorm. batch: BatchNorm, which normalises each micro-batch by itself, or with
    --run.sync-bn the micro-batches that all processes compute together."""
    heads: int = setting(4, at_least=1)
    """Number of attention heads of a vit; --scratch.width must be a multiple of it."""
    patches: int = setting(8, at_least=0)
    """Number of a vit's patches along each side; the size of the images must be a multiple of it."""
    dropout: float = 0.0
    """Dropout probability of a vit's hidden states and attention weights."""


def check_vision(shape: VisionScratch, size: int) -> None:
    """Raise a UserError for numbers that no model for images of this size, in pixels, can have."""
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
    check_dropout(shape.dropout)


def check_dropout(dropout: float) -> None:
    """Raise a UserError for a dropout probability that is none."""
    if not 0 <= dropout < 1:
        raise UserError(f"--scratch.dropout {dropout}: must be at least 0 and below 1")


def check_direction(size: LanguageScratch, masked: bool) -> None:
    """Raise a UserError for a shape that cannot predict masked tokens if there are any, or else the next token."""
    if masked and size.shape in ("llama", "gpt2"):
        raise UserError(
            f"--scratch.shape {size.shape} predicts the next token: with --mask.rate, leave it out or give bert"
        )
    if not masked and size.shape == "bert":
        raise UserError(
            "--scratch.shape bert predicts masked tokens: give --mask.rate 0.15 too, or --scratch.shape llama or gpt2"
        )


def check_shape(size: Scratch) -> None:
    """Raise a UserError for numbers that no model can have; the vocabulary is checked where it is made."""
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
    check_dropout(size.dropout)


@dataclass
class DetectorScratch:
    """The shape of a detector that is trained from scratch."""

    network: Literal["dense", "detr"] = "dense"
    """dense: each place of a feature map at a quarter of the resolution says which object has its middle there
    (CenterNet). detr: queries look for an object each (Conditional DETR). After 125 steps of 16 of builtin:scenes,
    dense had a mAP@0.5 of 0.72, detr below 0.001."""
    width: int = setting(16, at_least=1)
    """Channels at half of the resolution; deeper levels have up to 8 times as many. A multiple of 8."""
    layers: int = setting(1, at_least=1)
    """Residual units of each level."""
    queries: int = setting(50, at_least=0)
    """Queries of a detr: the most objects that it finds in an image."""


def check_detector(shape: DetectorScratch) -> None:
    """Raise a UserError for numbers that no detector can have."""
    for name in ("layers", "width", "queries"):
        if (value := getattr(shape, name)) < 1:
            raise UserError(f"--scratch.{name} {value}: must be at least 1")
    if shape.width % 8:
        raise UserError(f"--scratch.width {shape.width}: must be a multiple of 8")


@dataclass
class UNetScratch:
    """The shape of a U-Net that is trained from scratch."""

    channels: tuple[int, ...] = (16, 32, 64)
    """Channels of each level, from the top. Each level has half the resolution of the one above it."""
    units: int = setting(1, at_least=0)
    """Number of convolutions in each residual unit. 0: one convolution without a residual for each level."""
    norm: Literal["instance", "group", "batch"] = "instance"
    """group: GroupNorm with one group. batch: BatchNorm, which normalises each micro-batch by itself, or with
    --run.sync-bn the micro-batches that all processes compute together."""
    dropout: float = 0.0
    """Dropout probability after each convolution."""


def check_unet(shape: UNetScratch, patch: tuple[int, ...]) -> None:
    """Raise a UserError for numbers that no U-Net for patches of these sides, in voxels, can have."""
    channels = " ".join(map(str, shape.channels))
    if len(shape.channels) < 2 or min(shape.channels) < 1:
        raise UserError(f"--scratch.channels {channels}: give two or more levels, each with at least one channel")
    if shape.units < 0:
        raise UserError(f"--scratch.units {shape.units}: must be at least 0")
    check_dropout(shape.dropout)
    halvings = len(shape.channels) - 1
    factor = 2**halvings
    if odd := [side for side in patch if side % factor]:
        raise UserError(
            f"--data.patch {odd[0]}: {halvings + 1} levels (--scratch.channels) halve it {halvings} times, so it must "
            f"be a multiple of {factor}"
        )
    if shape.norm == "instance" and all(side == factor for side in patch):
        raise UserError(
            f"--data.patch {patch[0]}: the lowest level would have a single voxel, which --scratch.norm instance "
            "turns into 0: use larger patches or fewer --scratch.channels"
        )
