"""Tokenizer and chat template of a checkpoint folder. `tests/parity` compares both with transformers."""

import datetime
import json
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from knittrans_jax.models.hf_config import CheckpointError
from knittrans_jax.processing.chat import ChatTemplate, read_template
from knittrans_jax.processing.vocabulary import TokenizerVocabulary

from .made import SPECIALS, TEMPLATE, make_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> TokenizerVocabulary:
    return TokenizerVocabulary(folder)


@settings(max_examples=50, deadline=None)
@given(text=st.text())
def test_any_text_survives_encoding(vocabulary: TokenizerVocabulary, text: str):
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    assert all(0 <= token < vocabulary.size for token in ids)


def test_special_tokens_are_single_ids_and_known_by_their_part(vocabulary: TokenizerVocabulary):
    assert len(vocabulary.encode("".join(SPECIALS))) == len(SPECIALS)
    by_text = {token: vocabulary.encode(token)[0] for token in SPECIALS}
    assert vocabulary.end == by_text["<|im_end|>"]
    assert vocabulary.pad == by_text["<|endoftext|>"]
    assert vocabulary.ends == (vocabulary.end, vocabulary.pad)
    assert vocabulary.image == by_text["<|image_pad|>"]
    assert (vocabulary.image_start, vocabulary.image_end) == (by_text["<|vision_start|>"], by_text["<|vision_end|>"])


def test_ids_outside_are_named(vocabulary: TokenizerVocabulary):
    with pytest.raises(ValueError, match="token id 99999"):
        vocabulary.decode([5, 99999])


def test_folders_without_a_tokenizer_or_its_end_token_are_refused(folder: Path, tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        TokenizerVocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        TokenizerVocabulary(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|nothing|>"}))
    with pytest.raises(CheckpointError, match=r"eos_token = '<\|nothing\|>'"):
        TokenizerVocabulary(tmp_path)


def test_a_conversation_becomes_text_with_one_placeholder_per_picture(folder: Path):
    template = ChatTemplate(read_template(folder))
    messages = [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "left <b>?"}]},
        {"role": "assistant", "content": "7"},
    ]
    assert template.render(messages, add_generation_prompt=True) == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>left <b>?<|im_end|>\n"
        "<|im_start|>assistant\n7<|im_end|>\n<|im_start|>assistant\n"
    )
    assert '{"é": "<>"}\n' in template.render([], tools=[{"é": "<>"}])


def test_what_a_template_refuses_is_an_error_with_its_words(folder: Path):
    with pytest.raises(ValueError, match="unknown role robot"):
        ChatTemplate(TEMPLATE).render([{"role": "robot", "content": ""}])
    with pytest.raises(CheckpointError, match="chat template"):
        ChatTemplate("{% if %}")


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
    ],
)
def test_a_template_reaches_nothing_outside_its_sandbox(attack: str):
    messages: list[dict[str, str]] = []
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(attack).render(messages)
    assert messages == []


def test_the_date_is_an_argument():
    asks = "{{ strftime_now('%Y-%m-%d') }}"
    assert ChatTemplate(asks, today=datetime.date(2026, 1, 2)).render([]) == "2026-01-02"
    with pytest.raises(ValueError, match="date"):
        ChatTemplate(asks).render([])


def test_templates_are_found_where_checkpoints_keep_them(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no chat template"):
        read_template(tmp_path)
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == "a"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "c"}))
    assert read_template(tmp_path) == "c"
    (tmp_path / "chat_template.jinja").write_text("d")
    assert read_template(tmp_path) == "d"


def test_without_the_extra_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'knittrans-jax\[hf\]'"):
        TokenizerVocabulary(folder)
