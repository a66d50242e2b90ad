"""The zoo's list. It was written before the first model was tried, and never gets shorter."""

from dataclasses import dataclass, field

from fleetune.protocols.settings.task import TaskSection

RECONSTRUCTION, FORECAST = TaskSection(kind="reconstruction"), TaskSection(kind="forecast")


@dataclass(frozen=True)
class ZooModel:
    """A model of the zoo.

    Attributes:
        family: its family, one of `COUNTS`, or UNFIXED.
        function: where it is built, `module:function` below tests.zoo.
        shape: the shape of one sample; of a model with several inputs, the shapes by name.
        classes: the number of its outputs.
        task: the section [task] that it trains with.
    """

    family: str
    function: str
    shape: tuple[int, ...] | dict[str, tuple[int, ...]]
    classes: int = 10
    task: TaskSection = field(default_factory=TaskSection)

    @property
    def name(self) -> str:
        """What the table calls it."""
        module, name = self.function.split(":")
        return name if module == "library_models" else f"{module}:{name}"

    @property
    def path(self) -> str:
        """The name for [model]."""
        return f"tests.zoo.{self.function}"


IMAGE, SERIES, RECURRENT, TRANSFORMER = "image", "series", "recurrent", "own transformer"
TORCHVISION, TIMM, HUGGING_FACE = "torchvision", "timm", "transformers"
TABLE, SEVERAL = "tabular", "several inputs or outputs"
UNFIXED = "no fixed graph"
COUNTS = {
    IMAGE: 10, SERIES: 8, RECURRENT: 4, TRANSFORMER: 8, TORCHVISION: 8, TIMM: 8, HUGGING_FACE: 8, TABLE: 3,
    SEVERAL: 3,
}  # fmt: skip


def _family(family, module, shape, names, classes=10):
    return [ZooModel(family, f"{module}:{name}", shape, classes) for name in names.split()]


CIFAR, SMALL, SENSORS, STEPS, WORDS = (3, 32, 32), (3, 16, 16), (9, 128), (128, 9), (16,)

ZOO = [
    *_family(IMAGE, "images", SMALL, "keras_cnn vgg_bn CifarResNet WideResNet densenet mobilenet_v1"),
    *_family(IMAGE, "images", SMALL, "mobilenet_v3_like ConvNext MlpMixer cbam discriminator Pyramid"),
    *_family(IMAGE, "images", SMALL, "SpatialTransformer"),
    ZooModel(IMAGE, "images:video", (1, 4, 16, 16)),
    ZooModel(IMAGE, "images:UNet", (1, 16, 16), 256, RECONSTRUCTION),
    ZooModel(IMAGE, "images:autoencoder", (1, 16, 16), 256, RECONSTRUCTION),
    ZooModel(IMAGE, "images:Variational", (1, 8, 8), 64, RECONSTRUCTION),
    *_family(SERIES, "series", SENSORS, "har_cnn tcn tcn_of_2018 InceptionTime EegNet WaveNet Resnet1d", 6),
    ZooModel(SERIES, "series:ds_cnn", (1, 49, 10), 12),
    ZooModel(SERIES, "series:m5", (1, 2000)),
    ZooModel(SERIES, "series:SpectrogramCnn", (512,)),
    ZooModel(SERIES, "series:NBeats", (48,), 12, FORECAST),
    ZooModel(SERIES, "series:DLinear", (48,), 12, FORECAST),
    *_family(RECURRENT, "recurrent", STEPS, "lstm lstm_two_layers lstm_bidirectional Gru GivenStart", 6),
    *_family(RECURRENT, "recurrent", STEPS, "DeepConvLstm GruCells", 6),
    ZooModel(RECURRENT, "recurrent:CharRnn", (40,), 80),
    *_family(TRANSFORMER, "own_transformers", (24, 9), "Encoder OwnMha Perceiver", 6),
    *_family(TRANSFORMER, "own_transformers", WORDS, "CausalEncoder NanoGpt nano_gpt_untied OwnLlama", 100),
    *_family(TRANSFORMER, "own_transformers", WORDS, "PaddedText Shared Experts BagOfWords", 4),
    ZooModel(TRANSFORMER, "own_transformers:Vit", SMALL),
    ZooModel(TRANSFORMER, "own_transformers:PatchTst", (3, 64), 6),
    *_family(
        TORCHVISION, "library_models", CIFAR, "tv_resnet18 tv_mobilenet_v2 tv_mobilenet_v3_small tv_regnet"
    ),
    *_family(
        TORCHVISION, "library_models", CIFAR, "tv_shufflenet_v2 tv_mnasnet tv_efficientnet_b0 tv_googlenet"
    ),
    *_family(TORCHVISION, "library_models", CIFAR, "tv_squeezenet1_1 tv_vit tv_swin tv_convnext"),
    *_family(
        TIMM, "library_models", CIFAR, "timm_mobilenetv4 timm_lcnet timm_starnet timm_repvgg timm_ghostnet"
    ),
    *_family(
        TIMM, "library_models", CIFAR, "timm_edgenext timm_mobilevit timm_efficientnet_lite timm_convnextv2"
    ),
    *_family(TIMM, "library_models", CIFAR, "timm_vit timm_resnet10t timm_poolformer"),
    *_family(
        HUGGING_FACE, "library_models", WORDS, "hf_bert hf_roberta hf_distilbert hf_albert hf_electra", 4
    ),
    *_family(HUGGING_FACE, "library_models", WORDS, "hf_gpt2 hf_llama hf_minilm_mean hf_t5_encoder", 4),
    *_family(HUGGING_FACE, "library_models", WORDS, "hf_gpt2_lm hf_llama_lm hf_qwen2", 200),
    ZooModel(HUGGING_FACE, "library_models:hf_vit", CIFAR),
    ZooModel(HUGGING_FACE, "library_models:hf_wav2vec2", (1600,), 4),
    *_family(TABLE, "tables", (12,), "CategoriesAndNumbers FtTransformer TabNet DeepFm selu_net", 3),
    ZooModel(SEVERAL, "tables:ImageAndNumbers", {"image": (1, 16, 16), "numbers": (5,)}, 4),
    ZooModel(SEVERAL, "tables:Siamese", {"first": (1, 16, 16), "second": (1, 16, 16)}, 2),
    ZooModel(SEVERAL, "tables:DictOfColumns", {"ids": (6,), "numbers": (5,)}, 4),
    ZooModel(
        SEVERAL,
        "tables:bert_with_mask",
        {"input_ids": (16,), "attention_mask": (16,)},
        4,
    ),
    ZooModel(SEVERAL, "tables:TwoHeads", (12,), 4),
    *_family(UNFIXED, "without_fixed_graph", (12,), "BranchOnData EarlyExit double_parameters Counter", 4),
    *_family(UNFIXED, "without_fixed_graph", (12,), "VectorQuantiser", 4),
]
FIXED = [model for model in ZOO if model.family != UNFIXED]

# Why a model is refused that a fixed graph could express: words of the refusal.
NOT_YET = {
    "images:discriminator": "_SpectralNorm) changes its buffer",
    "series:SpectrogramCnn": "uses aten.as_strided",
    "hf_wav2vec2": "wav2vec2.encoder lets values of the data decide in Python",  # it skips layers at random
}
