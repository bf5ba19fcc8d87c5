"""Package metadata: what the two commands need, with bounds that are tested together at both ends.

The lower bounds are the newest versions for Python 3.11 (jax 0.10.2), the upper ones stop before the next
release that could break an interface (jax 0.12 needs Python 3.12). `.ci/run` installs what pip picks between
them. The heavy or rarely used packages (openai, matplotlib, tensorboardX, orbax, transformers) are imported
where they are used, so that `import opid_jax` stays light.
"""

import setuptools

CORE = [
  'absl-py>=2.5,<3',
  'bm25s>=0.3.16,<0.4',
  'chex>=0.1.92,<0.2',
  'flax>=0.12.8,<0.13',
  'jax>=0.10.2,<0.13',
  'matplotlib>=3.11,<4',
  'ml-collections>=1.1,<2',
  'ml_dtypes>=0.6,<1',
  'numpy>=2.4,<3',
  'openai>=3.57,<4',
  'optax>=0.2.8,<0.3',
  'orbax-checkpoint>=0.12.8,<0.13',  # never `orbax`, which is another, abandoned package
  'PyStemmer>=3.1,<4',
  'rapidfuzz>=3.14,<4',
  'tensorboardX>=2.6.5,<3',
  'tiktoken>=0.14,<1',
  'tokenizers>=0.23,<1',
  'tqdm>=4.70,<5',
  'transformers>=5.24,<6',
]

EXTRAS = {
  'tpu': ['jax[tpu]>=0.10.2,<0.13'],
  'cuda13': ['jax[cuda13]>=0.10.2,<0.13'],
  'wandb': ['wandb>=0.31,<1'],
  'test': ['packaging>=24', 'pytest>=9,<10', 'ruff>=0.17,<0.18', 'safetensors>=0.8,<1', 'setuptools>=77'],
}

setuptools.setup(
  name='opid_jax',
  version='0.1.0',
  description='OPID in JAX: reinforcement learning of language agents with skills found in hindsight',
  license='Apache-2.0',
  license_files=['LICENSE'],
  packages=setuptools.find_packages(include=['opid_jax', 'opid_jax.*']),
  package_data={'opid_jax': ['policies/**/*']},
  python_requires='>=3.11,<3.14',
  install_requires=CORE,
  extras_require=EXTRAS,
)
