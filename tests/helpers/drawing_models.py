"""Models that draw random numbers in training, each in another way. All take samples of shape (5, 8)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

SHAPE, CLASSES = (5, 8), 4


class Encoder(nn.Module):
    def __init__(self, *, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.out = nn.TransformerEncoderLayer(8, 2, 16, batch_first=batch_first), nn.Linear(8, 4)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.out(self.layer(x).mean(1))
        return self.out(self.layer(x.transpose(0, 1)).mean(0))


class Attention(nn.Module):
    def __init__(self, *, need_weights: bool) -> None:
        super().__init__()
        self.layer, self.out = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True), nn.Linear(8, 4)
        self.need_weights = need_weights

    def forward(self, x: Tensor) -> Tensor:
        return self.out((x + self.layer(x, x, x, need_weights=self.need_weights)[0]).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], *, batch_first: bool) -> None:
        super().__init__()
        self.layer, self.out = kind(8, 6, 2, dropout=0.3, batch_first=batch_first), nn.Linear(6, 4)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Tensor:
        if self.batch_first:
            return self.out(self.layer(x)[0][:, -1])
        return self.out(self.layer(x.transpose(0, 1).contiguous())[0][-1])


class Residual(nn.Module):
    """A residual block, on whose branch a function acts in training."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        y = torch.tanh(self.second(x))
        return self.out((x + (self.function(y) if self.training else y)).mean(1))


def depth_of_torchvision(x: Tensor) -> Tensor:
    noise = torch.empty((len(x), 1, 1), dtype=x.dtype, device=x.device).bernoulli_(0.8)
    return x * noise.div_(0.8)


def depth_of_timm(x: Tensor) -> Tensor:
    return x * x.new_empty((len(x), 1, 1)).bernoulli_(0.8).div_(0.8)


def depth_of_transformers(x: Tensor) -> Tensor:
    noise = 0.8 + torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device)
    return x.div(0.8) * noise.floor_()


def _shaped(drop: Callable[..., Tensor], *shape: int) -> Callable[[Tensor], Tensor]:
    return lambda x: drop(x.reshape(len(x), *shape), 0.3, True).reshape(x.shape)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "stochastic depth of torchvision": depth_of_torchvision,
    "stochastic depth of timm": depth_of_timm,
    "stochastic depth of transformers": depth_of_transformers,
    "alpha dropout": lambda x: functional.alpha_dropout(x, 0.2, True),
    "feature alpha dropout": lambda x: functional.feature_alpha_dropout(x, 0.2, True),
    "dropout1d": _shaped(functional.dropout1d, 5, 8),
    "dropout2d": _shaped(functional.dropout2d, 5, 4, 2),
    "dropout3d": _shaped(functional.dropout3d, 5, 2, 2, 2),
    "dropout in place": lambda x: functional.dropout(x * 1, 0.3, True, True),
    "dropout in place of a view": lambda x: functional.dropout((x * 1).flatten(1), 0.3, True, True).view_as(
        x
    ),
    "dropout in place of a view, then a function": lambda x: torch.sin(
        functional.dropout(torch.sin(x).transpose(0, 1), 0.3, True, True)
    ).transpose(0, 1),
    "dropout of time first": lambda x: functional.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "dropout of batch times time": lambda x: functional.dropout(x.reshape(-1, 8), 0.3).reshape(x.shape),
    "attention function": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.2),
    "normal noise": lambda x: x + 0.1 * torch.randn_like(x),
    "normal noise in place": lambda x: x + torch.empty_like(x).normal_(0.1, 0.2),
    "normal around a tensor": lambda x: x + torch.normal(x.detach(), 0.1),
    "normal noise of a size": lambda x: x + torch.randn(len(x), 5, 8) / 8 + torch.normal(0.1, 0.2, (5, 8)),
    "uniform noise": lambda x: x + torch.rand_like(x) / 8 + torch.empty_like(x).uniform_(-0.1, 0.1),
    "one mask for all samples": lambda x: x * torch.bernoulli(torch.full((5, 8), 0.7)),
    "mask of booleans": lambda x: x.masked_fill(torch.empty(x.shape, dtype=torch.bool).bernoulli_(0.2), 0),
    "masks by probability": lambda x: (
        x * torch.bernoulli(x.detach(), 0.6) * torch.empty_like(x).bernoulli_(x.detach().abs())
    ),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Encoder(batch_first=True),
    "encoder, time first": lambda: Encoder(batch_first=False),
    "attention": lambda: Attention(need_weights=False),
    "attention with weights": lambda: Attention(need_weights=True),
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm, time first": lambda: Recurrent(nn.LSTM, batch_first=False),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True),
    **{name: lambda function=function: Residual(function) for name, function in FUNCTIONS.items()},  # type: ignore[misc]
}
