"""Every field at its default, which is the method's own; see `opid_jax/fields.py` for ranges and meanings.

python -m opid_jax.train --config=configs/base.py --config.model.path=FOLDER --config.env.data_dir=FOLDER
Hardware, cost and result depend on what is set; the experiments are in the other files of this folder.
"""

from opid_jax import settings


def get_config():
  """Returns the locked default config."""
  return settings.make({})
