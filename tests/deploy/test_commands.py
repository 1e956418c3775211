"""Every command, example and snippet of settings in the documentation is one that works."""

import contextlib
import importlib.util
import json
import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from fusionkv.gateway.auth.tenants import Quotas
from fusionkv.gateway.auth.verifiers import StaticTokens
from fusionkv.gateway.cli import main as cli
from fusionkv.gateway.client.client import Client
from fusionkv.protos.runtime import settings
from tests.commands import fusionkv, run_python
from tests.deploy.rendering import CONFIGS, template
from tests.services import start_cache, start_gateway, start_worker, token_entry, token_flags

ROOT = Path(__file__).parent.parent.parent
ELSEWHERE = ("README.md", "CONTRIBUTING.md", "models/README.md", "k8s/fusionkv/README.md")
PAGES = [*(ROOT / page for page in ELSEWHERE), *sorted(ROOT.glob("docs/*.md"))]
PROGRAMS = ("make", "fusionkv", "python")
# What a table [name] of these pages is, if it is no service's.
TABLES = {"default": "quotas", "tenants": "quotas", "token": "tokens"}


def commands(*programs: str) -> list[str]:
    """Lines of indented blocks and of `sh` blocks, and what stands in backquotes, that begin with these programs."""
    found = set()
    for page in PAGES:
        text = page.read_text()
        shell = "\n".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
        text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
        lines = [*re.findall(r"^    ((?:.*\\\n)*.*)$", text, re.MULTILINE), *re.findall(r"`([^`\n]+)`", text)]
        lines += re.sub(r"\\\n", " ", shell).splitlines()
        for line in lines:
            words = shlex.split(re.sub(r"\\\n", " ", line), comments=True) if line.split()[:1] else []
            if words and words[0] in programs and words[1:] and "." * 3 not in line:
                found.add(shlex.join(words))
    return sorted(found)


@cache
def usage(*module: str) -> str:
    return run_python("-m", *module, "--help", cwd=ROOT).stdout


def flags_are_known(words: list[str], *module: str) -> None:
    flags = {w.partition("=")[0] for w in words if w.startswith("--")}
    assert not flags or flags <= set(re.findall(r"--[a-z][a-z-]*", usage(*module)))


def heavy(command: str) -> bool:
    """Whether its flags are those of a program that loads torch before it says them."""
    _, *words = shlex.split(command)
    named = words[1] if words[:1] == ["-m"] else ""
    slow = ("fusionkv.fusion_worker.", "fusionkv.bench.", "fusionkv.models.")
    return words[0] in cli.LOCAL or named.startswith(slow)


@pytest.mark.parametrize(
    "command", [pytest.param(c, marks=pytest.mark.slow) if heavy(c) else c for c in commands(*PROGRAMS)]
)
def test_a_command_is_one_that_there_is(command: str) -> None:
    program, *words = shlex.split(command)
    if program == "make":
        targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
        assert words[0] in targets
    elif program == "python":
        words = [w for w in words if w != "-P"]
        if words[0] == "-m":
            assert importlib.util.find_spec(words[1])
            flags_are_known(words[2:], words[1])
        else:
            # A module may say how it is run without where it lies.
            packages = (ROOT / "kvcache_service", ROOT / "fusion_worker", ROOT / "gateway")
            assert (ROOT / words[0]).exists() or any([*package.rglob(words[0])] for package in packages)
    elif words[0] in cli.LOCAL:
        flags_are_known(words[1:], "fusionkv.gateway.cli.main", words[0])
    elif words[0] == "serve" and words[1:] and words[1] in cli.MODULES:
        flags_are_known(words[2:], cli.MODULES[words[1]])
    elif words[1:] and not words[1].startswith("-"):
        with contextlib.redirect_stderr(None):
            # R stands for a number.
            cli._parser().parse_args(["0.5" if w == "R" else w for w in words])
    else:
        # Only mentioned, without what it needs.
        flags_are_known(words[1:], "fusionkv.gateway.cli.main", words[0])


def installs() -> list[str]:
    """Those of the pages, and the one that each example of values begins with."""
    examples = sorted((ROOT / "k8s/examples").glob("*.yaml"))
    headers = [re.findall(r"^#   (helm install .*)$", file.read_text(), re.MULTILINE) for file in examples]
    assert all(len(found) == 1 for found in headers)
    told = [line for line in commands("helm") if line.startswith(("helm install ", "helm upgrade "))]
    return [*told, *(line for (line,) in headers)]


@pytest.mark.slow
@pytest.mark.parametrize("command", installs())
def test_a_release_can_be_installed_so(command: str, helm: str) -> None:
    """As far as that goes without a cluster."""
    _, _, *words = shlex.split(command)
    subprocess.run([helm, "template", *words, "--kube-version", "1.33"], check=True, cwd=ROOT)


def test_what_docker_is_told_to_build_there_is() -> None:
    images = (ROOT / "Dockerfile").read_text()
    text = "".join(page.read_text() for page in PAGES)
    looped = " ".join(re.findall(r"for service in ([^;]+); do", text)).split()
    targets = {*re.findall(r"--target ([\w-]+)", text), *looped}
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", images, re.MULTILINE))
    assert {"kvcache", "worker", "gateway"} <= targets <= stages
    arguments = set(re.findall(r"--build-arg (\w+)=", text))
    assert arguments
    assert arguments <= set(re.findall(r"^ARG (\w+)=", images, re.MULTILINE))


