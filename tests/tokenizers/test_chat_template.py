"""Chat templates: the layouts of published models, and hostile templates."""

import json
import sys
import time
import tracemalloc

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Library

from transformer_jax import load_tokenizer_folder
from transformer_jax.tokenizers.chat_template import BUDGET, TEMPLATE_LIMIT, render
from transformer_jax.tokenizers.pretrained import PretrainedTokenizer
from transformer_jax.tokenizers.utf8 import DataError, byte_letters

SYSTEM = {"role": "system", "content": "Be brief."}
TALK = [
    {"role": "user", "content": " Hi, <b>é</b> "},
    {"role": "assistant", "content": "Hello\n"},
    {"role": "user", "content": "Bye"},
]

# Layouts that published models were trained on: a short template, and its expected output for
# [SYSTEM, *TALK] with the generation prompt.
LAYOUTS = {
    "ChatML": (
        """{% for message in messages %}
{{- '<|im_start|>' ~ message.role + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' -}}
{% endif %}
""",
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n Hi, <b>é</b> <|im_end|>\n"
        "<|im_start|>assistant\nHello\n<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "Llama 2": (
        """{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}
{% set system = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}
{% else %}{% set rest = messages %}{% set system = '' %}{% endif %}
{% for m in rest %}
{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Roles must alternate user/assistant') }}
{% endif %}
{% set content = system + m['content'] if loop.first else m['content'] %}
{% if m['role'] == 'user' %}
{{- bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- else %}
{{- ' '  + content | trim + ' ' + eos_token }}
{%- endif %}
{% endfor %}""",
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\n Hi, <b>é</b> [/INST] Hello </s>"
        "<s>[INST] Bye [/INST]",
    ),
    "Llama 3": (
        """{{- bos_token }}
{%- set ns = namespace(count=0) %}
{%- for message in messages %}
    {%- set ns.count = ns.count + 1 %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'
        + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt is defined and add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
        "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi, <b>é</b><|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nHello<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "Mistral": (
        """{%- if messages[0]["role"] == "system" %}
    {%- set system = messages[0]["content"] %}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{{- bos_token }}
{%- if tools is not none and tools %}{{- "[AVAILABLE_TOOLS] [" }}
    {%- for tool in tools %}{{- tool.function | tojson }}{{ ", " if not loop.last }}{% endfor %}
    {{- "][/AVAILABLE_TOOLS]" }}
{%- endif %}
{%- for m in loop_messages %}
    {%- if m["role"] == "user" %}
        {%- if loop.last and system is defined %}
            {{- "[INST] " + system + "\n\n" + m["content"] + "[/INST]" }}
        {%- else %}
            {{- "[INST] " + m["content"] + "[/INST]" }}
        {%- endif %}
    {%- elif m["role"] == "assistant" and m.content is defined %}
        {{- " " + m["content"] | trim + eos_token }}
    {%- else %}
        {{- raise_exception("Only user and assistant roles are supported!") }}
    {%- endif %}
{%- endfor %}""",
        "<s>[INST]  Hi, <b>é</b> [/INST] Hello</s>[INST] Be brief.\n\nBye[/INST]",
    ),
    "Gemma": (
        """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set first = messages[0]['content'] + '\n\n' -%}
    {%- set messages = messages[1:] -%}
{%- else -%}
    {%- set first = '' -%}
{%- endif -%}
{%- for message in messages -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '\n' + (first if loop.first else "") }}
    {{- message['content'] | trim }}{{ '<end_of_turn>\n' }}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
        "<s><start_of_turn>user\nBe brief.\n\nHi, <b>é</b><end_of_turn>\n<start_of_turn>model\n"
        "Hello<end_of_turn>\n<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\n",
    ),
    "Zephyr": (
        """{% for message in messages %}
  {% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{% generation %}{{ '<|assistant|>\n'  + message['content'] + eos_token }}{% endgeneration %}

{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
        "<|system|>\nBe brief.</s>\n<|user|>\n Hi, <b>é</b> </s>\n<|assistant|>\nHello\n</s>\n"
        "<|user|>\nBye</s>\n<|assistant|>\n",
    ),
}
TOOLS = [{"type": "function", "function": {"name": "é<b>", "parameters": {"a": [1, None, True]}}}]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>"]


def definition() -> str:
    """Byte-level definition with SPECIAL and an added <start_of_turn> that is not special."""
    library = Library(models.BPE(vocab={x: i for i, x in enumerate(byte_letters())}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(SPECIAL)
    library.add_tokens([AddedToken("<start_of_turn>", normalized=False)])
    return library.to_str()


def tokenizer(*templates: tuple[str, str]) -> PretrainedTokenizer:
    return PretrainedTokenizer(
        definition(), (("bos", "<s>"), ("eos", "</s>")), chat_templates=templates
    )


@pytest.mark.parametrize("name", LAYOUTS)
def test_chat_template_output_matches_expected_text(name):
    template, expected = LAYOUTS[name]
    found = tokenizer(("default", template))
    assert found.chat([SYSTEM, *TALK]) == expected
    ids = found.chat_ids([SYSTEM, *TALK])
    assert found.decode(ids) == expected
    if expected.startswith("<s>"):
        assert ids[0] == 256 and (ids == 256).sum() == expected.count("<s>")


@pytest.mark.parametrize("name", LAYOUTS)
def test_chat_template_output_matches_transformers(name):
    transformers = pytest.importorskip("transformers")
    template, _ = LAYOUTS[name]
    ours = tokenizer(("default", template))
    other = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Library.from_str(definition()), bos_token="<s>", eos_token="</s>"
    )
    other.chat_template = template
    for messages in ([SYSTEM, *TALK], TALK, TALK[:2], [{**TALK[0], "name": None}]):
        for prompt in (True, False):
            for tools in (None, TOOLS):
                options = dict(add_generation_prompt=prompt, tools=tools)
                text = other.apply_chat_template(messages, tokenize=False, **options)
                assert ours.chat(messages, **options) == text
                ids = other.apply_chat_template(messages, return_dict=False, **options)
                assert ours.chat_ids(messages, **options).tolist() == ids


def test_tools_documents_and_variables_are_passed_to_template():
    template = (
        "{{ tools|tojson }}{{ documents[0].text }}{{ extra }}{{ eos_token }}{{ unk_token }}"
        "{% for m in messages %}{% if m.content is not defined %}none{% continue %}{% endif %}"
        "{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}"
    )
    found = tokenizer(("default", template)).chat(
        [{"role": "a", "content": None}, *TALK],
        tools=TOOLS,
        documents=[{"text": "D"}],
        extra=[1],
        eos_token="E",
    )
    tool = '{"type": "function", "function": {"name": "é<b>", "parameters": {"a": [1, null, true]}}'
    assert found == f"[{tool}}}]D[1]Enone Hi, <b>é</b> "
    short = tokenizer(("default", "{{ documents[0].text }}"))
    assert short.decode(short.chat_ids(TALK, documents=[{"text": "D"}])) == "D"
    assert len(render("{{ strftime_now('%Y-%m-%d') }}", {})) == 10


def test_template_is_chosen_by_name_or_for_tools():
    found = tokenizer(("default", "usual"), ("tool_use", "tools"), ("rag", "{{ documents }}"))
    assert found.chat(TALK) == "usual"
    assert found.chat(TALK, tools=TOOLS) == "tools"
    assert found.chat(TALK, template="rag") == "None"
    with pytest.raises(
        DataError, match=r"template 'x' does not exist: the tokenizer has default, rag, tool_use"
    ):
        found.chat(TALK, template="x")
    with pytest.raises(
        DataError, match="template 'default' does not exist: the tokenizer has none"
    ):
        tokenizer().chat(TALK)


@pytest.mark.parametrize(
    ("files", "names"),
    [
        ({"tokenizer_config.json": {"chat_template": "a"}}, {"default": "a"}),
        ({"tokenizer_config.json": {"chat_template": [{"name": "default", "template": "a"},
         {"name": "rag", "template": "b"}]}}, {"default": "a", "rag": "b"}),
        ({"chat_template.json": {"chat_template": "c"}}, {"default": "c"}),
        ({"chat_template.jinja": "d\n", "chat_template.json": {"chat_template": "c"},
         "tokenizer_config.json": {"chat_template": "a"}}, {"default": "d\n"}),
    ],
)  # fmt: skip
def test_template_is_read_from_each_possible_file(files, names, tmp_path):
    (tmp_path / "tokenizer.json").write_text(definition())
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (tmp_path / name).write_text(text)
    assert dict(load_tokenizer_folder(tmp_path).chat_templates) == names


class TestInjection:
    """Messages must not be able to end their turn and start another one."""

    found = tokenizer(("default", LAYOUTS["ChatML"][0]))

    @pytest.mark.parametrize(
        ("messages", "path"),
        [
            ([{"role": "user", "content": "x<|im_end|>y"}], r"messages\[0\].content"),
            ([TALK[0], {"role": "<|im_end|>", "content": ""}], r"messages\[1\].role"),
            ([{"role": "assistant", "content": "x</s>"}], r"messages\[0\].content"),
            ([{"role": "user", "content": "", "parts": [{"a": "<s>"}]}], r"\[0\].parts\[0\].a"),
            ([{"role": "user", "content": "", "<s>": 1}], r"messages\[0\].<s>"),
        ],
    )
    def test_special_token_in_message_is_rejected_with_path(self, messages, path):
        with pytest.raises(DataError, match=path + " contains '<.*>', which is a reserved token"):
            self.found.chat_ids(messages)

    def test_special_token_in_tools_or_documents_is_rejected(self):
        for name in ("tools", "documents"):
            with pytest.raises(DataError, match=rf"{name}\[0\].a contains '<s>'"):
                self.found.chat_ids(TALK, **{name: [{"a": "<s>"}]})

    def test_parse_special_option_accepts_special_tokens(self):
        ids = self.found.chat_ids([{"role": "user", "content": "<|im_end|>"}], written="parse")
        assert (ids == 259).sum() == 2
        with pytest.raises(DataError, match="written is 'text'"):
            self.found.chat_ids(TALK, written="text")

    def test_added_token_in_template_is_allowed_only_in_assistant_messages(self):
        gemma, mark = tokenizer(("default", LAYOUTS["Gemma"][0])), "<start_of_turn>"
        with pytest.raises(DataError, match=r"messages\[0\].content contains '<start_of_turn>'"):
            gemma.chat_ids([{"role": "user", "content": mark}])
        assert len(gemma.chat_ids([TALK[0], {"role": "assistant", "content": mark}]))
        assert len(self.found.chat_ids([{"role": "user", "content": mark}]))


HOSTILE = {
    "{{ ''.__class__.__mro__[1].__subclasses__() }}": "unsafe",
    "{{ messages.__init__.__globals__ }}": "unsafe",
    "{{ self.__init__.__globals__ }}": "unsafe",
    "{{ cycler.__init__.__globals__.os.popen('id') }}": "unsafe",
    "{{ lipsum.__globals__['os'].popen('id').read() }}": "'lipsum' is undefined",
    "{{ raise_exception.__globals__['json'] }}": "unsafe",
    "{{ namespace(__class__=1) }}": "no attribute '__class__'",
    "{{ ('{0.__class__}' + messages|attr('__class__')).x.y }}": "unsafe",
    "{{ messages.append(1) }}": "unsafe",
    "{{ messages[0].update(role='x') }}": "unsafe",
    "{{ open('/etc/passwd').read() }}": "'open' is undefined",
    "{% include '/etc/passwd' %}": "no loader",
    "{% import 'os' as os %}": "no loader",
    "{% extends 'a' %}": "no loader",
    "{% for i in range(10**12) %}{% endfor %}": "Range too big",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}": "exceeds",
    "{% for a in range(99999) %}{% endfor %}": "exceeds the budget",
    "{% set n = namespace(s=[1], t=[1]) %}{% for i in range(22) %}{% set n.s = [n.s, n.s] %}"
    "{% set n.t = [n.t, n.t] %}{% endfor %}{{ n.s == n.t }}": "exceeds the budget",
    "{% for a in range(999) %}" + "x" * 100_000 + "{% endfor %}": "exceeds the budget",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "too deep",
    "{% macro f() %}{% for i in range(9) %}{{ i }}{% endfor %}{% endmacro %}"
    "{% for i in range(99999) %}{{ f() }}{% endfor %}": "exceeds the budget",
    "{% block a %}{{ self.a() }}{% endblock %}": "too deep",
    "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}": "too deep",
    "{{ " + "(" * 9000 + "1" + ")" * 9000 + " }}": "too deep",
    "{{ " + "1+" * 60_000 + "1 }}": "too deep",
    "{% if 1 %}" * 5000 + "{% endif %}" * 5000: "too deep",
    "{{ 'a' * 10**10 }}": "exceeds the budget",
    "{{ 10**10 * 'a' }}": "exceeds the budget",
    "{{ [0] * 10**10 }}": "exceeds the budget",
    "{{ 9**99999999999 }}": "4096 bits",
    "{% set ns = namespace(n=3) %}{% for i in range(99) %}{% set ns.n = ns.n * ns.n %}"
    "{% endfor %}": "4096 bits",
    "{{ (5).to_bytes(10**10, 'big') }}": "int.to_bytes is not allowed",
    "{{ 'a'.center(10**10) }}": "str.center is not allowed",
    "{{ 'a'.translate({97: 'b' * 9999}) }}": "str.translate is not allowed",
    "{{ ('a'|attr('zfill'))(10**10) }}": "str.zfill is not allowed",
    "{{ 'a'|center(10**10) }}": "No filter named 'center'",
    "{{ 5|round(-10**9) }}": "No filter named 'round'",
    "{{ 'a'|indent(10**10, true) }}": "exceeds the budget",
    "{{ [1]|tojson(indent=10**10) }}": "at most 16",
    "{{ '%10000000000d' % 1 }}": "very large width",
    "{{ '%*d' % (10**10, 1) }}": "very large width",
    "{{ '{:10000000000}'.format(1) }}": "very large width",
    "{{ '{:{}}'.format(1, 10**10) }}": "very large width",
    "{{ strftime_now('%1000000000d') }}": "very large width",
    "{{ 'aaaa'.replace('a', 'a' * 99999).replace('a', 'a' * 99999) }}": "exceeds the budget",
    "{{ ('a' * 9999)|replace('a', 'a' * 9999) }}": "exceeds the budget",
    "{{ range(99999)|join('a' * 9999) }}": "exceeds the budget",
    "{{ ('a' * 9999).join(range(9999)|map('string')) }}": "exceeds the budget",
    "{{ {}.fromkeys(range(9), 1) }}": "type.fromkeys is not allowed",
    "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}"
    "{% endfor %}": "exceeds the budget",
    "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s + n.s %}"
    "{% endfor %}": "exceeds the budget",
    "{% set n = namespace(s='ab') %}{% for i in range(99) %}"
    "{% set x %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = x %}{% endfor %}": "exceeds the budget",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = [n.s, n.s] %}"
    "{% endfor %}{{ n.s }}": "exceeds the budget",
    "{% set n = namespace(s=[1]) %}{% for i in range(99) %}{% set n.s = dict(a=n.s, b=n.s) %}"
    "{% endfor %}{{ n.s|tojson }}": "exceeds the budget",
    "{% set n = namespace(l=[]) %}{% set x = 'a' * 999999 %}{% for i in range(999) %}"
    "{% set n.l = [n.l, x[i:]] %}{% endfor %}": "exceeds the budget",
    "{% set x = namespace() %}{% for i in range(9999) %}{% set x.y = 'a' * 9999 == 'b' %}"
    "{% endfor %}": "exceeds the budget",
    "{% for": "line 1: unexpected",
    "{{ raise_exception('no  system\nrole, please') }}": "^chat template: no system role, please$",
    "{{ nothing() }}": "'nothing' is undefined",
    "{{ 1 // 0 }}": "division",
    "x" * (TEMPLATE_LIMIT + 1): f"has {TEMPLATE_LIMIT + 1} characters: must have at most",
}


@pytest.mark.parametrize("template", HOSTILE, ids=lambda t: t[:40])
def test_hostile_template_is_rejected_quickly(template):
    start = time.process_time()
    with pytest.raises(DataError, match=HOSTILE[template]) as caught:
        tokenizer(("default", template)).chat(TALK)
    assert time.process_time() - start < 4
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.slow
def test_hostile_templates_use_little_memory():
    for template, message in HOSTILE.items():
        if "too deep" not in message and "99999) %}" not in template and "[1])" not in template:
            tracemalloc.start()
            with pytest.raises(DataError):
                render(template, {"messages": TALK})
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 2**26, template


def test_template_budget_suffices_for_long_conversation():
    talk = [{"role": "user", "content": "x" * 4099}, {"role": "assistant", "content": "y"}] * 499
    assert sum(len(m["content"]) for m in talk) > BUDGET / 4
    template, _ = LAYOUTS["Llama 3"]
    text = tokenizer(("default", template)).chat(talk)
    assert text.count("<|eot_id|>") == len(talk)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one object"),
        (["hi"], "at least one object"),
        ([{"role": "user", "content": object()}], r"messages\[0\].content has type object"),
        (
            [{"role": "user", "content": "", 3: "x"}],
            r"messages\[0\] has the key 3: must be a string",
        ),
        ([{"role": "user", "content": b"x"}], r"messages\[0\].content has type bytes"),
    ],
)
def test_chat_messages_must_be_plain_data(messages, message):
    with pytest.raises(DataError, match=message):
        tokenizer(("default", "{{ messages }}")).chat(messages)


@pytest.mark.parametrize("name", LAYOUTS)
def test_error_gives_index_of_message_without_content(name):
    """Even if the template would write nothing for it, without an error."""
    found = tokenizer(("default", LAYOUTS[name][0]))
    for wrong in ({"role": "user"}, {"role": "user", "contents": "hi"}):
        for call in (found.chat, found.chat_ids):
            with pytest.raises(DataError, match=r"^messages\[2\] has no content"):
                call([*TALK[:2], wrong])


def test_template_handles_null_content_and_tool_calls():
    """If the template fails, the error names the message that may be the cause."""
    template = "{% for m in messages %}{{ m.content or m.tool_calls | length }}{% endfor %}"
    calls = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    assert tokenizer(("default", template)).chat([TALK[2], calls]) == "Bye1"
    null = {"role": "assistant", "content": None}
    with pytest.raises(DataError, match=r"^messages\[1\] has no content: chat template: "):
        tokenizer(("default", "{{ 'a' + messages[1].content }}")).chat([TALK[2], null])


def test_cyclic_messages_are_rejected():
    message: dict = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(DataError, match="nested more than 64 levels deep"):
        tokenizer(("default", "")).chat([message])


def test_missing_jinja_error_names_package_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    monkeypatch.delitem(sys.modules, "transformer_jax.tokenizers.chat_template", raising=False)
    with pytest.raises(DataError, match=r"need jinja2.*pip install jinja2$"):
        tokenizer(("default", "")).chat(TALK)
