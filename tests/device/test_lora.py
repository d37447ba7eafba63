"""What LoRA promises: W + (alpha / rank) A B, of which A and B alone are trained.

Expected values come from merged weights under the learner of whole models, from the
chain rule, and from transformers.
"""

import dataclasses
import json
import math
import pathlib
import re
import shutil

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
import torch
import toys
from toys import lines
import transformers

from jaxrl_sched import config as configs
from jaxrl_sched import evaluate, export, train
from jaxrl_sched.device import attention, lora, model, weights
from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device.checkpoint import Checkpoints
from jaxrl_sched.device.learner import Learner, Loss
from jaxrl_sched.device.lora import TARGETS, Lora
from jaxrl_sched.host import packing
from jaxrl_sched.host.advantages import group_advantages

ROOT = pathlib.Path(__file__).parents[2]
SMOKE = str(ROOT / 'configs' / 'smoke.py')
BASE = ROOT / 'configs' / 'quickstart_model'

# Where a weight lies, and A B in the axes of the weight, layers first.
PLACES = {
  'q': ('attn', 'ldr,lrnh->ldnh'),
  'k': ('attn', 'ldr,lrkh->ldkh'),
  'v': ('attn', 'ldr,lrkh->ldkh'),
  'o': ('attn', 'lnhr,lrd->lnhd'),
  'gate': ('mlp', 'ldr,lrf->ldf'),
  'up': ('mlp', 'ldr,lrf->ldf'),
  'down': ('mlp', 'lfr,lrd->lfd'),
}
# Every odd feature; Q and K of different widths, neither of them D.
ODD = dataclasses.replace(
  toys.CONFIG, heads=6, kv_heads=2, qkv_bias=True, qk_norm=True, tied=False
)
TOKENS = np.random.default_rng(0).integers(300, size=(2, 12))
ADAM = dict(learning_rate=1e-2, steps=100)
LOSS = Loss(kl_coef=0.3)


def with_lora(config=ODD, **settings):
  return dataclasses.replace(config, lora=Lora(**settings))


def noisy(tree, seed, size=0.3):
  """Something in every norm, bias and B."""
  leaves, structure = jax.tree.flatten(tree)
  rng = np.random.default_rng(seed)
  moved = [x + size * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
  return jax.tree.unflatten(structure, moved)


def parts(config, seed=0):
  """Base and adapters, none of them 0."""
  base, adapters = lora.split(model.init(config, seed))
  return noisy(base, 1, 0.1), noisy(adapters, 2)


def merged(base, adapters, scale):
  """By hand, in float64."""
  whole = jax.tree.map(lambda x: np.asarray(x, np.float64), base)
  for name, (place, axes) in PLACES.items():
    pair = adapters['blocks'].get(place, {}).get('lora', {}).get(name)
    if pair is not None:
      a, b = (np.asarray(pair[x], np.float64) for x in 'ab')
      whole['blocks'][place][name] += scale * np.einsum(axes, a, b)
  return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), whole)


def assert_close(found, expected, relative=1e-5):
  """Trees, each array to this fraction of its largest entry."""

  def one(path, a, b):
    limit, where = relative * np.abs(b).max(), jax.tree_util.keystr(path)
    np.testing.assert_allclose(a, b, rtol=relative, atol=limit, err_msg=where)

  jax.tree_util.tree_map_with_path(one, jax.device_get(found), jax.device_get(expected))


def assert_identical(found, expected):
  jax.tree.map(np.testing.assert_array_equal, found, expected)


def batches(rows=8):
  """Two groups, of which the second was sampled with older weights."""
  rng = np.random.default_rng(0)
  groups = [
    toys.group(rng, draw, n, version=1 - draw)
    for draw, n in enumerate([(3, 7, 1, 5), (9, 2)])
  ]
  return packing.fill(
    groups,
    [group_advantages(g.rewards) for g in groups],
    packing.answer_weights(
      [g.lengths for g in groups], averaging='token', max_new_tokens=16
    ),
    version=1,
    rows=rows,
    row_tokens=24,
    window=16,
  )


def build(base, config, **settings):
  how = dict(rows=8, row_tokens=24, optimizer=ADAM, loss=LOSS) | settings
  return Learner(base, config, **how)


def put(learner, trained):
  at = jax.tree.map(lambda x: x.sharding, learner.like()['parameters'])
  learner.state = learner.state | dict(parameters=jax.device_put(trained, at))


# --- the function ------------------------------------------------------------------


