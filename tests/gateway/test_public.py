"""The package `fusionkv`: what it offers, and that the examples and the documentation need nothing below it."""

import ast
import importlib
import pickle
import re
from pathlib import Path

import pytest

import fusionkv
from fusionkv import Answer, Explanation, Passage, Summary, Token
from fusionkv.protos.runtime.errors import ServiceError

ROOT = Path(__file__).parent.parent.parent
PUBLIC = {"fusionkv", "fusionkv.langchain", "fusionkv.llama_index"}


def codes() -> dict[str, str]:
    """The Python examples, and the blocks of Python in the documentation, by where they are."""
    found = {str(file.relative_to(ROOT)): file.read_text() for file in ROOT.glob("examples/*.py")}
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        found |= {f"{page.name}, block {number}": block for number, block in enumerate(blocks)}
    return found


def test_applications_import_the_package_and_its_integrations_alone() -> None:
    imported = {
        (where, module)
        for where, code in codes().items()
        for node in ast.walk(ast.parse(code))
        for module in (
            [str(node.module)] if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        )
        if module.partition(".")[0] == "fusionkv"
    }  # fmt: skip
    assert len(imported) > 8
    assert {(where, module) for where, module in imported if module not in PUBLIC} == set()


def test_static_tools_see_what_is_imported_on_first_access() -> None:
    tree = ast.parse(Path(fusionkv.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {(node.names[0].name, node.module) for node in block.body if isinstance(node, ast.ImportFrom)}
    assert seen == {*fusionkv._MODULES.items()}
    assert {*fusionkv.__all__} == {*fusionkv._MODULES, "__version__"} <= {*dir(fusionkv)}


@pytest.mark.parametrize("name", fusionkv.__all__)
def test_a_name_is_its_modules(name: str) -> None:
    if name in fusionkv._MODULES:
        assert getattr(fusionkv, name) is getattr(importlib.import_module(fusionkv._MODULES[name]), name)
    else:
        assert fusionkv.__version__.count(".") == 2


def test_every_error_of_a_call_can_be_caught() -> None:
    assert {error.__name__ for error in (ServiceError, *ServiceError.__subclasses__())} <= {*fusionkv.__all__}


def test_other_names_are_no_attributes() -> None:
    with pytest.raises(AttributeError, match="module 'fusionkv' has no attribute 'Cleint'"):
        fusionkv.Cleint  # type: ignore[attr-defined]  # noqa: B018


def test_an_answer_may_be_pickled_for_another_process_or_a_cache() -> None:
    answer = Answer("535", (Passage(text="The code is 535.", metadata={"page": "3"}),), Summary(prompt_tokens=7))
    for result in (answer, Token(text="5"), Explanation()):
        assert pickle.loads(pickle.dumps(result)) == result
