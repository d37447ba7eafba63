"""Each architecture against transformers: logits alone, packed, and after export."""

from hf_configs import LLAMA3, YARN
import numpy as np
import pytest
import torch
from torch_models import build
import transformers

from jaxrl_sched.device import model, weights

SMALL = dict(
  vocab_size=97,
  intermediate_size=40,
  num_hidden_layers=2,
  num_attention_heads=6,
  num_key_value_heads=2,
  max_position_embeddings=64,
  rms_norm_eps=1e-5,
)
NINE = dict(num_attention_heads=9, num_key_value_heads=3)
PLAIN = dict(rope_type='default', rope_theta=500.0)
LINEAR = dict(rope_type='linear', rope_theta=500.0, factor=4.0)
DEEPSEEK = YARN | dict(mscale=1.0, mscale_all_dim=0.7)
OWN_FACTOR = YARN | dict(attention_factor=1.3, truncate=False)
KINDS = {
  'llama 2': ('Llama', NINE | dict(hidden_size=54), PLAIN),
  'llama 3.1': ('Llama', dict(hidden_size=48, head_dim=16), LLAMA3),
  'llama 3.2': ('Llama', NINE | dict(hidden_size=72, head_dim=16, tie=True), LLAMA3),
  'smollm2': ('Llama', NINE | dict(hidden_size=36, head_dim=4, tie=True), PLAIN),
  'llama with biases': (
    'Llama',
    dict(hidden_size=48, head_dim=16, attention_bias=True, mlp_bias=True),
    PLAIN,
  ),
  'llama of attention_bias': (
    'Llama',
    dict(hidden_size=48, attention_bias=True),
    PLAIN,
  ),
  'llama of mlp_bias': ('Llama', dict(hidden_size=48, mlp_bias=True, tie=True), PLAIN),
  'mistral': (
    'Mistral',
    dict(hidden_size=40, head_dim=16, sliding_window=None),
    LINEAR,
  ),
  'qwen2': ('Qwen2', NINE | dict(hidden_size=40, head_dim=16), DEEPSEEK),
  'qwen2.5': ('Qwen2', dict(hidden_size=84, num_attention_heads=14, tie=True), YARN),
  'qwen3': ('Qwen3', NINE | dict(hidden_size=40, head_dim=16, tie=True), YARN),
  'qwen3 untied': ('Qwen3', dict(hidden_size=40, head_dim=10), OWN_FACTOR),
}
LENGTHS = 9, 23, 61  # the context before scaling is 16


def sequences() -> list[np.ndarray]:
  rng = np.random.default_rng(0)
  return [rng.integers(0, 97, n) for n in LENGTHS]


@pytest.fixture(scope='module')
def theirs(tmp_path_factory):
  """A kind's model by transformers, its folder, and its logits of each sequence."""
  made = {}

  def get(kind: str):
    if kind not in made:
      name, sizes, settings = KINDS[kind]
      sizes = dict(sizes)
      tied = sizes.pop('tie', False)
      more = dict(rope_parameters=dict(settings), tie_word_embeddings=tied)
      reference = build(name, **SMALL | sizes | more)
      where = tmp_path_factory.mktemp('theirs') / 'model'
      reference.save_pretrained(where)
      made[kind] = reference, where, their_logits(reference)
    return made[kind]

  return get


def their_logits(reference: torch.nn.Module) -> list[np.ndarray]:
  with torch.no_grad():
    return [reference(torch.tensor(s)[None]).logits[0].numpy() for s in sequences()]


def assert_close(a, b, atol: float) -> None:
  np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


@pytest.mark.parametrize('kind', KINDS)
def test_logits_are_those_of_transformers_alone_and_packed(kind, theirs):
  """I1 tied and untied, I2 head width of its own, I3 scaling, I6 biases of about 0.5.

  Three rows padded on the right, and a fourth that holds all three sequences.
  """
  reference, where, expected = theirs(kind)
  config, parameters = weights.load(where)
  assert ('head' in parameters) == (not config.tied)
  tokens, segments = np.full((2, 4, 96), 5)
  segments[:] = 0
  for i, s in enumerate(sequences()):
    tokens[i, : len(s)], segments[i, : len(s)] = s, 1
  tokens[3, : sum(LENGTHS)] = np.concatenate(sequences())
  segments[3, : sum(LENGTHS)] = np.repeat([1, 2, 3], LENGTHS)
  ours = model.logits(parameters, config, tokens, segments=segments)
  assert np.concatenate(expected).std() > 0.5  # or nothing is compared
  for i, logits in enumerate(expected):
    assert_close(ours[i, : LENGTHS[i]], logits, atol=1e-4)
  assert_close(ours[3, : sum(LENGTHS)], np.concatenate(expected), atol=1e-4)


@pytest.mark.parametrize(
  'kind',
  [
    'llama 3.2',
    'llama with biases',
    'llama of attention_bias',
    'llama of mlp_bias',
    'mistral',
    'qwen2',
    'qwen3 untied',
  ],
)
def test_transformers_reads_what_is_exported(kind, theirs, tmp_path):
  """The model is the same function, with its scaling, its sizes and its biases."""
  _, where, expected = theirs(kind)
  config, parameters = weights.load(where)
  weights.export(config, parameters, tmp_path / 'out')
  assert weights.load(tmp_path / 'out')[0] == config
  made, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path / 'out', output_loading_info=True
  )
  assert not any(report.values()), report
  for a, b in zip(their_logits(made.eval()), expected, strict=True):
    assert_close(a, b, atol=1e-5)
