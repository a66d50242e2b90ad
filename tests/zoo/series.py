"""Networks for time series and sound, as people write them."""

import torch
from torch import nn
from torch.nn import functional


def har_cnn(shape, classes):
    return nn.Sequential(
        nn.Conv1d(shape[0], 64, 3),
        nn.ReLU(),
        nn.Conv1d(64, 64, 3),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(64 * ((shape[1] - 4) // 2), 100),
        nn.ReLU(),
        nn.Linear(100, classes),
    )


class _Chomp(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.size = size

    def forward(self, x):
        return x[:, :, : -self.size].contiguous()


class _TemporalBlock(nn.Module):
    def __init__(self, inputs, outputs, dilation, norm):
        super().__init__()
        padding = 2 * dilation

        def part(channels):
            conv = norm(nn.Conv1d(channels, outputs, 3, padding=padding, dilation=dilation))
            return [conv, _Chomp(padding), nn.ReLU(), nn.Dropout(0.2)]

        self.net = nn.Sequential(*part(inputs), *part(outputs))
        self.short = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x):
        return functional.relu(self.net(x) + (x if self.short is None else self.short(x)))


class Tcn(nn.Module):
    def __init__(self, shape, classes, norm):
        super().__init__()
        blocks = [_TemporalBlock(shape[0] if index == 0 else 25, 25, 2**index, norm) for index in range(3)]
        self.blocks, self.out = nn.Sequential(*blocks), nn.Linear(25, classes)

    def forward(self, x):
        return self.out(self.blocks(x)[:, :, -1])


def tcn(shape, classes):
    return Tcn(shape, classes, nn.utils.parametrizations.weight_norm)


def tcn_of_2018(shape, classes):
    """With torch's first weight_norm, as the paper's code has it."""
    return Tcn(shape, classes, nn.utils.weight_norm)


class _Inception(nn.Module):
    def __init__(self, inputs, width=8):
        super().__init__()
        self.bottleneck = nn.Conv1d(inputs, width, 1, bias=False)
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, size, padding="same", bias=False) for size in (39, 19, 9)
        )
        self.pool, self.last = nn.MaxPool1d(3, 1, 1), nn.Conv1d(inputs, width, 1, bias=False)
        self.norm = nn.BatchNorm1d(4 * width)

    def forward(self, x):
        y = self.bottleneck(x)
        return functional.relu(
            self.norm(torch.cat([*(conv(y) for conv in self.convs), self.last(self.pool(x))], 1))
        )


