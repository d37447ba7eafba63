"""Programs compiled for TPUs that are not there: what they need, and what is said of it.

The compiler is the TPU's own (libtpu); it runs on a CPU. What it says is held against
paper: bytes of arguments, what is written in place, what may never be in memory at all.
"""

import dataclasses
import math
import pathlib
import re

import jax
from jax.experimental.compilation_cache import compilation_cache
import pytest

from jaxrl_sched import config, fitting, preflight
from jaxrl_sched.device import compiled, slots
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.footprint import Footprint, cache_length, model_of

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
D, F, L, N, K, H, V = 256, 512, 2, 4, 2, 128, 2048
ROWS, T, SLOTS, S = 4, 256, 16, 256  # S: 128 prompt tokens and as many of an answer
TINY = f"""
from ml_collections import ConfigDict


def get_config():
  c = ConfigDict()
  c.seed, c.steps = 0, 9
  c.model = dict(path='there/is/none', dtype='bfloat16')
  c.model.hf_config = dict(
    architectures=['LlamaForCausalLM'], vocab_size={V}, hidden_size={D},
    intermediate_size={F}, num_hidden_layers={L}, num_attention_heads={N},
    num_key_value_heads={K}, head_dim={H}, max_position_embeddings=1024,
    tie_word_embeddings=True,
  )
  c.prompts = dict(
    datasets=dict(none=dict(source='none.jsonl', reward='exact')), max_tokens=128
  )
  c.sampling = dict(max_new_tokens={S - 128})
  c.mesh = dict(fsdp=4, model=2)
  c.sampler = dict(slots={SLOTS}, chunk=4, prefill_rows=4)
  c.scheduler = dict(groups_per_step=4, group_size=4)
  c.loss = dict(kind='dapo')
  c.optimizer = dict(learning_rate=1e-3)
  c.learner = dict(rows={ROWS}, row_tokens={T}, remat=True)
  c.advantage = dict(divide_by_std=True)
  return c
"""


@pytest.fixture(scope='module', autouse=True)
def no_cache_on_disk():
  """Programs for devices that are not there can be written to it, but not read."""
  jax.config.update('jax_enable_compilation_cache', False)
  compilation_cache.reset_cache()
  yield
  jax.config.update('jax_enable_compilation_cache', True)
  compilation_cache.reset_cache()


@pytest.fixture(scope='module')
def tiny(tmp_path_factory):
  path = tmp_path_factory.mktemp('config') / 'tiny.py'
  path.write_text(TINY)
  return str(path)


@pytest.fixture(scope='module')
def eight():
  return preflight.topology('v5e:2x4', None)


@pytest.fixture(scope='module')
def footprint(tiny, eight):
  return Footprint(config.read(tiny), eight, preflight.one_host('v5e:2x4', eight))


@pytest.fixture(scope='module')
def told(footprint):
  """The programs of the tiny config for v5e:2x4, and the table's lines."""
  lines = []
  programs, failed = preflight.measure(footprint, say=lines.append)
  assert not failed
  return programs, lines


# --- a small config for v5e:2x4 ----------------------------------------------------


def weights_on_a_device(parts_of_matrices, parts_of_norms):
  """Their number: V D + L (2 D N H + 2 D K H + 3 D F), and (2 L + 1) D."""
  matrices = V * D + L * (2 * D * N * H + 2 * D * K * H + 3 * D * F)
  return matrices // parts_of_matrices + (2 * L + 1) * D // parts_of_norms


