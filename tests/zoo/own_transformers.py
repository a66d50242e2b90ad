"""Transformers as people write them, with dropout as torch sets it by default."""

import math

import torch
from torch import nn
from torch.nn import functional


class Encoder(nn.Module):
    """`nn.TransformerEncoder` with default settings over sensor values, with sine positions."""

    def __init__(self, shape, classes):
        super().__init__()
        self.inputs = nn.Linear(shape[1], 32)
        place = torch.arange(shape[0]).unsqueeze(1)
        rate = torch.exp(torch.arange(0, 32, 2) * (-math.log(10000.0) / 32))
        table = torch.zeros(1, shape[0], 32)
        table[0, :, 0::2], table[0, :, 1::2] = torch.sin(place * rate), torch.cos(place * rate)
        self.register_buffer("pe", table)
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, batch_first=True)
        self.encoder, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(32, classes)

    def forward(self, x):
        return self.out(self.encoder(self.inputs(x) + self.pe[:, : x.size(1)]).mean(dim=1))


class CausalEncoder(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.embed, self.place = nn.Embedding(classes, 32), nn.Embedding(shape[0], 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, norm_first=True, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        mask = nn.Transformer.generate_square_subsequent_mask(x.size(1))
        x = self.embed(x) + self.place(torch.arange(x.size(1)))
        return self.out(self.encoder(x, mask=mask, is_causal=True)[:, -1])


class PaddedText(nn.Module):
    """Token 0 is padding, which attention and the mean leave out."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embed = nn.Embedding(100, 32, padding_idx=0)
        layer = nn.TransformerEncoderLayer(32, 4, 64, activation="gelu", batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        padding = x == 0
        hidden = self.encoder(self.embed(x), src_key_padding_mask=padding & ~padding.all(1, keepdim=True))
        there = (~padding).unsqueeze(-1).float()
        return self.out((hidden * there).sum(1) / there.sum(1).clamp(min=1))


class _VitBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.drop = nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * width, width),
            nn.Dropout(0.1),
        )

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        attention = self.drop(((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1))
        x = x + self.proj((attention @ v).transpose(1, 2).reshape(b, n, c))
        return x + self.mlp(self.norm2(x))


class Vit(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.patches = nn.Conv2d(shape[0], 32, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 32))
        self.place = nn.Parameter(torch.randn(1, 1 + (shape[1] // 4) ** 2, 32) * 0.02)
        self.drop, self.blocks = nn.Dropout(0.1), nn.Sequential(_VitBlock(32, 4), _VitBlock(32, 4))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.first.expand(x.shape[0], -1, -1), x), dim=1) + self.place
        return self.head(self.norm(self.blocks(self.drop(x)))[:, 0])


class _CausalBlock(nn.Module):
    """nanoGPT's block, with its mask as a buffer."""

    def __init__(self, width, heads, length):
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.attn_dropout, self.resid_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.register_buffer("bias", torch.tril(torch.ones(length, length)).view(1, 1, length, length))

    def forward(self, x):
        b, t, c = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(c, dim=2)
        q, k, v = (one.view(b, t, self.heads, c // self.heads).transpose(1, 2) for one in (q, k, v))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
        att = att.masked_fill(self.bias[:, :, :t, :t] == 0, float("-inf"))
        att = self.attn_dropout(functional.softmax(att, dim=-1))
        y = (att @ v).transpose(1, 2).contiguous().view(b, t, c)
        x = x + self.resid_dropout(self.c_proj(y))
        return x + self.mlp(self.ln_2(x))


class NanoGpt(nn.Module):
    """The next token; embedding and head are one tensor."""

    def __init__(self, shape, classes, *, tied=True):
        super().__init__()
        self.wte, self.wpe, self.drop = nn.Embedding(classes, 32), nn.Embedding(shape[0], 32), nn.Dropout(0.1)
        self.h = nn.ModuleList(_CausalBlock(32, 4, shape[0]) for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(32), nn.Linear(32, classes, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, x):
        x = self.drop(self.wte(x) + self.wpe(torch.arange(0, x.size(1), dtype=torch.long)))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)[:, -1])


def nano_gpt_untied(shape, classes):
    return NanoGpt(shape, classes, tied=False)


class PatchTst(nn.Module):
    """Each channel's patches are a sequence; norms over the batch, as the paper has them."""

    def __init__(self, shape, classes):
        super().__init__()
        self.inputs, self.drop = nn.Linear(16, 32), nn.Dropout(0.2)
        count = (shape[1] - 16) // 8 + 1
        self.place = nn.Parameter(torch.empty(count, 32).uniform_(-0.02, 0.02))
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.2, batch_first=True)
        self.encoder, self.norm = nn.TransformerEncoder(layer, 2), nn.BatchNorm1d(32)
        self.head = nn.Linear(32 * count * shape[0], classes)

    def forward(self, x):
        b, c, _ = x.shape
        x = x.unfold(-1, 16, 8).reshape(b * c, -1, 16)
        x = self.encoder(self.drop(self.inputs(x) + self.place))
        return self.head(self.norm(x.transpose(1, 2)).reshape(b, -1))


class OwnMha(nn.Module):
    """`nn.MultiheadAttention` with dropout, its weights asked for, and batch on the second axis."""

    def __init__(self, shape, classes):
        super().__init__()
        self.inputs, self.attention = nn.Linear(shape[1], 24), nn.MultiheadAttention(24, 3, dropout=0.1)
        self.norm, self.out = nn.LayerNorm(24), nn.Linear(24, classes)

    def forward(self, x):
        x = self.inputs(x).transpose(0, 1)
        y, _ = self.attention(x, x, x)
        return self.out(self.norm(x + y).mean(0))


class Shared(nn.Module):
    """One layer used three times, as in ALBERT."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embed = nn.Embedding(100, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu")
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        x = self.embed(x)
        for _ in range(3):
            x = self.layer(x)
        return self.out(x[:, 0])


class _Rotary(nn.Module):
    def __init__(self, width, heads, length):
        super().__init__()
        self.heads, size = heads, width // heads
        rate = 1.0 / (10000 ** (torch.arange(0, size, 2).float() / size))
        angle = torch.outer(torch.arange(length).float(), rate)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        self.norm, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.kv = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 64, bias=False), nn.Linear(width, 64, bias=False)
        self.down = nn.Linear(64, width, bias=False)

    def _turned(self, x):
        one, two = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat((-two, one), dim=-1) * self.sin

    def forward(self, x):
        b, t, c = x.shape
        y = self.norm(x)
        q = self._turned(self.q(y).view(b, t, self.heads, -1).transpose(1, 2))
        k, v = self.kv(y).view(b, t, 2, self.heads // 2, -1).permute(2, 0, 3, 1, 4)
        k, v = (one.repeat_interleave(2, dim=1) for one in (self._turned(k), v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, c))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class OwnLlama(nn.Module):
    """Grouped queries, rotary positions, RMSNorm and SwiGLU."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embed = nn.Embedding(classes, 32)
        self.layers = nn.Sequential(_Rotary(32, 4, shape[0]), _Rotary(32, 4, shape[0]))
        self.norm, self.head = nn.RMSNorm(32), nn.Linear(32, classes, bias=False)

    def forward(self, x):
        return self.head(self.norm(self.layers(self.embed(x)))[:, -1])


class Perceiver(nn.Module):
    """Learned queries read the samples; attention drops inside torch's own function."""

    def __init__(self, shape, classes):
        super().__init__()
        self.inputs, self.latents = nn.Linear(shape[1], 32), nn.Parameter(torch.randn(6, 32) * 0.02)
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, classes)

    def forward(self, x):
        x = self.inputs(x)
        latents = self.latents.unsqueeze(0).repeat(x.shape[0], 1, 1)
        q, k, v = self.q(latents), self.k(x), self.v(x)
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        return self.out(self.norm(latents + y).mean(1))


class Experts(nn.Module):
    """A mixture of four experts, of which each token uses the best two."""

    def __init__(self, shape, classes):
        super().__init__()
        self.embed, self.gate = nn.Embedding(100, 32), nn.Linear(32, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4)
        )
        self.out = nn.Linear(32, classes)

    def forward(self, x):
        x = self.embed(x)
        best, chosen = torch.topk(self.gate(x), 2, dim=-1)
        share = torch.zeros_like(self.gate(x)).scatter(-1, chosen, best.softmax(-1))
        found = torch.stack([expert(x) for expert in self.experts], dim=-1)
        return self.out((x + (found * share.unsqueeze(-2)).sum(-1)).mean(1))


class BagOfWords(nn.Module):
    def __init__(self, shape, classes):
        super().__init__()
        self.embedding, self.fc = nn.EmbeddingBag(100, 32, sparse=False), nn.Linear(32, classes)

    def forward(self, x):
        return self.fc(self.embedding(x))
