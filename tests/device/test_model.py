"""The decoder: the formula, who sees whom, and that layout changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sched.device import mesh as meshes
from jaxrl_sched.device import model
from jaxrl_sched.device.model import ModelConfig

LLAMA = ModelConfig(
  vocab_size=32,
  known_tokens=32,
  d_model=16,
  d_ff=24,
  layers=2,
  heads=4,
  kv_heads=2,
  head_dim=8,
  rope_theta=100.0,
)
KINDS = {
  'llama': LLAMA,
  'untied': dataclasses.replace(LLAMA, tied=False),
  'qwen2': dataclasses.replace(LLAMA, qkv_bias=True),
  'biases': dataclasses.replace(LLAMA, qkv_bias=True, out_bias=True, mlp_bias=True),
  'qwen3': dataclasses.replace(LLAMA, qk_norm=True, tied=False),
}


def lively(config: ModelConfig, seed: int = 0) -> dict:
  """Parameters at which every part has a say; at init norms are 1 and biases 0."""
  rng = np.random.default_rng(seed)

  def one(path, shape):
    x = rng.standard_normal(shape.shape).astype(np.float32)
    key = path[-1].key
    if key == 'scale':
      return jnp.asarray(1 + 0.3 * x)
    return jnp.asarray(x * {'embed': 0.5, 'head': 0.5, 'q': 0.6}.get(key, 0.3))

  return jax.tree_util.tree_map_with_path(one, model.abstract(config)[0])


def plain(parameters: dict, c: ModelConfig, tokens) -> np.ndarray:
  """The same model in float64 loops, for one sequence: [T] -> [T, V]."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), parameters)

  def norm(x, scale):
    return x / np.sqrt(np.mean(x**2) + c.norm_eps) * scale

  def turn(x, t):  # a pair of entries, half a head apart, is a complex number
    half = c.head_dim // 2
    angle = t * c.rope_theta ** (-np.arange(half) / half)
    z = (x[:half] + 1j * x[half:]) * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag])

  xs = [p['embed'][token] for token in tokens]
  for i in range(c.layers):
    b = jax.tree.map(lambda x, i=i: x[i], p['blocks'])
    a = b['attn']
    keys, values, after = [], [], []
    for t, x in enumerate(xs):
      x = norm(x, b['attn_norm']['scale'])
      q, k, v = (np.einsum('d,dnh->nh', x, a[name]) for name in 'qkv')
      if c.qkv_bias:
        q, k, v = q + a['q_bias'], k + a['k_bias'], v + a['v_bias']
      if c.qk_norm:
        q = [norm(head, a['q_norm']['scale']) for head in q]
        k = [norm(head, a['k_norm']['scale']) for head in k]
      keys.append([turn(head, t) for head in k])
      values.append(v)
      mixed = np.zeros((c.heads, c.head_dim))
      for n in range(c.heads):
        shared = n * c.kv_heads // c.heads
        scores = [turn(q[n], t) @ k[shared] / c.head_dim**0.5 for k in keys]
        weights = np.exp(scores - np.max(scores))
        for w, v in zip(weights / weights.sum(), values, strict=True):
          mixed[n] += w * v[shared]
      out = np.einsum('nh,nhd->d', mixed, a['o'])
      after.append(xs[t] + out + (a['o_bias'] if c.out_bias else 0))
    xs = []
    for x in after:
      y = norm(x, b['mlp_norm']['scale'])
      m = b['mlp']
      gate, up, down = (
        m.get(f'{name}_bias', 0.0) for name in ('gate', 'up', 'down')
      )  # biases
      gate, up = y @ m['gate'] + gate, y @ m['up'] + up
      xs.append(x + (gate / (1 + np.exp(-gate)) * up) @ m['down'] + down)
  head = p['embed'] if c.tied else p['head']
  return np.array([norm(x, p['norm']['scale']) @ head.T for x in xs])


def close(a, b, atol=1e-4):
  np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=atol)


def rows(*lengths: int, seed: int = 0) -> list[np.ndarray]:
  rng = np.random.default_rng(seed)
  return [rng.integers(0, LLAMA.vocab_size, n) for n in lengths]


@pytest.mark.parametrize('kind', KINDS)
def test_logits_are_those_of_the_formula_written_in_loops(kind):
  config = KINDS[kind]
  parameters = lively(config)
  (tokens,) = rows(9)
  expected = plain(parameters, config, tokens)
  assert expected.std() > 0.5  # or nothing is compared
  close(model.logits(parameters, config, tokens[None])[0], expected)


