"""Network factories: plain modules whose weights are a function of `seed`; the global random state stays untouched."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import imports
from pacprune.types import check_name

__all__ = [
    "GPT",
    "MLP",
    "MODELS",
    "NAMES",
    "NextToken",
    "build",
    "convnext",
    "gpt",
    "lenet5",
    "lstm",
    "mixer",
    "mlp",
    "next_character",
    "resnet20",
    "vgg",
    "vit",
    "wide_resnet",
]

_SMALLEST_IMAGE = 12
_Model = TypeVar("_Model", bound=nn.Module)


def mlp(inputs: int | None = None, classes: int = 10, *, hidden: Sequence[int] | None = None, seed: int = 0) -> "MLP":
    """Flatten, then Linear and ReLU: 784-1000x3-10 by default, 64-300-100-10 for at most 64 inputs.

    Args:
        inputs: Numbers per example. None means 784, until the first batch: the network is then made anew for the
            width of that batch, unless its weights were changed.
        classes: Number of outputs, such as 10.
        hidden: Widths of the hidden layers, such as (300, 100); None chooses by `inputs`.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Example:
        >>> net = pp.models.mlp(64, 10, hidden=(300, 100), seed=0)
        >>> net(x).shape
        torch.Size([1437, 10])
    """
    return MLP(inputs, classes, hidden, seed)


class MLP(nn.Module):
    """The network of `mlp`; `layers` is the nn.Sequential that does the work.

    Args:
        inputs: Numbers per example, or None to learn it from the first batch.
        classes: Number of outputs.
        hidden: Widths of the hidden layers, or None to choose by `inputs`.
        seed: Chooses the first weights.

    Example:
        >>> pp.models.MLP(64, 10, (16,), 0).layers[0]
        Linear(in_features=64, out_features=16, bias=True)
    """

    def __init__(self, inputs: int | None, classes: int, hidden: Sequence[int] | None, seed: int) -> None:
        super().__init__()
        self.inputs, self.classes, self.hidden, self.seed = inputs or 784, classes, hidden, seed
        self.settled = inputs is not None
        self.layers = self._stack(self.inputs)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (n, classes) of x (n, ...)."""
        x = x.flatten(1)
        if not self.settled:
            self._settle(x.shape[1])
        if x.shape[1] != self.inputs:
            raise ValueError(f"this mlp takes {self.inputs} inputs but the batch has {x.shape[1]}; build another one")
        return self.layers(x)

    def _stack(self, inputs: int) -> nn.Sequential:
        default = (300, 100) if inputs <= 64 else (1000, 1000, 1000)
        widths = (inputs, *(default if self.hidden is None else self.hidden), self.classes)

        def make() -> nn.Sequential:
            pairs = [[nn.Linear(a, b), nn.ReLU()] for a, b in itertools.pairwise(widths)]
            return nn.Sequential(*[layer for pair in pairs for layer in pair][:-1])

        return _seeded(make, self.seed)

    def _settle(self, width: int) -> None:
        """Takes on the width of the data, unless the weights were changed already: those must not be lost."""
        if width != self.inputs:
            old, fresh = self.layers.state_dict(), self._stack(self.inputs).state_dict()
            if old.keys() == fresh.keys() and all(torch.equal(old[key], fresh[key].to(old[key])) for key in old):
                self.layers = self._stack(width).to(next(iter(old.values()))).train(self.training)
                self.inputs = width
        self.settled = True


def lenet5(channels: int = 1, size: int = 28, classes: int = 10, *, seed: int = 0) -> nn.Sequential:
    """LeNet-5 with max-pooling and ReLU for size x size images: 61,470 weights for 28x28 grey images, 10 classes.

    LeCun et al., "Gradient-based learning applied to document recognition", 1998.

    Args:
        channels: Channels of an image: 1 for grey, 3 for colour.
        size: Height and width of an image, at least 12.
        classes: Number of outputs, such as 10.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Example:
        >>> net = pp.models.lenet5()
        >>> sum(weight.numel() for weight in pp.prunable(net).values())
        61470
    """
    _check_image("lenet5", size, size)
    side = (size // 2 - 4) // 2
    return _seeded(
        lambda: nn.Sequential(
            nn.Conv2d(channels, 6, 5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * side * side, 120),
            nn.ReLU(),
            nn.Linear(120, 84),
            nn.ReLU(),
            nn.Linear(84, classes),
        ),
        seed,
    )


def resnet20(channels: int = 3, classes: int = 10, *, seed: int = 0) -> nn.Sequential:
    """The CIFAR-10 ResNet20 with option-A shortcuts: 269,722 parameters for 3 channels and 10 classes.

    He et al., "Deep residual learning for image recognition", 2016, section 4.2; weights as in He et al. 2015.

    Args:
        channels: Channels of an image: 1 for grey, 3 for colour.
        classes: Number of outputs, such as 10.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Example:
        >>> net = pp.models.resnet20()
        >>> sum(parameter.numel() for parameter in net.parameters())
        269722
    """

    def make() -> nn.Sequential:
        model = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            *[_Block(16, 16) for _ in range(3)],
            *[_Block(16 if i == 0 else 32, 32) for i in range(3)],
            *[_Block(32 if i == 0 else 64, 64) for i in range(3)],
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(64, classes),
        )
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        return model

    return _seeded(make, seed)


