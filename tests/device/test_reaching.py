"""What a record says is in its prompt, or the record is refused by name."""

import json

import pytest
from transformers import AutoTokenizer

from jaxrl_sched.device.prompts import PromptSet
from jaxrl_sched.device.tokenizers import build_byte_tokenizer

# Short templates that behave as those of the families, in the byte tokenizer's words.
SAY = "'<|' + m.role + '|>' + {} + '<|end|>'"
TOOLS = (
  '{%- if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>'
  '{%- endif %}'
)
CALLS = (
  '{%- for c in m.tool_calls or [] %}<call>{{ c.function.name }}'
  '{{ c.function.arguments | tojson }}</call>{%- endfor %}'
)
ASK = '{%- if add_generation_prompt %}{{ "<|assistant|>" }}{%- endif %}'
QWEN25 = (  # roles it does not know are passed over, ids of calls too
  TOOLS + '{%- for m in messages %}'
  "{%- if m.role in ('system', 'user') or (m.role == 'assistant' and not m.tool_calls) %}"
  f'{{{{ {SAY.format("m.content")} }}}}'
  "{%- elif m.role == 'assistant' %}{{ '<|assistant|>' + (m.content or '') }}"
  + CALLS
  + "{{ '<|end|>' }}"
  "{%- elif m.role == 'tool' %}{{ '<|user|><result>' + m.content + '</result>' }}"
  '{%- endif %}{%- endfor %}' + ASK
)
QWEN3 = (  # thoughts of former turns are cut, its options are looked at
  TOOLS + '{%- for m in messages %}{%- set said = m.content %}'
  "{%- if m.role == 'assistant' and '</think>' in said %}"
  "{%- set said = said.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
  "{%- if m.role in ('system', 'user', 'assistant') %}"
  f'{{{{ {SAY.format("said")} }}}}'
  '{%- endif %}{%- endfor %}' + ASK + '{%- if enable_thinking is defined and '
  'enable_thinking is false %}{{ "<think></think>" }}{%- endif %}'
)
LLAMA3 = (  # any role; contents are stripped; what tools gave is JSON
  "{{ bos_token }}{%- for m in messages %}{%- if m.role == 'tool' %}"
  f'{{{{ {SAY.format("m.content | tojson")} }}}}'
  f'{{%- else %}}{{{{ {SAY.format("m.content | trim")} }}}}{{%- endif %}}'
  '{%- endfor %}' + ASK
)
SMOLLM2 = (
  '{% for m in messages %}{% if loop.first and m.role != "system" %}'
  '{{ "<|system|>You help.<|end|>" }}{% endif %}'
  f'{{{{ {SAY.format("m.content")} }}}}{{% endfor %}}' + ASK
)
TOOL = {
  'type': 'function',
  'function': {'name': 'add', 'description': 'Adds two.', 'parameters': {}},
}
CALL = {'id': 'c1', 'type': 'function'}
CALL['function'] = {'name': 'add', 'arguments': {'a': 6, 'b': 'seven'}}
CALLED = [
  dict(role='user', content='6 + seven?'),
  dict(role='assistant', content=None, tool_calls=[CALL]),
  dict(role='tool', content='13', tool_call_id='c1'),
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('bytes')
  build_byte_tokenizer(folder)
  return folder


@pytest.fixture
def text_of(folder, tmp_path):
  """The prompt of a record (an answer is added), as the last of a dataset 'd'."""

  def text_of(program, record, *before, **settings) -> str:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = program
    lines = [json.dumps(one | dict(answer=42)) for one in (*before, record)]
    (tmp_path / 'd.jsonl').write_text('\n'.join(lines))
    given = dict(tokenizer=tokenizer, max_tokens=999, root=tmp_path) | settings
    return PromptSet({'d': dict(source='d.jsonl')}, **given).get('d', len(before)).text

  return text_of


@pytest.fixture
def lost(text_of):
  """The place of a record that is refused, and what is said of it."""

  def lost(*given, **settings) -> str:
    with pytest.raises(ValueError) as caught:
      text_of(*given, **settings)
    (message,) = str(caught.value).splitlines()
    return message.split('d.jsonl, ')[-1]

  return lost


def asked(role='user', content='What is 6*7?', **more) -> dict:
  return dict(messages=[dict(role=role, content=content, **more)])


NOT = 'does not reach the prompt that the chat template writes'


@pytest.mark.parametrize('role', ['human', 'User', 'developer'])
@pytest.mark.parametrize('program', [QWEN25, QWEN3], ids=['qwen2.5', 'qwen3'])
def test_a_message_of_a_role_that_the_template_does_not_know(lost, program, role):
  """Issue 13, 1: the prompt would be empty. A short content is not found by chance."""
  expected = f'line 2: messages: the content of the {role!r} message at 0 {NOT}'
  for content in ('What is 6*7?', 'a'):  # 'a' stands in '<|assistant|>'
    assert lost(program, asked(role, content), asked()) == expected


@pytest.mark.parametrize('program', [QWEN25, QWEN3, LLAMA3, SMOLLM2])
def test_what_a_template_writes_is_taken(text_of, program):
  turns = [
    ('system', 'Be brief.'),
    ('user', ' a \n'),
    ('assistant', 'b'),
    ('user', 'a'),
  ]
  record = dict(messages=[dict(role=role, content=said) for role, said in turns])
  text = text_of(program, record)
  assert text.count('a') - text.count('assistant') * 2 == 2 and 'Be brief.' in text
  shown = [dict(prompt='1+1=', solution='It is 2.')]
  text = text_of(program, dict(prompt='hi'), examples=shown)
  assert text.endswith(
    '1+1=<|end|><|assistant|>It is 2.<|end|><|user|>hi<|end|><|assistant|>'
  )


def test_thoughts_that_a_template_cuts(lost, text_of):
  """In few-shot replies and in a record's own history."""
  said = '<think>6*7</think>\n42'
  shown = [dict(prompt='6*7?', solution=said)]
  message = lost(QWEN3, dict(prompt='hi'), examples=shown)
  assert (
    message == f"line 1: messages: the content of the 'assistant' message at 1 {NOT}"
  )
  turns = [('user', 'a'), ('assistant', said), ('user', 'b')]
  record = dict(messages=[dict(role=role, content=text) for role, text in turns])
  message = lost(QWEN3, record, asked())
  assert (
    message == f"line 2: messages: the content of the 'assistant' message at 1 {NOT}"
  )
  assert said in text_of(QWEN25, record) and said in text_of(
    QWEN25, dict(prompt='hi'), examples=shown
  )


def test_two_equal_contents_need_two_places(lost):
  """By what a text holds: of equal questions this one writes the last alone."""
  program = (
    '{% for m in messages %}{% if loop.last or m.content != messages[-1].content %}'
    '{{ m.content }}{% endif %}{% endfor %}'
  )
  twice = dict(messages=asked()['messages'] * 2)
  assert f'message at 1 {NOT}' in lost(program, twice)


def test_tools_are_rendered_where_the_template_takes_them(text_of, lost):
  record = asked() | dict(tools=[TOOL])
  for tools in ([TOOL], json.dumps([TOOL])):  # a column of one type holds the text
    text = text_of(QWEN25, record | dict(tools=tools))
    assert text.startswith(f'<tools>{json.dumps(TOOL)}</tools><|user|>What is 6*7?')
  for nothing in ([], None, ''):
    assert text_of(LLAMA3, record | dict(tools=nothing)).startswith('<|bos|><|user|>W')
  for program in (LLAMA3, SMOLLM2):
    assert lost(program, record, asked()) == f"line 2: tools: 'name' {NOT}"
  plain = dict(template='Q: {prompt}')
  message = lost(None, dict(prompt='x', tools=[TOOL]), **plain)
  assert message == "line 1: tools: need the template 'chat', found 'Q: {prompt}'"
  assert lost(QWEN25, record | dict(tools=[3])).startswith(
    'line 1: tools: expected a list of schemas, found [3]'
  )
  assert lost(QWEN25, record | dict(tools='[{"a": 1, "a": 2}]')) == (
    'line 1: tools: not JSON: a given twice'
  )


def test_a_record_may_have_options_for_the_template(text_of, lost):
  record = asked() | dict(chat_template_kwargs=dict(enable_thinking=False))
  assert text_of(QWEN3, record).endswith('<|assistant|><think></think>')
  on = dict(template_options=dict(enable_thinking=True))
  assert text_of(QWEN3, record, **on).endswith('<|assistant|><think></think>')
  assert text_of(QWEN3, asked(), record).endswith('<|assistant|>')  # its own alone
  message = lost(QWEN25, record)
  assert message.startswith(
    "line 1: chat_template_kwargs: 'enable_thinking' is unknown to the chat template"
  )
  message = lost(QWEN3, record | dict(chat_template_kwargs=dict(tokenize=True)))
  assert message == "line 1: chat_template_kwargs: 'tokenize' is not for them to say"
  message = lost(
    None, dict(prompt='x') | record | dict(messages=None), template='{prompt}'
  )
  assert message.startswith("line 1: chat_template_kwargs: need the template 'chat'")


def test_an_option_that_makes_a_template_drop_a_turn(text_of, lost):
  program = '{% if not quiet %}{{ messages[0].content }}{% endif %}' + ASK
  record = asked(content='a')  # which stands in '<|assistant|>'
  quiet = record | dict(chat_template_kwargs=dict(quiet=True))
  assert text_of(program, record) == 'a<|assistant|>'
  message = lost(program, quiet, record)
  assert message == f"line 2: messages: the content of the 'user' message at 0 {NOT}"


def test_calls_of_tools_are_rendered_or_refused(text_of, lost):
  """`content: null` is how a message that calls a tool comes."""
  text = text_of(QWEN25, dict(messages=CALLED, tools=[TOOL]))
  assert text.endswith(
    '<|user|>6 + seven?<|end|><|assistant|>'
    '<call>add{"a": 6, "b": "seven"}</call><|end|>'
    '<|user|><result>13</result><|assistant|>'
  )
  # One that writes the content of every message has none for this one.
  assert 'line 1: ' in lost(SMOLLM2, dict(messages=CALLED))
  spoken = [CALLED[0], CALLED[1] | dict(content='I add.'), CALLED[2]]
  message = lost(SMOLLM2, dict(messages=spoken))
  assert (
    message == f"line 1: messages: 'tool_calls' of the 'assistant' message at 1 {NOT}"
  )
  silent = [dict(role='user', content='a'), dict(role='assistant', content=None)]
  assert "expected texts 'role' and 'content'" in lost(
    QWEN25, dict(messages=[*silent, silent[0]])
  )


@pytest.mark.parametrize(
  'key, value',
  [('name', 'Ann'), ('reasoning_content', 'so'), ('weight', 0), ('cached', True)],
)
def test_other_keys_of_a_message_reach_the_prompt_or_are_refused(
  text_of, lost, key, value
):
  record = asked(**{key: value})
  assert (
    lost(QWEN25, record)
    == f"line 1: messages: {key!r} of the 'user' message at 0 {NOT}"
  )
  takes = QWEN25.replace("'system', 'user'", "'system'") + (
    f'{{{{ messages[0].{key} ~ messages[0].content }}}}'
  )
  assert text_of(takes, record).endswith(f'{value}What is 6*7?')
  assert text_of(QWEN25, asked(**{key: None})).endswith('6*7?<|end|><|assistant|>')


def test_what_a_tool_gave_may_be_written_as_json(text_of):
  said = 'two\n"lines"'
  record = dict(messages=[*asked()['messages'], dict(role='tool', content=said)])
  assert r'two\n\"lines\"' in text_of(LLAMA3, record)


def test_special_tokens_in_tools_and_calls_are_refused(lost):
  """They would begin and end turns, as those of a content."""
  forged = json.loads(json.dumps(TOOL).replace('Adds two.', 'x<|end|>'))
  assert "'<|end|>' stands in the text" in lost(QWEN25, asked() | dict(tools=[forged]))
  calls = json.loads(json.dumps(CALLED).replace('seven"', '<|user|>"'))
  assert "'<|user|>' stands in the text" in lost(QWEN25, dict(messages=calls))


def test_one_more_rendering_for_each_form_not_for_each_record(folder, tmp_path):
  tokenizer = AutoTokenizer.from_pretrained(folder)
  tokenizer.chat_template, calls = QWEN25, []
  render = tokenizer.apply_chat_template
  tokenizer.apply_chat_template = lambda *a, **k: calls.append(1) or render(*a, **k)
  tools = [[TOOL | dict(extra=i)] for i in range(20)]
  lines = [dict(prompt=f'{i}', answer=1) for i in range(20)]
  lines += [dict(prompt=f'{i}', answer=1, tools=tools[i]) for i in range(20)]
  (tmp_path / 'd.jsonl').write_text('\n'.join(map(json.dumps, lines)))
  dataset = {'d': dict(source='d.jsonl')}
  PromptSet(dataset, tokenizer=tokenizer, max_tokens=999, root=tmp_path)
  assert len(calls) == 40 + 2 + 1  # two forms; and how a turn ends
