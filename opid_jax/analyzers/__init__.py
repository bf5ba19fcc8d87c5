"""Hindsight: finished trajectories in, skills (or the reason there are none) out. No JAX in here.

An analyzer is a module of this package that offers `make(settings, *, generate=None) -> Analyzer`:
`contrast` (no language model), `openai` (any OpenAI-compatible endpoint), `policy` (the policy itself).
"""
