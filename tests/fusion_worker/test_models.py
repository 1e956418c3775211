"""What is served, what is refused and why, and what a model's name, template and fingerprint are made of."""

import copy
import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fusionkv.fusion_worker import models, template
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.library.cache import fingerprint
from fusionkv.fusion_worker.template import INSTRUCTION, PromptTemplate
from fusionkv.kernels.segments import Rotation
from fusionkv.protos.runtime.errors import FailedPrecondition
from tests.fusion_worker.oracle import byte_tokenizer, network, saved

QWEN_LIKE = """{%- if messages[0]['role'] != 'system' -%}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""
LLAMA_LIKE = """{{ bos_token }}{% for message in messages -%}
<|start_header_id|>{{ message['role'] }}<|end_header_id|>

{{ message['content'] | trim }}<|eot_id|>
{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""

GEMMA_LIKE = """{{ bos_token }}
{%- set first = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' -%}
{%- for message in (messages[1:] if first else messages) -%}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}{{ raise_exception('by turns') }}{%- endif -%}
{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else 'user') + '\\n' }}
{{- (first if loop.first else '') + message['content'] | trim }}{{ '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}"""


@pytest.fixture
def save(tmp_path: Path) -> Any:
    return partial(saved, tmp_path / "tiny")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_is_read_back(family: str, dtype: torch.dtype, save: Any) -> None:
    directory = save(family, dtype)
    model = models.load(directory, "cpu", str(dtype).removeprefix("torch."))
    config, attention = network(family, dtype).config, network(family, dtype).model.layers[0].self_attn
    assert (model.name, model.family) == ("tiny", config.model_type)
    if config.model_type == "deepseek_v2":
        expected = models.KVShape(layers=3, kv_heads=1, head_dim=24 + 8, dtype=dtype, tensors=1)
    else:
        expected = models.KVShape(3, config.num_key_value_heads, attention.head_dim, dtype)
    assert model.kv == expected
    assert model.kv.token_bytes == 3 * expected.tensors * expected.kv_heads * expected.head_dim * dtype.itemsize
    assert (model.begin, model.ends, model.max_tokens) == ("", {257}, 2048)
    for most, taken in ((100, 100), (9999, 2048)):
        assert models.load(directory, "cpu", max_tokens=most).max_tokens == taken
    assert model.tokenizer.encode("aé").ids == byte_tokenizer().backend_tokenizer.encode("aé").ids


def wrapped(ours: Any) -> models.Model:
    return models.wrap("ours", copy.deepcopy(network("qwen2")), ours, bytes(32), 100)


def test_link_tokens_are_found_in_the_tokenizer(save: Any) -> None:
    plain = models.load(save(), "cpu")
    assert plain.links == ()
    links = [[f"<|link_{chunk}_{number}|>" for number in (1, 2, 3)] for chunk in (1, 2)]
    ours = byte_tokenizer()
    ours.add_special_tokens({"extra_special_tokens": [name for names in links for name in names]})
    found = wrapped(ours)
    assert found.links == tuple(tuple(ours.convert_tokens_to_ids(names)) for names in links)
    # A chunk that lacks one ends the list: every chunk has as many as the first.
    ours.add_special_tokens({"extra_special_tokens": ["<|link_3_1|>", "<|link_3_2|>", "<|link_4_1|>"]})
    assert wrapped(ours).links == found.links


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("computes", [True, False])
def test_the_checkpoints_dtype_where_the_cpu_computes_in_it(
    kind: torch.dtype, computes: bool, save: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "computes", lambda dtype: computes or dtype == torch.float32)
    assert models.load(save("llama", kind), "cpu").kv.dtype == (kind if computes else torch.float32)


def test_another_dtype_is_another_name_for_entries(save: Any) -> None:
    directory = save()
    found = [models.load(directory, "cpu", dtype) for dtype in ("auto", "bfloat16", "float16")]
    assert [m.kv.dtype for m in found] == [torch.float32, torch.bfloat16, torch.float16]
    assert len({m.fingerprint for m in found}) == 1
    assert len({tuple(m.settings.items()) for m in found}) == 3


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")


@pytest.mark.parametrize(
    ("where", "message"),
    [
        *(pytest.param([device], "device", marks=no_gpu) for device in ("cuda", "cuda:7", "tpu", "")),
        (["cpu", "int3"], "unknown dtype 'int3': use auto, float32"),
    ],
)
def test_a_device_or_dtype_that_is_not_there(where: list[str], message: str, save: Any) -> None:
    with pytest.raises(FailedPrecondition, match=message):
        models.load(save(), *where)


def test_heads_that_are_too_wide_for_a_gpu(save: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek-V2's have 512 and 64 channels; these 24 and 8."""
    monkeypatch.setattr(models, "device_of", lambda name: torch.device("cuda"))
    monkeypatch.setattr(models, "MOST_CHANNELS", 31)
    with pytest.raises(FailedPrecondition, match="tiny runs on CPUs only: a head of its KV has 32 channels"):
        models.load(save("deepseek-v2"))


def test_the_fingerprint_covers_every_byte(save: Any, tmp_path: Path) -> None:
    directory = save(chat_template=QWEN_LIKE)
    first = fingerprint(directory)
    shutil.copytree(directory, tmp_path / "elsewhere")
    assert fingerprint(tmp_path / "elsewhere") == first
    # generation_config.json decides no KV byte.
    names = {path.name for path in directory.iterdir()} - {"generation_config.json"}
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= names
    seen = {first}
    for name in names:
        whole = (directory / name).read_bytes()
        for at in (0, len(whole) - 1):
            (directory / name).write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            seen.add(fingerprint(directory))
        (directory / name).write_bytes(whole)
    assert len(seen) == 1 + 2 * len(names)
    shutil.copy(directory / "model.safetensors", directory / "model-2.safetensors")
    more = fingerprint(directory)
    assert more not in seen
    # Weights of Mistral's own code count where there are no others.
    (directory / "consolidated.safetensors").write_bytes(b"the same once more")
    assert fingerprint(directory) == more
    for file in directory.glob("model*.safetensors"):
        file.unlink()
    alone = fingerprint(directory)
    (directory / "consolidated.safetensors").unlink()
    assert fingerprint(directory) != alone


def test_a_template_without_a_chat_template() -> None:
    template = PromptTemplate.of(byte_tokenizer())
    assert (template.system, template.chunk) == (f"{INSTRUCTION}\n", "{text}\n")
    assert template.question == "Question: {question}\nAnswer:"
    assert (template.own_system, template.turn) == ("{system}\n", "\nAnswer: {answer}\nQuestion: ")


@pytest.mark.parametrize("chat", [QWEN_LIKE, LLAMA_LIKE], ids=["qwen", "llama"])
def test_a_template_puts_a_prompt_together_as_the_chat_template_does(chat: str) -> None:
    tokenizer = byte_tokenizer(chat_template=chat)
    template = PromptTemplate.of(tokenizer)
    assert template.chunk.count("{text}") == template.question.count("{question}") == 1
    chunks, question = ["First passage.", "Second {one}."], "Who?"
    pages = "".join(template.chunk.replace("{text}", c) for c in chunks)
    built = template.system + pages + template.question.replace("{question}", question)
    content = f"{INSTRUCTION}\n\n" + "".join(f"{c}\n\n" for c in chunks) + f"Question: {question}"
    messages = [{"role": "user", "content": content}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert built == template.head + content + template.tail == whole
    assert whole.startswith("<s>") == (chat is LLAMA_LIKE)


def talked(template: PromptTemplate) -> str:
    """A conversation with a system prompt of its own, put together as the gateway does."""
    before, after = template.question.split("{question}")
    turn = template.turn.replace("{answer}", "He.")
    return f"{template.own_system.replace('{system}', 'Be brief.')}Page.\n\n{before}Who?{turn}Why?{after}"


@pytest.mark.parametrize("chat", [QWEN_LIKE, LLAMA_LIKE, GEMMA_LIKE], ids=["qwen", "llama", "gemma"])
def test_a_template_puts_a_conversation_together_as_the_chat_template_does(chat: str) -> None:
    tokenizer = byte_tokenizer(chat_template=chat)
    said = ("system", "Be brief."), ("user", "Page.\n\nQuestion: Who?"), ("assistant", "He."), ("user", "Why?")
    messages = [{"role": role, "content": content} for role, content in said]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert talked(PromptTemplate.of(tokenizer)) == whole


@pytest.mark.parametrize("chat", [None, QWEN_LIKE, LLAMA_LIKE, GEMMA_LIKE], ids=["plain", "qwen", "llama", "gemma"])
def test_an_operators_prompt_is_put_into_the_chat_template(chat: str | None) -> None:
    tokenizer = byte_tokenizer(**({"chat_template": chat} if chat else {}))
    template = PromptTemplate.of(tokenizer)
    assert template.configured("", "") == template
    set_ = template.configured("Be brief.", "Sources:\n\n{passages}Say {question} now.")
    built = f"{set_.system}Page.\n\n{set_.question.replace('{question}', 'who')}"
    content = "Sources:\n\nPage.\n\nSay who now."
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) if chat else ""
    assert built == (whole or f"Be brief.\n{content}")
    # A request's system prompt replaces the operator's, and leaves the user message as it is.
    assert set_.own_system.replace("{system}", "Be brief.") == set_.system
    assert template.configured("Be brief.", "").system == template.own_system.replace("{system}", "Be brief.")
    assert template.configured("", "{passages}{question}").system == template.head


PLACES = "{question}", "{passages}", "{question}{passages}", "{passages}{question}{question}"
ADDRESSES = "7070", "localhost", "http://localhost:7070"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        *(({"prompt_template": wrong}, r"must contain \{passages\} and") for wrong in PLACES),
        *(({"cache": address}, "cache must be host:port, unix:/path or none") for address in ADDRESSES),
        ({"store": "int3"}, "plain, int8, fp8, int4"),
        ({"tensor_parallel": 2, "device": "cuda:1"}, "rank i takes GPU i"),
        ({"template_date": "today"}, "isoformat"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WorkerConfig(**settings)


def test_a_chat_template_without_roles_gets_the_conversation_as_text() -> None:
    """In its one message: what can't be said by the template is not lost."""
    one = (
        "{% if messages|length > 1 or messages[0]['role'] != 'user' %}{{ raise_exception('one message') }}{% endif %}"
        "[{{ messages[0]['content'] }}]"
    )
    said = "[Be brief.\n\nPage.\n\nQuestion: Who?\nAnswer: He.\nQuestion: Why?]"
    assert talked(PromptTemplate.of(byte_tokenizer(chat_template=one))) == said


ONCE = "does not write each text once and unchanged"


@pytest.mark.parametrize(
    ("chat", "why"),
    [
        ("{{ raise_exception('system first') }}", "system first"),
        ("{% for m in messages %}{{ m['role'] }}{% endfor %}", ONCE),
        ("{% for m in messages * 2 %}{{ m['content'] }}{% endfor %}", ONCE),
        ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", ONCE),
        ("{% for m in messages %}{{ m[", "unexpected"),
        ("{{ messages + 1 }}", "list"),
    ],
)
def test_chat_templates_that_show_no_message_once(chat: str, why: str) -> None:
    with pytest.raises(FailedPrecondition, match=f"chat template can't render a single user message .*{why}"):
        PromptTemplate.of(byte_tokenizer(chat_template=chat))


DATED = "{%% set today = %s %%}{%% for m in messages %%}[{{ today }}] {{ m['content'] }}{%% endfor %%}"
STATES = [
    "strftime_now('%d %b %Y')",
    "date_string if date_string is defined else (strftime_now('%Y') if strftime_now is defined else '26 Jul 2024')",
]


@pytest.mark.parametrize("today", STATES)
def test_a_chat_template_is_told_the_same_date_each_day(today: str, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = byte_tokenizer(chat_template=DATED % today)
    assert PromptTemplate.of(tokenizer).head in ("[01 Jan 2026] ", "[2026] ")
    assert "states the date, and is told that it is 2026-01-01 each day" in caplog.text
    assert PromptTemplate.of(tokenizer, today="2031-05-04").head in ("[04 May 2031] ", "[2031] ")
    of_request = template.ChatTemplate(tokenizer, today="2031-05-04").rendered({})
    assert of_request.head in ("[04 May 2031] ", "[2031] ")
    caplog.clear()
    PromptTemplate.of(byte_tokenizer(chat_template=LLAMA_LIKE))
    assert caplog.text == ""


@pytest.mark.parametrize(
    "endless",
    [
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) %}{% for b in range(99) %}abcdefghijkl{% endfor %}{% endfor %}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ '%02000000d' % 1 }}",
        "{{ ['a'] * 10 ** 9 }}",
    ],
)
def test_a_chat_template_that_takes_too_much_is_refused(endless: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "_SECONDS", 1)
    with pytest.raises(FailedPrecondition, match=r"chat template (takes more than|can't render)"):
        PromptTemplate.of(byte_tokenizer(chat_template=endless + LLAMA_LIKE))