def test_shared_key_value_heads_are_repeated_ones():
  """A head that serves a group of queries equals that many copies of it."""
  parameters = lively(LLAMA)
  attn = dict(parameters['blocks']['attn'])
  for name in 'kv':
    attn[name] = jnp.repeat(attn[name], LLAMA.heads // LLAMA.kv_heads, axis=2)
  repeated = parameters | {'blocks': parameters['blocks'] | {'attn': attn}}
  config = dataclasses.replace(LLAMA, kv_heads=LLAMA.heads)
  (tokens,) = rows(9)
  close(
    model.logits(parameters, LLAMA, tokens[None]),
    model.logits(repeated, config, tokens[None]),
    atol=1e-5,
  )


@pytest.mark.parametrize('kind', ['llama', 'qwen3'])
def test_packed_rows_are_separate_rows(kind):
  """Segments do not see each other, and positions restart (J1)."""
  config = KINDS[kind]
  parameters = lively(config)
  parts = rows(5, 1, 7)
  packed = np.concatenate(parts)[None]
  segments = np.repeat([1, 2, 3], [5, 1, 7])[None]
  together = model.logits(parameters, config, packed, segments=segments)[0]
  apart = [model.logits(parameters, config, part[None])[0] for part in parts]
  close(together, np.concatenate(apart), atol=1e-5)


@pytest.mark.parametrize(
  'side, width',
  [('left', 16), ('right', 16), ('both', 64), ('left', 256), ('right', 256)],
)
def test_padding_changes_nothing(side, width):
  """B4: the same row padded to 16, 64, 256, on either side."""
  parameters = lively(LLAMA)
  (tokens,) = rows(11)
  before = {'left': width - 11, 'right': 0, 'both': (width - 11) // 2}[side]
  padded = np.full((1, width), 3)
  padded[0, before : before + 11] = tokens
  segments = np.zeros((1, width), int)
  segments[0, before : before + 11] = 1
  for dtype, atol in (('float32', 1e-4), ('bfloat16', 2e-2)):
    config = dataclasses.replace(LLAMA, dtype=dtype)
    alone = model.logits(parameters, config, tokens[None])[0]
    there = model.logits(parameters, config, padded, segments=segments)[0]
    assert np.isfinite(there).all()
    close(
      jax.nn.log_softmax(there[before : before + 11]),
      jax.nn.log_softmax(alone),
      atol=atol,
    )


def test_positions_given_are_the_positions_used():
  parameters = lively(LLAMA)
  tokens = np.stack(rows(6))
  as_counted = model.logits(parameters, LLAMA, tokens)
  spread = 3 * np.arange(6)[None]
  close(
    as_counted, model.logits(parameters, LLAMA, tokens, positions=np.arange(6)[None])
  )
  # Rotary attention sees distances only: a shift is nothing, a spread is something.
  shifted = model.logits(parameters, LLAMA, tokens, positions=np.arange(6)[None] + 40)
  close(as_counted, shifted)
  differs = model.logits(parameters, LLAMA, tokens, positions=spread) - as_counted
  assert np.abs(differs[0, 2:]).max() > 0.1


def test_gradients_tell_who_sees_whom():
  """A token hangs on its own segment up to itself, and on exactly nothing else."""
  parameters = lively(KINDS['untied'])
  tokens = jnp.arange(8, dtype=jnp.int32)[None]  # all different: a row of embed each
  segments = jnp.array([[0, 1, 1, 1, 2, 2, 0, 0]], jnp.int32)
  positions = jnp.array([[0, 0, 1, 2, 0, 1, 0, 1]], jnp.int32)

  def hidden(embed):
    decoder = model.decoder(KINDS['untied'], parameters | {'embed': embed})
    return jnp.sin(decoder.rows(tokens, segments, positions)[0]).sum(-1)

  slopes = jnp.abs(jax.jacrev(hidden)(parameters['embed'])).sum(-1)  # [T, V]
  expected = np.array(
    [
      [1, 0, 0, 0, 0, 0, 0, 0],
      [0, 1, 0, 0, 0, 0, 0, 0],
      [0, 1, 1, 0, 0, 0, 0, 0],
      [0, 1, 1, 1, 0, 0, 0, 0],
      [0, 0, 0, 0, 1, 0, 0, 0],
      [0, 0, 0, 0, 1, 1, 0, 0],
      [1, 0, 0, 0, 0, 0, 1, 0],  # padding sees padding only
      [1, 0, 0, 0, 0, 0, 1, 1],
    ]
  )
  assert ((np.asarray(slopes[:, :8]) > 1e-6) == expected).all()
  assert (np.asarray(slopes[:, :8])[expected == 0] == 0).all()
  assert (np.asarray(slopes[:, 8:]) == 0).all()


def table_model(table: np.ndarray) -> tuple[ModelConfig, dict]:
  """A model whose next token has distribution table[current token], whatever else.

  Attention and feed-forward add nothing, so the hidden state of id i is its one-hot
  embedding after the norm: sqrt(D) in place i.
  """
  v = len(table)
  config = ModelConfig(
    vocab_size=v,
    known_tokens=v,
    d_model=v,
    d_ff=2,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=2,
    norm_eps=1e-12,
    tied=False,
  )
  parameters = jax.tree.map(
    lambda shape: jnp.zeros(shape.shape), model.abstract(config)[0]
  )
  parameters['embed'] = jnp.eye(v)
  parameters['norm']['scale'] = jnp.ones(v)
  parameters['head'] = jnp.asarray(np.log(table).T / v**0.5, jnp.float32)
  return config, parameters


def test_a_logit_speaks_of_the_next_token():
  """B3: p(completion[0]) is predicted from the last prompt token, and so on."""
  table = np.array(
    [
      [0.20, 0.20, 0.20, 0.20, 0.20],
      [0.02, 0.08, 0.10, 0.30, 0.50],
      [0.05, 0.10, 0.15, 0.60, 0.10],  # after 2: 3 has 0.6
      [0.10, 0.30, 0.20, 0.15, 0.25],  # after 3: 4 has 0.25
      [0.70, 0.10, 0.05, 0.12, 0.03],  # after 4: 0, the end, has 0.7
    ]
  )
  config, parameters = table_model(table)
  row = np.array([1, 2, 3, 4, 0])  # prompt [1, 2], completion [3, 4, end]
  logp = np.asarray(
    jax.nn.log_softmax(model.logits(parameters, config, row[None])[0], axis=-1)
  )
  expected = np.log([0.6, 0.25, 0.7])
  close(logp[[1, 2, 3], row[2:]], expected)
  assert (np.abs(logp[[2, 3, 4], row[2:]] - expected) > 0.1).all()  # rolled by one


@pytest.mark.parametrize('kind', ['qwen2', 'qwen3'])
def test_steps_on_a_cache_are_whole_rows(kind):
  """One token at a time, in slots of different age, beside an idle one."""
  config = KINDS[kind]
  parameters = lively(config)
  tokens = np.stack(rows(10, 10, 10))
  whole = model.logits(parameters, config, tokens)
  cache_length, ahead = 12, np.array([4, 0, 12])  # slot 2 is idle: it writes nowhere
  decoder, layers = model.unrolled(config, model.by_layer(config, parameters))
  ones = jnp.ones((3, 10), jnp.int32)
  kv = decoder.prefill(layers, jnp.asarray(tokens, jnp.int32), ones)
  k, v = (np.stack(part) for part in zip(*kv, strict=True))
  # What lies past a slot's position is left over from others, and must not matter.
  fill = 9.0 * np.random.default_rng(1).standard_normal((2, 2, 3, cache_length, 2, 8))
  fill = fill.astype(np.float32)
  for slot in (0, 1):
    fill[0, :, slot, : ahead[slot]] = k[:, slot, : ahead[slot]]
    fill[1, :, slot, : ahead[slot]] = v[:, slot, : ahead[slot]]
  fill = np.swapaxes(fill, 3, 4)  # as the cache has it: heads before places
  cache = tuple((jnp.asarray(k), jnp.asarray(v)) for k, v in zip(*fill, strict=True))
  idle = [np.asarray(x)[2].copy() for pair in cache for x in pair]

  step = jax.jit(
    lambda tokens, positions, cache, used: decoder.step(
      layers, tokens, positions, cache, used=used
    ),
    static_argnums=3,
  )
  for i in range(6):
    positions = np.where(ahead < cache_length, ahead + i, cache_length)
    current = tokens[np.arange(3), np.minimum(positions, 9)]
    used = 8 if positions[0] < 8 else cache_length  # read no further than need be
    hidden, cache = step(
      jnp.asarray(current, jnp.int32), jnp.asarray(positions, jnp.int32), cache, used
    )
    out = model.head_logits(hidden, decoder.head_weight(), config)
    for slot in (0, 1):
      close(out[slot], whole[slot, positions[slot]])
  for before, after in zip(idle, (x for pair in cache for x in pair), strict=True):
    np.testing.assert_array_equal(before, np.asarray(after)[2])


def test_remat_changes_nothing():
  parameters = lively(LLAMA)
  tokens = jnp.asarray(np.stack(rows(12, 12)), jnp.int32)
  segments = jnp.repeat(jnp.array([[1, 2], [1, 0]], jnp.int32), 6, axis=1)
  positions = jnp.tile(jnp.arange(6), 2)[None].repeat(2, axis=0)

  def loss(parameters, remat):
    decoder = model.decoder(LLAMA, parameters)
    return jnp.sum(jnp.sin(decoder.rows(tokens, segments, positions, remat=remat)))

  grad = jax.jit(jax.grad(loss), static_argnums=1)
  for a, b in zip(
    jax.tree.leaves(grad(parameters, False)),
    jax.tree.leaves(grad(parameters, True)),
    strict=True,
  ):
    close(a, b, atol=1e-5 * np.abs(a).max())


def test_spare_rows_are_never_predicted():
  """C6: 151,936 rows, 151,665 known ids; the normaliser leaves out the spare ones."""
  config = ModelConfig(
    vocab_size=151_936,
    known_tokens=151_665,
    d_model=2,
    d_ff=2,
    layers=1,
    heads=1,
    kv_heads=1,
    head_dim=2,
    tied=False,
  )
  parameters = model.init(config, 0)
  parameters['head'] = jnp.zeros_like(parameters['head'])  # uniform
  logp = jax.nn.log_softmax(model.logits(parameters, config, [[5]])[0, 0])
  # With the spare rows it would be -log(151936), 0.0018 lower.
  close(logp[:151_665], np.full(151_665, -np.log(151_665)), atol=1e-5)
  assert (np.exp(logp[151_665:]) == 0).all()


def test_spare_rows_get_no_gradient_and_spoil_none():
  config = dataclasses.replace(KINDS['untied'], known_tokens=29)
  parameters = lively(config)
  tokens = np.stack(rows(8)) % 29

  def loss(parameters):
    return -jax.nn.log_softmax(model.logits(parameters, config, tokens))[..., 7].sum()

  grad = jax.grad(loss)(parameters)
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(grad))
  assert (np.asarray(grad['head'])[29:] == 0).all()
  assert (np.abs(np.asarray(grad['head'])[:29]).sum(1) > 0).all()


def test_tied_stays_tied():
  """I1: one array, its gradient the sum of both uses, before and after a step."""
  tied, untied = LLAMA, KINDS['untied']
  parameters = lively(tied)
  assert 'head' not in parameters
  tokens = np.stack(rows(8))

  def loss(parameters, config):
    logp = jax.nn.log_softmax(model.logits(parameters, config, tokens))
    return -logp[0, jnp.arange(7), tokens[0, 1:]].mean()

  grad = jax.grad(loss)(parameters, tied)
  apart = jax.grad(loss)(parameters | {'head': parameters['embed']}, untied)
  close(grad['embed'], apart['embed'] + apart['head'], atol=1e-5)
  after = jax.tree.map(lambda w, g: w - 0.1 * g, parameters, grad)
  assert 'head' not in after
  as_untied = after | {'head': after['embed']}
  close(
    model.logits(after, tied, tokens),
    model.logits(as_untied, untied, tokens),
    atol=1e-5,
  )
  assert loss(after, tied) < loss(parameters, tied)


@pytest.mark.parametrize('kind', KINDS)
def test_abstract_is_the_shape_of_what_init_makes(kind):
  shapes, axes = model.abstract(KINDS[kind])
  made = model.init(KINDS[kind], 0)
  like = jax.tree.map(lambda x: (x.shape, x.dtype), made)
  assert like == jax.tree.map(lambda x: (x.shape, x.dtype), shapes)
  assert all(x.dtype == np.float32 for x in jax.tree.leaves(made))
  names = jax.tree.map(
    lambda shape, names: len(shape.shape) == len(names),
    shapes,
    axes,
    is_leaf=lambda x: isinstance(x, tuple),
  )
  assert all(jax.tree.leaves(names))


def test_init_is_a_function_of_the_seed_and_layers_differ():
  a, b, c = (model.init(LLAMA, seed) for seed in (0, 0, 1))
  same = jax.tree.map(np.array_equal, a, b)
  assert all(jax.tree.leaves(same))
  assert not np.array_equal(a['embed'], c['embed'])
  q = a['blocks']['attn']['q']
  assert not np.array_equal(q[0], q[1])
  assert not np.array_equal(q, c['blocks']['attn']['q'])


def test_fresh_models_are_nearly_uniform():
  """Otherwise the first losses are above log V."""
  logp = jax.nn.log_softmax(model.logits(model.init(LLAMA, 0), LLAMA, [[1, 2, 3]]))
  close(logp, np.full(logp.shape, -np.log(32)), atol=0.4)


@pytest.mark.parametrize(
  'kind, shape',
  [
    ('qwen2', (8, 1, 1)),
    ('qwen2', (2, 2, 2)),
    ('qwen3', (1, 8, 1)),
    ('qwen3', (1, 4, 2)),
    ('qwen3', (1, 1, 2)),
  ],
)
def test_a_mesh_gives_what_one_device_gives(kind, shape):
  config = KINDS[kind]
  parameters = lively(config)
  tokens = np.stack(rows(*[6] * 8))
  expected = model.logits(parameters, config, tokens)
  mesh = meshes.make_mesh(**dict(zip(('data', 'fsdp', 'model'), shape, strict=True)))
  shardings = meshes.parameter_shardings(*model.abstract(config), mesh)
  spread = jax.device_put(parameters, shardings)
  placed = jax.device_put(tokens, meshes.sharding(mesh, 'rows', None))
  close(model.logits(spread, config, placed), expected, atol=2e-5)


def test_every_parameter_but_norms_is_cut_by_a_full_mesh():
  """What is whole on every device does not scale."""
  mesh = meshes.make_mesh(data=2, fsdp=2, model=2)
  shardings = meshes.parameter_shardings(*model.abstract(KINDS['untied']), mesh)
  for path, sharding in jax.tree_util.tree_flatten_with_path(shardings)[0]:
    used = {name for name in sharding.spec if name is not None}
    norm, embed = path[-1].key == 'scale', ('fsdp', 'sequence')
    expected = {embed} if norm else {embed, 'model'}
    assert used == expected, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
  'sizes, changes, words',
  [
    (dict(model=4), {}, ["'k'", '2 kv_heads', 'model=4']),
    (dict(model=8), dict(kv_heads=4), ["'k'", '4 kv_heads', 'model=8']),
    (dict(fsdp=8), dict(d_model=20), ["'k'", '20 embed', 'fsdp=8']),
    (dict(model=2), dict(d_ff=25), ["'down'", '25 mlp', 'model=2']),
    (dict(model=2), dict(vocab_size=33), ["'embed'", '33 vocab', 'model=2']),
  ],
)
def test_a_mesh_that_does_not_divide_is_refused_by_name(sizes, changes, words):
  config = dataclasses.replace(LLAMA, **changes)
  with pytest.raises(ValueError) as error:
    meshes.parameter_shardings(*model.abstract(config), meshes.make_mesh(**sizes))
  assert '\n' not in str(error.value)
  assert all(word in str(error.value) for word in words), error.value


def test_a_mesh_of_more_devices_than_there_are_is_refused():
  with pytest.raises(ValueError, match=r'data=4 \* fsdp=2 \* model=2 = 16 .* 1 to 8'):
    meshes.make_mesh(data=4, fsdp=2, model=2)
  with pytest.raises(ValueError, match='model=0'):
    meshes.make_mesh(model=0)


@pytest.mark.parametrize(
  'changes, words',
  [
    (dict(kv_heads=3), 'model.kv_heads: 3, expected a divisor of heads=4'),
    (dict(known_tokens=33), 'model.known_tokens: 33, expected 1 to vocab_size=32'),
    (dict(known_tokens=0), 'model.known_tokens: 0'),
    (dict(head_dim=7), 'model.head_dim: 7, expected an even number'),
  ],
)
def test_a_model_that_cannot_be_is_refused(changes, words):
  with pytest.raises(ValueError, match=words):
    dataclasses.replace(LLAMA, **changes)
