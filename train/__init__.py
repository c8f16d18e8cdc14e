"""Training: the objective, the update step, and the training process. Imported as `knittrans_jax.train`."""
