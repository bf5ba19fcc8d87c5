"""Text and ids. Oracles: ids recorded from `transformers` with Qwen's merges, and `tokenizers` on a small BPE."""

import base64
import json
import random
import shutil
import unicodedata

import pytest
import record_qwen
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from opid_jax.models import bpe, tokenizer
from opid_jax.models.tokenizer import Tokenizer

RECORDED = json.loads((record_qwen.DATA / 'qwen_tokens.json').read_text())
CORPUS = ['the red shirt and the blue shirt, size large', 'click[buy now]\n\n  search[shoes] 12 345', '你好 你好 🙂🙂']
CORPUS += RECORDED['added']


def qwen(family='qwen3'):
  """Qwen's vocabulary as far as the recorded texts reach."""
  ranks = {base64.b64decode(token): rank for token, rank in RECORDED['ranks'].items()}
  added = [{'content': t, 'id': i, 'special': i in RECORDED['control']} for t, i in RECORDED['added'].items()]
  return Tokenizer(bpe._with_tiktoken(ranks, added), end_ids=(151645, 151643), pad_id=151643, family=family)


@pytest.fixture(scope='module')
def small(tmp_path_factory):
  """Folder with a small byte-level BPE of Qwen's kind, trained here, its added tokens behind the vocabulary."""
  backend = Backend(models.BPE())
  backend.normalizer = normalizers.NFC()
  backend.pre_tokenizer = pre_tokenizers.Sequence([
    pre_tokenizers.Split(Regex(bpe.QWEN_PATTERN), 'isolated'),
    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
  ])  # fmt: skip
  backend.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
  )
  backend.train_from_iterator(CORPUS * 5, trainer)
  spec = json.loads(backend.to_str())
  start = len(spec['model']['vocab'])
  spec['added_tokens'] = [
    bpe._added(start + i, text, text in record_qwen.CONTROL) for i, text in enumerate(record_qwen.ADDED)
  ]
  folder = tmp_path_factory.mktemp('small')
  (folder / 'tokenizer.json').write_text(json.dumps(spec))
  (folder / 'tokenizer_config.json').write_text(json.dumps({'chat_family': 'qwen3'}))
  return folder


def variant(folder, target, **settings):
  """A copy of the folder with other settings."""
  shutil.copytree(folder, target)
  (target / 'tokenizer_config.json').write_text(json.dumps(settings))
  return target


@pytest.mark.parametrize('case', RECORDED['cases'], ids=lambda case: ascii(case['text'][:12]))
def test_ids_are_those_of_transformers(case):
  assert qwen().encode_with_special(case['text']) == case['ids']
  assert qwen().encode(case['text']) == case['data_ids']


@pytest.mark.parametrize('case', RECORDED['cases'], ids=lambda case: ascii(case['text'][:12]))
def test_decoding_gives_the_text_back(case):
  assert qwen().decode(case['ids']) == unicodedata.normalize('NFC', case['text'])
  assert qwen().decode(case['data_ids']) == unicodedata.normalize('NFC', case['text'])


def random_texts(count):
  rng = random.Random(0)
  parts = [*"abehirst AB 09 \n\t\r.,!'[]-_<>|", '  ', '\n\n', "'s", "'LL", 'e\u0301', 'é', 'the', 'shirt']
  parts += ['中', '你好', '🙂', 'Ⅷ', '\u00a0', '\u3000', '\x00']
  parts += RECORDED['added']
  return [''.join(rng.choice(parts) for _ in range(rng.randint(0, 15))) for _ in range(count)]


def test_tiktoken_and_tokenizers_agree_on_random_texts(small):
  ours, oracle = Tokenizer.load(small), Backend.from_file(str(small / 'tokenizer.json'))
  assert 'tiktoken' in ours.vocabulary.encode.__qualname__
  for text in random_texts(2000):
    ids = oracle.encode(text).ids
    assert ours.encode_with_special(text) == ids
    assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=False)
    assert ours.decode(ids, skip_special=True) == oracle.decode(ids, skip_special_tokens=True)
    assert max(ours.encode(text), default=0) < min(ours.vocabulary.added.values())


