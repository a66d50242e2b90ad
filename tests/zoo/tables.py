"""Networks for rows of a table, and networks with several inputs or with an object as output."""

import torch
from tests.zoo.library_models import TEXT, _hugging_face
from torch import nn
from torch.nn import functional


class CategoriesAndNumbers(nn.Module):
    """Columns 0 to 2 are categories, the rest numbers; all travel as floats."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(10, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(shape[0] - 3)
        self.net = nn.Sequential(
            nn.Linear(18 + shape[0] - 3, 64),
            nn.ReLU(),
            nn.BatchNorm1d(64),
            nn.Dropout(0.1),
            nn.Linear(64, classes),
        )

    def forward(self, x):
        parts = [embed(x[:, index].long()) for index, embed in enumerate(self.embeds)]
        return self.net(torch.cat([*parts, self.norm(x[:, 3:])], 1))


class FtTransformer(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape[0], 24) * 0.1)
        self.bias = nn.Parameter(torch.zeros(shape[0], 24))
        self.first = nn.Parameter(torch.randn(1, 1, 24) * 0.1)
        layer = nn.TransformerEncoderLayer(24, 4, 48, dropout=0.2, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(24), nn.ReLU(), nn.Linear(24, classes))

    def forward(self, x):
        tokens = x.unsqueeze(-1) * self.weight + self.bias
        tokens = torch.cat([self.first.expand(len(x), -1, -1), tokens], 1)
        return self.head(self.encoder(tokens)[:, 0])


def _sparsemax(z):
    ordered = torch.sort(z, dim=-1, descending=True)[0]
    place = torch.arange(1, z.shape[-1] + 1, dtype=z.dtype)
    total = ordered.cumsum(-1) - 1
    support = (place * ordered > total).sum(-1, keepdim=True)
    threshold = total.gather(-1, support - 1) / support.to(z.dtype)
    return torch.clamp(z - threshold, min=0)


class _Glu(nn.Module):
    def __init__(self, inputs, width):
        super().__init__()
        self.fc, self.norm = (
            nn.Linear(inputs, 2 * width, bias=False),
            nn.BatchNorm1d(2 * width, momentum=0.02),
        )

    def forward(self, x):
        return functional.glu(self.norm(self.fc(x)))


class TabNet(nn.Module):
    """Two decision steps with sparse masks over the features."""

    def __init__(self, shape, classes):
        super().__init__()
        self.norm, self.shared = nn.BatchNorm1d(shape[0], momentum=0.01), _Glu(shape[0], 16)
        self.steps = nn.ModuleList(_Glu(16, 16) for _ in range(3))
        self.masks = nn.ModuleList(nn.Linear(8, shape[0], bias=False) for _ in range(2))
        self.mask_norms = nn.ModuleList(nn.BatchNorm1d(shape[0], momentum=0.02) for _ in range(2))
        self.out = nn.Linear(8, classes, bias=False)

    def forward(self, x):
        x = self.norm(x)
        prior, found = torch.ones_like(x), 0
        hidden = self.steps[0](self.shared(x))
        for index in range(2):
            mask = _sparsemax(self.mask_norms[index](self.masks[index](hidden[:, 8:])) * prior)
            prior = prior * (1.3 - mask)
            shared = self.shared(mask * x)
            hidden = (self.steps[index + 1](shared) + shared) * 0.5**0.5
            found = found + functional.relu(hidden[:, :8])
        return self.out(found)


class DeepFm(nn.Module):
    """Each column is an id in one large table, as in click prediction."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(20 * shape[0], 8), nn.Embedding(20 * shape[0], 1)
        self.register_buffer("offsets", torch.arange(shape[0]) * 20, persistent=False)
        self.mlp = nn.Sequential(
            nn.Linear(8 * shape[0], 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, classes)
        )

    def forward(self, x):
        x = x.clamp(0, 19) + self.offsets
        e = self.embedding(x)
        pairs = 0.5 * (e.sum(1) ** 2 - (e**2).sum(1)).sum(1, keepdim=True)
        return self.linear(x).sum(1) + pairs + self.mlp(e.flatten(1))


def selu_net(shape, classes):
    return nn.Sequential(
        nn.Linear(shape[0], 64),
        nn.SELU(),
        nn.AlphaDropout(0.1),
        nn.Linear(64, 64),
        nn.SELU(),
        nn.Linear(64, classes),
    )


class ImageAndNumbers(nn.Module):
    def __init__(self, shapes, classes):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2)
        )
        self.out = nn.Sequential(
            nn.Linear(32 + shapes["numbers"][0], 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, classes)
        )

    def forward(self, image, numbers):
        return self.out(torch.cat([self.conv(image).flatten(1), numbers], 1))


class Siamese(nn.Module):
    """Two images through one encoder; the output says whether they show the same."""

    def __init__(self, shapes, classes):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.ReLU(), nn.Flatten(), nn.LazyLinear(16))
        self.out = nn.Linear(16, classes)
        with torch.no_grad():
            self.encoder(torch.zeros(2, *shapes["first"]))

    def forward(self, first, second):
        return self.out((self.encoder(first) - self.encoder(second)).abs())


class DictOfColumns(nn.Module):
    """A dict of token ids and numbers, as loaders of tables give it."""

    def __init__(self, shapes, classes):
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 8), nn.Linear(8 + shapes["numbers"][0], classes)

    def forward(self, batch):
        return self.out(torch.cat([self.embed(batch["ids"]).mean(1), batch["numbers"]], 1))


def bert_with_mask(shapes, classes):
    """Token ids and mask in, a `SequenceClassifierOutput` out."""
    return _hugging_face("BertConfig", "BertForSequenceClassification", classes, **TEXT)


class TwoHeads(nn.Module):
    """A dict as output, of which one entry is the logits."""

    def __init__(self, shape, classes):
        super().__init__()
        self.body, self.a, self.b = nn.Linear(shape[0], 32), nn.Linear(32, classes), nn.Linear(32, 1)

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return {"logits": self.a(hidden), "value": self.b(hidden)}
