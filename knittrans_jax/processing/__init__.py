"""What stands between people and a Qwen3(-VL) model, without torch: tokenizer, chat template, pictures.

The libraries that it needs (`tokenizers`, `jinja2`, `pillow`) come with the extra `hf` and are imported on first use.
"""