class InceptionTime(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.blocks = nn.ModuleList(_Inception(shape[0] if index == 0 else 32) for index in range(3))
        self.short = nn.Sequential(nn.Conv1d(shape[0], 32, 1, bias=False), nn.BatchNorm1d(32))
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        y = x
        for block in self.blocks:
            y = block(y)
        return self.out(functional.relu(y + self.short(x)).mean(-1))


class EegNet(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        channels, length = shape
        self.first = nn.Sequential(nn.Conv2d(1, 8, (1, 32), padding="same", bias=False), nn.BatchNorm2d(8))
        self.depthwise = nn.Conv2d(8, 16, (channels, 1), groups=8, bias=False)
        self.second = nn.Sequential(nn.BatchNorm2d(16), nn.ELU(), nn.AvgPool2d((1, 4)), nn.Dropout(0.5))
        self.third = nn.Sequential(
            nn.Conv2d(16, 16, (1, 16), padding="same", groups=16, bias=False),
            nn.Conv2d(16, 16, 1, bias=False),
            nn.BatchNorm2d(16),
            nn.ELU(),
            nn.AvgPool2d((1, 8)),
            nn.Dropout(0.5),
        )
        self.out = nn.Linear(16 * (length // 32), classes)

    def forward(self, x):
        with torch.no_grad():  # the paper's bound on the norm of each filter
            self.depthwise.weight.data = torch.renorm(self.depthwise.weight.data, p=2, dim=0, maxnorm=1.0)
        x = self.third(self.second(self.depthwise(self.first(x.unsqueeze(1)))))
        return self.out(x.flatten(1))


def ds_cnn(shape, classes):
    """Keyword spotting on 49 frames of 10 coefficients, from `Hello Edge`."""
    layers = [
        nn.Conv2d(1, 64, (10, 4), 2, (5, 1), bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.Dropout(0.2),
    ]
    for _ in range(4):
        layers += [nn.Conv2d(64, 64, 3, padding=1, groups=64, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
        layers += [nn.Conv2d(64, 64, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.Dropout(0.4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes)
    )


def m5(shape, classes):
    """Raw sound."""
    layers, channels = [], shape[0]
    for width, size, stride in ((32, 80, 16), (32, 3, 1), (64, 3, 1)):
        layers += [
            nn.Conv1d(channels, width, size, stride),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.MaxPool1d(4),
        ]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, classes))


class SpectrogramCnn(nn.Module):
    """Raw sound, its spectrogram within the model."""

    def __init__(self, shape, classes):
        super().__init__()
        self.register_buffer("window", torch.hann_window(64))
        self.net = nn.Sequential(
            nn.BatchNorm2d(1), nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()
        )
        self.out = nn.Linear(128, classes)

    def forward(self, x):
        spectrum = torch.stft(x, 64, 32, window=self.window, return_complex=True)
        return self.out(self.net(torch.log(spectrum.abs() ** 2 + 1e-6).unsqueeze(1)))


class _NBeatsBlock(nn.Module):
    def __init__(self, length, horizon):
        super().__init__()
        layers = [nn.Linear(length, 64), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Linear(64, 64), nn.ReLU()]
        self.net = nn.Sequential(*layers)
        self.theta_b, self.theta_f = nn.Linear(64, 8, bias=False), nn.Linear(64, 8, bias=False)
        self.back, self.front = nn.Linear(8, length), nn.Linear(8, horizon)

    def forward(self, x):
        hidden = self.net(x)
        return self.back(self.theta_b(hidden)), self.front(self.theta_f(hidden))


class NBeats(nn.Module):
    """A forecast of `classes` values."""

    def __init__(self, shape, classes):
        super().__init__()
        self.blocks = nn.ModuleList(_NBeatsBlock(shape[0], classes) for _ in range(3))

    def forward(self, x):
        forecast = 0
        for block in self.blocks:
            back, front = block(x)
            x, forecast = x - back, forecast + front
        return forecast


class DLinear(nn.Module):
    """A forecast from trend and season; the mean of the input is taken off and added again."""

    def __init__(self, shape, classes):
        super().__init__()
        self.trend, self.season = nn.Linear(shape[0], classes), nn.Linear(shape[0], classes)
        self.average = nn.AvgPool1d(25, stride=1)

    def forward(self, x):
        level = x.mean(1, keepdim=True).detach()
        x = x - level
        front, end = x[:, 0:1].repeat(1, 12), x[:, -1:].repeat(1, 12)
        trend = self.average(torch.cat([front, x, end], dim=1).unsqueeze(1)).squeeze(1)
        return self.season(x - trend) + self.trend(trend) + level


class _GatedLayer(nn.Module):
    def __init__(self, width, dilation):
        super().__init__()
        self.pad = nn.ConstantPad1d((dilation, 0), 0.0)
        self.filter, self.gate = (
            nn.Conv1d(width, width, 2, dilation=dilation),
            nn.Conv1d(width, width, 2, dilation=dilation),
        )
        self.skip, self.out = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x):
        y = self.pad(x)
        y = torch.tanh(self.filter(y)) * torch.sigmoid(self.gate(y))
        return x + self.out(y), self.skip(y)


class WaveNet(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.first = nn.Conv1d(shape[0], 16, 1)
        self.layers = nn.ModuleList(_GatedLayer(16, 2**index) for index in range(5))
        self.out = nn.Linear(16, classes)

    def forward(self, x):
        x, skips = self.first(x), []
        for layer in self.layers:
            x, skip = layer(x)
            skips.append(skip)
        return self.out(functional.relu(torch.stack(skips).sum(0)).mean(-1))


class Resnet1d(nn.Module):
    """An electrocardiogram network with noise on its input and reversible instance norm."""

    def __init__(self, shape, classes):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(shape[0], 32, 15, 2, 7), nn.Conv1d(32, 32, 15, 1, 7)
        self.bn1, self.bn2 = nn.BatchNorm1d(32), nn.BatchNorm1d(32)
        self.pool, self.drop = nn.MaxPool1d(2), nn.Dropout1d(0.1)
        self.out = nn.Linear(64, classes)

    def forward(self, x):
        x = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5)
        if self.training:
            x = x + 0.01 * torch.randn_like(x)
        x = self.drop(functional.relu(self.bn1(self.conv1(x))))
        x = self.pool(functional.relu(x + self.bn2(self.conv2(x))))
        return self.out(torch.cat([x.mean(-1), x.std(-1)], 1))
