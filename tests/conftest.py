"""Simulated devices and strictness for every test; runs before anything imports JAX."""

import os

# Eight devices on one CPU, so that sharding and resuming on another machine can be tested everywhere.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
flags = os.environ.get('XLA_FLAGS', '')
if 'xla_force_host_platform_device_count' not in flags:
  os.environ['XLA_FLAGS'] = f'{flags} --xla_force_host_platform_device_count=8'.strip()
# An accidental [N] + [N, T] broadcast is an error, as a wrong advantage would be silent.
os.environ.setdefault('JAX_NUMPY_RANK_PROMOTION', 'raise')
