"""A small tokenizer of Qwen's kind, made on the spot, and a chat template with what Qwen3-VL's uses."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
TEMPLATE = """
{%- if tools %}
    {{- '<|im_start|>system\\nTools:\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set counted = namespace(images=0) %}
{%- for message in messages %}
    {%- if message.role not in ('system', 'user', 'assistant') %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' %}
                {%- set counted.images = counted.images + 1 %}
                {%- if numbered %}Picture {{ counted.images }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif not part.text %}
                {%- continue %}
            {%- else %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
CORPUS = [
    "what is the digit in the top left cell?",
    "naïve café, 日本語 and 12345",
    "the answer is seven\n\n  indented",
] * 4


def make_tokenizer(directory: Path) -> Path:
    """`tokenizer.json`, `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "eos_token": "<|im_end|>",
        "pad_token": {
            "__type": "AddedToken",
            "content": "<|endoftext|>",
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        },
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return directory
