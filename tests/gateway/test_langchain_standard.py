"""LangChain's standard test suites, against a real gateway."""

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import ChatModelIntegrationTests, RetrieversIntegrationTests
from langchain_tests.unit_tests import ChatModelUnitTests

from fusionkv.gateway.client.client import Client
from fusionkv.langchain import ChatFusionKV, FusionKVRetriever

pytestmark = pytest.mark.system


@pytest.fixture
def benchmark() -> Callable[[Callable[[], None]], None]:
    """In place of pytest-benchmark's: once is enough to see that it works."""
    return lambda run: run()


@pytest.fixture
def vcr() -> None:
    """The suite skips the test that takes it: it records HTTP, which a gateway's calls are not."""


@pytest.fixture
def snapshot() -> None:
    """The suite skips the test that takes it: objects with a token are not serialised."""


@pytest.fixture(scope="module")
def lakes(notes: str) -> str:
    """The gateway with a corpus that has enough passages for the suite of retrievers."""
    with Client(notes) as client:
        client.ingest("lakes", "lakes.jsonl", "\n".join(f'"Lake {i} is {i} meters deep."' for i in range(1, 5)))
    return notes


class TestChatModel(ChatModelUnitTests):
    supports_model_override = False  # a gateway serves one model
    chat_model_class: type[BaseChatModel] = ChatFusionKV
    chat_model_params: ClassVar[dict[str, Any]] = {"corpus": "notes"}


class TestChatModelAnswers(ChatModelIntegrationTests):
    supports_model_override = False
    chat_model_class: type[BaseChatModel] = ChatFusionKV

    @pytest.fixture(autouse=True)
    def _address(self, notes: str) -> None:
        self.address = notes

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {"corpus": "notes", "address": self.address, "max_tokens": 16}


class TestRetriever(RetrieversIntegrationTests):
    retriever_constructor: type[BaseRetriever] = FusionKVRetriever
    retriever_query_example = "How deep is the lake?"

    @pytest.fixture(autouse=True)
    def _address(self, lakes: str) -> None:
        self.address = lakes

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        return {"corpus": "lakes", "address": self.address}
