"""Four models as people bring them: of timm, of transformers, and two small networks of one's own."""

import csv
import gzip
import os
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

WORDS, VOCABULARY = 32, 4000
FILE = Path(os.environ.get("FLEETUNE_DATA", "."), "ag_news", "ag_news_test.csv.gz")


def backbone(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A MobileNetV3 of timm, which trains from `weights` of [model], or from its own with pretrained=True."""
    import timm

    return timm.create_model("tf_mobilenetv3_small_075", in_chans=input_shape[0], num_classes=num_classes)


def text_classifier(shapes: dict[str, tuple[int, ...]], num_classes: int) -> nn.Module:
    """A small BERT of transformers. It takes token ids and a mask, and returns an object with `logits`."""
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            max_position_embeddings=shapes["input_ids"][0],
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            num_labels=num_classes,
        )
    )


def news() -> tuple[dict[str, np.ndarray], np.ndarray]:
    """AG News for `text_classifier`: ids of each text's first words, a mask of them, and four classes."""
    with gzip.open(FILE, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    ids = np.zeros((len(rows), WORDS), np.int64)
    for row, (_, title, text) in enumerate(rows):
        words = f"{title} {text}".lower().split()[:WORDS]
        ids[row, : len(words)] = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return {"input_ids": ids, "attention_mask": ids > 0}, np.array([int(row[0]) - 1 for row in rows])


def keywords(_: tuple[int, ...], num_classes: int) -> nn.Module:
    """DS-CNN (Zhang et al. 2018) for spoken words, with log-mel features of shape (1, mels, frames)."""
    width = 64
    layers: list[nn.Module] = [
        nn.Conv2d(1, width, (10, 4), stride=2, padding=(5, 1)), nn.BatchNorm2d(width), nn.ReLU(),
    ]  # fmt: skip
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.Conv2d(width, width, 1), nn.BatchNorm2d(width), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


class SensorLstm(nn.Module):
    """Two LSTM layers over windows of sensor readings, (channels, time steps); the last state decides."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(channels, 32, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(32, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(torch.transpose(x, 1, 2))
        return self.out(states[:, -1])


def sensors(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return SensorLstm(input_shape[0], num_classes)
