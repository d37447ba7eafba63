"""What is read out of compiled programs, against paper; and what they are to show."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
import toys

from jaxrl_sched.device import compiled, hlo, slots
from jaxrl_sched.device import learner as learning
from jaxrl_sched.device import mesh as meshes

# As the TPU's compiler writes: a loop of 6 with a step of 2; in it another that turns 5
# times by its own word, and one that nothing is said of. An all-gather in two pieces of
# one channel; a product of 3 matrices as a convolution whose window is the batch.
TEXT = """\
HloModule jit_f, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[]{:T(128)} parameter(0)
  %b = f32[]{:T(128)} parameter(1)
  ROOT %add.0 = f32[]{:T(128)} add(%a, %b)
}

%begun (param_0: bf16[2,8]) -> bf16[16,8] {
  %param_0 = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.1 = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_0), \
channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
}

%ended (param_1: bf16[2,8]) -> bf16[16,8] {
  %param_1 = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(0)
  ROOT %all-gather.2 = bf16[16,8]{1,0:T(8,128)(2,1)S(1)} all-gather(%param_1), \
channel_id=7, replica_groups=[1,8]<=[8], dimensions={0}
}

%all-reduce-scatter.1 (param_2: f32[16,4]) -> f32[2,4] {
  %param_2 = f32[16,4]{1,0:T(8,128)} parameter(0)
  %all-reduce.1 = f32[16,4]{1,0:T(8,128)} all-reduce(%param_2), channel_id=8, \
to_apply=%sum
  ROOT %slice.1 = f32[2,4]{1,0:T(2,128)} slice(%all-reduce.1), slice={[0:2], [0:4]}
}

%five (p.5: (s32[])) -> pred[] {
  %p.5 = (s32[]) parameter(0)
  ROOT %odd.1 = pred[] custom-call(%p.5), custom_call_target="unknown"
}

%inner (p.6: (s32[])) -> (s32[]) {
  %p.6 = (s32[]) parameter(0)
  %x = f32[4,2]{1,0} constant({...})
  %y = f32[2,3]{1,0} constant({...})
  %dot.1 = f32[4,3]{1,0} dot(%x, %y), lhs_contracting_dims={1}, \
rhs_contracting_dims={0}
  ROOT %same.1 = (s32[]) tuple(%p.6)
}

%body (p.1: (s32[], bf16[2,8])) -> (s32[], bf16[2,8]) {
  %p.1 = (s32[]{:T(128)}, bf16[2,8]{1,0:T(8,128)(2,1)}) parameter(0)
  %i.1 = s32[]{:T(128)} get-tuple-element(%p.1), index=0
  %v.1 = bf16[2,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p.1), index=1
  %two = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i.1, %two)
  %fusion.1 = bf16[16,8]{1,0} fusion(%v.1), kind=kCustom, calls=%begun
  %fusion.2 = bf16[16,8]{1,0} fusion(%v.1), kind=kCustom, calls=%ended
  %permute-start.1 = (bf16[2,8]{1,0}, bf16[2,8]{1,0}, u32[]{:S(2)}) \
collective-permute-start(%v.1), channel_id=9, source_target_pairs={{0,1},{1,0}}
  %permute-done.1 = bf16[2,8]{1,0} collective-permute-done(%permute-start.1)
  %t.1 = (s32[]) tuple(%i.1)
  %while.2 = (s32[]) while(%t.1), condition=%five, body=%inner, \
backend_config={"known_trip_count":{"n":"5"}}
  %while.3 = (s32[]) while(%t.1), condition=%five, body=%inner
  ROOT %out.1 = (s32[]{:T(128)}, bf16[2,8]{1,0}) tuple(%next, %v.1)
}

%condition (p.2: (s32[], bf16[2,8])) -> pred[] {
  %end = s32[]{:T(128)} constant(6), metadata={op_name="while/cond"}
  %p.2 = (s32[]{:T(128)}, bf16[2,8]{1,0}) parameter(0)
  %i.2 = s32[]{:T(128)} get-tuple-element(%p.2), index=0
  ROOT %lt.1 = pred[]{:T(512)} compare(%i.2, %end), direction=LT
}

