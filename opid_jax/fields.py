"""Every field of a run's config, declared once: its default, its range and what it means.

The type of a field is the type of its default. No default is None, so that each field can be set from the
command line; '', 0 and -1 stand for "none" where a comment says so. The defaults are the method's own; a file
in `configs/` sets what an experiment changes. `opid_jax.settings` builds and checks the config.
"""

import math
from typing import NamedTuple


class Field(NamedTuple):
  """One declared field.

  Attributes:
    default: its value; an int, float, bool or str.
    low: smallest value allowed (numbers only).
    high: largest value allowed (numbers only).
    above: the value must be greater than this (numbers only).
    choices: the values allowed (text only); empty means any text.
  """

  default: int | float | bool | str
  low: float = -math.inf
  high: float = math.inf
  above: float = -math.inf
  choices: tuple[str, ...] = ()


def _choice(default: str, *others: str) -> Field:
  return Field(default, choices=(default, *others))


def _count(default: int) -> Field:
  return Field(default, low=1)


def _size(default: int) -> Field:
  return Field(default, low=0)


def _amount(default: float) -> Field:
  return Field(default, low=0.0)


def _share(default: float) -> Field:
  return Field(default, low=0.0, high=1.0)


FIELDS = {
  'seed': _size(0),
  'num_steps': _count(160),  # training steps; one step = one batch of episodes
  'compile_cache': Field(''),  # folder of compiled programs; '' = the default folder, 'off' = none

  # The world in which the agent acts.
  'env.name': Field('webshop'),  # module in opid_jax/envs
  'env.data_dir': Field(''),  # folder with the official files; '' = the embedded catalogue
  'env.max_turns': _count(15),
  'env.history_length': _size(2),  # turns repeated in the prompt
  'env.results_per_page': _count(10),
  'env.max_results': _count(50),
  'env.projection': _choice('strict', 'reference'),  # how a response becomes an action
  'env.instructions': _choice('full', 'brief'),  # wording of the prompt: language model, or tiny policy
  'env.split_seed': _size(233),  # which goals are held out; results with other seeds do not compare
  'env.num_heldout': _count(500),  # goals never trained on
  'env.goals': _choice('synthetic', 'human'),
  'env.num_products': _count(1000),  # embedded catalogue only
  'env.skip_history_above': _size(20000),  # characters of prompt above which the history is left out

  # The policy.
  'model.path': Field(''),  # Hugging Face folder; '' = the embedded tiny policy
  'model.dtype': _choice('float32', 'bfloat16'),  # of the computation; master weights are always float32
  'model.reference_dtype': _choice('float32', 'bfloat16'),  # of the frozen reference policy's weights
  'model.remat': _choice('none', 'layer', 'dots', 'attention'),  # what the backward pass keeps, qwen.REMAT
  'model.thinking': Field(False),  # Qwen3 chat template only
  'model.attention_block': _size(0),  # query columns per block; 0 = whole row

  # Acting.
  'rollout.tasks_per_step': _count(16),
  'rollout.group_size': _count(8),  # G, attempts at each task
  'rollout.temperature': _amount(1.0),
  'rollout.top_p': Field(1.0, above=0.0, high=1.0),
  'rollout.top_k': _size(0),  # 0 = off
  'rollout.max_prompt_tokens': _count(4096),
  'rollout.max_skill_tokens': _count(256),  # a longer skill is cut
  'rollout.max_response_tokens': _count(512),  # per turn
  'rollout.max_episode_tokens': _size(0),  # sampled tokens per episode; 0 = no limit
  'rollout.slots': _count(64),  # sequences decoded at the same time
  'rollout.prefill_rows': _count(8),  # prompts per prefill call
  'rollout.decode_chunk': _count(32),  # tokens decoded between two visits of the host
  'rollout.bucket': _count(256),  # prompt lengths are padded to multiples of this
  'rollout.prompt_style': _choice('full', 'brief'),  # how a skill is set into the prompt

  # Looking back: who writes the skills.
  'analyzer.name': Field('contrast', choices=('contrast', 'openai', 'policy', 'none')),
  'analyzer.max_step_skills': _size(5),  # M, per trajectory
  'analyzer.max_failure_share': _share(0.5),  # of a step's trajectories; above it the run stops
  'analyzer.model': Field(''),
  'analyzer.base_url': Field(''),  # OpenAI-compatible endpoint; '' = OpenAI's own
  'analyzer.api_key_env': Field('OPENAI_API_KEY'),  # name of the variable, never the key
  'analyzer.concurrency': _count(32),
  'analyzer.timeout_s': Field(60.0, above=0.0),  # seconds per request
  'analyzer.step_timeout_s': Field(300.0, above=0.0),  # seconds per training step, all requests together
  'analyzer.max_attempts': _count(3),
  'analyzer.max_reply_tokens': _count(4096),
  'analyzer.token_budget': _size(0),  # tokens per run, in and out; 0 = no limit
  'analyzer.max_prompt_chars': Field(60000, low=6000),  # below that, task, outcome and last steps would not fit
  'analyzer.max_prompt_tokens': _count(8192),  # analyzer 'policy' only: longest prompt it can read
  'analyzer.temperature': _amount(0.4),

  # Credit.
  'algorithm.name': _choice('opid', 'grpo'),
  'algorithm.routing': _choice('critical_first', 'additive', 'episode', 'step'),
  'algorithm.episode_weight': _amount(0.001),  # λ of episode skills
  'algorithm.step_weight': _amount(0.001),  # λ of step skills
  'algorithm.center': Field(False),  # subtract the mean of the skill shift over the batch's skilled tokens
  'algorithm.rms': Field(False),  # divide the shift by its root mean square
  'algorithm.shift_clip': _amount(0.0),  # bound of the shift, after the two above; 0 = none
  'algorithm.start_step': _size(0),  # first training step with the skill term
  'algorithm.stop_step': _size(0),  # first training step without it again; 0 = never
  'algorithm.norm': _choice('mean', 'mean_std'),
  'algorithm.stats': _choice('trajectory', 'row'),  # what a group counts; 'row': the reference code
  'algorithm.invalid_penalty': _amount(0.1),  # reward units, per invalid action
  'algorithm.penalty': _choice('after', 'before'),  # relative to the group normalisation

  # The objective.
  'loss.clip_low': Field(0.2, above=0.0, high=1.0),
  'loss.clip_high': Field(0.2, above=0.0),
  'loss.dual_clip': _amount(3.0),  # 0 = off
  'loss.kl_coef': _amount(0.01),
  'loss.kl': _choice('k3', 'k1', 'abs', 'k2'),
  'loss.entropy_coef': _amount(0.001),
  'loss.skip_zero_advantage': Field(False),  # leave steps without any advantage (tied groups) out, KL included
  'loss.aggregation': _choice(
    'token-mean', 'seq-mean-token-sum', 'seq-mean-token-mean', 'seq-mean-token-sum-norm'
  ),

  # AdamW.
  'optimizer.learning_rate': _amount(1e-6),
  'optimizer.b1': Field(0.9, low=0.0, high=0.9999999),
  'optimizer.b2': Field(0.999, low=0.0, high=0.9999999),
  'optimizer.eps': Field(1e-8, above=0.0),
  'optimizer.weight_decay': _amount(0.01),
  'optimizer.clip_norm': _amount(1.0),  # of the global gradient; 0 = off
  'optimizer.warmup_steps': _size(0),  # training steps
  'optimizer.schedule': _choice('constant', 'cosine'),

  # How the batch goes through the device.
  'learner.minibatch_steps': _count(64),  # environment steps per optimizer update
  'learner.epochs': _count(1),
  'learner.row_length': _count(8192),  # L, tokens of a packed row
  'learner.slots_per_row': _count(2048),  # K, scored response tokens of a packed row
  'learner.rows_per_call': _count(8),  # R, packed rows per device call
  'learner.head_chunk': _size(512),  # scored tokens of a row per block of the vocabulary head; 0 = all at once

  # Devices; -1 = as many as are left. At most one axis may be -1.
  'mesh.data': Field(1, low=-1),
  'mesh.fsdp': Field(-1, low=-1),
  'mesh.tensor': Field(1, low=-1),

  # Evaluation on the fixed held-out panel.
  'evaluate.every': _size(5),  # training steps; 0 = only before and after
  'evaluate.num_tasks': _count(128),
  'evaluate.temperature': _amount(0.4),
  'evaluate.greedy': Field(False),  # the most likely token; the temperature is then not used
  'evaluate.before': Field(True),  # also before the first training step

  # What survives a killed process.
  'checkpoint.every': _count(10),  # training steps
  'checkpoint.keep': _count(2),  # newest checkpoints kept
  'checkpoint.on_full_disk': _choice('stop', 'continue'),  # after a save that failed for want of space

  # What a run writes besides metrics.jsonl.
  'log.tensorboard': Field(True),
  'log.wandb': Field(False),
  'log.wandb_project': Field('opid_jax'),
  'log.samples': _size(4),  # trajectories with their skills written per training step
}
