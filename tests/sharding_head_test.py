import functools

import jax
import numpy as np
import pytest
import tiny

from opid_jax import layout, learner, sharding
from opid_jax.models import qwen

SETTINGS = learner.LossSettings(0.2, 0.3, 3.0, 'k3', 0.2, 0.05, 0.9, 4)


SEQUENCES = tiny.make_sequences([(6, 5), (3, 8), (9, 2), (7, 7)])
PACKED, _ = layout.pack(SEQUENCES, row_length=24, slots=12, rows_multiple=4)


def gradient(options):
  loss = functools.partial(learner.loss, config=tiny.QWEN3, options=options, settings=SETTINGS)
  values = np.random.default_rng(0).normal(size=(4, *PACKED.target.shape)).astype(np.float32)
  return jax.jit(jax.grad(loss, has_aux=True))(tiny.make_params(), PACKED, learner.Targets(*values))


@functools.cache
def whole():
  return gradient(qwen.Options())


@pytest.mark.parametrize('sizes', [{'fsdp': 2, 'tensor': 2}, {'data': 2, 'fsdp': 2}])
def test_vocabulary_split_changes_nothing(sizes):
  mesh = sharding.make_mesh(jax.devices()[:4], **sizes)
  found = gradient(qwen.Options(constrain_head=sharding.constrain_head(mesh)))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), whole(), found)


def test_vocabulary_that_does_not_divide_stays_whole():
  pin = sharding.constrain_head(sharding.make_mesh(jax.devices()[:4]))
  x, weight = np.zeros((4, 3, 8)), np.zeros((10, 8))
  assert pin(x, weight) == (x, weight)