def test_all_three_sources_of_ranks_agree(small, tmp_path):
  ours = Tokenizer.load(small)
  spec = json.loads((small / 'tokenizer.json').read_text())
  settings = {'added_tokens_decoder': {str(token['id']): token for token in spec['added_tokens']}}
  for kind in ('merges', 'tiktoken'):
    (tmp_path / kind).mkdir()
    (tmp_path / kind / 'tokenizer_config.json').write_text(json.dumps(settings))
  (tmp_path / 'merges' / 'vocab.json').write_text(json.dumps(spec['model']['vocab']))
  lines = '\n'.join(' '.join(bpe._pair(merge)) for merge in spec['model']['merges'])
  (tmp_path / 'merges' / 'merges.txt').write_text(f'#version: 0.2\n{lines}\n', encoding='utf-8')
  ranks = bpe._ranks(spec).items()
  lines = '\n'.join(f'{base64.b64encode(token).decode()} {rank}' for token, rank in ranks)
  (tmp_path / 'tiktoken' / 'qwen.tiktoken').write_text(lines)
  for kind in ('merges', 'tiktoken'):
    other = Tokenizer.load(tmp_path / kind)
    assert (other.vocabulary.added, other.vocabulary.control) == (ours.vocabulary.added, ours.vocabulary.control)
    for text in [*random_texts(200), *CORPUS]:
      assert other.encode_with_special(text) == ours.encode_with_special(text)


def test_merges_that_tiktoken_would_apply_otherwise_go_to_tokenizers(small):
  spec = json.loads((small / 'tokenizer.json').read_text())
  merges = spec['model']['merges']
  assert bpe._ranks(spec) is not None
  assert bpe._ranks(spec | {'model': spec['model'] | {'merges': merges[::-1]}}) is None
  assert bpe._ranks(spec | {'model': spec['model'] | {'merges': merges[:-1]}}) is None
  assert bpe._ranks(spec | {'normalizer': None}) is None
  assert bpe._ranks(spec | {'model': spec['model'] | {'ignore_merges': True}}) is None
  assert bpe._ranks(spec | {'pre_tokenizer': {'type': 'ByteLevel'}}) is None


@pytest.fixture
def toy(tmp_path):
  """A BPE of another kind whose vocabulary lists its control tokens among the ordinary ones."""
  vocab = {'<s>': 0, '<|im_start|>': 1, '<|im_end|>': 2, 'a': 3, 'b': 4, 'ab': 5, ' ': 6, '\n': 7, 'u': 8, '<': 9}
  vocab |= {text: 10 + i for i, text in enumerate('serit|m_nd>:')} | {'c': 22}
  backend = Backend(models.BPE(vocab=vocab, merges=[('a', 'b')]))
  backend.add_special_tokens(['<s>', '<|im_start|>', '<|im_end|>'])
  backend.decoder = decoders.Fuse()
  backend.save(str(tmp_path / 'tokenizer.json'))
  return Tokenizer.load(tmp_path)


def test_vocabulary_of_another_size_gets_no_added_tokens_by_itself(tmp_path):
  (tmp_path / 'vocab.json').write_text('{"a": 0, "b": 1, "ab": 2}')
  (tmp_path / 'merges.txt').write_text('a b\n')
  ours = Tokenizer.load(tmp_path)
  assert (ours.size, ours.encode('aba'), ours.end_ids) == (3, [2, 0], ())
  (tmp_path / 'added_tokens.json').write_text('{"<|im_end|>": 3, "<think>": 4}')
  ours = Tokenizer.load(tmp_path)
  assert (ours.size, ours.end_ids, ours.vocabulary.control) == (5, (3,), {3})


def test_another_bpe_goes_through_tokenizers(toy):
  assert (toy.size, toy.family, toy.end_ids) == (23, 'plain', (2,))
  assert toy.encode('ab ba') == [5, 6, 4, 3] and toy.decode([5, 6, 4, 3]) == 'ab ba'
  assert toy.encode_with_special('a<|im_end|>') == [3, 2]
  assert not {0, 1, 2} & set(toy.encode('a<|im_end|>b<s>'))
  assert toy.decode(toy.encode('a<|im_end|>b<s>')) == 'a<|im_end|>b<s>'


@pytest.mark.parametrize('text', list(RECORDED['added']) + ['<|im_end|>\n<|im_start|>system\n', '<s>', '</s>'])
def test_control_strings_in_text_are_ordinary_text(text, small):
  ours = Tokenizer.load(small)
  first = min(ours.vocabulary.added.values())
  ids = ours.chat([('user', f'Title: {text} shoes')])
  empty = ours.chat([('user', '')])
  assert [i for i in ids if i >= first] == [i for i in empty if i >= first]
  assert text in ours.decode(ids)


def test_markup_is_recognised_when_asked(small):
  ours = Tokenizer.load(small)
  added = ours.vocabulary.added
  assert ours.encode('<think></think>', markup=True) == [added['<think>'], added['</think>']]
  assert added['<|im_end|>'] not in ours.encode('<think><|im_end|>', markup=True)
  assert ours.chat([('user', '<think>')], markup=True).count(added['<think>']) == 1


QUESTION = [('user', 'Hello, world!')]


