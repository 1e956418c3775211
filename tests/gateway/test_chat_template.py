"""Variables of a model's chat template that requests set: in templates, over gRPC and over HTTP."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from fusionkv.fusion_worker.quality.verdict import FILE
from fusionkv.fusion_worker.rendering import RENDERER
from fusionkv.fusion_worker.template import INSTRUCTION, ChatTemplate, PromptTemplate
from fusionkv.gateway.client.client import Client
from fusionkv.protos.contract.template import template_values
from fusionkv.protos.runtime.errors import InvalidArgument
from tests.fusion_worker.oracle import byte_tokenizer
from tests.fusion_worker.test_models import GEMMA_LIKE, LLAMA_LIKE, QWEN_LIKE
from tests.services import Launch, start_cache, start_gateway, start_worker

THINKING = """{%- if not effort is defined -%}{%- set effort = 'medium' -%}{%- endif -%}
<|im_start|>system
Effort: {{ effort }}<|im_end|>
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{%- endif -%}"""
FAILING = QWEN_LIKE + "{%- if strict -%}{{ raise_exception('strict') }}{%- endif -%}"
NOT_THINKING = {"enable_thinking": False}
# Harmless with a small n, which is what they are given without one.
ENDLESS = {
    "time": "{% for a in range(n | default(1)) %}{% for b in range(n | default(1)) %}{% endfor %}{% endfor %}",
    "one operation": "{% set x = 10 ** ((n | default(1)) ** 2) %}",
    "memory": "{% set x = 'a' * (n | default(1)) ** 2 %}",
    "text": "{{ 'a' * 10 * (n | default(1)) }}",
}
EXCEEDED = {
    "time": "1 s of processor time",
    "one operation": "1 s of processor time",
    "memory": "512 MiB of memory",
    "text": "256 KiB of text",
}


@pytest.mark.parametrize(
    ("chat", "variables"),
    [
        (None, set()),
        *((chat, set()) for chat in (QWEN_LIKE, LLAMA_LIKE, GEMMA_LIKE)),
        (THINKING, {"enable_thinking", "effort"}),
        (FAILING, {"strict"}),
        ("{{ strftime_now('%Y') }}{{ bos_token }}{{ tools }}{{ namespace(x=y) }}{{ truncation }}", {"y"}),
    ],
)
def test_variables_are_what_a_template_reads_and_nobody_sets(chat: str | None, variables: set[str]) -> None:
    tokenizer = byte_tokenizer(**({"chat_template": chat} if chat else {}))
    assert ChatTemplate(tokenizer).variables == variables


@pytest.mark.parametrize("values", [{}, NOT_THINKING, {"effort": "high"}, {"enable_thinking": True, "effort": "low"}])
def test_a_prompt_is_that_of_the_chat_template_with_the_values(values: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer(chat_template=THINKING)
    template = ChatTemplate(tokenizer).rendered(values)
    content = f"{INSTRUCTION}\n\nText.\n\nQuestion: Who?"
    built = template.system + "Text.\n\n" + template.question.replace("{question}", "Who?")
    messages = [{"role": "user", "content": content}]
    assert built == tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **values)
    assert (template == PromptTemplate.of(tokenizer)) == (not values)


def test_an_operators_system_prompt_stays() -> None:
    tokenizer = byte_tokenizer(chat_template=THINKING)
    made = replace(ChatTemplate(tokenizer), system="Be kind.", prompt="From {passages}tell {question}")
    template = made.rendered(NOT_THINKING)
    assert "Be kind." in template.system
    assert template.question == "tell {question}" + template.tail
    assert template.tail.endswith("<think></think>")
    default = made.rendered({})
    assert asdict(default) == asdict(PromptTemplate.of(tokenizer).configured(made.system, made.prompt))


@pytest.mark.parametrize(
    ("chat", "values", "said"),
    [
        (THINKING, {"thinking": False}, "has no variable 'thinking'; it has: effort, enable_thinking$"),
        (THINKING, {"messages": "x"}, "has no variable 'messages'"),
        (THINKING, {"tokenize": True}, "has no variable 'tokenize'"),
        (None, NOT_THINKING, "has no variable 'enable_thinking'; it has: none"),
        (FAILING, {"strict": True}, r"can't render a single user message \(strict\)"),
    ],
)
def test_what_a_template_cannot_follow_is_refused(chat: str | None, values: dict[str, Any], said: str) -> None:
    tokenizer = byte_tokenizer(**({"chat_template": chat} if chat else {}))
    with pytest.raises(InvalidArgument, match=said):
        ChatTemplate(tokenizer).rendered(values)


@pytest.mark.parametrize("kind", ENDLESS)
def test_values_that_take_too_much_are_refused(kind: str) -> None:
    chat = ChatTemplate(byte_tokenizer(chat_template=ENDLESS[kind] + QWEN_LIKE))
    assert chat.variables == {"n"}
    chat.rendered({"n": 2})
    process = RENDERER.process
    with pytest.raises(InvalidArgument, match=f"with these values, .* takes more than {EXCEEDED[kind]}$"):
        chat.rendered({"n": 99_999})
    chat.rendered({"n": 3})
    assert RENDERER.process is process


def test_a_process_that_renders_has_one_thread_and_is_small() -> None:
    ChatTemplate(byte_tokenizer(chat_template=THINKING)).rendered(NOT_THINKING)
    assert RENDERER.process is not None
    process = psutil.Process(RENDERER.process.pid)
    assert process.num_threads() == 1
    assert process.memory_info().rss <= 100_000_000


def test_a_process_that_renders_is_started_again() -> None:
    chat = ChatTemplate(byte_tokenizer(chat_template=THINKING))
    expected = chat.rendered(NOT_THINKING)
    process = RENDERER.process
    assert process is not None
    process.kill()
    process.wait()
    assert chat.rendered(NOT_THINKING) == expected
    assert RENDERER.process is not process


ACCEPTED = [True, False, 0, 512, -1.5, 1 << 20, "", "high", "26 Jul 2024", "de-CH", "ä" * 64]
REFUSED = [
    *(None, [], {}, [1], (1 << 20) + 1, 1e300, float("nan"), float("inf")),
    *("x" * 65, "{question}", "<|end|>", "a\nb", "\0question\0", "[INST]"),
]


def test_values_are_short_and_hold_no_control_tokens() -> None:
    for value in ACCEPTED:
        assert template_values({"a": json.dumps(value)}) == {"a": value}
    for text in (*map(json.dumps, REFUSED), "", "x", "[" * 5000, "1" * 5000):
        with pytest.raises(InvalidArgument, match=r"chat_template_kwargs: 'a' must be true, false, a number"):
            template_values({"a": text})
    with pytest.raises(InvalidArgument, match="has 17 values; the maximum is 16"):
        template_values(dict.fromkeys(map(str, range(17)), "1"))


@pytest.fixture(scope="module")
def model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with a chat template that thinks."""
    folder = tmp_path_factory.mktemp("thinking") / "model"
    shutil.copytree(tiny_model, folder, ignore=shutil.ignore_patterns(FILE))
    (folder / "chat_template.jinja").write_text(THINKING + ENDLESS["time"])
    return folder