def test_training_starts_from_the_base_itself():
  """B = 0, A is not; and adapters do not change what the seed says of the base."""
  base = model.init(ODD, 3)
  config = with_lora(rank=3)
  same, adapters = lora.split(model.init(config, 3))
  assert_identical(same, base)
  for name, (place, _) in PLACES.items():
    pair = adapters['blocks'][place]['lora'][name]
    assert np.all(pair['b'] == 0) and np.all(pair['a'] != 0)
  learner = build(base, config, seed=3)
  assert_identical(learner.parameters, base)
  assert_close(learner.state['parameters'], adapters)


@pytest.mark.parametrize('targets', [*((t,) for t in TARGETS), TARGETS], ids='-'.join)
def test_merging_adds_scale_a_b_to_the_targets_alone(targets):
  """Also at a rank above D, F and H, where adapters are no saving but no harm."""
  config = with_lora(rank=64 if len(targets) > 1 else 3, alpha=6.0, targets=targets)
  base, adapters = parts(config)
  found = lora.merge(base, adapters, config.lora.scale)
  places = {PLACES[name][0] for name in targets}
  assert {p: set(found['blocks'][p]) for p in found['blocks']} == {
    p: {name for name in targets if PLACES[name][0] == p} for p in places
  }
  whole = lora.join(base, found)
  assert_close(whole, merged(base, adapters, 6.0 / config.lora.rank), 1e-6)
  for name in targets:
    place = PLACES[name][0]
    assert not np.allclose(whole['blocks'][place][name], base['blocks'][place][name])


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_what_stands_beside_merged_weights_adds_no_value(dtype):
  """It is there for its gradient: bit for bit the function stays what it was."""
  plain = dataclasses.replace(ODD, dtype=dtype)
  config = with_lora(plain, rank=3)
  base, adapters = parts(config)
  whole = merged(base, adapters, config.lora.scale)
  beside = model.logits(lora.join(whole, adapters), config, TOKENS)
  np.testing.assert_array_equal(beside, model.logits(whole, plain, TOKENS))


@pytest.mark.parametrize('tied', [False, True])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_sampler_and_learner_have_one_function_bit_for_bit(dtype, tied):
  """Kind D: piece by piece, each given the same, op by op, as compilers round freely.

  The sampler's weights are cast once and have no adapters beside them. None of them
  is exact in bfloat16, the last norm's neither.
  """
  plain = dataclasses.replace(ODD, dtype=dtype, tied=tied)
  config = with_lora(plain, rank=3)
  base, adapters = parts(config)
  whole = merged(base, adapters, config.lora.scale)
  for leaf in jax.tree.leaves(whole):
    assert np.mean(leaf != leaf.astype(jnp.bfloat16)) > 0.9
  sampler, layers = model.unrolled(plain, model.by_layer(plain, whole))
  learner = model.decoder(config, lora.join(whole, adapters))
  graph, stacked = nnx.split(learner.blocks)
  places = jnp.broadcast_to(jnp.arange(TOKENS.shape[1])[None], TOKENS.shape)
  turned = model.rotation(places, plain)

  def attend(q, k, v):
    return attention.packed(q, k, v, jnp.ones_like(places)), (k, v)

  x = sampler.embedded(TOKENS)
  assert x.dtype == dtype
  assert_identical(x, learner.embedded(TOKENS))
  for i, layer in enumerate(layers):
    learners = nnx.merge(graph, jax.tree.map(lambda w, i=i: w[i], stacked))
    found = layer(x, *turned, attend)
    assert_identical(found, learners(x, *turned, attend))
    x = found[0]
  hidden = sampler.norm(x)
  assert_identical(hidden, learner.norm(x))
  assert_identical(
    model.head_logits(hidden, sampler.head_weight(), plain),
    model.head_logits(hidden, learner.head_weight(), plain),
  )


def test_without_lora_nothing_is_added():
  shapes, axes = model.abstract(ODD)
  base, adapters = lora.split(shapes)
  assert adapters == {} and base == shapes
  with_shapes, with_axes = model.abstract(with_lora())
  assert lora.split(with_shapes)[0] == shapes and lora.split(with_axes)[0] == axes


# --- learning ----------------------------------------------------------------------


@pytest.fixture(scope='module')
def tuned():
  """config, base, adapters, and a learner that is there."""
  config = with_lora(rank=3, alpha=6.0)
  base, adapters = parts(config)
  learner = build(base, config)
  put(learner, adapters)
  return config, base, adapters, learner


