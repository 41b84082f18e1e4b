"""Parameter shapes of three well-known models, from their architecture's rules: for `psstore plan` and benches.

Names are torchvision's and the original GPT-2's; the tests hold the totals against the published ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

Shape = tuple[int, ...]
Named = tuple[str, Shape]

NUM_CLASSES = 1000
"""ImageNet's."""


def resnet50() -> dict[str, Shape]:
    """ResNet-50 (He et al. 2015, table 1), with the stride in the 3x3 convolution; no batch-norm statistics."""
    return dict(_resnet50())


def _resnet50() -> Iterator[Named]:
    yield from _convolution_and_norm("conv1", "bn1", 3, 64, kernel=7)
    channels = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), start=1):
        for block in range(blocks):
            at = f"layer{stage}.{block}"
            yield from _convolution_and_norm(f"{at}.conv1", f"{at}.bn1", channels, width, kernel=1)
            yield from _convolution_and_norm(f"{at}.conv2", f"{at}.bn2", width, width, kernel=3)
            yield from _convolution_and_norm(f"{at}.conv3", f"{at}.bn3", width, 4 * width, kernel=1)
            if block == 0:
                shortcut = f"{at}.downsample"
                yield from _convolution_and_norm(f"{shortcut}.0", f"{shortcut}.1", channels, 4 * width, kernel=1)
            channels = 4 * width
    yield from _linear("fc", channels, NUM_CLASSES)


def _convolution_and_norm(conv: str, norm: str, inputs: int, outputs: int, *, kernel: int) -> Iterator[Named]:
    """The norm has its own bias, so the convolution has none."""
    yield f"{conv}.weight", (outputs, inputs, kernel, kernel)
    yield f"{norm}.weight", (outputs,)
    yield f"{norm}.bias", (outputs,)


def vgg16() -> dict[str, Shape]:
    """VGG-16 (Simonyan and Zisserman 2014, table 1, column D)."""
    return dict(_vgg16())


def _vgg16() -> Iterator[Named]:
    channels, index = 3, 0
    for width, convolutions in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(convolutions):
            yield f"features.{index}.weight", (width, channels, 3, 3)
            yield f"features.{index}.bias", (width,)
            channels = width
            index += 2  # a ReLU follows
        index += 1  # a pooling layer
    yield from _linear("classifier.0", 512 * 7 * 7, 4096)
    yield from _linear("classifier.3", 4096, 4096)
    yield from _linear("classifier.6", 4096, NUM_CLASSES)


def _linear(name: str, inputs: int, outputs: int) -> Iterator[Named]:
    yield f"{name}.weight", (outputs, inputs)
    yield f"{name}.bias", (outputs,)


def gpt2() -> dict[str, Shape]:
    """GPT-2 small (Radford et al. 2019): 12 layers of width 768; the output layer is the token embedding."""
    return dict(_gpt2(layers=12, width=768, vocabulary=50257, context=1024))


def _gpt2(*, layers: int, width: int, vocabulary: int, context: int) -> Iterator[Named]:
    yield "wte.weight", (vocabulary, width)
    yield "wpe.weight", (context, width)
    for layer in range(layers):
        at = f"h.{layer}"
        yield from _norm(f"{at}.ln_1", width)
        yield from _transposed_linear(f"{at}.attn.c_attn", width, 3 * width)
        yield from _transposed_linear(f"{at}.attn.c_proj", width, width)
        yield from _norm(f"{at}.ln_2", width)
        yield from _transposed_linear(f"{at}.mlp.c_fc", width, 4 * width)
        yield from _transposed_linear(f"{at}.mlp.c_proj", 4 * width, width)
    yield from _norm("ln_f", width)


def _norm(name: str, width: int) -> Iterator[Named]:
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def _transposed_linear(name: str, inputs: int, outputs: int) -> Iterator[Named]:
    """GPT-2's Conv1D keeps its weight as (inputs, outputs)."""
    yield f"{name}.weight", (inputs, outputs)
    yield f"{name}.bias", (outputs,)


MODELS: Mapping[str, Callable[[], dict[str, Shape]]] = {"resnet50": resnet50, "vgg16": vgg16, "gpt2": gpt2}
