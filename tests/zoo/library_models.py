"""Models of torchvision, timm and transformers: their own code and default settings, few and small layers."""

from functools import cache

import torch


@cache
def torchvision():
    """The package; its operators in C++ are declared only, for it fits another build of torch."""
    if not hasattr(torch.ops.torchvision, "nms"):
        torch.library.define("torchvision::nms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
        torch.library.define("torchvision::qnms", "(Tensor dets, Tensor scores, float threshold) -> Tensor")
    import torchvision

    return torchvision


def _vision(name, shape, classes, **settings):
    return getattr(torchvision().models, name)(num_classes=classes, **settings)


def tv_resnet18(shape, classes):
    return _vision("resnet18", shape, classes)


def tv_mobilenet_v2(shape, classes):
    return _vision("mobilenet_v2", shape, classes)


def tv_mobilenet_v3_small(shape, classes):
    return _vision("mobilenet_v3_small", shape, classes)


def tv_squeezenet1_1(shape, classes):
    return _vision("squeezenet1_1", shape, classes)


def tv_shufflenet_v2(shape, classes):
    return _vision("shufflenet_v2_x0_5", shape, classes)


def tv_mnasnet(shape, classes):
    return _vision("mnasnet0_5", shape, classes)


def tv_efficientnet_b0(shape, classes):
    return _vision("efficientnet_b0", shape, classes)


def tv_regnet(shape, classes):
    return _vision("regnet_y_400mf", shape, classes)


def tv_googlenet(shape, classes):
    return _vision("googlenet", shape, classes, aux_logits=False, init_weights=False)


def tv_vit(shape, classes):
    return torchvision().models.VisionTransformer(
        image_size=shape[1], patch_size=8, num_layers=2, num_heads=3, hidden_dim=48, mlp_dim=96,
        dropout=0.1, attention_dropout=0.1, num_classes=classes,
    )  # fmt: skip


def tv_swin(shape, classes):
    return torchvision().models.SwinTransformer(
        patch_size=[2, 2],
        embed_dim=16,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=[4, 4],
        num_classes=classes,
    )


def tv_convnext(shape, classes):
    convnext = torchvision().models.convnext
    blocks = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 2)]
    return convnext.ConvNeXt(blocks, 0.1, num_classes=classes)


def _timm(name, classes, **settings):
    torchvision()
    import timm

    return timm.create_model(name, num_classes=classes, **settings)


def timm_mobilenetv4(shape, classes):
    return _timm("mobilenetv4_conv_small", classes)


def timm_lcnet(shape, classes):
    return _timm("lcnet_035", classes)


def timm_starnet(shape, classes):
    return _timm("starnet_s050", classes)


def timm_edgenext(shape, classes):
    return _timm("edgenext_xx_small", classes)


def timm_repvgg(shape, classes):
    return _timm("repvgg_a0", classes)


def timm_ghostnet(shape, classes):
    return _timm("ghostnet_050", classes)


def timm_mobilevit(shape, classes):
    return _timm("mobilevit_xxs", classes)


def timm_efficientnet_lite(shape, classes):
    return _timm("tf_efficientnet_lite0", classes, drop_rate=0.2, drop_path_rate=0.2)


def timm_convnextv2(shape, classes):
    return _timm("convnextv2_atto", classes, depths=(1, 1, 2, 1), drop_path_rate=0.1)


def timm_vit(shape, classes):
    return _timm(
        "vit_tiny_patch16_224", classes, img_size=shape[1], patch_size=8, depth=2, embed_dim=48, num_heads=3,
        drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.1,
    )  # fmt: skip


def timm_resnet10t(shape, classes):
    return _timm("resnet10t", classes)


def timm_poolformer(shape, classes):
    return _timm("poolformer_s12", classes, drop_path_rate=0.1)


TEXT = {
    "vocab_size": 200, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 64, "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip


def _hugging_face(config, model, classes, **settings):
    torchvision()
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(num_labels=classes, **settings))