def snippets(language: str) -> list[Any]:
    """All blocks in that language."""
    found = []
    for page in PAGES:
        blocks = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
        found += [pytest.param(text, id=f"{page.name}-{i}") for i, text in enumerate(blocks)]
    return found


@pytest.mark.parametrize("text", snippets("toml"))
def test_settings_are_taken(text: str, tmp_path: Path) -> None:
    file = tmp_path / "given.toml"
    file.write_text(text.replace("64 hexadecimal digits", "0" * 64))
    tables = {name.split(".")[0] for name in re.findall(r"^\[+([\w.]+)\]+$", text, re.MULTILINE)}
    assert tables
    for name in tables:
        if name in CONFIGS:
            settings.load(CONFIGS[name], name, file=file)
        elif TABLES[name] == "quotas":
            assert Quotas(file).of("acme").requests_per_minute
        else:
            StaticTokens(file)


@pytest.mark.slow
@pytest.mark.parametrize("text", snippets("yaml"))
def test_values_are_taken(text: str, helm: str, tmp_path: Path) -> None:
    values = yaml.safe_load(text)
    assert values
    template(helm, tmp_path, values)


# What needs a gateway is run by tests/gateway/test_examples.py.
@pytest.mark.slow
@pytest.mark.parametrize("text", [s for s in snippets("sh") if "7072" not in s.values[0]])
def test_a_shell_example_runs(text: str) -> None:
    done = subprocess.run(["bash", "-euc", text], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def worker(launch_module: Any, reference_model: Path) -> Any:
    return start_worker(launch_module, reference_model)


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("text", snippets("python"))
def test_a_python_example_runs(text: str, launch: Any, worker: Any, authority: Any, tmp_path: Path) -> None:
    """Each against a gateway of its own, over TLS and with a token where it uses one."""
    flags: tuple[str, ...] = ("--http-listen", "127.0.0.1:0")
    if secured := "tls=" in text:
        ca = authority("ca")
        cert, key = ca.issue("gateway")
        (tmp_path / "token").write_text("t")
        flags += ("--tls-cert", str(cert), "--tls-key", str(key), *token_flags(tmp_path, token_entry("t", "app")))
        text = text.replace("/run/token", str(tmp_path / "token")).replace("ca.crt", str(ca.ca))
    gateway = start_gateway(launch, tmp_path, worker, *flags, services=2)
    if not secured:
        with Client(gateway.address) as client:
            client.ingest("notes", "a.md", "Report Velkorda. The lake is blue. The code of Bervek is 535.")
    text = text.replace("127.0.0.1:7072", gateway.address).replace("gateway.example:7072", gateway.address)
    if "127.0.0.1:7070" in text:
        text = text.replace("127.0.0.1:7070", start_cache(launch, tmp_path).address)
    text = text.replace("127.0.0.1:8080", gateway.addresses["fusionkv-gateway-http"][0])
    assert run_python("-c", text, timeout=200).stdout.strip()


@pytest.mark.slow
@pytest.mark.system
@pytest.mark.parametrize("weights", [False, pytest.param(True, marks=pytest.mark.weights)])
@pytest.mark.parametrize(
    ("page", "first", "last"), [("README.md", "## Try it", "\n## "), ("docs/tutorial.md", "# ", "## 6")]
)
def test_the_commands_of_a_page_answer_as_it_says(
    root: Path, launch: Any, tmp_path: Path, page: str, first: str, last: str, weights: bool
) -> None:
    """As they stand, apart from ports and folders, which tests do not share.

    weights: with the models that they fetch. Without them, a small model takes the place of both, and its answers are
    no answers, so a dozen of the documents suffices.
    """
    clone = root
    if not weights:
        clone = tmp_path / "clone"
        world = clone / "examples/world/halmere"
        world.mkdir(parents=True)
        for file in sorted((root / "examples/world/halmere").iterdir())[:12]:
            shutil.copy(file, world)
    text = (root / page).read_text().partition(first)[2].partition(last)[0]
    lines = [shlex.split(line)[1:] for line in re.findall(r"^    (fusionkv .*)$", text, re.MULTILINE)]
    assert lines[:3] == [
        ["model", "get", "smollm2"],
        ["model", "get", "minilm"],
        ["serve", "all", "--model", "smollm2"],
    ]
    assert [words[0] for words in lines[3:]][:3] == ["ingest", "ask", "ask"]
    own = ("--listen", "127.0.0.1:0", "--data-dir", str(tmp_path / "data"), "--json")
    model = "smollm2" if weights else str(root / "models/eased-3")
    env = {"FUSIONKV_WORKER_THREADS": "1", "FUSIONKV_GATEWAY_EMBEDDER": "minilm" if weights else "none"}
    service = launch("fusionkv.gateway.cli.main", "serve", "all", "--model", model, *own, services=0, env=env)
    service.wait_for_line('"event": "ready"', timeout=120)
    told = [json.loads(line) for line in service.log.splitlines() if line.startswith("{")]
    (address,) = [event["addresses"][0] for event in told if event.get("service") == "gateway"]
    explained = tmp_path / "answer.html"
    (expected,) = re.findall(r"(?:The answer is|should name) the (\w+)\.", text)
    for words in lines[3:]:
        argv = [str(explained) if word == explained.name else word for word in words]
        done = fusionkv(*argv, "--gateway", address, cwd=clone, timeout=600)
        if words[0] == "ask" and weights:
            assert expected in done.stdout
    assert "full_attention" in explained.read_text().replace("<wbr>", "")