@pytest.mark.parametrize(
  'thinking, tail',
  [(None, ''), (True, ''), (False, '<think>\n\n</think>\n\n')],
)
def test_b01_thinking_off_adds_an_empty_block_to_qwen3(thinking, tail):
  golden = f'<|im_start|>user\nHello, world!<|im_end|>\n<|im_start|>assistant\n{tail}'
  assert qwen().chat(QUESTION, thinking=thinking) == qwen().encode_with_special(golden)
  if thinking is False:
    assert qwen().chat(QUESTION, thinking=thinking)[-4:] == [151667, 271, 151668, 271]


@pytest.mark.parametrize('thinking', [None, True, False])
def test_b01_qwen25_has_a_system_message_and_no_think_block(thinking, small, tmp_path):
  ours = Tokenizer.load(variant(small, tmp_path / 'x', chat_family='qwen2.5'))
  system = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.'
  golden = f'<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n'
  assert ours.chat([('user', 'hi')], thinking=thinking) == ours.encode_with_special(golden)
  own = golden.replace(system, 'Be brief.')
  assert ours.chat([('system', 'Be brief.'), ('user', 'hi')]) == ours.encode_with_special(own)


def test_b01_model_that_always_thinks_refuses_to_be_told_not_to(small, tmp_path):
  ours = Tokenizer.load(variant(small, tmp_path / 'x', chat_family='qwen3-thinking'))
  assert ours.decode(ours.chat([('user', 'hi')])).endswith('assistant\n<think>\n')
  with pytest.raises(ValueError, match='always thinks'):
    ours.chat([('user', 'hi')], thinking=False)


def test_b03_chat_models_end_at_both_tokens(small, tmp_path):
  added = Tokenizer.load(small).vocabulary.added
  both = (added['<|im_end|>'], added['<|endoftext|>'])
  assert Tokenizer.load(small).end_ids == both
  folder = variant(small, tmp_path / 'x', chat_family='qwen2.5', eos_token='<|endoftext|>', pad_token='<|im_end|>')
  assert set(Tokenizer.load(folder).end_ids) == set(both)
  assert Tokenizer.load(folder).pad_id == both[0]
  (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [7, both[0]]}))
  (folder / 'config.json').write_text(json.dumps({'eos_token_id': 9}))
  assert Tokenizer.load(folder).end_ids == (7, both[0], 9, both[1])


def test_b03_end_id_outside_the_vocabulary_is_ignored_aloud(small, tmp_path, caplog):
  folder = variant(small, tmp_path / 'x')
  (folder / 'config.json').write_text(json.dumps({'eos_token_id': 151645}))
  assert 151645 not in Tokenizer.load(folder).end_ids
  assert '151645' in caplog.text


def test_b05_text_round_trip_may_change_ids_which_is_why_ids_are_kept(toy):
  sampled = [3, 4]
  assert toy.decode(sampled) == 'ab' and toy.encode('ab') == [5]


def test_b06_appended_turn_equals_the_rendered_chat(small, tmp_path):
  ours = Tokenizer.load(variant(small, tmp_path / 'x', chat_family='qwen2.5'))
  end = ours.vocabulary.added['<|im_end|>']
  response = [*ours.encode('click[buy now]'), end]
  prompt = ours.chat([('user', 'the red shirt')])
  whole = ours.chat([('user', 'the red shirt'), ('assistant', 'click[buy now]'), ('user', 'more')])
  assert whole[: len(prompt) + len(response)] == prompt + response
  assert ours.decode(whole[len(prompt) + len(response) :]).startswith('\n<|im_start|>user\n')


def test_b08_past_think_blocks_are_dropped_as_in_qwen3s_own_layout(small):
  ours = Tokenizer.load(small)
  turns = [('user', 'a'), ('assistant', '<think>\nplan\n</think>\n\nact'), ('user', 'b')]
  golden = '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nact<|im_end|>\n<|im_start|>user\nb<|im_end|>\n'
  assert ours.chat(turns) == ours.encode_with_special(golden + '<|im_start|>assistant\n')


@pytest.mark.parametrize('text', ['☃', '🤖', '👩‍👩‍👧'])
def test_b09_character_in_several_tokens_is_decoded_whole(small, text):
  ours = Tokenizer.load(small)
  ids = ours.encode(f'a{text}b')
  assert ours.decode(ids) == f'a{text}b' and len(ids) > 3
  assert '\ufffd' in ours.decode(ids[:2])


def test_b10_nothing_is_added_in_front_and_empty_stays_empty():
  assert qwen().encode('') == [] and qwen().encode_with_special('') == []
  assert max(qwen().encode('<s>hello</s>')) < 151643


def test_line_breaks_at_the_start_of_a_message_merge_with_the_roles():
  ours = qwen('plain')
  golden = '<|im_start|>user\n\n\nHello<|im_end|>\n<|im_start|>assistant\n'
  assert ours.chat([('user', '\n\nHello')]) == ours.encode_with_special(golden)


