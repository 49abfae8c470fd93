"""Networks of the benchmarks of curvature and of GPUs: ResNets and a transformer."""

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions around a short cut (He et al. 2016)."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.short = nn.Sequential()
        if stride > 1 or into != out:
            self.short = nn.Sequential(
                nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return (y + self.short(x)).relu()


def resnet20() -> nn.Module:
    """ResNet-20 for 3 x 32 x 32 images, 0.27 million weights."""
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
    for into, out, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
        layers += [Block(into, out, stride), Block(out, out, 1), Block(out, out, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def resnet(width: int = 64) -> nn.Module:
    """ResNet-18 for 3 x 32 x 32 images, 11 173 962 weights at width 64."""
    layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    into = width
    for out, stride in ((width, 1), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
        layers += [Block(into, out, stride), Block(out, out, 1)]
        into = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(into, 10))


class Transformer(nn.Module):
    """Sequences of 64 tokens with 384 numbers to ten classes (10.6 million weights, 6 layers)."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.output = nn.Linear(384, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.encoder(x).mean(1))


class FilterResponse(nn.Module):
    """x / rms(x over the positions) g + b of each channel (Singh & Krishnan 2020)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(channels, 1, 1))
        self.bias = nn.Parameter(torch.zeros(channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        scale = (x.square().mean((-2, -1), keepdim=True) + 1e-6).rsqrt()
        return x * scale * self.gain + self.bias


class ResponseBlock(nn.Module):
    """The same block with filter response normalization and swish."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1)
        self.norm1 = FilterResponse(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1)
        self.norm2 = FilterResponse(out)
        self.short = nn.Sequential()
        if stride > 1 or into != out:
            self.short = nn.Sequential(nn.Conv2d(into, out, 1, stride), FilterResponse(out))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(nn.functional.silu(self.norm1(self.conv1(x)))))
        return nn.functional.silu(y + self.short(x))


def resnet20_frn(width: int = 16) -> nn.Module:
    """ResNet-20 of Izmailov et al. (2021), whose outputs do not depend on the other images."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1), FilterResponse(width), nn.SiLU()]
    for into, out, stride in ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
        layers += [ResponseBlock(into, out, stride)]
        layers += [ResponseBlock(out, out, 1), ResponseBlock(out, out, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))