ENTRY %main.1 (a.1: bf16[2,8], a.2: f32[16,4], a.3: bf16[3,5,7], a.4: bf16[3,7,9]) -> \
f32[2,4] {
  %a.1 = bf16[2,8]{1,0:T(8,128)(2,1)} parameter(0)
  %a.2 = f32[16,4]{1,0:T(8,128)} parameter(1)
  %a.3 = bf16[3,5,7]{2,1,0} parameter(2)
  %a.4 = bf16[3,7,9]{2,1,0} parameter(3)
  %zero = s32[]{:T(128)} constant(0)
  %t.2 = (s32[]{:T(128)}, bf16[2,8]{1,0}) tuple(%zero, %a.1)
  %while.1 = (s32[]{:T(128)}, bf16[2,8]{1,0}) while(%t.2), condition=%condition, \
body=%body
  %convolution.1 = f32[3,5,9]{2,1,0} convolution(%a.3, %a.4), \
window={size=3 stride=2 pad=0_0 lhs_dilate=3}, dim_labels=0bf_0io->0bf
  ROOT %fusion.3 = f32[2,4]{1,0} fusion(%a.2), kind=kCustom, \
calls=%all-reduce-scatter.1
}
"""


def test_collectives_are_counted_as_often_as_they_run():
  """3 turns of the loop; the gather's two pieces are one, and its bytes the whole."""
  found = hlo.read(TEXT).collectives
  assert found == {
    'all-gather': (3, 3 * 16 * 8 * 2),
    'collective-permute': (3, 3 * 2 * 8 * 2),
    'reduce-scatter': (1, 16 * 4 * 4),
  }


@pytest.mark.parametrize('trips', [1, 10])
def test_flops_are_counted_as_often_as_they_run(trips):
  """A batch of 3 products of [5, 7] and [7, 9], and inside the loops one of 4, 2, 3."""
  of_loops = 3 * (5 + trips) * 2 * 4 * 2 * 3
  assert hlo.read(TEXT, trips=trips).flops == 3 * 2 * 5 * 7 * 9 + of_loops


def test_a_batch_is_a_window_that_meets_each_entry_once():
  """Else 3 x 3 pairs would be counted for 3 products."""
  assert hlo._positions(0, 'size=3 stride=2 pad=0_0 lhs_dilate=3', 3, 3, 3) == 3
  assert hlo._positions(0, 'size=3 pad=2_2 rhs_reversal=1', 4, 3, 6) == 12
  assert hlo._positions(0, 'size=2', 2, 2, 1) == 2
  assert hlo._positions(1, 'size=1x2 pad=0_0x1_1', 3, 2, 4) == 6


def test_what_is_no_program_is_refused():
  with pytest.raises(ValueError, match='ENTRY'):
    hlo.read('HloModule nothing')


def test_flops_of_a_program_are_those_on_paper():
  """4 layers of [8, 16] x [16, 16], as XLA compiles them here."""
  x, w = (jax.ShapeDtypeStruct(s, 'float32') for s in ((8, 16), (4, 16, 16)))
  program = jax.jit(lambda x, w: jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0])
  found = compiled.compile_program(program, (x, w))
  assert found.flops == 4 * 2 * 8 * 16 * 16
  assert found.arguments == 4 * (8 * 16 + 4 * 16 * 16)
  assert found.outputs == 4 * 8 * 16 and not found.collectives


MESSAGE = """\
RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.12G of 15.75G hbm. \
Exceeded hbm capacity by 4.37G.

  Largest program allocations in hbm:

  1. Size: 9.27G
     Operator: op_name="jit(f)/dot_general" source_file="f.py" source_line=3
     Shape: f32[16384,151936]{1,0:T(8,128)}
     Unpadded size: 9.27G
     Allocation type: HLO temp
     ==========================

  2. Size: 512.00M
     Shape: bf16[2048,131072]{1,0:T(8,128)(2,1)}
     XLA label: copy.5 = copy(fusion.3)
     ==========================
"""


def test_the_compilers_complaint_is_read():
  error = compiled.DoesNotFit(MESSAGE)
  assert (error.needed, error.available) == ('20.12G', '15.75G')
  assert error.largest == [
    '9.27G f32[16384,151936] jit(f)/dot_general',
    '512.00M bf16[2048,131072] copy.5',
  ]
  short = compiled.DoesNotFit(
    'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO '
    'temporaries (17.91G) exceeds available HBM (15.75G).'
  )
  assert (short.needed, short.available, short.largest) == ('17.91G', '15.75G', [])


# --- what lies where --------------------------------------------------------------


@pytest.fixture(scope='module')
def mesh():
  return meshes.make_mesh(fsdp=2, sequence=2, model=2)


@pytest.fixture(scope='module')
def programs(mesh):
  return learning.Programs(
    toys.CONFIG,
    mesh=mesh,
    rows=2,
    row_tokens=32,
    optimizer=dict(learning_rate=1e-3, steps=9),
    loss=learning.Loss(),
    temperature=1.0,
    remat=False,
    seed=0,
  )


