"""The supervised start: demonstrations that heed advice, examples with weights, and the policy that ships."""

import random
from pathlib import Path

import jax
import numpy as np
import pytest
from tinyrun import finish, start

from opid_jax import envs, evaluate, flags, learner, warmstart
from opid_jax import policy as policies
from opid_jax.envs.webshop import demonstrate
from opid_jax.models import hf, qwen
from opid_jax.models.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
CONFIG = flags.load(str(ROOT / 'configs/webshop.py'))


@pytest.fixture(scope='module')
def env():
  return envs.make(CONFIG.env, seed=0)


def shown(env, advised, count=40):
  return list(demonstrate.demonstrations(env, env.tasks(0, count), seed=0, care=(0.2, 0.8), advised=advised, draws=2))


def test_practice_knows_the_products_and_no_sentence_of_the_run(env):
  practice = demonstrate.practice_tasks(env, 6000, seed=0)
  sizes = env.describe()
  own = [task for split in ('train', 'heldout') for task in env.panel(split, sizes[f'{split}_goals'])]
  assert not {task.text for task in practice} & {task.text for task in own}
  assert len({task.data.asin for task in practice}) > 0.98 * len(env.shop.products)


def test_advice_to_do_is_followed_and_advice_to_avoid_heeded(env):
  for d in shown(env, advised=1.0):
    action = env.step(d.state, d.responses[0]).action
    if d.step_skill.startswith('Do: '):
      assert d.step_skill == f'Do: {action}'
    for skill in (d.episode_skill, d.step_skill):
      if skill.startswith('Avoid: '):
        assert skill != f'Avoid: {action}' or len(d.state.actions) == 1


def test_no_advice_means_none(env):
  assert not any(d.episode_skill or d.step_skill for d in shown(env, advised=0.0))


def test_demonstrations_are_a_function_of_the_seed(env):
  assert shown(env, 0.5, 10) == shown(env, 0.5, 10)


def make_examples(rng, count, vocab):
  def tokens(length):
    return rng.integers(1, vocab, length).astype(np.int32)

  return [
    warmstart.Example(tokens(p), [tokens(t) for t in rng.integers(1, 5, 3)], [0.5, 0.25, 0.25])
    for p in rng.integers(2, 12, count)
  ]


def test_responses_that_branch_off_one_prompt_score_as_sequences_of_their_own():
  model = qwen.QwenConfig('qwen3', 32, 16, 2, 2, 1, 8, 24, 1e4)
  params = qwen.init(jax.random.key(0), model)
  data = make_examples(np.random.default_rng(0), 6, 32)
  packed, on_prompt, on_response = warmstart.pack(data, row_length=48, slots=48)
  logp, _ = learner.score(params, packed, config=model, options=qwen.Options(), temperature=1.0, head_chunk=0)
  expected_prompt = expected_response = 0.0
  for example in data:
    for n, (response, share) in enumerate(zip(example.responses, example.shares, strict=True)):
      ids = np.concatenate([example.prompt, response])
      scores = jax.nn.log_softmax(qwen.logits(params, model, ids[None]))[0, np.arange(len(ids) - 1), ids[1:]]
      expected_response += share * scores[len(example.prompt) - 1 :].sum()
      expected_prompt += 0 if n else scores[: len(example.prompt) - 1].sum()
  np.testing.assert_allclose((on_prompt * logp).sum(), expected_prompt, rtol=1e-5)
  np.testing.assert_allclose((on_response * logp).sum(), expected_response, rtol=1e-5)


def test_batches_have_one_shape_and_hold_every_share():
  data = make_examples(np.random.default_rng(1), 50, 9)
  packed, on_prompt, on_response = next(warmstart.batches(data, rows=2, row_length=64, seed=0))
  assert packed.tokens.shape == (2, 64) and on_prompt.shape == on_response.shape == packed.target.shape
  used = packed.is_scored > 0
  assert not on_prompt[~used].any() and ((on_prompt + on_response)[used] > 0).all()


def test_the_shipped_policy_is_small_and_belongs_to_the_config():
  folder = Path(policies.embedded_folder('webshop'))
  assert sum(file.stat().st_size for file in folder.iterdir()) <= 5e6
  policy = policies.describe(CONFIG, None)
  count = sum(int(np.prod(leaf.shape)) for leaf in hf.leaves(policy.config))
  assert 1e6 <= count <= 3e6
  text = "<think>look for it</think><action>search[red <|im_end|> shirt]</action>"
  assert policy.tokenizer.decode(policy.tokenizer.encode(text)) == text
  assert not set(policy.tokenizer.end_ids) & set(policy.tokenizer.encode(text))


def run_program(module, *arguments, folder):
  return finish(start(module, f'--config={ROOT}/configs/webshop.py', *arguments, folder=folder))


def test_a_short_warm_start_writes_a_folder_that_loads(tmp_path):
  out = tmp_path / 'policy'
  options = [f'--out={out}', '--episodes=20', '--updates=2', '--rows=2']
  code, text = run_program('warmstart', *options, folder=tmp_path)
  assert code == 0, text
  config = hf.load_config(out)
  assert hf.load_params(out, config)['embed']['embedding'].shape == (config.vocab_size, config.width)
  assert Tokenizer.load(out).size <= config.vocab_size
  code, text = run_program('warmstart', *options, folder=tmp_path)
  assert code != 0 and 'is there already' in text and 'Traceback' not in text


@pytest.mark.slow
def test_the_shipped_policy_is_middling_on_the_held_out_panel(tmp_path):
  code, text = run_program('evaluate', folder=tmp_path)
  assert code == 0, text
  rate = float(next(line.split()[1] for line in text.splitlines() if line.startswith('eval/success_rate')))
  assert 0.1 <= rate <= 0.5


def test_limits_leave_room_for_the_longest_prompt(env):
  tokenizer = policies.describe(CONFIG, None).tokenizer
  limits = evaluate.limits(CONFIG)
  sample = random.Random(0).sample(shown(env, advised=1.0), 60)
  lengths = [len(e.prompt) for e in warmstart.examples(
    [warmstart.Shown(env.prompt(d.state), d.episode_skill, d.step_skill, d.responses) for d in sample],
    tokenizer, limits,
  )]  # fmt: skip
  assert max(lengths) <= limits.max_prompt_tokens + limits.max_skill_tokens
