"""The policy of a run: model shape, weights, tokenizer and how to sample from it, as the config names them."""

import dataclasses
import functools
import importlib.resources
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from opid_jax import sampling, sharding
from opid_jax.models import hf, qwen
from opid_jax.models.tokenizer import Tokenizer


class Policy(NamedTuple):
  """A model without its parameters.

  Attributes:
    config: shape of the model.
    options: how to run it on this mesh.
    tokenizer: text <-> ids.
    folder: where the weights, the config and the tokenizer files came from.
  """

  config: qwen.QwenConfig
  options: qwen.Options
  tokenizer: Tokenizer
  folder: str


def embedded_folder(env_name: str) -> str:
  """Folder of the tiny policy that ships with the package.

  Raises:
    ValueError: if none ships for this environment.
  """
  folder = importlib.resources.files('opid_jax') / 'policies' / env_name
  if not os.path.isfile(str(folder / 'config.json')):
    raise ValueError(
      f'No embedded policy for environment {env_name!r} ({folder}). Set model.path to a Hugging Face folder, or make '
      f'one with `python -m opid_jax.warmstart --config=configs/{env_name}.py`.'
    )
  return str(folder)


def describe(config, mesh) -> Policy:
  """Reads everything but the weights.

  Args:
    config: the run's config (`model.*`, `env.name`).
    mesh: where it will run; None for one device without constraints.

  Raises:
    ValueError: if the folder is not a model that this package runs, or the tokenizer is larger than the embedding.
  """
  folder = config.model.path or embedded_folder(config.env.name)
  model = hf.load_config(folder)
  tokenizer = Tokenizer.load(folder)
  if tokenizer.size > model.vocab_size:
    raise ValueError(
      f'{folder}: the tokenizer has {tokenizer.size} tokens but the embedding only {model.vocab_size} rows; '
      'the two files do not belong together.'
    )
  longest = config.rollout.max_prompt_tokens + config.rollout.max_skill_tokens + config.rollout.max_response_tokens
  if longest > model.max_positions:
    raise ValueError(
      f'rollout.max_prompt_tokens + max_skill_tokens + max_response_tokens = {longest} exceeds the '
      f'{model.max_positions} positions of {folder}.'
    )
  return Policy(model, make_options(config, mesh), tokenizer, folder)


def make_options(config, mesh) -> qwen.Options:
  options = qwen.Options(config.model.dtype, config.model.remat, config.model.attention_block)
  if mesh is None:
    return options
  return dataclasses.replace(
    options, constrain=sharding.constrain(mesh), constrain_head=sharding.constrain_head(mesh)
  )


def shapes(policy: Policy, mesh):
  """`ShapeDtypeStruct`s of the float32 parameters, with their shardings."""
  tree = jax.eval_shape(functools.partial(qwen.init, config=policy.config), jax.random.key(0))
  return jax.tree.map(
    lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where),
    tree,
    sharding.shard_tree(tree, mesh),
  )


def load_params(policy: Policy, mesh):
  """float32 master weights, placed leaf by leaf, so that the host never holds the whole model."""
  where = {
    sharding.path_of(keys): leaf.sharding for keys, leaf in jax.tree_util.tree_leaves_with_path(shapes(policy, mesh))
  }

  def place(path, array):
    return jax.device_put(array, where['/'.join(path)])

  return hf.load_params(policy.folder, policy.config, dtype='float32', place=place)


def slots_sharding(model: qwen.QwenConfig, mesh) -> sampling.Slots:
  """Where the device state of the slots lives: all of it split like rows, the cache's heads over `tensor` too."""
  cache, rows = sharding.cache_sharding(mesh, model.num_kv_heads), sharding.rows(mesh)
  return sampling.Slots(qwen.Cache(cache, cache), *[rows] * (len(sampling.Slots._fields) - 1))


def sampler_programs(policy: Policy, params, mesh, settings, *, end_ids, max_prompt: int, max_response: int):
  """Jits what a sampler runs; nothing is computed yet.

  Args:
    params: parameters or their shapes; only shapes are read, so a mesh of absent devices will do.
    settings: the `rollout` group of the config.
    end_ids: tokens that end a response.

  Returns:
    `empty() -> slots`, and the `prefill` and `decode` that `sampling.Sampler` wants.
  """
  where = sharding.shard_tree(params, mesh)
  slots, rows = slots_sharding(policy.config, mesh), sharding.rows(mesh)
  empty = jax.jit(
    functools.partial(
      sampling.empty_slots,
      policy.config,
      num_slots=settings.slots,
      max_tokens=max_prompt + max_response,
      max_response=max_response,
      dtype=jnp.dtype(policy.options.dtype),
    ),
    out_shardings=slots,
  )
  static: dict[str, Any] = {'config': policy.config, 'options': policy.options}
  prefill = jax.jit(
    functools.partial(sampling.prefill, **static),
    in_shardings=(where, slots, rows, rows, rows, rows, rows),
    out_shardings=slots,
    donate_argnums=1,
  )
  decode = jax.jit(
    functools.partial(
      sampling.decode,
      **static,
      end_ids=end_ids,
      num_tokens=settings.decode_chunk,
      top_k=settings.top_k,
      top_p=settings.top_p,
    ),
    in_shardings=(where, slots, sharding.replicated(mesh)),
    out_shardings=slots,
    donate_argnums=1,
  )
  return empty, prefill, decode


def make_sampler(policy: Policy, params, mesh, settings, *, max_prompt: int, max_response: int) -> sampling.Sampler:
  """A sampler over `settings.slots` slots (the `rollout` group of the config).

  Args:
    params: parameters or their shapes; only shapes are read.
    max_prompt: longest prompt in tokens.
    max_response: longest response in tokens.
  """
  end_ids = policy.tokenizer.end_ids
  empty, prefill, decode = sampler_programs(
    policy, params, mesh, settings, end_ids=end_ids, max_prompt=max_prompt, max_response=max_response
  )
  return sampling.Sampler(
    prefill,
    decode,
    empty(),
    prefill_rows=settings.prefill_rows,
    bucket=settings.bucket,
    max_prompt=max_prompt,
    end_ids=end_ids,
  )
