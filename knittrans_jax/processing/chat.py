"""A checkpoint's chat template, rendered in a sandbox: messages to the text that the tokenizer takes.

A template is a program by somebody else. It runs in jinja2's immutable sandbox: no attribute that reaches Python, no change
of what it is given. Source of the conventions (block trimming, `raise_exception`, `tojson` without escapes): transformers.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from knittrans_jax.models.hf_config import CheckpointError, read_json
from knittrans_jax.processing.extra import import_extra


def read_template(directory: Path) -> str:
    """The template of a checkpoint: `chat_template.jinja`, `chat_template.json`, or the tokenizer's configuration.

    Raises:
        CheckpointError: there is none.
    """
    directory = Path(directory)
    plain = directory / "chat_template.jinja"
    if plain.is_file():
        return plain.read_text(encoding="utf-8")
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (directory / name).is_file():
            template = read_json(directory / name).get("chat_template")
            if isinstance(template, str):
                return template
            if isinstance(template, list):  # several by name
                named = {entry.get("name"): entry.get("template") for entry in template}
                if isinstance(named.get("default"), str):
                    return named["default"]
    raise CheckpointError(
        f"{directory}: no chat template in chat_template.jinja, chat_template.json or tokenizer_config.json"
    )


class ChatTemplate:
    """A compiled template."""

    def __init__(self, template: str, today: datetime.date | None = None) -> None:
        """`today` is what the template's `strftime_now` shows; without it a template that asks for the date fails.

        Raises:
            CheckpointError: the template does not compile.
        """
        jinja2 = import_extra("jinja2")
        sandbox = import_extra("jinja2.sandbox")

        def fail(message: str) -> None:
            raise jinja2.TemplateError(message)

        def strftime_now(pattern: str) -> str:
            if today is None:
                fail("the template asks for the date, but none was given to ChatTemplate(today=...)")
                raise AssertionError
            return today.strftime(pattern)

        def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **options: Any) -> str:
            return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = to_json
        environment.globals["raise_exception"] = fail
        environment.globals["strftime_now"] = strftime_now
        self._error = jinja2.TemplateError
        try:
            self._template = environment.from_string(template)
        except self._error as error:
            raise CheckpointError(f"chat template: {error}") from error

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = False, **variables: Any
    ) -> str:
        """The conversation as text, special tokens spelled out, one placeholder per picture.

        Args:
            messages: `{"role": ..., "content": text or parts}`; a part is `{"type": "text", "text": ...}` or
                `{"type": "image"}`.
            add_generation_prompt: end with the opening of the assistant's answer.
            variables: further ones that the template knows (`tools`, `enable_thinking`, ...).

        Raises:
            ValueError: the template refuses the messages, or does what the sandbox forbids.
        """
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except self._error as error:
            raise ValueError(f"chat template: {error}") from error