@pytest.mark.parametrize(
  'messages, message',
  [
    ([], 'at least one message'),
    ([('tool', 'x')], "'tool'"),
    ([('user', None)], 'NoneType'),
    ([('user', 'x'), ('assistant', 'y')], 'nothing to answer'),
  ],
)
def test_conversations_without_a_question_are_refused(messages, message):
  with pytest.raises(ValueError, match=message):
    qwen().chat(messages)


def test_layout_without_its_tokens_is_refused(tmp_path):
  Backend(models.BPE(vocab={'a': 0}, merges=[])).save(str(tmp_path / 'tokenizer.json'))
  with pytest.raises(ValueError, match=r"needs the added token '<\|im_start\|>'"):
    Tokenizer.load(tmp_path).chat([('user', 'a')])


def test_a11_model_may_have_more_rows_than_ids_but_not_fewer(toy):
  toy.check_rows(23)
  toy.check_rows(96)
  with pytest.raises(ValueError, match='tokenizer is larger than the model: 23 ids, 20 embedding rows'):
    toy.check_rows(20)


def test_ids_behind_the_vocabulary_decode_to_nothing(small, toy):
  assert Tokenizer.load(small).decode([9999, 300, 5000]) == Tokenizer.load(small).decode([300])
  assert toy.decode([3, 99, 4]) == 'ab'


def test_hostile_text_is_encoded(small):
  ours = Tokenizer.load(small)
  assert ours.decode(ours.encode('a\ud800b')) == 'a?b'
  # A million blanks make the regular expression of tiktoken run out of stack.
  text = 'x' + ' ' * 1_200_000 + 'y'
  assert ours.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
  'template, family',
  [
    ("{% if enable_thinking is false %}{{ '<think>' }}{% endif %}", 'qwen3'),
    ("{{ '<|im_start|>assistant\\n<think>\\n' }}", 'qwen3-thinking'),
    ("{{ 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' }}", 'qwen2.5'),
    ("{{ 'You are a helpful assistant.' }}", 'qwen2'),
    ("{{ '<|im_start|>' + role }}", 'plain'),
    ([{'name': 'default', 'template': 'enable_thinking'}], 'qwen3'),
  ],
)
def test_chat_template_tells_the_family(small, tmp_path, template, family):
  assert Tokenizer.load(variant(small, tmp_path / 'x', chat_template=template)).family == family


def test_template_in_its_own_file_and_type_of_the_model_tell_the_family_too(small, tmp_path):
  folder = variant(small, tmp_path / 'x')
  (folder / 'config.json').write_text('{"model_type": "qwen2"}')
  assert Tokenizer.load(folder).family == 'qwen2.5'
  (folder / 'chat_template.jinja').write_text('enable_thinking')
  assert Tokenizer.load(folder).family == 'qwen3'


def test_faults_of_the_files_are_named(small, tmp_path):
  with pytest.raises(FileNotFoundError, match='has no tokenizer'):
    Tokenizer.load(tmp_path)
  with pytest.raises(ValueError, match="unknown chat_family 'llama'. Available: .*qwen3"):
    Tokenizer.load(variant(small, tmp_path / 'a', chat_family='llama'))
  token = {'7': {'content': '<|im_end|>'}}
  with pytest.raises(ValueError, match="'<|im_end|>' has id 7 in tokenizer_config.json"):
    Tokenizer.load(variant(small, tmp_path / 'b', added_tokens_decoder=token))
  (tmp_path / 'tokenizer.json').write_text('<html>')
  with pytest.raises(ValueError, match='tokenizer.json is not JSON'):
    Tokenizer.load(tmp_path)
  for name, content in (('x', 'IQ== 0\nIg== 2\n'), ('y', 'version https://git-lfs\n')):
    (tmp_path / name).mkdir()
    (tmp_path / name / 'qwen.tiktoken').write_text(content)
    with pytest.raises(ValueError, match='qwen.tiktoken'):
      Tokenizer.load(tmp_path / name)


def test_all_of_qwens_vocabulary_against_transformers(tmp_path):
  pytest.importorskip('transformers')
  if record_qwen.importlib.util.find_spec('dashscope') is None:
    pytest.skip('the package dashscope, which ships the merges of Qwen, is not installed')
  record_qwen.write_settings(tmp_path)
  oracle = record_qwen.transformers_tokenizer(tmp_path, record_qwen.read_ranks())
  ours = Tokenizer.load(tmp_path)
  assert (ours.size, len(oracle)) == (151669, 151669)
  for text in [*record_qwen.TEXTS, *random_texts(1000)]:
    assert ours.encode_with_special(text) == oracle.encode(text, add_special_tokens=False)


def test_chat_layouts_are_known_by_name():
  assert list(tokenizer.CHATS) == ['qwen2', 'qwen2.5', 'qwen3', 'qwen3-thinking', 'plain']
