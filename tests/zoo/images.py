"""Image networks as people write them: default settings, dropout and drop path included."""

import torch
from torch import nn
from torch.nn import functional


def keras_cnn(shape, classes):
    """The first network of many tutorials."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.LazyLinear(128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    ).apply(_made_with(torch.zeros(2, *shape)))


def _made_with(batch):
    """Runs a module with lazy layers once, so that they get their sizes."""

    def make(module):
        if isinstance(module, nn.Sequential):
            with torch.no_grad():
                module(batch)

    return make


def vgg_bn(shape, classes):
    layers, channels = [], shape[0]
    for width in (16, 16, "M", 32, 32, "M", 64, "M"):
        if width == "M":
            layers.append(nn.MaxPool2d(2, 2))
            continue
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        channels = width
    head = [nn.Flatten(), nn.Linear(64 * (shape[1] // 8) ** 2, 64), nn.ReLU(True), nn.Dropout()]
    return nn.Sequential(*layers, *head, nn.Linear(64, classes))


class _BasicBlock(nn.Module):
    """The block of He et al.'s CIFAR networks; shortcuts drop pixels and pad channels (option A)."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.more = outputs - inputs

    def forward(self, x):
        y = self.bn2(self.conv2(functional.relu(self.bn1(self.conv1(x)))))
        if self.more:
            x = functional.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.more // 2, self.more // 2))
        return functional.relu(x + y)


class CifarResNet(nn.Module):
    def __init__(self, shape, classes, depth=3):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 16, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        blocks, inputs = [], 16
        for outputs in (16, 32, 64):
            for index in range(depth):
                blocks.append(_BasicBlock(inputs, outputs, 2 if outputs > inputs and index == 0 else 1))
                inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(64, classes)
        for part in self.modules():
            if isinstance(part, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(part.weight)

    def forward(self, x):
        x = self.blocks(functional.relu(self.bn(self.conv(x))))
        return self.fc(functional.avg_pool2d(x, x.size()[3]).view(x.size(0), -1))


class _WideBlock(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.bn1, self.bn2 = nn.BatchNorm2d(inputs), nn.BatchNorm2d(outputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.drop_rate = 0.3
        self.short = None if inputs == outputs else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        y = functional.relu(self.bn1(x), inplace=True)
        z = functional.relu(self.bn2(self.conv1(y)), inplace=True)
        z = functional.dropout(z, p=self.drop_rate, training=self.training)
        return torch.add(x if self.short is None else self.short(y), self.conv2(z))


class WideResNet(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.conv = nn.Conv2d(shape[0], 16, 3, 1, 1, bias=False)
        self.blocks = nn.Sequential(_WideBlock(16, 32, 1), _WideBlock(32, 64, 2), _WideBlock(64, 64, 1))
        self.bn, self.fc = nn.BatchNorm2d(64), nn.Linear(64, classes)

    def forward(self, x):
        x = functional.relu(self.bn(self.blocks(self.conv(x))))
        return self.fc(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class _DenseLayer(nn.Module):
    def __init__(self, inputs, growth):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, growth, 3, padding=1, bias=False)
        self.drop = nn.Dropout2d(0.2)

    def forward(self, x):
        return torch.cat([x, self.drop(self.conv(functional.relu(self.norm(x))))], 1)


def densenet(shape, classes):
    layers, width = [nn.Conv2d(shape[0], 16, 3, padding=1, bias=False)], 16
    for _ in range(2):
        for _ in range(3):
            layers.append(_DenseLayer(width, 12))
            width += 12
        layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1), nn.AvgPool2d(2)]
        width //= 2
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))


def mobilenet_v1(shape, classes):
    def separable(inputs, outputs, stride):
        return nn.Sequential(
            nn.Conv2d(inputs, inputs, 3, stride, 1, groups=inputs, bias=False),
            nn.BatchNorm2d(inputs),
            nn.ReLU6(inplace=True),
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU6(inplace=True),
        )

    first = nn.Sequential(nn.Conv2d(shape[0], 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU6(True))
    blocks = [separable(16, 32, 1), separable(32, 64, 2), separable(64, 64, 1), separable(64, 128, 2)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.001), nn.Linear(128, classes)]
    return nn.Sequential(first, *blocks, *head)