@pytest.fixture(scope='module')
def found(tuned):
  return tuned[-1].gradient(batches())


def test_the_gradient_is_the_chain_rule_on_that_of_whole_weights(tuned, found):
  """dA = s dW B^T and dB = s A^T dW, dW being the learner's of all weights.

  So is the KL penalty's, whose reference is the base.
  """
  _, base, adapters, _ = tuned
  whole = build(base, ODD)
  put(whole, merged(base, adapters, 2.0))
  full, sums = whole.gradient(batches())
  assert_close(found[1], sums, 1e-4)
  assert sums['kl'] > 0.1
  for name, (place, axes) in PLACES.items():
    a_axes, b_axes, w_axes = axes.replace('->', ',').split(',')
    pair = adapters['blocks'][place]['lora'][name]
    dw = np.asarray(full['blocks'][place][name])
    expected = {
      'a': 2.0 * np.einsum(f'{w_axes},{b_axes}->{a_axes}', dw, pair['b']),
      'b': 2.0 * np.einsum(f'{a_axes},{w_axes}->{b_axes}', pair['a'], dw),
    }
    assert_close(found[0]['blocks'][place]['lora'][name], expected, 1e-4)


def products(program: str) -> set[tuple[str, int]]:
  """What a compiled program multiplies out or scatters, by how many numbers it is."""
  found = re.findall(r'= \w+\[([\d,]*)\]\S* (dot|scatter)\(', program)
  return {(name, math.prod(map(int, dims.split(',')))) for dims, name in found}


def test_no_gradient_of_the_base_is_ever_made(tuned):
  """Not even of one layer, nor of the head; the learner of whole weights makes each.

  In the compiled program: the traced one has what nobody asks for, too.
  """
  config, base, *_ = tuned
  blocks = base['blocks']
  layer = {blocks[place][n][0].size for n, (place, _) in PLACES.items()}
  of_base = {('dot', size) for size in layer | {base['head'].size}}
  of_base.add(('scatter', base['embed'].size))
  batch = {k: jnp.asarray(v) for k, v in vars(batches()[0]).items()}

  def made(learner, rest):
    arguments = learner.state['parameters'], rest, base, batch
    return products(learner.programs.gradient.lower(*arguments).compile().as_text())

  with_all, with_adapters = made(build(base, ODD), {}), made(build(base, config), base)
  assert of_base <= with_all and not of_base & with_adapters


def test_updates_move_adapters_and_nothing_else(tuned):
  config, base, *_ = tuned
  before = jax.tree.map(np.array, base)
  learner = build(base, config)
  start = jax.device_get(learner.state['parameters'])
  for _ in range(3):
    metrics = learner.update(batches())
  assert metrics['update/refused'] == 0
  assert_identical(base, before)
  after = learner.state['parameters']
  for old, new in zip(jax.tree.leaves(start), jax.tree.leaves(after), strict=True):
    assert np.all(np.any(old != new, axis=tuple(range(1, old.ndim))))  # in each layer
  now = learner.parameters
  assert_close(now, merged(base, jax.device_get(after), 2.0), 1e-6)
  for place in ('attn', 'mlp'):  # all that is not adapted, bit for bit
    for name in PLACES:
      now['blocks'][place].pop(name, None)
      before['blocks'][place].pop(name, None)
  assert_identical(now, before)


def test_the_optimizer_knows_the_adapters_only(tuned):
  """Two moments of each, and their counter: as many numbers as on paper."""
  config, base, *_ = tuned
  c, rank = config, 3
  width, narrow = c.heads * c.head_dim, c.kv_heads * c.head_dim
  ins_and_outs = [
    c.d_model + width,
    2 * (c.d_model + narrow),
    width + c.d_model,
    3 * (c.d_model + c.d_ff),
  ]
  count = c.layers * rank * sum(ins_and_outs)
  bf16 = dataclasses.replace(config, dtype='bfloat16')
  for learner in (build(base, config), build(base, bf16)):
    like = learner.like()
    sizes = [x.size for x in jax.tree.leaves(like['optimizer'])]
    assert sum(sizes) == 2 * count + 1
    assert sum(x.size for x in jax.tree.leaves(like['parameters'])) == count
    assert {x.dtype for x in jax.tree.leaves(like['parameters'])} == {
      np.dtype('float32')
    }


