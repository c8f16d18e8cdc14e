"""KnitTrans for JAX: the path from rollout to training in LLM and VLM reinforcement learning."""

__version__ = "0.1.0"
