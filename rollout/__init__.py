"""Rollout: tasks, the sampling engine, and the host process around them. Imported as `knittrans_jax.rollout`."""