def test_a_chat_template_that_varies_is_refused() -> None:
    chat = "{{ range(100000) | random }}" + LLAMA_LIKE
    with pytest.raises(FailedPrecondition, match="renders differently each time"):
        PromptTemplate.of(byte_tokenizer(chat_template=chat))


@pytest.mark.parametrize(
    ("kind", "layer", "interleaved", "share"),
    [("llama", 0, True, 1.0), ("glm4", 0, False, 1.0), ("glm4", 0, True, 0.5), ("gemma3", 1, True, 1.0)],
)
async def test_a_rotation_that_is_not_the_models_own(
    kind: str, layer: int, interleaved: bool, share: float, start: Any
) -> None:
    def other(model: models.Model) -> models.Model:
        frequencies, rotations = model.rotations[layer].inv_freq, [*model.rotations]
        rotations[layer] = Rotation(frequencies[: int(len(frequencies) * share)], interleaved)
        return dataclasses.replace(model, rotations=tuple(rotations))

    with pytest.raises(FailedPrecondition, match="don't follow their rotary embedding"):
        await start(kind, replace=other)


def test_no_template_is_rendered_in_a_fork_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would crash or hang beside gRPC's threads."""
    monkeypatch.delattr("os.fork")
    chat = template.ChatTemplate(byte_tokenizer(chat_template=LLAMA_LIKE))
    assert chat.rendered({}) == PromptTemplate.of(chat.tokenizer)
