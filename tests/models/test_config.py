from typing import Any

import msgspec
import pytest

from knittrans_jax.models import PRESETS, TextConfig, VisionConfig, abstract_model, parameter_count, preset
from knittrans_jax.models.config import ModelConfig, mrope_components

TINY = PRESETS["tiny"]
assert TINY.vision is not None
TEXT: dict[str, Any] = msgspec.structs.asdict(TINY.text)
VISION: dict[str, Any] = msgspec.structs.asdict(TINY.vision)


def test_tiny_has_about_a_quarter_of_a_million_parameters():
    _, shapes = abstract_model(preset("tiny", 48))
    assert 200_000 < parameter_count(shapes) < 300_000


def test_preset_takes_the_vocabulary_of_the_tokenizer():
    assert preset("tiny", 33).text.vocab_size == 33


def test_unknown_preset_names_key_value_and_choices():
    with pytest.raises(ValueError, match=r"preset = 'huge'; expected one of .*tiny"):
        preset("huge", 48)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"kv_heads": 3}, "text.kv_heads"),
        ({"head_dim": 15}, "text.head_dim"),
        ({"mrope_section": (4, 2, 1)}, "text.mrope_section"),
        ({"mrope_section": (0, 4, 4)}, "text.mrope_section"),
        ({"layers": 0}, "text.layers"),
    ],
)
def test_impossible_text_configurations_are_refused_by_name(changes: dict[str, Any], key: str):
    with pytest.raises(ValueError, match=key):
        TextConfig(**(TEXT | changes))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"heads": 5}, "vision.d_model"),
        ({"deepstack_layers": (1, 0)}, "vision.deepstack_layers"),
        ({"deepstack_layers": (2,)}, "vision.deepstack_layers"),
        ({"pixel_std": 0.0}, "vision.pixel_std"),
    ],
)
def test_impossible_vision_configurations_are_refused_by_name(changes: dict[str, Any], key: str):
    with pytest.raises(ValueError, match=key):
        VisionConfig(**(VISION | changes))


def test_more_deepstack_levels_than_decoder_layers_are_refused():
    text = msgspec.structs.replace(TINY.text, layers=1)
    assert TINY.vision is not None
    vision = msgspec.structs.replace(TINY.vision, deepstack_layers=(0, 1))
    with pytest.raises(ValueError, match="deepstack_layers"):
        ModelConfig(text=text, vision=vision)


def test_unknown_keys_are_refused():
    with pytest.raises(msgspec.ValidationError, match="colour"):
        msgspec.convert(TEXT | {"colour": 1}, TextConfig)


def test_mrope_interleaves_as_in_qwen3_vl():
    components = mrope_components(128, (24, 20, 20))
    assert components[:7] == (0, 1, 2, 0, 1, 2, 0)
    assert components[-4:] == (0, 0, 0, 0)
    assert [components.count(axis) for axis in range(3)] == [24, 20, 20]