class _Block(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters; more channels out than in halve the image."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.extra = (outputs - inputs) // 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=2 if self.extra else 1, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        if self.extra:
            # Option A: every second pixel, and zeros for the channels that x lacks.
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))
        return F.relu(out + x)


def wide_resnet(
    channels: int = 3, classes: int = 10, *, depth: int = 16, width: int = 2, seed: int = 0
) -> nn.Sequential:
    """The wide ResNet WRN-depth-width, whose blocks normalise before they convolve: 691,674 parameters for WRN-16-2.

    Zagoruyko and Komodakis, "Wide residual networks", 2016, without dropout; weights as in He et al. 2015.

    Args:
        channels: Channels of an image: 1 for grey, 3 for colour.
        classes: Number of outputs, such as 10.
        depth: Number of layers, 4 more than a multiple of 6, such as 16 or 28.
        width: How many times wider than 16, 32 and 64 channels it is, such as 2.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Raises:
        ValueError: If no number of blocks has this depth.

    Example:
        >>> net = pp.models.wide_resnet(depth=10, width=1)
        >>> net(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """
    blocks, rest = divmod(depth - 4, 6)
    if rest or blocks < 1:
        raise ValueError(f"depth is {depth}, but wide_resnet has 6 n + 4 layers; choose 10, 16, 22, 28 or more")

    def make() -> nn.Sequential:
        widths = [16, *(width * base for base in (16, 32, 64) for _ in range(blocks))]
        halving = [stage > 0 and block == 0 for stage in range(3) for block in range(blocks)]
        model = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1, bias=False),
            *[_WideBlock(a, b, half) for (a, b), half in zip(itertools.pairwise(widths), halving, strict=True)],
            nn.BatchNorm2d(widths[-1]),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(widths[-1], classes),
        )
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        return model

    return _seeded(make, seed)


class _WideBlock(nn.Module):
    """BatchNorm, ReLU, 3x3 convolution, twice; where the channels change, a 1x1 convolution is the shortcut."""

    def __init__(self, inputs: int, outputs: int, halving: bool) -> None:
        super().__init__()
        stride = 2 if halving else 1
        self.norm1, self.norm2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        out = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return out + (x if self.shortcut is None else self.shortcut(active))


def convnext(
    channels: int = 3,
    classes: int = 10,
    *,
    widths: Sequence[int] = (48, 96, 192),
    blocks: int = 2,
    scale: float | None = None,
    seed: int = 0,
) -> nn.Sequential:
    """A ConvNeXt for small images: 7x7 convolutions by channel, and two-layer networks on the channels of each pixel.

    Liu et al., "A ConvNet for the 2020s", 2022. Patches of 2x2 pixels come first, and between two stages the image is
    halved: 32x32 pixels become 16x16, 8x8 and 4x4.

    Args:
        channels: Channels of an image: 1 for grey, 3 for colour.
        classes: Number of outputs, such as 10.
        widths: Channels of each stage, such as (48, 96, 192).
        blocks: Blocks of each stage, such as 2.
        scale: What a trained factor per channel at the end of every block begins with, such as 1e-6; None has none.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Example:
        >>> net = pp.models.convnext(1, widths=(8, 16), blocks=1)
        >>> net(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """

    def make() -> nn.Sequential:
        layers: list[nn.Module] = [nn.Conv2d(channels, widths[0], 2, stride=2), _ChannelNorm(widths[0])]
        for stage, width in enumerate(widths):
            if stage:
                layers += [_ChannelNorm(widths[stage - 1]), nn.Conv2d(widths[stage - 1], width, 2, stride=2)]
            layers += [_ConvNextBlock(width, scale) for _ in range(blocks)]
        head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(widths[-1]), nn.Linear(widths[-1], classes)
        return _small_start(nn.Sequential(*layers, *head))

    return _seeded(make, seed)


