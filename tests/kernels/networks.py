"""Small networks of many kinds for images [n, 3, 8, 8] and 4 classes, one line each where a line is enough."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pacprune import models

SIZE = 8


class Net(nn.Module):
    """Layers by name, and how they are applied: function(layers, x)."""

    def __init__(self, function: Callable[[Any, Tensor], Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.out = nn.LazyLinear(4)
        with torch.no_grad():
            self(torch.zeros(2, 3, SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.function(self, x).flatten(1))


class Scale(nn.Module):
    """One number for each entry of a shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def conv(inputs: int = 3, outputs: int = 4, size: int = 3, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, size, **{"padding": size // 2, **options})


def tokens(x: Tensor) -> Tensor:
    """[n, height * width, channels]."""
    return x.flatten(2).transpose(1, 2)


def attention(qkv: Tensor, heads: int = 2) -> Tensor:
    """Of [n, length, 3 * width], by matrix products."""
    n, length, width = qkv.shape
    q, k, v = qkv.view(n, length, 3, heads, width // (3 * heads)).permute(2, 0, 3, 1, 4)
    return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).reshape(n, length, width // 3)


def windows(x: Tensor, side: int = 4) -> Tensor:
    """[n * windows, side * side, channels] of [n, channels, height, width]."""
    n, channels, height, width = x.shape
    x = x.view(n, channels, height // side, side, width // side, side)
    return x.permute(0, 2, 4, 3, 5, 1).reshape(-1, side * side, channels)


def unet(net: Any, x: Tensor, mode: str) -> Tensor:
    fine = torch.relu(net.a(x))
    coarse = torch.relu(net.b(F.max_pool2d(fine, 2)))
    return torch.relu(net.c(torch.cat([fine, F.interpolate(coarse, scale_factor=2, mode=mode)], dim=1)))


def conv_lstm(net: Any, x: Tensor) -> Tensor:
    h = c = x.new_zeros(len(x), 4, *x.shape[2:])
    for _ in range(3):
        i, f, o, g = net.a(torch.cat([x, h], dim=1)).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
    return h


def recurrent_rows(net: Any, x: Tensor) -> Tensor:
    rows = net.a(x).permute(2, 0, 1, 3).flatten(2)
    h = rows.new_zeros(x.shape[0], 6)
    for row in rows:
        h = torch.tanh(net.b(row) + net.c(h))
    return h


def shuffled(x: Tensor, groups: int = 2) -> Tensor:
    n, channels, height, width = x.shape
    return x.view(n, groups, channels // groups, height, width).transpose(1, 2).reshape(n, channels, height, width)


def axial(net: Any, x: Tensor) -> Tensor:
    y = net.a(x).permute(0, 2, 3, 1)
    along = torch.softmax(y @ y.transpose(-1, -2), -1) @ y
    down = y.transpose(1, 2)
    return along + (torch.softmax(down @ down.transpose(-1, -2), -1) @ down).transpose(1, 2)


def window_attention(net: Any, x: Tensor) -> Tensor:
    y = torch.roll(net.a(x), (2, 2), (2, 3))
    y = attention(net.qkv(net.norm(windows(y)))).view(len(x), 2, 2, 4, 4, 4)
    return torch.roll(y.permute(0, 5, 1, 3, 2, 4).reshape(len(x), 4, SIZE, SIZE), (-2, -2), (2, 3)) + net.a(x)


def mixer(net: Any, x: Tensor) -> Tensor:
    y = tokens(net.a(x))
    y = y + net.across(net.norm(y).transpose(1, 2)).transpose(1, 2)
    return y + net.along(net.norm(y))


def many_elementwise(net: Any, x: Tensor) -> Tensor:
    y = net.a(x)
    y = F.gelu(y) + F.silu(y) * F.softplus(y) - F.leaky_relu(y).clamp(-1, 1)
    y = torch.where(y > 0.1, y, y.exp().neg()) + (1 + y.abs()).sqrt() + net.b(y)
    return torch.maximum(y, y.roll(1, 0)) + y.square().log1p()


def squeezed(net: Any, x: Tensor) -> Tensor:
    y = torch.relu(net.a(x))
    return y * net.c(torch.relu(net.b(y.mean((2, 3))))).sigmoid()[:, :, None, None] + y


def strided(net: Any, x: Tensor) -> Tensor:
    y = torch.relu(net.a(x)).contiguous()
    return y.as_strided((len(y), 4, 3, 3), (4 * SIZE * SIZE, SIZE * SIZE, 2 * SIZE, 2)).sin()


def relu(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.relu(layer(x))


def chain(*layers: nn.Module) -> Net:
    return Net(lambda net, x: net.layers(x), layers=nn.Sequential(*layers))


def _vit() -> nn.Module:
    return models.vit(size=SIZE, patch=2, width=8, depth=1, heads=2, classes=4)


def _lenet() -> nn.Module:
    return models.lenet5(3, 12, 4)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": lambda: chain(conv(), nn.ReLU(), conv(4, 5, bias=False), nn.ReLU()),
    "strides": lambda: chain(conv(stride=2), nn.ReLU(), conv(4, 4, 2, stride=2)),
    "odd strides": lambda: chain(nn.Conv2d(3, 4, (3, 2), (2, 1), (0, 1)), nn.Tanh(), nn.Conv2d(4, 3, (1, 3), (1, 3))),
    "dilation": lambda: chain(conv(dilation=2, padding=2), nn.ReLU(), conv(4, 4, dilation=3)),
    "circular padding": lambda: chain(conv(padding_mode="circular"), nn.ReLU(), conv(4, 4, padding_mode="reflect")),
    "depthwise": lambda: chain(conv(3, 6, groups=3), nn.ReLU(), conv(6, 4, 1), nn.ReLU(), conv(4, 4, groups=4)),
    "groups": lambda: chain(conv(), nn.ReLU(), conv(4, 6, groups=2), nn.ReLU()),
    "shuffled groups": lambda: Net(
        lambda net, x: relu(net.b, shuffled(relu(net.a, x))), a=conv(), b=conv(4, 4, groups=2)
    ),
    "transposed convolution": lambda: chain(conv(stride=2), nn.ReLU(), nn.ConvTranspose2d(4, 3, 2, 2), nn.ReLU()),
    "one dimension": lambda: Net(
        lambda net, x: relu(net.b, relu(net.a, x.flatten(2))), a=nn.Conv1d(3, 4, 5, 2), b=nn.Conv1d(4, 3, 3)
    ),
    "three dimensions": lambda: Net(
        lambda net, x: relu(net.a, x.unflatten(2, (2, 4))), a=nn.Conv3d(3, 4, (1, 3, 3), padding=1)
    ),
    "batch norm": lambda: chain(conv(bias=False), nn.BatchNorm2d(4), nn.ReLU(), conv(4, 3), nn.BatchNorm2d(3)),
    "group norm": lambda: chain(conv(3, 6), nn.GroupNorm(3, 6), nn.ReLU(), conv(6, 4), nn.GroupNorm(1, 4)),
    "instance norm": lambda: chain(conv(), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), conv(4, 4)),
    "layer norm of images": lambda: chain(conv(), nn.LayerNorm([4, SIZE, SIZE]), nn.GELU(), conv(4, 4)),
    "layer norm of channels": lambda: Net(
        lambda net, x: net.b(net.norm(net.a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)).relu(),
        a=conv(),
        b=conv(4, 4),
        norm=nn.LayerNorm(4),
    ),
    "residual": lambda: Net(
        lambda net, x: torch.relu(net.b(relu(net.a, x)) + net.c(x)), a=conv(), b=conv(4, 4), c=conv(3, 4, 1)
    ),
    "residual of a view": lambda: Net(
        lambda net, x: torch.relu(net.a(x) + net.b(x).view(len(x), 2, 2, SIZE, SIZE).flip(1).flatten(1, 2)),
        a=conv(),
        b=conv(),
    ),
    "residual of a transpose": lambda: Net(
        lambda net, x: relu(net.b, net.a(x) * 2 + net.a(x).transpose(2, 3).relu()), a=conv(), b=conv(4, 4)
    ),
    "strided residual": lambda: Net(
        lambda net, x: torch.relu(net.a(x) + F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 0, 1))), a=conv(stride=2)
    ),
    "dense block": lambda: Net(
        lambda net, x: relu(net.b, torch.cat([x, relu(net.a, x)], dim=1)), a=conv(), b=conv(7, 4)
    ),
    "branches": lambda: Net(
        lambda net, x: torch.cat([net.a(x), F.max_pool2d(x, 3, 1, 1), net.b(x).relu(), F.avg_pool2d(x, 3, 1, 1)], 1),
        a=conv(size=1),
        b=conv(size=5),
    ),
    "U-Net": lambda: Net(lambda net, x: unet(net, x, "nearest"), a=conv(), b=conv(4, 6), c=conv(10, 4)),
    "bilinear U-Net": lambda: Net(lambda net, x: unet(net, x, "bilinear"), a=conv(), b=conv(4, 6), c=conv(10, 4)),
    "pixel shuffle": lambda: chain(conv(3, 8), nn.PixelShuffle(2), nn.ReLU(), conv(2, 3), nn.PixelUnshuffle(4)),
    "squeeze and excite": lambda: Net(squeezed, a=conv(), b=nn.Linear(4, 2), c=nn.Linear(2, 4)),
    "max pool": lambda: chain(conv(), nn.MaxPool2d(3, 2), nn.ReLU(), conv(4, 4)),
    "adaptive pools": lambda: chain(conv(), nn.AdaptiveAvgPool2d((3, 2)), nn.ReLU(), nn.AdaptiveMaxPool2d(2)),
    "space to depth": lambda: Net(
        lambda net, x: relu(net.a, x.view(-1, 3, 4, 2, 4, 2).permute(0, 3, 5, 1, 2, 4).reshape(-1, 12, 4, 4)),
        a=conv(12, 4),
    ),
    "flattened with channels last": lambda: Net(
        lambda net, x: torch.relu(net.b(net.a(x).relu().permute(0, 2, 3, 1).flatten(1))),
        a=conv(),
        b=nn.Linear(4 * SIZE * SIZE, 5),
    ),
    "turned images": lambda: Net(
        lambda net, x: relu(net.b, relu(net.a, x).transpose(2, 3).flip(2)).roll(1, 3), a=conv(), b=conv(4, 4)
    ),
    "slices": lambda: Net(
        lambda net, x: relu(net.b, relu(net.a, x)[:, ::2, 1:, ::3]) - 1, a=conv(), b=conv(2, 4, padding=0)
    ),
    "gated halves": lambda: chain(conv(3, 8), nn.GLU(1), conv(4, 4), nn.Softmax2d()),
    "many elementwise operations": lambda: Net(many_elementwise, a=conv(), b=nn.PReLU(4)),
    "scales": lambda: chain(conv(), Scale(4, 1, 1), nn.ReLU(), Scale(1, 1, SIZE), Scale(SIZE, 1), conv(4, 4)),
    "one pixel": lambda: chain(nn.Conv2d(3, 4, SIZE), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.ReLU()),
    "one channel": lambda: chain(conv(3, 1), nn.ReLU(), conv(1, 1), nn.Sigmoid(), conv(1, 2)),
    "shared convolution": lambda: Net(lambda net, x: relu(net.b, relu(net.b, relu(net.a, x))), a=conv(), b=conv(4, 4)),
    "patches unfolded": lambda: Net(
        lambda net, x: torch.relu(net.b(F.unfold(relu(net.a, x), 3, stride=2).transpose(1, 2))),
        a=conv(),
        b=nn.Linear(36, 3),
    ),
    "patches folded": lambda: Net(
        lambda net, x: relu(net.b, F.fold(F.unfold(relu(net.a, x), 2, stride=2), SIZE, 2, stride=2)),
        a=conv(),
        b=conv(4, 3),
    ),
    "as_strided": lambda: Net(strided, a=conv()),
    "bilinear pooling": lambda: Net(
        lambda net, x: torch.einsum("nchw,ndhw->ncd", relu(net.a, x), net.b(x).tanh()), a=conv(), b=conv()
    ),
    "channels by index": lambda: Net(
        lambda net, x: relu(net.b, relu(net.a, x)[:, [3, 0, 0, 2]]) * 2, a=conv(), b=conv(4, 4)
    ),
    "half precision between": lambda: Net(
        lambda net, x: relu(net.b, net.a(x).bfloat16().relu().float()), a=conv(), b=conv(4, 4)
    ),
    "spatial softmax": lambda: Net(
        lambda net, x: net.a(x).flatten(2).softmax(-1).view(len(x), 4, SIZE, SIZE).cumsum(2), a=conv()
    ),
    "Fourier": lambda: Net(lambda net, x: relu(net.b, torch.fft.fft2(relu(net.a, x)).real) / 9, a=conv(), b=conv(4, 4)),
    "vision transformer": _vit,
    "fused attention": lambda: Net(
        lambda net, x: net.b(net.attention(*[tokens(net.a(x))] * 3)[0]).relu(),
        a=conv(stride=2),
        attention=nn.MultiheadAttention(4, 2, batch_first=True),
        b=nn.LayerNorm(4),
    ),
    "encoder layer": lambda: Net(
        lambda net, x: net.encoder(tokens(net.a(x))),
        a=conv(size=2, stride=2, padding=0),
        encoder=nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True, norm_first=True),
    ),
    "axial attention": lambda: Net(axial, a=conv()),
    "window attention": lambda: Net(window_attention, a=conv(), norm=nn.LayerNorm(4), qkv=nn.Linear(4, 12)),
    "mixer": lambda: Net(
        mixer,
        a=conv(size=2, stride=2, padding=0),
        norm=nn.LayerNorm(4),
        across=nn.Sequential(nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 16)),
        along=nn.Linear(4, 4),
    ),
    "convolutional LSTM": lambda: Net(conv_lstm, a=conv(7, 16)),
    "recurrent over rows": lambda: Net(recurrent_rows, a=conv(), b=nn.Linear(4 * SIZE, 6), c=nn.Linear(6, 6)),
    "LSTM": lambda: Net(
        lambda net, x: net.b(tokens(net.a(x)))[0][:, -1], a=conv(stride=4), b=nn.LSTM(4, 5, batch_first=True)
    ),
    "no convolution": lambda: Net(lambda net, x: net.a(x.flatten(1)).relu(), a=nn.Linear(192, 5)),
    "LeNet-5": lambda: Net(lambda net, x: net.a(F.pad(x, (2, 2, 2, 2))), a=_lenet()),
    "ConvNeXt": lambda: models.convnext(classes=4, widths=(4, 6, 8), blocks=1),
    "wide ResNet": lambda: models.wide_resnet(classes=4, depth=10, width=1),
    "ResNet-20": lambda: models.resnet20(classes=4),
}
"""Names by what is odd about them."""