def parts(shapes, shardings):
  """Of each array its path and into how many parts the devices hold it."""
  found = {}
  leaves = jax.tree_util.tree_leaves_with_path(shapes)
  for (path, x), at in zip(leaves, jax.tree.leaves(shardings), strict=True):
    name = jax.tree_util.keystr(path)
    found[name] = math.prod(x.shape) // math.prod(at.shard_shape(x.shape))
  return found


def expected(shapes):
  """Matrices are cut along D over fsdp and sequence and along another axis over model;
  norms, which have D alone, over fsdp and sequence; the counter not at all."""

  def of(path, x):
    if x.ndim == 0:
      return 1
    return 4 if 'scale' in jax.tree_util.keystr(path) else 8

  leaves = jax.tree_util.tree_leaves_with_path(shapes)
  return {jax.tree_util.keystr(path): of(path, x) for path, x in leaves}


def test_neither_weights_nor_optimizer_are_ever_replicated(programs):
  """As compiled for 8 devices: what goes in, and what comes out."""
  arguments = programs.arguments()
  state, gradient, _, _ = arguments['apply']
  assert len(jax.tree.leaves(state)) == 3 * len(jax.tree.leaves(gradient)) + 1
  apply = programs.apply.lower(*arguments['apply']).compile()
  of_state, of_gradient, _, _ = apply.input_shardings[0]
  assert parts(state, of_state) == expected(state)
  assert parts(gradient, of_gradient) == expected(gradient)
  assert parts(state, apply.output_shardings[0]) == expected(state)
  first = programs.gradient.lower(*arguments['gradient']).compile()
  weights, _, _, batch = first.input_shardings[0]
  assert parts(gradient, weights) == expected(gradient)
  assert parts(gradient, first.output_shardings[0]) == expected(gradient)
  shapes = programs.batch(learning.Batch)
  assert set(parts(shapes, batch).values()) == {
    4
  }  # rows over fsdp, tokens over sequence


def test_bytes_on_a_device_are_those_on_paper(programs):
  """Weights and two moments, float32: V D + L (2 D N H + 2 D K H + 3 D F) of them in 8
  parts, and (2 L + 1) D of norms in 4; and a counter."""
  d, f, layers, v = 16, 32, 2, 304
  matrices = v * d + layers * (2 * d * 4 * 8 + 2 * d * 2 * 8 + 3 * d * f)
  norms = (2 * layers + 1) * d
  total = 3 * 4 * (matrices // 8 + norms // 4) + 4
  assert compiled.bytes_of(programs.state) == total
  name, largest = compiled.by_name(programs.state)[0]
  assert 'embed' in name and largest == 4 * v * d // 8


def test_what_a_microbatch_cannot_be_cut_into_is_refused(mesh):
  how = dict(
    mesh=mesh,
    optimizer=dict(learning_rate=1e-3, steps=9),
    loss=learning.Loss(),
    temperature=1.0,
    remat=False,
    seed=0,
  )
  with pytest.raises(
    ValueError, match=r'learner.rows: 3, expected a multiple of .*= 2'
  ):
    learning.Programs(toys.CONFIG, rows=3, row_tokens=32, **how)
  with pytest.raises(ValueError, match=r'row_tokens: 31, .* sequence = 2'):
    learning.Programs(toys.CONFIG, rows=2, row_tokens=31, **how)


def test_shapes_are_those_of_training(programs, mesh):
  """What a learner and slots that hold arrays have is what their programs say."""
  learner = learning.Learner(
    toys.parameters(),
    toys.CONFIG,
    mesh=mesh,
    rows=2,
    row_tokens=32,
    optimizer=dict(learning_rate=1e-3, steps=9),
    loss=learning.Loss(),
  )
  how = dict(cache_length=64, chunk=4, mesh=mesh, prefill_rows=4)
  held = slots.Slots(slots.Programs(toys.CONFIG, 8, **how), seed=0)

  def same(shape, array):
    assert (shape.shape, shape.dtype) == (array.shape, array.dtype)
    assert shape.sharding.is_equivalent_to(array.sharding, array.ndim)

  jax.tree.map(same, programs.state, learner.state)
  jax.tree.map(same, held.programs.cache, held._cache)
  jax.tree.map(same, held.programs.state, held._state)


def test_a_hand_over_gives_what_slots_take(mesh):
  config = dataclasses.replace(toys.CONFIG, dtype='bfloat16')
  shapes = slots.weights_of(config, mesh)
  assert {x.dtype for x in jax.tree.leaves(shapes['layers'])} == {jnp.bfloat16.dtype}
  assert len(shapes['layers']) == config.layers
  embed = shapes['embed']
  assert embed.sharding.shard_shape(embed.shape) == (152, 16)  # V over model, D whole
