"""AG News with four classes: word ids, an embedding, its mean, and one layer.

`data` reads ag_news/ag_news_test.csv.gz (7,600 texts: class, title, text) in $FLEETUNE_DATA or here.
"""

import csv
import gzip
import os
import re
import zlib
from pathlib import Path

import numpy as np
from torch import Tensor, nn

VOCABULARY, WORDS = 8000, 48
FILE = Path(os.environ.get("FLEETUNE_DATA", "."), "ag_news", "ag_news_test.csv.gz")


def ids(text: str) -> list[int]:
    """Ids of the first words of a text; 0 pads short texts.

    An id is a checksum of the word, so that no device needs a dictionary.
    """
    words = re.findall(r"[a-z0-9']+", text.lower())[:WORDS]
    found = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return found + [0] * (WORDS - len(found))


def data() -> tuple[np.ndarray, np.ndarray]:
    """Word ids, uint16, shape (n, WORDS), and labels, shape (n,)."""
    with gzip.open(FILE, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    x = np.array([ids(f"{title} {text}") for _, title, text in rows], np.uint16)
    return x, np.array([int(label) - 1 for label, _, _ in rows])


class MeanOfWords(nn.Module):
    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16, padding_idx=0)
        self.out = nn.Linear(16, num_classes)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.embedding(words).mean(1))


def net(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:  # noqa: ARG001
    """The network; Fleetune calls this function for `model.name = "agnews:net"`."""
    return MeanOfWords(num_classes)
