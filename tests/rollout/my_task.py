"""A user's own task in a file of its own: spell the word back, without any picture."""

from typing import Any

from knittrans_jax.rollout.tasks.base import Outcome, Prompt, TaskLimits, Turn
from knittrans_jax.rollout.text import Vocabulary

WORDS = ("a", "ab", "abc")


class EchoEpisode:
    def __init__(self, word: str):
        self.word, self.answer = word, ""

    def first(self):
        return Turn((self.word, "?"))

    def respond(self, answer: str):
        self.answer = answer

    def outcome(self):
        return Outcome(float(self.answer == self.word), 1, int(self.answer == self.word))


class Echo:
    def __init__(self, options: dict[str, Any], seed: int):
        if set(options) - {"repeat"}:
            raise ValueError(f"unknown options {sorted(set(options) - {'repeat'})}; expected repeat")
        self.words = [word * options.get("repeat", 1) for word in WORDS]
        self.vocabulary = Vocabulary()
        self.sampled_ids = (self.vocabulary.end, *self.vocabulary.encode("abc"))
        longest = max(map(len, self.words))
        self.limits = TaskLimits(
            turns=1, text_tokens_per_turn=longest + 1, images_per_turn=0, image_shapes=(), answer_tokens=longest + 1
        )

    def prompts(self, split: str):
        return [Prompt(f"{split}-{word}", {"domain": str(len(word))}) for word in self.words]

    def episode(self, prompt_id: str):
        return EchoEpisode(prompt_id.partition("-")[2])


class NoTask:
    def __init__(self, options: dict[str, Any], seed: int):
        self.vocabulary = Vocabulary()


class CannotEnd(Echo):
    def __init__(self, options: dict[str, Any], seed: int):
        super().__init__(options, seed)
        self.sampled_ids = self.sampled_ids[1:]


class OtherAlphabet(Echo):
    def __init__(self, options: dict[str, Any], seed: int):
        super().__init__(options, seed)
        self.vocabulary = Vocabulary("abc?")
        self.sampled_ids = (self.vocabulary.end, *self.vocabulary.encode("abc"))