def test_arguments_are_those_on_paper(told):
  """Float32 weights and gradient, and two moments: 8 parts of matrices, 4 of norms."""
  programs, _ = told
  one = 4 * weights_on_a_device(8, 4)
  batch = 6 * 4 * (ROWS // 4) * T + (ROWS // 4) * T  # `fresh` is a byte a token
  # What is small takes a tile, of 512 bytes and more.
  assert programs['add'].arguments == pytest.approx(2 * one + batch, rel=0.03)
  assert programs['apply'].arguments == pytest.approx(4 * one, rel=0.03)
  assert programs['apply'].aliased == pytest.approx(3 * one, rel=0.03)
  given = programs['give layer'], programs['give outside']
  assert sum(p.arguments for p in given) == pytest.approx(one, rel=0.03)
  # A host has 4 devices: matrices in 2 parts, norms whole, in bfloat16.
  ready = 2 * weights_on_a_device(2, 1)
  made = L * given[0].outputs + given[1].outputs
  assert made == pytest.approx(ready, rel=0.03)
  cache = 2 * L * (SLOTS // 2) * S * K * H * 2 // 2
  assert programs['decode'].arguments == pytest.approx(ready + cache, rel=0.03)


def test_the_decode_chunk_writes_on_its_cache_and_copies_nothing_like_it(
  footprint, told
):
  programs, _ = told
  cache = compiled.bytes_of(footprint.cache)
  assert programs['decode'].aliased >= cache
  assert programs['insert'].aliased >= cache


def test_flops_are_those_on_paper(told):
  """A forward, a second one for the backward, and the backward, which is two: of each
  device's half of a row's products. The head has no forward of its own in between."""
  programs, _ = told
  layer = 2 * D * N * H + 2 * D * K * H + 3 * D * F
  paper = 2 * T * 4 * (L * layer + V * D) / 2
  # The last product of a layer is not needed twice; attention's kernel is not counted.
  assert 0.85 * paper < programs['add'].flops < 1.1 * paper


def test_weights_are_gathered_and_gradients_reduced(told):
  """Over fsdp=4, in bfloat16, whether at once or piece by piece on a ring: a layer's
  twice and its gradient once, each 3/4 of it or more; all is not much more."""
  programs, _ = told
  moved = sum(size for _, size in programs['add'].collectives.values())
  layers = 2 * L * (2 * D * N * H + 2 * D * K * H + 3 * D * F) // 2
  assert moved > 3 * 0.75 * layers
  assert not programs['apply'].collectives.keys() & {'all-gather', 'all-to-all'}


def test_the_table_has_a_line_for_each_program(told):
  programs, lines = told
  first = [line.split()[0] for line in lines[-len(programs) :]]
  assert first == ['add', 'apply', 'give', 'give', 'prefill', 'insert', 'decode']
  row = lines[-7].split()
  assert row[1] == preflight.size(programs['add'].arguments)
  assert row[6] == f'{programs["add"].flops:.2e}'


def test_what_fits_is_said_to_fit(footprint, told, capsys):
  """All that is held, all code, and the most that a program needs beside."""
  programs, _ = told
  needs = [footprint.part(name).needs(p) for name, p in programs.items()]
  code = sum(p.code for p in programs.values())
  total = compiled.bytes_of(footprint.held) + code + max(needs)
  assert preflight.verdict(footprint, programs, {}, total)
  assert 'It fits' in capsys.readouterr().out
  assert not preflight.verdict(footprint, programs, {}, total - 1)
  said = capsys.readouterr().err
  # The largest of what is held is the samplers' embedding: V / 2 rows of D, bfloat16.
  assert 'does not fit' in said
  embed = preflight.size(V // 2 * D * 2)
  assert f"{embed} weights of samplers, 1: [0]['embed']" in said


def test_what_is_held_is_what_is_on_paper(footprint):
  held = {name: compiled.bytes_of(tree) for name, tree in footprint.held.items()}
  one = 4 * weights_on_a_device(8, 4)
  of_slot = 1 + 6 * 4 + 2 * 4 + 2 * 4 + 8 * 4  # flag, numbers, key, stop ids
  assert held == {
    'weights trained': one,
    'optimizer': 2 * one + 4,  # two moments of each, and their counter
    # In bfloat16, but for the last norm.
    'weights of samplers, 1': 2 * weights_on_a_device(2, 1) + 2 * D,
    f'cache of {SLOTS} slots': SLOTS // 2 * (2 * L * S * K * H * 2 // 2 + of_slot),
  }


def test_what_hosts_read_is_whole_on_each_of_several(tiny, eight, footprint):
  """With sampler.mesh='global' all of them read tokens and how many there are."""
  c = config.read(tiny, [('sampler.mesh', "'global'")])
  spread = Footprint(c, eight, eight[:4])
  assert spread.of_sampler.size == 8 and footprint.of_sampler.size == 4
  assert spread.cache[1]['made'].sharding.is_fully_replicated
  assert not spread.cache[1]['token'].sharding.is_fully_replicated
  assert not footprint.cache[1]['made'].sharding.is_fully_replicated
  part = spread.part('decode')
  _, _, *read = part.program.lower(*part.arguments).out_info
  assert len(read) == 2 and all(x.sharding.is_fully_replicated for x in read)


# --- Qwen2.5-3B for v5e:4x4 ----------------------------------------------------------


@pytest.fixture(scope='module')
def qwen():
  """The config, and the devices of v5e:4x4 and of one of its hosts."""
  c = config.read(str(ROOT / 'configs' / 'qwen25_3b.py'))
  devices = preflight.topology('v5e:4x4', None)
  return c, devices, preflight.one_host('v5e:4x4', devices)


@pytest.fixture(scope='module')
def qwen_slots(qwen):
  """A sampler's programs, with 4 of the 36 layers, which are in no loop, but 9 times
  the places: a cache as large. What grows with places is more than it would be."""
  c, devices, host = qwen
  found = Footprint(c, devices, host)
  model = dataclasses.replace(model_of(c), layers=4)
  programs = slots.Programs(
    model,
    c['sampler']['slots'],
    cache_length=9 * cache_length(c),
    chunk=c['sampler']['chunk'],
    mesh=found.of_sampler,
    prefill_rows=c['sampler']['prefill_rows'],
  )
  assert compiled.bytes_of(programs.cache) == compiled.bytes_of(found.cache[0])
  return programs


def test_the_learner_of_3b_holds_its_part_of_the_weights_and_no_logits(qwen):
  """Weights and gradient a chip: within 5 % of all / chips. 65,536 tokens' logits would
  be [tokens / 16, V] float32 on each device, if they were ever whole."""
  part = Footprint(*qwen).part('add')
  program, seconds = compiled.compiled(part.program, part.arguments)
  found = compiled.described(program, seconds)
  weights = sum(x.size for x in jax.tree.leaves(part.arguments[1]))
  assert weights == pytest.approx(3.086e9, rel=1e-3)
  assert found.arguments == pytest.approx(2 * 4 * weights / 16, rel=0.05)
  tokens = 16 * 4096 // 16
  assert largest_float32(program.as_text()) < tokens * 151936 / 8


def test_the_decode_chunk_of_3b_writes_on_its_cache(qwen_slots):
  """All of it in place, and less than a tenth of it beside."""
  arguments = qwen_slots.arguments(512)['decode']
  found = compiled.compile_program(qwen_slots.decode, arguments)
  cache = compiled.bytes_of(qwen_slots.cache)
  assert found.aliased >= cache
  assert found.temporaries < 0.1 * cache


def test_the_prefill_of_3b_gives_keys_and_values_of_its_part(qwen_slots):
  """4 layers' of 8 rows of 512 tokens: 2 heads of 128 in bfloat16, on 4 devices."""
  arguments = qwen_slots.arguments(512)['prefill']
  found = compiled.compile_program(qwen_slots.prefill, arguments)
  assert found.outputs == pytest.approx(2 * 4 * 8 * 512 * 2 * 128 * 2 / 4, rel=0.01)


def largest_float32(text):
  """Elements of the largest float32 array that a compiled program has anywhere, but for
  the weights, which are its arguments."""
  dims = {shape for shape in re.findall(r'= f32\[([\d,]+)\]', text)}
  weights = set(re.findall(r'f32\[([\d,]+)\]\S* parameter\(', text))
  return max(math.prod(map(int, d.split(','))) for d in dims - weights)


# --- what is refused, before anything is compiled ------------------------------------


def main(capsys, *arguments):
  code = preflight.main(list(arguments))
  return code, capsys.readouterr()


@pytest.mark.parametrize(
  'arguments, said',
  [
    (['--topology=v5e'], '--topology=v5e: expected such as v5e:4x4'),
    (['--topology=v1e:2x2'], '--topology=v1e:2x2: Invalid TPU external name'),
    (['--topology=v5e:2x4', '--processes=3'], 'expected a divisor of the 8 chips'),
    (['--topology=v5e:4x4'], 'fsdp=4 * model=2 are 8 devices, expected the 16'),
    (['--topology=v5e:2x4', '--margin=1'], '--margin=1.0: expected 0 to below 1'),
    (
      ['--topology=v5e:2x4', '--config.mesh.fsdp=1', '--config.mesh.model=8'],
      'config.sampler.model: 8, expected a divisor of the 4 devices',
    ),
    (['--topology=v5e:2x4', '--config.learner.rows=6'], 'learner.rows: 6, expected'),
    (
      ['--topology=v5e:2x4', '--config.sampler.slots=3'],
      'sampler.slots: 3, expected a multiple',
    ),
    (
      ['--topology=v5e:2x4', '--config.sampling.max_new_tokens=2000'],
      'expected at least prompts.max_tokens + sampling.max_new_tokens',
    ),
    (
      ['--topology=v5e:2x4', '--config.learner.row=6'],
      "config.learner: unknown key 'row'",
    ),
  ],
  ids=lambda x: x[-1] if isinstance(x, list) else '',
)
def test_bad_input_is_refused_in_a_line(tiny, capsys, arguments, said):
  code, told = main(capsys, f'--config={tiny}', *arguments)
  assert code == 2
  assert said in told.err and told.err.count('\n') == 1
  assert not told.out


@pytest.mark.parametrize(
  'name, processes, hosts',
  [
    ('v5e:2x4', None, 2),
    ('v5e:2x4', 1, 1),
    ('v5e:4x4', 8, 8),
    ('v5p:2x2x2', None, 2),
    ('v5e:1x1', None, 1),
  ],
)
def test_devices_are_spread_over_as_many_hosts(name, processes, hosts):
  devices = preflight.topology(name, processes)
  assert len(devices) == math.prod(map(int, name.partition(':')[2].split('x')))
  spread = meshes.by_host(devices)
  assert len(spread) == hosts and len(set(map(len, spread))) == 1


def test_the_compiler_tells_what_a_device_has():
  """16 GiB less a quarter (v5e); 95 GiB of a v5p's, and a little more."""
  told = [
    compiled.memory_of(preflight.topology(name, None)[0]) / 2**30
    for name in ('v5e:2x2', 'v5p:2x2x1')
  ]
  assert told == pytest.approx([15.75, 95.74], abs=0.02)


# --- the search ------------------------------------------------------------------------


def test_meshes_to_try_divide_the_model_and_cut_no_more_than_has_to_be(tiny, eight):
  """4 devices a host; 2 key-value heads: samplers in 1 or 2 parts."""
  found = list(fitting.meshes_for(config.read(tiny), eight))
  shapes = [(c['mesh']['sequence'], c['mesh']['model']) for c in found]
  assert shapes == sorted(shapes) and shapes[:3] == [(1, 1), (1, 1), (1, 2)]
  assert {c['sampler']['model'] for c in found} == {1, 2}
  for c in found:
    assert math.prod(c['mesh'].values()) == 8
    assert c['sampler']['slots'] == 8 * 4 // c['sampler']['model']
  assert all(
    c['learner']['row_tokens'] % (128 * c['mesh']['sequence']) == 0 for c in found
  )


@pytest.mark.parametrize('room', [1000, 10_000, 100_000])
def test_the_largest_number_is_found_by_two_looks(tiny, eight, monkeypatch, room):
  """Where needs are 100 + 7 a row, by brute force over all multiples of 8."""
  c = config.read(tiny)
  c['learner']['rows'] = 8
  search = fitting.Search(c, eight, eight[:4], room, say=print, size=str)
  asked = []

  def needs(c, program):
    asked.append(c['learner']['rows'])
    return 100.0 + 7 * c['learner']['rows']

  monkeypatch.setattr(search, '_needs', needs)
  rows, needed = search._largest(c, 'learner', 'rows', 'add', 4000, room, share=1.0)
  assert rows == max(n for n in range(8, 4001, 8) if 100 + 7 * n <= room)
  assert needed == pytest.approx(100 + 7 * rows) and len(asked) == 2


def test_what_fits_is_ended_with_as_overrides(tiny, capsys, monkeypatch):
  """There is room for more than a step has: 16 answers of 256 tokens are 16 rows, and
  their slots the fewest, 8 on each of a host's 4 devices."""
  monkeypatch.setattr(preflight, 'report', lambda found, room: True)
  code, told = main(capsys, f'--config={tiny}', '--topology=v5e:2x4', '--fit')
  assert code == 0
  chosen = dict(
    line.removeprefix('--config.').split('=') for line in told.out.split()[-8:]
  )
  assert chosen == {
    **{'mesh.data': '1', 'mesh.fsdp': '8', 'mesh.sequence': '1', 'mesh.model': '1'},
    **{'sampler.model': '1', 'sampler.slots': '32', 'sampler.prefill_rows': '4'},
    'learner.rows': '16',
  }


def test_where_nothing_fits_is_said(tiny, capsys):
  code, told = main(
    capsys, f'--config={tiny}', '--topology=v5e:2x4', '--fit', '--margin=0.9999999'
  )
  assert code == 1
  assert 'are held all the time' in told.out and 'no mesh of these devices' in told.err
