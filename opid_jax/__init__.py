"""OPID: on-policy skill distillation for language agents, in JAX (https://arxiv.org/abs/2606.26790)."""

__version__ = '0.1.0'