class _ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of each pixel of (n, channels, height, width)."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(1, -1)).movedim(-1, 1)


class _ConvNextBlock(nn.Module):
    """A 7x7 convolution of every channel by itself, LayerNorm, and a network 4 times as wide; added to its input."""

    def __init__(self, width: int, scale: float | None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.hidden, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = None if scale is None else nn.Parameter(torch.full((width,), scale))

    def forward(self, x: Tensor) -> Tensor:
        out = self.out(F.gelu(self.hidden(self.norm(self.conv(x).movedim(1, -1)))))
        return x + (out if self.scale is None else self.scale * out).movedim(-1, 1)


def _small_start(model: _Model) -> _Model:
    """Weights of normal law with deviation 0.02, cut at 2, and biases of 0, as transformers begin with."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def vit(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    *,
    patch: int = 4,
    width: int = 128,
    depth: int = 4,
    heads: int = 4,
    seed: int = 0,
) -> nn.Module:
    """A vision transformer for size x size images: 802,048 weights by default.

    Dosovitskiy et al., "An image is worth 16x16 words", 2021, with the mean over patches in place of a class token, and
    without biases in its blocks' Linear layers.

    Args:
        channels: Channels of an image: 1 for grey, 3 for colour.
        size: Height and width of an image, a multiple of `patch`.
        classes: Number of outputs, such as 10.
        patch: Height and width of the patches that an image is cut into.
        width: Numbers per patch, a multiple of `heads`.
        depth: Number of blocks.
        heads: Attention heads per block.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Raises:
        ValueError: If patches do not cover the image, or heads the width.

    Example:
        >>> net = pp.models.vit(1, 8, patch=2, width=32, depth=2, heads=2)
        >>> net(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """
    return _seeded(lambda: _ViT(channels, _patches(size, patch), classes, patch, width, depth, heads), seed)


class _ViT(nn.Module):
    """The network of `vit`, for images of side x side patches."""

    def __init__(self, channels: int, side: int, classes: int, patch: int, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn(side * side, width))
        self.blocks = nn.Sequential(*[_Transformer(width, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        _small_start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (n, classes) of images x (n, channels, height, width)."""
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.blocks(x)).mean(1))


def vgg(
    channels: int = 3, size: int = 32, classes: int = 10, *, widths: Sequence[int] = (32, 64, 128), seed: int = 0
) -> nn.Sequential:
    """A chain of 3x3 convolutions without shortcuts, two at each size: 288,746 parameters by default.

    Simonyan and Zisserman, "Very deep convolutional networks", 2015, small, with BatchNorm and one Linear layer.

    Args:
        channels: Channels of an image: 1 for grey, 3 for colour.
        size: Height and width of an image; pooling halves it once per width.
        classes: Number of outputs, such as 10.
        widths: Channels of the convolutions at every size, such as (32, 64, 128).
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Raises:
        ValueError: If pooling leaves nothing of the image.

    Example:
        >>> net = pp.models.vgg(1, 8, widths=(4, 8))
        >>> net(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """
    if size < 2 ** len(widths):
        raise ValueError(f"an image of {size}x{size} pixels cannot be halved {len(widths)} times; give it fewer widths")

    def make() -> nn.Sequential:
        layers: list[nn.Module] = []
        for before, width in itertools.pairwise((channels, *widths)):
            for inputs in (before, width):
                layers += [nn.Conv2d(inputs, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
            layers.append(nn.MaxPool2d(2))
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], classes))
        for module in model.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)
        return model

    return _seeded(make, seed)


def mixer(
    channels: int = 3,
    size: int = 32,
    classes: int = 10,
    *,
    patch: int = 4,
    width: int = 128,
    depth: int = 4,
    seed: int = 0,
) -> nn.Module:
    """An MLP-Mixer for size x size images: two-layer networks over the patches and over the channels, in turn.

    Tolstikhin et al., "MLP-Mixer: an all-MLP architecture for vision", 2021, without biases in its blocks.

    Args:
        channels: Channels of an image: 1 for grey, 3 for colour.
        size: Height and width of an image, a multiple of `patch`.
        classes: Number of outputs, such as 10.
        patch: Height and width of the patches that an image is cut into.
        width: Numbers per patch.
        depth: Number of blocks.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Raises:
        ValueError: If patches do not cover the image.

    Example:
        >>> net = pp.models.mixer(1, 8, patch=2, width=32, depth=2)
        >>> net(torch.zeros(3, 1, 8, 8)).shape
        torch.Size([3, 10])
    """
    return _seeded(lambda: _Mixer(channels, _patches(size, patch), classes, patch, width, depth), seed)


