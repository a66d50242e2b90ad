"""Recurrent networks over 128 steps of sensor values, or over words."""

import torch
from torch import nn


class Lstm(nn.Module):
    def __init__(self, shape, classes, **settings):
        super().__init__()
        self.rnn = nn.LSTM(shape[1], 32, batch_first=True, **settings)
        self.fc = nn.Linear(64 if settings.get("bidirectional") else 32, classes)

    def forward(self, x):
        out, (_, _) = self.rnn(x)
        return self.fc(out[:, -1, :])


def lstm(shape, classes):
    return Lstm(shape, classes)


def lstm_two_layers(shape, classes):
    return Lstm(shape, classes, num_layers=2, dropout=0.2)


def lstm_bidirectional(shape, classes):
    return Lstm(shape, classes, bidirectional=True)


class Gru(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.rnn, self.drop, self.fc = (
            nn.GRU(shape[1], 32, batch_first=True),
            nn.Dropout(0.2),
            nn.Linear(32, classes),
        )

    def forward(self, x):
        _, hidden = self.rnn(x)
        return self.fc(self.drop(hidden[-1]))


class GivenStart(nn.Module):
    """The state begins at zeros that the model makes itself, as tutorials do."""

    def __init__(self, shape, classes):
        super().__init__()
        self.lstm, self.fc = nn.LSTM(shape[1], 24, 2, batch_first=True), nn.Linear(24, classes)

    def forward(self, x):
        h0 = torch.zeros(2, x.size(0), 24).requires_grad_()
        c0 = torch.zeros(2, x.size(0), 24).requires_grad_()
        out, _ = self.lstm(x, (h0.detach(), c0.detach()))
        return self.fc(out[:, -1, :])


class DeepConvLstm(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.convs = nn.Sequential(
            nn.Conv2d(1, 16, (5, 1)), nn.ReLU(), nn.Conv2d(16, 16, (5, 1)), nn.ReLU(), nn.Dropout(0.5)
        )
        self.lstm = nn.LSTM(16 * shape[1], 32)
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        x = self.convs(x.unsqueeze(1)).permute(2, 0, 3, 1)
        x, _ = self.lstm(x.reshape(x.shape[0], x.shape[1], -1))
        return self.fc(x[-1])


class CharRnn(nn.Module):
    """The next character, as LEAF's Shakespeare network."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embed = nn.Embedding(classes, 8)
        self.lstm = nn.LSTM(8, 32, num_layers=2, batch_first=True)
        self.fc = nn.Linear(32, classes)

    def forward(self, x):
        out, _ = self.lstm(self.embed(x))
        return self.fc(out[:, -1])


class GruCells(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.cell, self.fc = nn.GRUCell(shape[1], 16), nn.Linear(16, classes)

    def forward(self, x):
        hidden = x.new_zeros(x.shape[0], 16)
        for index in range(x.shape[1]):
            hidden = self.cell(x[:, index], hidden)
        return self.fc(hidden)
