"""A real pretrained model, SmolLM2-135M-Instruct, against transformers.

launch/test.sh makes it by launch/smollm2.py.
"""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from jaxrl_sched import train
from jaxrl_sched.device import weights
from jaxrl_sched.device.learner import answer_logps
from jaxrl_sched.device.sampler import Sampler
from jaxrl_sched.device.templates import Template
from jaxrl_sched.device.tokenizers import load_tokenizer, stop_ids
from jaxrl_sched.types import Prompt, Request, Sampling

pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
FOLDER = ROOT / 'runs' / 'smollm2'
QUESTIONS = (
  'What is 7 * 8?',
  'What is the capital of France?',
  'Write one sentence about the sea.',
  'Name three colours.',
  'Translate "good morning" into Spanish.',
  'Who wrote Hamlet?',
  'Explain gravity to a child.',
  'Write a Python function that adds two numbers.',
  'What is 15% of 200?',
  'List the days of the week.',
  'Why is the sky blue?',
  'Give me a word that rhymes with "light".',
  'How many legs does a spider have?',
  'Finish this: once upon a time',
  'What does HTTP stand for?',
  'Is 17 a prime number?',
)
NEW = 64


@pytest.fixture(scope='module')
def loaded():
  if not FOLDER.exists():
    pytest.fail(f'{FOLDER} is not there: make it by python launch/smollm2.py')
  return weights.load(FOLDER)


@pytest.fixture(scope='module')
def prompts():
  template = Template(load_tokenizer(FOLDER))
  return template.ids([template.text({'prompt': q}) for q in QUESTIONS])


@pytest.fixture(scope='module')
def greedy(prompts):
  """Transformers' greedy answers, up to and with the end, and their log-probs."""
  theirs = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
  width = max(map(len, prompts))
  ids = np.zeros((len(prompts), width), np.int64)
  mask = np.zeros_like(ids)
  for row, prompt in enumerate(prompts):  # generate() wants padding on the left
    ids[row, width - len(prompt) :] = prompt
    mask[row, width - len(prompt) :] = 1
  ids, mask = torch.tensor(ids), torch.tensor(mask)
  out = theirs.generate(
    ids,
    attention_mask=mask,
    do_sample=False,
    max_new_tokens=NEW,
    output_logits=True,
    return_dict_in_generate=True,
  )
  stop = theirs.generation_config.eos_token_id
  logits = torch.stack(out.logits, 1)  # [prompts, NEW, V]
  answers, logps = [], []
  for answer, of_answer in zip(out.sequences[:, width:], logits, strict=True):
    ends = np.flatnonzero(answer.numpy() == stop)
    answer = answer[: ends[0] + 1] if len(ends) else answer
    found = torch.log_softmax(of_answer[: len(answer)], -1).gather(1, answer[:, None])
    answers.append(answer.numpy())
    logps.append(found[:, 0].numpy())
  return answers, logps


def test_greedy_answers_are_those_of_transformers(loaded, prompts, greedy):
  """16 prompts, 64 tokens each, through slots that are refilled."""
  config, parameters = loaded
  generation = weights.generation_config(FOLDER)
  sampling = Sampling(
    temperature=0.0,
    max_new_tokens=NEW,
    stop_ids=stop_ids(load_tokenizer(FOLDER), generation),
  )
  requests = [
    Request(
      draw=i,
      prompt=Prompt(id=f'x/{i}', dataset='x', index=i, tokens=tokens, text=''),
      size=1,
      sampling=sampling,
    )
    for i, tokens in enumerate(prompts)
  ]
  longest = max(map(len, prompts))
  sampler = Sampler(parameters, config, slots=12, cache_length=longest + NEW, chunk=16)
  found = [c.tokens.tolist() for c in sampler.generate(requests)]
  assert found == [answer.tolist() for answer in greedy[0]]
  assert sum(map(len, found)) > 16 * 20


def test_log_probs_are_those_of_transformers(loaded, prompts, greedy):
  """As the learner finds them, two sequences packed in each row."""
  config, parameters = loaded
  answers, expected = greedy
  shape = (len(prompts) // 2, 2 * (max(map(len, prompts)) + NEW))
  tokens, segments, positions = (np.zeros(shape, np.int32) for _ in range(3))
  places = []
  for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
    row, start = i // 2, int(np.count_nonzero(segments[i // 2]))
    length = len(prompt) + len(answer)
    tokens[row, start : start + length] = np.concatenate([prompt, answer])
    segments[row, start : start + length] = 1 + i % 2
    positions[row, start : start + length] = np.arange(length)
    places.append((row, slice(start + len(prompt), start + length)))
  batch = dict(tokens=tokens, segments=segments, positions=positions)
  run = jax.jit(lambda p, b: answer_logps(p, config, b)[0])
  found = np.asarray(run(parameters, jax.tree.map(jnp.asarray, batch)))
  for place, logps in zip(places, expected, strict=True):
    np.testing.assert_allclose(found[place], logps, atol=1e-3)


def test_two_steps_of_training(tmp_path, loaded):
  """The real run of configs/smollm2_products.py in its short form."""
  config = f'{ROOT}/configs/smollm2_products.py:short'
  assert train.main([f'--config={config}', f'--workdir={tmp_path}']) == 0
  lines = [json.loads(line) for line in open(tmp_path / 'metrics.jsonl')]
  steps = [line for line in lines if 'loss' in line]
  assert [line['step'] for line in steps] == [0, 1]
  # Answers carried over are of other weights than those that learn from them.
  gaps = [line['mismatch/logp_abs_max'] for line in steps if line['lag/max'] == 0]
  assert gaps and max(gaps) < 1e-3
  for line in steps:
    assert line['compile/count'] == 0
    assert line['update/refused'] == 0 and line['grad_norm'] > 0
