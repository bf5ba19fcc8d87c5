"""Writes `tests/data/tiny_policy/`: weights that write well-formed actions in a shop of 60 products, and no more.

python tests/record_tiny_policy.py      (half a minute on two cores; run again after a change of the brief wording)
"""

import dataclasses
import shutil
import tempfile

import jax
from tinyrun import POLICY, make_config

from opid_jax import envs, evaluate, warmstart
from opid_jax.envs.webshop import demonstrate
from opid_jax.models import hf, qwen
from opid_jax.models.tokenizer import Tokenizer

MODEL = dataclasses.replace(
  warmstart.MODEL, vocab_size=600, width=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, mlp_width=64
)
TRAINING = {'learning_rate': 1e-2, 'updates': 200, 'rows': 4, 'prompt_weight': 0.1}


def main() -> None:
  config = make_config(env__max_turns=5)
  env = envs.make(config.env, seed=0)
  shown = list(demonstrate.demonstrations(env, env.tasks(0, 150), seed=0, care=(0.6, 0.9), advised=0.2))
  limits = evaluate.limits(config)
  with tempfile.TemporaryDirectory() as folder:
    warmstart.train_tokenizer(warmstart.corpus(env, shown, limits.style), folder, vocab_size=MODEL.vocab_size)
    data = warmstart.examples(env, shown, Tokenizer.load(folder), limits)
    params = qwen.init(jax.random.key(0), MODEL)
    params = warmstart.fit(params, data, MODEL, TRAINING, row_length=416, seed=0)
    shutil.rmtree(POLICY, ignore_errors=True)
    hf.save_folder(POLICY, params, MODEL, dtype='bfloat16', tokenizer_folder=folder)


if __name__ == '__main__':
  main()