def _patches(size: int, patch: int) -> int:
    """How many patches lie side by side."""
    if size % patch:
        raise ValueError(
            f"an image of {size}x{size} pixels cannot be cut into patches of {patch}x{patch}; "
            f"choose a patch that divides {size}"
        )
    return size // patch


class _Mixer(nn.Module):
    """The network of `mixer`, for images of side x side patches."""

    def __init__(self, channels: int, side: int, classes: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.blocks = nn.Sequential(*[_MixerBlock(side * side, width) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)
        _small_start(self)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores (n, classes) of images x (n, channels, height, width)."""
        return self.head(self.norm(self.blocks(self.patches(x).flatten(2).transpose(1, 2))).mean(1))


class _MixerBlock(nn.Module):
    """A two-layer network over the patches and one over the channels, each added to its input."""

    def __init__(self, places: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.places, self.places_out = (
            nn.Linear(places, 2 * places, bias=False),
            nn.Linear(2 * places, places, bias=False),
        )
        self.hidden, self.hidden_out = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.places_out(F.gelu(self.places(self.norm1(x).transpose(1, 2))))
        x = x + mixed.transpose(1, 2)
        return x + self.hidden_out(F.gelu(self.hidden(self.norm2(x))))


def lstm(
    inputs: int = 28,
    classes: int = 10,
    *,
    width: int = 128,
    depth: int = 1,
    tokens: bool = False,
    seed: int = 0,
) -> nn.Module:
    """An LSTM that reads the rows of an image, one after another, or the tokens of a text.

    Hochreiter and Schmidhuber, "Long short-term memory", 1997, as nn.LSTM computes it; 81,152 weights by default.

    Args:
        inputs: Numbers per row: the channels of an image times its width. With `tokens`, how many there are.
        classes: Number of outputs, such as 10.
        width: Numbers in the state of a layer.
        depth: Number of layers.
        tokens: Whether examples are sequences of whole numbers, which are embedded, with an answer after each; else
            there is one answer, after the last row.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Example:
        >>> pp.models.lstm()(torch.zeros(3, 1, 28, 28)).shape
        torch.Size([3, 10])
        >>> pp.models.lstm(65, 65, width=16, tokens=True)(torch.zeros(3, 20, dtype=torch.long)).shape
        torch.Size([3, 20, 65])
    """
    return _seeded(lambda: _LSTM(inputs, classes, width, depth, tokens), seed)


class _LSTM(nn.Module):
    """The network of `lstm`."""

    def __init__(self, inputs: int, classes: int, width: int, depth: int, tokens: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(inputs, width) if tokens else None
        self.lstm = nn.LSTM(width if tokens else inputs, width, depth, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (n, classes) of images or sequences of rows, (n, length, classes) of tokens (n, length)."""
        if self.embedding is not None:
            return self.head(self.lstm(self.embedding(x))[0])
        rows = x.transpose(1, 2).flatten(2) if x.ndim == 4 else x
        return self.head(self.lstm(rows)[0][:, -1])


def gpt(
    vocabulary: int = 65,
    *,
    width: int = 384,
    depth: int = 6,
    heads: int = 6,
    context: int = 256,
    dropout: float = 0.2,
    seed: int = 0,
) -> "GPT":
    """A decoder that predicts the next token: 10,740,096 weights by default, the head tied to the embedding.

    The architecture of GPT-2 (Radford et al., 2019), without biases in its Linear layers.

    Args:
        vocabulary: Number of different tokens, such as 65 characters.
        width: Numbers per token, a multiple of `heads`.
        depth: Number of blocks.
        heads: Attention heads per block.
        context: Most tokens that it reads at once.
        dropout: Share of activations set to zero in training, such as 0.2.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Example:
        >>> net = pp.models.gpt(65, width=32, depth=2, heads=2, context=16)
        >>> net(torch.zeros(3, 16, dtype=torch.long)).shape
        torch.Size([3, 16, 65])
    """
    return _seeded(lambda: GPT(vocabulary, width, depth, heads, context, dropout), seed)


class GPT(nn.Module):
    """The network of `gpt`.

    Args:
        vocabulary: Number of different tokens.
        width: Numbers per token, a multiple of `heads`.
        depth: Number of blocks.
        heads: Attention heads per block.
        context: Most tokens that it reads at once.
        dropout: Share of activations set to zero in training.

    Example:
        >>> len(pp.models.GPT(65, 32, 2, 2, 16, 0.0).blocks)
        2
    """

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*[_Transformer(width, heads, dropout, causal=True) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.dropout = dropout
        for name, weight in self.named_parameters():
            if weight.ndim > 1:
                # 2 * depth branches add up: each begins so much smaller that their sum does not grow with the depth.
                nn.init.normal_(weight, std=0.02 / (2 * depth) ** 0.5 if name.endswith("out.weight") else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Scores (n, length, vocabulary) of the token after each of x (n, length)."""
        length, most = x.shape[1], self.places.num_embeddings
        if length > most:
            raise ValueError(f"this gpt reads {most} tokens at most but the batch has {length}; build another one")
        x = F.dropout(self.tokens(x) + self.places.weight[:length], self.dropout, self.training)
        return self.head(self.norm(self.blocks(x)))


class NextToken(nn.Module):
    """A language model as a classifier of the token that follows a text: the rows of `pp.data.one_token`.

    Args:
        network: A network with a causal mask, which gives scores (n, length, vocabulary), alone or as `logits`.

    Example:
        >>> net = pp.models.NextToken(pp.models.gpt(65, width=32, depth=2, heads=2, context=16))
        >>> net(torch.tensor([[3, 1, 4, -1, -1], [1, 5, 9, 2, 6]])).shape
        torch.Size([2, 65])
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Scores (n, vocabulary) of the token after each row of x, which ends before its first -1."""
        scores = self.network(x.clamp_min(0))
        scores = getattr(scores, "logits", scores)
        last = ((x >= 0).sum(1) - 1).clamp_min(0)
        return scores.gather(1, last[:, None, None].expand(-1, 1, scores.shape[-1])).squeeze(1)


class _Transformer(nn.Module):
    """Attention and a two-layer network, each on what its LayerNorm gives and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0, *, causal: bool = False) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(
                f"width {width} cannot be cut into {heads} heads of one size; choose a multiple of {heads}"
            )
        self.heads, self.dropout, self.causal = heads, dropout, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.hidden = nn.Linear(width, 4 * width, bias=False)
        self.hidden_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention(self.norm1(x)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.attention_out(seen), self.dropout, self.training)
        return x + F.dropout(self.hidden_out(F.gelu(self.hidden(self.norm2(x)))), self.dropout, self.training)


class _Split(Protocol):
    """What `build` reads of a data.Split."""

    @property
    def train(self) -> Any: ...
    @property
    def classes(self) -> int: ...


Factory = Callable[..., nn.Module]
"""(shape of an example, number of outputs, seed=) -> network."""


def _mlp_of(shape: tuple[int, ...], outputs: int, *, seed: int) -> nn.Module:
    return mlp(math.prod(shape), outputs, seed=seed)


def _lenet5_of(shape: tuple[int, ...], outputs: int, *, seed: int) -> nn.Module:
    channels, size = _square_image("lenet5", shape)
    return lenet5(channels, size, outputs, seed=seed)


def _resnet20_of(shape: tuple[int, ...], outputs: int, *, seed: int) -> nn.Module:
    channels, _ = _square_image("resnet20", shape)
    return resnet20(channels, outputs, seed=seed)


MODELS: dict[str, Factory] = {"mlp": _mlp_of, "lenet5": _lenet5_of, "resnet20": _resnet20_of}
NAMES = tuple(MODELS)


def build(name: str | Factory, split: _Split, *, seed: int = 0) -> nn.Module:
    """A network by its name, or by a function, sized for the examples and classes of a split.

    Args:
        name: mlp, lenet5 or resnet20; or a function f(shape, outputs, seed=seed) that returns a network for examples
            of that shape; or such as package.module:factory, where a function or a class lies. Such a factory gets
            those of these that it has as parameters: `shape` of an example, `inputs` (the numbers in it), of an image
            its `channels` and `size` (height), `classes` and `seed`.
        split: The data; its `train` part says the shape of an example, its classes the number of outputs.
        seed: Chooses the first weights; one seed gives one network.

    Returns:
        The network, on the CPU.

    Raises:
        ValueError: If there is no network of this name, or it cannot take such examples.

    Example:
        >>> net = pp.models.build("mlp", split, seed=0)
        >>> [layer.out_features for layer in net.layers[::2]]
        [300, 100, 10]
        >>> net = pp.models.build("pacprune.models:lenet5", pp.data.split(torch.rand(9, 1, 28, 28), torch.arange(9)))
    """
    outputs = outputs_of(split)
    model = build_for(name, tuple(split.train.x.shape[1:]), outputs, seed=seed)
    # In the seed's random state, since lazy layers draw their weights when they meet the first examples.
    return _seeded(lambda: _checked(name, model, split.train.x[:2], outputs), seed) if is_own(name) else model


def outputs_of(split: _Split) -> int:
    """How many outputs a network for these data has: a class each, or where examples have several labels, a label."""
    y = split.train.y
    return y[0].numel() if split.classes < 2 or (split.classes == 2 and y.ndim > 1) else split.classes


def build_for(name: str | Factory, shape: tuple[int, ...], outputs: int, *, seed: int = 0) -> nn.Module:
    """`build` where only the shape of an example and the number of outputs are known, not the data."""
    if is_own(name):
        return _seeded(lambda: _own(str(name), shape, outputs, seed), seed)
    if isinstance(name, str):
        check_name("model", name, MODELS, alternative="a function such as package.module:factory")
    factory = MODELS[name] if isinstance(name, str) else name
    return factory(shape, outputs, seed=seed)


def is_own(name: str | Factory) -> bool:
    """Whether a name is package.module:factory, which is imported and called."""
    return isinstance(name, str) and ":" in name


def _own(name: str, shape: tuple[int, ...], outputs: int, seed: int) -> nn.Module:
    """The network that package.module:factory makes for examples of a shape."""
    image = {"channels": shape[0], "size": shape[1]} if len(shape) == 3 else {}
    offers = {"shape": shape, "inputs": math.prod(shape), **image, "classes": outputs, "seed": seed}
    model = imports.call(name, offers, what="model")
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} made a {type(model).__name__}; it must make a torch.nn.Module")
    return model


def _checked(name: str | Factory, model: nn.Module, x: Tensor, outputs: int) -> nn.Module:
    """The network, if it gives a score for every class of these examples; one will do for two classes."""
    training = model.training
    try:
        with torch.no_grad():
            scores = model.eval()(x)
    except Exception as error:  # the user's code may raise anything
        raise ValueError(
            f"the network of {name} cannot take examples of shape {tuple(x.shape[1:])} ({type(error).__name__}: "
            f"{error}); a factory may ask for shape, inputs, channels or size by a parameter of that name"
        ) from error
    finally:
        model.train(training)
    shape = tuple(scores.shape) if isinstance(scores, Tensor) else ()
    is_logit = outputs == 2 and shape in ((len(x),), (len(x), 1))
    if not is_logit and (len(shape) != 2 or shape[0] != len(x) or shape[1] < outputs):
        raise ValueError(
            f"the network of {name} gives a {type(scores).__name__} of shape {shape} for {len(x)} examples of "
            f"{outputs} classes, but it must give {(len(x), outputs)}; a factory may ask for a parameter named classes"
        )
    return model


def _square_image(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """(channels, size) of images of a shape that the network `name` can take."""
    if len(shape) != 3:
        raise ValueError(f"{name} takes images (channels, height, width) but examples have shape {shape}; use mlp")
    _check_image(name, *shape[1:])
    return shape[0], shape[1]


def _check_image(name: str, height: int, width: int) -> None:
    if height != width or height < _SMALLEST_IMAGE:
        raise ValueError(
            f"{name} takes square images of at least {_SMALLEST_IMAGE}x{_SMALLEST_IMAGE} pixels "
            f"but these are {height}x{width}; use mlp"
        )


def _seeded(make: Callable[[], _Model], seed: int) -> _Model:
    """Runs `make` under its own random state, on the CPU, so that a seed means the same weights everywhere."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # torch.manual_seed would seed the accelerators too, whose state is not the factory's to change.
        torch.default_generator.manual_seed(seed)
        return make()


def next_character(out: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy per character, a `loss` for networks that predict the next token.

    Args:
        out: Scores (n, length, vocabulary), as `gpt` gives them.
        y: The tokens that follow, (n, length).

    Returns:
        The mean over all n * length places, in nats.

    Example:
        >>> float(pp.models.next_character(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.long)))
        1.386...
    """
    return F.cross_entropy(out.flatten(0, 1), y.flatten())
