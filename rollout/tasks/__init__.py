"""Tasks: prompts with attributes, multi-turn episodes with text and images, and a reward."""