@pytest.fixture(scope="module")
def gateway(launch_module: Launch, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gateway")
    worker = start_worker(launch_module, model, cache=start_cache(launch_module, folder))
    return start_gateway(launch_module, folder, worker, "--http-listen", "127.0.0.1:0", services=2)


@pytest.fixture
def client(gateway: Any) -> Iterator[Client]:
    with Client(gateway.address, timeout=60) as made:
        made.ingest("notes", "lake.txt", "The lake is blue and deep.")
        yield made


@pytest.mark.system
def test_a_request_sets_variables_over_grpc(client: Client) -> None:
    def tokens(**values: Any) -> tuple[int, int]:
        """Of the prompt, and those of the chunk whose KV was not there, or is of another context."""
        more = {"chat_template_kwargs": values} if values else {}
        summary = client.ask("notes", "Which colour has the lake?", max_tokens=1, **more).summary  # type: ignore[arg-type]
        assert summary.context_tokens > 0
        stale = summary.tokens_reused + summary.tokens_recomputed
        return summary.prompt_tokens, summary.tokens_encoded + stale

    plain, _ = tokens()
    # The end of the prompt differs; what stands before a chunk does not, so that its KV is exact.
    assert tokens(enable_thinking=False) == (plain + len("<think></think>"), 0)
    # The system prompt differs, and with it what a chunk's KV depends on.
    high, other = tokens(effort="high")
    assert high == plain - len("medium") + len("high")
    assert other > 0
    assert tokens(enable_thinking=True)[0] == tokens()[0] == plain
    for values, said in (
        ({"thinking": False}, "has no variable 'thinking'"),
        ({"effort": [1]}, "'effort' must be"),
        ({"n": 99_999}, "takes more than 1 s of processor time"),
    ):
        with pytest.raises(InvalidArgument, match=said):
            client.ask("notes", "Which colour has the lake?", chat_template_kwargs=values)
    none = client.ask("notes", "Which colour has the lake?", max_tokens=1, chat_template_kwargs=None)  # type: ignore[arg-type]
    assert none.summary.prompt_tokens == plain
    for wrong in ("x", [1], {1: 2}, {"effort": object()}):
        with pytest.raises(InvalidArgument, match="chat_template_kwargs"):
            client.ask("notes", "Which colour has the lake?", chat_template_kwargs=wrong)  # type: ignore[arg-type]


@pytest.mark.system
async def test_a_request_sets_variables_over_http(gateway: Any, client: Client) -> None:
    url = f"http://{gateway.addresses['fusionkv-gateway-http'][0]}/v1"
    asked: dict[str, Any] = {
        "model": "notes", "messages": [{"role": "user", "content": "Which colour has the lake?"}], "max_tokens": 1
    }  # fmt: skip
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=60) as http:

        async def tokens(values: Any) -> int:
            chat = await http.chat.completions.create(**asked, extra_body={"chat_template_kwargs": values})
            return int(chat.usage.prompt_tokens)

        plain, empty, null, without = await asyncio.gather(
            *map(tokens, (None, {}, {"enable_thinking": None}, NOT_THINKING))
        )
        assert plain == empty == null == without - len("<think></think>")
        for values, param, said in (
            ({"thinking": False}, None, "has no variable 'thinking'; it has: effort, enable_thinking"),
            ({"effort": "<|end|>"}, "chat_template_kwargs", "'effort' must be"),
            ("x", "chat_template_kwargs", "must be an object"),
        ):
            with pytest.raises(openai.BadRequestError, match=said) as refused:
                await tokens(values)
            assert refused.value.param == param
