"""A checkpoint's `tokenizer.json` behind the interface that tasks use (`rollout.text.Vocabulary`), and more.

What it guarantees: text is encoded as the checkpoint's own tokenizer does, without adding anything; ids that a run relies on
(end, padding, picture marks) exist, or it is refused at once, naming file and token. Placeholders of pictures are expanded
where turns are encoded (`rollout.turns`), not here: a text with a placeholder in it has one id for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from knittrans_jax.models.hf_config import CheckpointError, read_json
from knittrans_jax.processing.extra import import_extra

IMAGE_START, IMAGE, IMAGE_END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"


class TokenizerVocabulary:
    """Ids of a checkpoint. `end` ends an answer; `image_start`, `image`, `image_end` are -1 for a text-only model."""

    def __init__(self, directory: Path) -> None:
        """Reads `tokenizer.json`, and special tokens from `tokenizer_config.json` or `generation_config.json`.

        Raises:
            CheckpointError: a file is missing or damaged, or names a token that the tokenizer does not have.
        """
        tokenizers = import_extra("tokenizers")
        directory = Path(directory)
        self._path = directory / "tokenizer.json"
        if not self._path.is_file():
            raise CheckpointError(f"{self._path}: no such file")
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(self._path))
        except Exception as error:  # tokenizers raises plain Exception
            raise CheckpointError(f"{self._path}: cannot be read: {error}") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        settings = _optional(directory / "tokenizer_config.json")
        self.end = self._id(_content(settings.get("eos_token")), "eos_token")
        pad = _content(settings.get("pad_token"))
        self.pad = self.end if pad is None else self._id(pad, "pad_token")
        ends = _optional(directory / "generation_config.json").get("eos_token_id", self.end)
        self.ends: tuple[int, ...] = tuple(ends) if isinstance(ends, list) else (ends,)
        """All ids that end an answer where the checkpoint is served; `end` is the one that is trained to."""
        marks = [self._tokenizer.token_to_id(token) for token in (IMAGE_START, IMAGE, IMAGE_END)]
        self.image_start, self.image, self.image_end = (-1 if mark is None else mark for mark in marks)

    @property
    def size(self) -> int:
        """Number of ids, added tokens included; a model may have more rows."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Ids of a text; special tokens spelled in it become their ids."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids, special tokens spelled out.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        listed = [int(token) for token in ids]
        for token in listed:
            if self._tokenizer.id_to_token(token) is None:
                raise ValueError(f"token id {token}: not in {self._path}")
        return self._tokenizer.decode(listed, skip_special_tokens=False)

    def _id(self, token: str | None, key: str) -> int:
        found = None if token is None else self._tokenizer.token_to_id(token)
        if found is None:
            raise CheckpointError(f"{self._path.with_name('tokenizer_config.json')}: {key} = {token!r}: no such token")
        return found


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: Any) -> str | None:
    """A special token is written as its text, or as an object with it."""
    return token.get("content") if isinstance(token, dict) else token