class _Excite(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc = nn.Sequential(
            nn.Linear(width, width // 4),
            nn.ReLU(inplace=True),
            nn.Linear(width // 4, width),
            nn.Hardsigmoid(),
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        return x * self.fc(x.mean((2, 3))).view(b, c, 1, 1).expand_as(x)


class _Inverted(nn.Module):
    def __init__(self, inputs, outputs, stride, ratio):
        super().__init__()
        inner = inputs * ratio
        self.conv = nn.Sequential(
            nn.Conv2d(inputs, inner, 1, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish(inplace=True),
            nn.Conv2d(inner, inner, 5, stride, 2, groups=inner, bias=False),
            nn.BatchNorm2d(inner),
            nn.Hardswish(inplace=True),
            _Excite(inner),
            nn.Conv2d(inner, outputs, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.conv(x) if self.residual else self.conv(x)


def mobilenet_v3_like(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, 2, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.Hardswish(inplace=True),
        _Inverted(16, 16, 1, 2),
        _Inverted(16, 24, 2, 4),
        _Inverted(24, 24, 1, 4),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, 64),
        nn.Hardswish(inplace=True),
        nn.Dropout(p=0.2, inplace=True),
        nn.Linear(64, classes),
    )


class UNet(nn.Module):
    """Removes noise: its target is the image."""

    def __init__(self, shape, classes):
        super().__init__()

        def double(inputs, outputs):
            layers = []
            for one in (inputs, outputs):
                layers += [
                    nn.Conv2d(one, outputs, 3, padding=1),
                    nn.BatchNorm2d(outputs),
                    nn.ReLU(inplace=True),
                ]
            return nn.Sequential(*layers)

        self.down1, self.down2, self.down3 = double(shape[0], 8), double(8, 16), double(16, 32)
        self.up1, self.up2 = nn.ConvTranspose2d(32, 16, 2, 2), nn.ConvTranspose2d(16, 8, 2, 2)
        self.conv1, self.conv2 = double(32, 16), double(16, 8)
        self.out = nn.Conv2d(8, shape[0], 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(functional.max_pool2d(one, 2))
        three = self.down3(functional.max_pool2d(two, 2))
        x = self.conv1(torch.cat([self.up1(three), two], dim=1))
        return self.out(self.conv2(torch.cat([self.up2(x), one], dim=1))).flatten(1)


def autoencoder(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(16, shape[0], 3, stride=2, padding=1, output_padding=1),
        nn.Sigmoid(),
        nn.Flatten(),
    )


class Variational(nn.Module):
    """A variational autoencoder whose loss is the reconstruction alone; it draws normal noise."""

    def __init__(self, shape, classes):
        super().__init__()
        size = shape[0] * shape[1] * shape[2]
        self.encode, self.mean, self.log = nn.Linear(size, 64), nn.Linear(64, 8), nn.Linear(64, 8)
        self.decode = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, size), nn.Sigmoid())

    def forward(self, x):
        hidden = functional.relu(self.encode(x.flatten(1)))
        mean, std = self.mean(hidden), torch.exp(0.5 * self.log(hidden))
        code = mean + torch.randn_like(std) * std if self.training else mean
        return self.decode(code)


class _DropPath(nn.Module):
    """Stochastic depth as timm writes it."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if self.rate == 0.0 or not self.training:
            return x
        keep = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(keep)
        mask.div_(keep)
        return x * mask


class _ConvNextBlock(nn.Module):
    def __init__(self, width, rate):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.one, self.two = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(1e-6 * torch.ones(width))
        self.drop = _DropPath(rate)

    def forward(self, x):
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.two(functional.gelu(self.one(self.norm(y))))
        return x + self.drop(y.permute(0, 3, 1, 2))


class ConvNext(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.stem = nn.Conv2d(shape[0], 24, 4, 4)
        self.blocks = nn.Sequential(*[_ConvNextBlock(24, 0.1 * index) for index in range(3)])
        self.norm, self.head = nn.LayerNorm(24), nn.Linear(24, classes)

    def forward(self, x):
        return self.head(self.norm(self.blocks(self.stem(x)).mean([-2, -1])))


class _MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()

        def mlp(size):
            return nn.Sequential(
                nn.Linear(size, 2 * size),
                nn.GELU(),
                nn.Dropout(0.1),
                nn.Linear(2 * size, size),
                nn.Dropout(0.1),
            )

        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens, self.channels = mlp(tokens), mlp(width)

    def forward(self, x):
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norm2(x))


class MlpMixer(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.patches = nn.Conv2d(shape[0], 32, 4, 4)
        self.blocks = nn.Sequential(*[_MixerBlock((shape[1] // 4) ** 2, 32) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, classes)

    def forward(self, x):
        x = self.blocks(self.patches(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(dim=1))


class _Attention(nn.Module):
    """The channel and spatial attention of CBAM."""

    def __init__(self, width):
        super().__init__()
        self.mlp = nn.Sequential(nn.Conv2d(width, width // 4, 1), nn.ReLU(), nn.Conv2d(width // 4, width, 1))
        self.spatial = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x):
        pooled = self.mlp(functional.adaptive_avg_pool2d(x, 1)) + self.mlp(
            functional.adaptive_max_pool2d(x, 1)
        )
        x = x * torch.sigmoid(pooled)
        maps = torch.cat([x.mean(1, keepdim=True), torch.max(x, 1, keepdim=True)[0]], 1)
        return x * torch.sigmoid(self.spatial(maps))


def cbam(shape, classes):
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.PReLU(16),
        _Attention(16),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.GroupNorm(8, 32),
        nn.SiLU(),
        _Attention(32),
        nn.AdaptiveMaxPool2d(3),
        nn.LayerNorm([32, 3, 3]),
        nn.Flatten(),
        nn.Linear(288, classes),
    )


def discriminator(shape, classes):
    """Spectral norm as torch has it now."""
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(
        norm(nn.Conv2d(shape[0], 16, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        norm(nn.Conv2d(16, 32, 4, 2, 1)),
        nn.LeakyReLU(0.2, inplace=True),
        nn.Flatten(),
        norm(nn.Linear(32 * (shape[1] // 4) ** 2, classes)),
    )


class Pyramid(nn.Module):
    """Features of two sizes, resized and added."""

    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.b, self.c = (
            nn.Conv2d(shape[0], 8, 3, 2, 1),
            nn.Conv2d(8, 16, 3, 2, 1),
            nn.Conv2d(16, 8, 1),
        )
        self.norm = nn.InstanceNorm2d(8, affine=True)
        self.out = nn.Linear(16, classes)

    def forward(self, x):
        small = functional.interpolate(x, scale_factor=0.5, mode="bicubic", align_corners=False)
        one = functional.relu(self.a(functional.interpolate(small, scale_factor=2, mode="nearest")))
        two = functional.relu(self.b(one))
        one = self.norm(one + functional.interpolate(self.c(two), size=one.shape[-2:], mode="bilinear"))
        return self.out(torch.cat([one.mean((2, 3)), one.amax((2, 3))], 1))


class SpatialTransformer(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.locate = nn.Sequential(
            nn.Conv2d(shape[0], 8, 7),
            nn.MaxPool2d(2, 2),
            nn.ReLU(True),
            nn.AdaptiveAvgPool2d(3),
            nn.Flatten(),
        )
        self.angle = nn.Linear(72, 6)
        self.angle.weight.data.zero_()
        self.angle.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.net = keras_cnn(shape, classes)

    def forward(self, x):
        theta = self.angle(self.locate(x)).view(-1, 2, 3)
        grid = functional.affine_grid(theta, x.size(), align_corners=False)
        return self.net(functional.grid_sample(x, grid, align_corners=False))


def video(shape, classes):
    return nn.Sequential(
        nn.Conv3d(shape[0], 8, 3, padding=1),
        nn.BatchNorm3d(8),
        nn.ReLU(),
        nn.MaxPool3d(2),
        nn.Conv3d(8, 16, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Dropout(),
        nn.Linear(16, classes),
    )