def test_eight_devices_learn_what_one_does(tuned, found):
  config, base, adapters, one = tuned
  mesh = meshes.make_mesh(data=2, fsdp=2, model=2)
  eight = build(base, config, mesh=mesh)
  put(eight, adapters)
  gradient, sums = eight.gradient(batches())
  assert_close(gradient, found[0], 1e-4)
  assert_close(sums, found[1], 1e-4)
  assert_close(eight.parameters, one.parameters)
  shapes, axes = model.abstract(ODD)
  at = meshes.parameter_shardings(shapes, axes, mesh)
  assert jax.tree.all(
    jax.tree.map(
      lambda x, s: x.sharding.is_equivalent_to(s, x.ndim), eight.parameters, at
    )
  )
  up = eight.like()['parameters']['blocks']['mlp']['lora']['up']
  assert tuple(up['a'].sharding.spec) == (None, ('fsdp', 'sequence'), None)
  assert tuple(up['b'].sharding.spec) == (None, None, 'model')
  prints = {lora.fingerprint(base, m) for m in (mesh, meshes.make_mesh())}
  assert len(prints) == 1
  other = base | dict(norm=dict(scale=base['norm']['scale'] * 1.001))
  assert lora.fingerprint(other, mesh) not in prints


def test_a_base_is_told_from_another_by_any_bit_of_it():
  """And by its place: weights that are exact in bfloat16, swapped far apart."""
  base = jax.tree.map(
    lambda x: np.array(x.astype(jnp.bfloat16), np.float32), parts(with_lora())[0]
  )
  rng, others = np.random.default_rng(0), []
  for index, leaf in enumerate(jax.tree.leaves(base)):
    if index % 3 == 0:
      others.append(jax.tree.map(np.copy, base))
      bits = jax.tree.leaves(others[-1])[index].view(np.int32).reshape(-1)
      bits[rng.integers(leaf.size)] ^= 1 << rng.integers(23)
  others.append(jax.tree.map(np.copy, base))
  up = others[-1]['blocks']['mlp']['up']
  up[:] = up[::-1].copy()  # the layers, in another order
  prints = [lora.fingerprint(tree, meshes.make_mesh()) for tree in (base, *others)]
  assert len(others) > 4 and len(set(prints)) == len(prints)
  assert lora.fingerprint(base, meshes.make_mesh(fsdp=2, model=2)) == prints[0]


# --- runs --------------------------------------------------------------------------

RUN = [
  '--config.lora.rank=4',
  '--config.lora.targets=("q", "v", "o", "down")',
  '--config.optimizer.learning_rate=1e-2',
  '--config.evaluate=None',
]


def run(workdir, steps):
  argv = [f'--config={SMOKE}', f'--workdir={workdir}', f'--config.steps={steps}', *RUN]
  assert train.main(argv) == 0


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  """A run of two steps, stopped, and gone on with to the third."""
  workdir = tmp_path_factory.mktemp('run')
  run(workdir, 2)
  run(workdir, 3)
  return workdir


def test_a_run_goes_on_as_if_never_stopped(workdir, tmp_path):
  """Promise 6, and kind D of the faults: sampler and learner agree after merging."""
  run(tmp_path, 3)
  metrics = lines(tmp_path)
  assert lines(workdir) == metrics
  # Answers carried over are of other weights than those that learn from them.
  gaps = [s['mismatch/logp_abs_max'] for s in metrics[:3] if s['lag/max'] == 0]
  assert gaps and max(gaps) < 1e-4
  for step in metrics[:3]:
    assert step['compile/count'] == 0
    assert step['grad_norm'] > 0


def test_a_checkpoint_holds_adapters_only(workdir):
  manifest = json.loads((workdir / 'checkpoints' / '3' / 'manifest.json').read_text())
  arrays = manifest['manifest']['arrays']
  assert {'parameters.blocks.attn.lora.q.a', 'parameters.blocks.mlp.lora.down.b'} <= (
    arrays.keys()
  )
  assert all('.lora.' in name or name.endswith('count') for name in arrays)


def their_logits(folder, tokens, adapters=None):
  """Of transformers, each adapter acting beside its weight as in the paper."""
  made = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

  def beside(a, b, ins):
    a, b = a.reshape(ins, -1), b.reshape(4, -1)
    a, b = torch.tensor(a), torch.tensor(b)
    return lambda _, x, y: y + 32.0 / 4 * (x[0] @ a) @ b

  for place, module in [('attn', 'self_attn'), ('mlp', 'mlp')] if adapters else []:
    for name, pair in adapters['blocks'][place]['lora'].items():
      for layer, block in enumerate(made.model.layers):
        linear = getattr(getattr(block, module), f'{name}_proj')
        a, b = pair['a'][layer], pair['b'][layer]
        linear.register_forward_hook(beside(a, b, linear.in_features))
  with torch.no_grad():
    return made(torch.tensor(tokens)).logits.numpy()


