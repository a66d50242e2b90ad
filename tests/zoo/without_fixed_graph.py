"""Models that no fixed graph of float32 tensors can express; each must be refused by name."""

import torch
from torch import nn
from torch.nn import functional


class BranchOnData(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.b = nn.Linear(shape[0], 16), nn.Linear(16, classes)

    def forward(self, x):
        x = self.a(x)
        return self.b(torch.relu(x) if x.mean() > 0 else torch.tanh(x))


class EarlyExit(nn.Module):
    """Computes the second layer only for uncertain samples."""

    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.b = nn.Linear(shape[0], classes), nn.Linear(shape[0], classes)

    def forward(self, x):
        first = self.a(x)
        unsure = first.softmax(1).amax(1) < 0.5
        out = first.clone()
        out[unsure] = first[unsure] + self.b(x[unsure])
        return out


def double_parameters(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 16), nn.ReLU(), nn.Linear(16, classes)).double()


class Counter(nn.Module):
    """Counts its batches in a buffer that scales the output."""

    def __init__(self, shape, classes):
        super().__init__()
        self.out = nn.Linear(shape[0], classes)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.seen += 1
        return self.out(x) / (1 + 0.1 * self.seen)


class VectorQuantiser(nn.Module):
    """Its code book is a buffer that moves with the batch, as in VQ-VAE with moving averages."""

    def __init__(self, shape, classes):
        super().__init__()
        self.a, self.out = nn.Linear(shape[0], 8), nn.Linear(8, classes)
        self.register_buffer("book", torch.randn(16, 8))

    def forward(self, x):
        x = self.a(x)
        hot = functional.one_hot(torch.cdist(x, self.book).argmin(1), 16).float()
        found = hot @ self.book
        if self.training:
            with torch.no_grad():
                self.book.mul_(0.99).add_(0.01 * hot.T @ x)
        return self.out(x + (found - x).detach())
