"""Which finished groups form the next mini-batch, and which prompts are launched: a pure controller over an event log."""
