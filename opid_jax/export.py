"""Writes a checkpoint as a Hugging Face folder, which `transformers` (and this package) load again.

python -m opid_jax.export --config=configs/webshop.py --checkpoint=runs/NAME/checkpoints/20 --out=runs/NAME/hf
"""

import sys
from collections.abc import Sequence

import jax

from opid_jax import checkpoint, flags, policy, sharding
from opid_jax.models import hf

OPTIONS = {
  'checkpoint': flags.Option('', 'checkpoint folder, RUN/checkpoints/STEP, or RUN/checkpoints for its newest'),
  'out': flags.Option('', 'folder to write; must not be there yet'),
  'dtype': flags.Option('bfloat16', 'of the written weights: bfloat16 or float32'),
}


def main(argv: Sequence[str]) -> None:
  config, option = flags.read_or_exit(argv, OPTIONS, __doc__)
  for name in ('checkpoint', 'out'):
    if not option[name]:
      sys.exit(f'export: --{name} is missing ({OPTIONS[name].help}).')
  mesh = sharding.make_mesh(jax.devices(), **config.mesh)
  source = policy.describe(config, mesh)
  # The checkpoint names the tensors; shapes come from the config of the model it was trained from.
  params = checkpoint.restore_params(option['checkpoint'], policy.shapes(source, mesh))
  hf.save_folder(option['out'], params, source.config, dtype=option['dtype'], tokenizer_folder=source.folder)
  print(f'Wrote {option["out"]}.')


if __name__ == '__main__':
  main(sys.argv)