class Logits(torch.nn.Module):
    """Gives the logits of a model of transformers, which gives an object."""

    def __init__(self, model, *, last=False):
        super().__init__()
        self.m, self.last = model, last

    def forward(self, x):
        logits = self.m(x).logits
        return logits[:, -1] if self.last else logits


def hf_bert(shape, classes):
    return Logits(_hugging_face("BertConfig", "BertForSequenceClassification", classes, **TEXT))


def hf_roberta(shape, classes):
    settings = TEXT | {"pad_token_id": 1}
    return Logits(_hugging_face("RobertaConfig", "RobertaForSequenceClassification", classes, **settings))


def hf_distilbert(shape, classes):
    settings = {"vocab_size": 200, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
    return Logits(
        _hugging_face("DistilBertConfig", "DistilBertForSequenceClassification", classes, **settings)
    )


def hf_albert(shape, classes):
    settings = TEXT | {"embedding_size": 16, "attention_probs_dropout_prob": 0.1, "hidden_dropout_prob": 0.1}
    return Logits(_hugging_face("AlbertConfig", "AlbertForSequenceClassification", classes, **settings))


def hf_electra(shape, classes):
    return Logits(
        _hugging_face("ElectraConfig", "ElectraForSequenceClassification", classes, embedding_size=16, **TEXT)
    )


_GPT2 = {"vocab_size": 200, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
_GPT2 |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def hf_gpt2(shape, classes):
    return Logits(_hugging_face("GPT2Config", "GPT2ForSequenceClassification", classes, **_GPT2))


def hf_gpt2_lm(shape, classes):
    return Logits(_hugging_face("GPT2Config", "GPT2LMHeadModel", classes, **_GPT2), last=True)


_LLAMA = TEXT | {"num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 1}


def hf_llama(shape, classes):
    return Logits(_hugging_face("LlamaConfig", "LlamaForSequenceClassification", classes, **_LLAMA))


def hf_llama_lm(shape, classes):
    return Logits(_hugging_face("LlamaConfig", "LlamaForCausalLM", classes, **_LLAMA), last=True)


def hf_qwen2(shape, classes):
    settings = _LLAMA | {"tie_word_embeddings": True}
    return Logits(_hugging_face("Qwen2Config", "Qwen2ForCausalLM", classes, **settings), last=True)


class MeanOfTokens(torch.nn.Module):
    """A sentence embedding with a head, as sentence-transformers' MiniLM has it."""

    def __init__(self, model, classes):
        super().__init__()
        self.m, self.head = model, torch.nn.Linear(32, classes)

    def forward(self, x):
        mask = (x != 0).float()
        hidden = self.m(input_ids=x, attention_mask=mask).last_hidden_state
        mask = mask.unsqueeze(-1).expand(hidden.size())
        return self.head((hidden * mask).sum(1) / torch.clamp(mask.sum(1), min=1e-9))


def hf_minilm_mean(shape, classes):
    return MeanOfTokens(_hugging_face("BertConfig", "BertModel", classes, **TEXT), classes)


def hf_t5_encoder(shape, classes):
    settings = {"vocab_size": 200, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return MeanOfTokens(_hugging_face("T5Config", "T5EncoderModel", classes, **settings), classes)


def hf_vit(shape, classes):
    settings = {key: value for key, value in TEXT.items() if key in _SIZES} | {
        "image_size": shape[1], "patch_size": 8,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    }  # fmt: skip
    return Logits(_hugging_face("ViTConfig", "ViTForImageClassification", classes, **settings))


_SIZES = {"hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}


def hf_wav2vec2(shape, classes):
    settings = {key: value for key, value in TEXT.items() if key in _SIZES} | {
        "conv_dim": (16, 16, 16), "conv_stride": (5, 4, 4), "conv_kernel": (10, 8, 4),
        "apply_spec_augment": False,
        "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
    }  # fmt: skip
    return Logits(_hugging_face("Wav2Vec2Config", "Wav2Vec2ForSequenceClassification", classes, **settings))
