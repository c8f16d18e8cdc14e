"""The character vocabulary of the built-in tasks: one fixed alphabet, so that a model reads every one of them.

`encode` and `decode` are inverse on the alphabet; a character outside it is an error that names it, never a silent unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

SPECIALS = ("pad", "end", "image_start", "image", "image_end")
"""Ids 0..4. `image` is the placeholder of one image token: it stands in prompts and is never sampled."""
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz ?.,:-+"
"""Characters, from id 5 on."""


@dataclasses.dataclass(frozen=True)
class Vocabulary:
    """Ids of the special tokens and of the characters of `alphabet`, in order."""

    alphabet: str = ALPHABET
    pad: int = 0
    end: int = 1
    """Ends an answer."""
    image_start: int = 2
    image: int = 3
    image_end: int = 4

    def __post_init__(self) -> None:
        if len(set(self.alphabet)) != len(self.alphabet):
            repeated = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
            raise ValueError(f"vocabulary alphabet: {repeated} occur more than once")

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(SPECIALS) + len(self.alphabet)

    def encode(self, text: str) -> list[int]:
        """Ids of a text's characters.

        Raises:
            ValueError: a character is not in the alphabet.
        """
        ids = [self.alphabet.find(character) for character in text]
        if -1 in ids:
            character = text[ids.index(-1)]
            raise ValueError(f"character {character!r} of {text!r} is not in the vocabulary {self.alphabet!r}")
        return [len(SPECIALS) + index for index in ids]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of ids; a special token is shown as `<name>`.

        Raises:
            ValueError: an id outside the vocabulary.
        """
        return "".join(self._symbol(int(token)) for token in ids)

    def _symbol(self, token: int) -> str:
        if not 0 <= token < self.size:
            raise ValueError(f"token id {token}: expected 0..{self.size - 1}")
        return f"<{SPECIALS[token]}>" if token < len(SPECIALS) else self.alphabet[token - len(SPECIALS)]
