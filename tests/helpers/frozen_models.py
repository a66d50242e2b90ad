"""Users' models with tensors that are neither trained nor running statistics; functions build them by
name.
"""

import torch
from torch import nn

CLASSES = 10


class FrozenLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(64, 32).requires_grad_(False)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.out(self.inner(x.flatten(1)).relu())


class WithProjection(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("projection", torch.randn(64, 32) / 8, persistent=False)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.out((x.flatten(1) @ self.projection).relu())


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.rand(32, 64) < 0.5)
        self.inner = nn.Linear(64, 32)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x):
        weight = self.inner.weight * self.mask
        return self.out((x.flatten(1) @ weight.T + self.inner.bias).relu())


class Shuffled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.stack([torch.randperm(64), torch.randperm(64)]))
        self.out = nn.Linear(64, CLASSES)

    def forward(self, x):
        rows = x.flatten(1)
        return self.out(rows[:, self.order[0]] + rows[:, self.order[1]].abs())


class FrozenAndRandom(nn.Module):
    def __init__(self):
        super().__init__()
        self.projection = WithProjection()
        self.inner = nn.Linear(CLASSES, 32).requires_grad_(False)
        self.out = nn.Linear(32, CLASSES)

    def forward(self, x):
        return self.out(self.inner(self.projection(x)).relu())


def frozen_and_random(shape, classes):
    return FrozenAndRandom()