def test_an_export_is_an_ordinary_folder_of_the_same_function(workdir, tmp_path):
  """Kind I of the faults: adapters are merged in, and no trace is left of them.

  transformers on the base, with the adapters beside its weights, says the same.
  """
  out = tmp_path / 'out'
  assert export.main([f'--workdir={workdir}', '--step=3', f'--out={out}']) == 0
  assert load_file(out / 'model.safetensors').keys() == (
    load_file(BASE / 'model.safetensors').keys()
  )
  plain, base = weights.load(BASE)
  config = with_lora(plain, rank=4, targets=('q', 'v', 'o', 'down'))
  like = build(base, config).like()
  _, state, *_ = Checkpoints(workdir / 'checkpoints', read_only=True).restore(like)
  tokens = TOKENS % 256
  found = their_logits(BASE, tokens, adapters=jax.device_get(state['parameters']))
  np.testing.assert_allclose(their_logits(out, tokens), found, atol=1e-4)
  assert np.abs(found - their_logits(BASE, tokens)).max() > 0.01


def test_a_checkpoint_is_evaluated(workdir, capsys):
  argv = [f'--workdir={workdir}', f'--config={SMOKE}', *RUN[:3]]
  assert evaluate.main([*argv, '--step=latest']) == 0
  assert 'sums' in capsys.readouterr().out
  assert (workdir / 'eval' / '3' / 'sums.json').exists()


def test_adapters_of_another_shape_or_base_are_refused(workdir, tmp_path, capsys):
  other = tmp_path / 'base'
  shutil.copytree(BASE, other)
  tensors = load_file(other / 'model.safetensors')
  tensors['model.layers.1.mlp.up_proj.weight'] *= np.float16(1.01)
  save_file(tensors, other / 'model.safetensors', metadata={'format': 'pt'})
  for change, message in [
    ('lora.rank=8', 'of another model: lora.rank: saved 4, expected 8'),
    ('lora=None', 'of another model: base: saved '),
    (f'model.path={other}', 'of another model: base: saved '),
    ("lora.targets=('q','v')", 'lora.targets.2: saved o, expected nothing'),
  ]:
    argv = [f'--workdir={workdir}', f'--config.{change}', f'--out={tmp_path / "out"}']
    assert export.main(argv) == 2
    err = capsys.readouterr().err
    assert message in err and err.count('\n') == 1, err


@pytest.mark.parametrize(
  'override, message',
  [
    ('lora.rank=0', 'lora.rank: 0, expected at least 1'),
    ('lora.rank=1.5', 'config.lora.rank: 1.5, expected int'),
    ('lora.alpha=0', 'lora.alpha: 0.0, expected above 0, at most 1000 times the rank'),
    ('lora.alpha=1e300', 'lora.alpha: 1e+300, expected above 0, at most 1000 times'),
    ('lora.alpha=1e999', 'config.lora.alpha: inf, expected a finite number'),
    # The model has D = N H = 128, K H = 64, F = 384.
    ('lora.rank=65', 'lora.rank: 65, expected at most 64, the smaller side of k'),
    (
      "lora={'rank': 129, 'targets': ('q', 'down')}",
      'lora.rank: 129, expected at most 128, the smaller side of q',
    ),
    (
      'lora.targets=()',
      'lora.targets: (), expected some of q, k, v, o, gate, up, down',
    ),
    ("lora.targets=('q_proj',)", "lora.targets: 'q_proj', expected some of q, k, v, o"),
    ("lora.targets=('q_proj',)", "did you mean 'q'?"),
    ("lora.targets=('gates',)", "did you mean 'gate'?"),
    ("lora.targets=('q','q')", "lora.targets: ('q', 'q'), expected each name once"),
    ('lora.targets=q', "config.lora.targets: 'q', expected tuple"),
    ('lora.target=q', "config.lora: unknown key 'target'; did you mean 'targets'?"),
  ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_built(
  override, message
):
  with pytest.raises(ValueError) as error:
    configs.prepare(configs.read(SMOKE, [tuple(override.split('=', 1))]))
  assert message in str(error.value) and '\n' not in str(error.value)
