"""Two tenants with the same documents on the same services: neither learns anything of the other."""

import hashlib
import hmac
import random
import secrets
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fusionkv.fusion_worker.client import WorkerClient
from fusionkv.fusion_worker.models import LAYOUT
from fusionkv.gateway.client.client import Client
from fusionkv.gateway.client.results import Summary, Token
from fusionkv.gateway.ingest.document import Document
from fusionkv.gateway.plan import corpus_name
from fusionkv.gateway.tokens import Vocabulary
from fusionkv.kvcache_service import keys
from fusionkv.protos.deadline import Deadline
from fusionkv.protos.runtime.errors import NotFound, PermissionDenied, ServiceError
from tests.services import Launch, start_cache, start_gateway, start_worker, token_entry, token_flags
from tests.system.prompts import request
from tests.waiting import until

pytestmark = [pytest.mark.system, pytest.mark.slow]
PAIRS, MOST_ROUNDS = 30, 4
TOKENS = {(tenant, role): secrets.token_urlsafe(32) for tenant in ("acme", "bolt") for role in ("app", "operator")}
WORDS = ["harbour", "engine", "winter", "ledger", "copper", "meadow", "signal", "archive", "lantern", "bridge"]


class Services:
    """One cache service, one worker, one gateway that asks for tokens and hashes tenants' names."""

    def __init__(self, launch: Launch, folder: Path, model: Path) -> None:
        self.folder = folder
        self.cache = start_cache(launch, folder)
        self.worker = start_worker(launch, model, "--pool-bytes", "256MiB", cache=self.cache)
        tokens = token_flags(folder, *(token_entry(token, role, t) for (t, role), token in TOKENS.items()))
        (folder / "tenant.key").write_bytes(secrets.token_bytes(32))
        secure = (*tokens, "--tenant-key", str(folder / "tenant.key"), "--chunk-tokens", "512")
        self.gateway = start_gateway(launch, folder, self.worker, *secure)

    def client(self, tenant: str, role: str = "app") -> Client:
        return Client(self.gateway.address, token=TOKENS[tenant, role])


@pytest.fixture(scope="module")
def services(launch_module: Launch, reference_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Services:
    return Services(launch_module, tmp_path_factory.mktemp("isolation"), reference_model)


def text(name: str, number: int) -> str:
    """A document of about 900 tokens; its first chunk, of 512, is found by its name."""
    chosen = random.Random(f"{name}{number}")
    return f"Report {name}{number}. " + " ".join(chosen.choice(WORDS) for _ in range(150))


def found(client: Client, corpus: str, question: str) -> dict[str, int]:
    """Chunks of one answer, by where they came from."""
    summary = client.ask(corpus, question, top_k=1, max_tokens=1).summary
    assert summary.chunks_retrieved == 1
    hits = {f"{h.kind} {h.tier}": h.chunks for h in summary.hits}
    return {**hits, "missed": summary.chunks_missed} if summary.chunks_missed else hits


def test_what_one_tenant_cached_is_no_hit_for_another(services: Services) -> None:
    with services.client("acme") as acme, services.client("bolt") as bolt:
        for client in (acme, bolt):
            client.ingest("same", "report", text("Delta", 0), media_type="text/plain")
        ask = "same", "Report Delta0?"
        assert found(acme, *ask) == {"missed": 1}
        assert found(acme, *ask) == {"exact device": 1}
        assert found(bolt, *ask) == {"missed": 1}
        assert found(bolt, *ask) == {"exact device": 1}


def test_a_tenant_sees_and_deletes_nothing_of_another(services: Services) -> None:
    with services.client("acme", "operator") as acme, services.client("bolt", "operator") as bolt:
        for number in range(3):
            acme.ingest("private", f"page-{number}", text("Echo", number), media_type="text/plain")
        acme.ingest("private-2", "page", text("Echo", 9), media_type="text/plain")
        assert "private" in [item.name for item in acme.list()]
        assert "private" not in [item.name for item in bolt.list()]
        for corpus in ("private", "none"):
            # Another tenant's corpus is told of in the same words as one that does not exist.
            for call in (
                lambda c: bolt.list(c),
                lambda c: bolt.delete(c),
                lambda c: bolt.delete(c, "page-1"),
                lambda c: bolt.retrieve(c, "Report Echo1?"),
                lambda c: bolt.ask(c, "Report Echo1?"),
                lambda c: list(bolt.precompute(c)),
            ):
                with pytest.raises(NotFound) as raised:
                    call(corpus)
                told = f"gateway: no corpus {corpus!r}"
                assert str(raised.value).startswith(f"{told}: list the corpora")
        for guess in ("acme/private", "../acme/private", "tenants/acme", "..", "acme\0private"):
            with pytest.raises(ServiceError) as error:
                bolt.list(guess)
            assert error.value.status.name in ("INVALID_ARGUMENT", "NOT_FOUND")
        assert len(acme.list("private")) == 3
        bolt.ingest("private", "mine", text("Foxtrot", 0), media_type="text/plain")
        assert [item.name for item in bolt.list("private")] == ["mine"]
        bolt.delete("private")
        assert len(acme.list("private")) == 3
        with services.client("acme") as app, pytest.raises(PermissionDenied):
            app.delete("private")


async def test_a_tenants_name_opens_nothing_in_worker_or_cache(services: Services, cache_client: Any) -> None:
    """Who reaches them past the gateway still needs the gateway's tenant key to name a tenant's entries."""
    with services.client("acme") as acme:
        acme.ingest("guess", "report", text("Golf", 0), media_type="text/plain")
        assert found(acme, "guess", "Report Golf0?") == {"missed": 1}
    key = (services.folder / "tenant.key").read_bytes()
    salt = hmac.new(key, b"acme", hashlib.sha256).hexdigest()
    worker, cache = WorkerClient(services.worker.address), cache_client(services.cache)
    model = await worker.model()
    vocabulary = Vocabulary(model)
    ids = vocabulary.chunks(Document(text("Golf", 0)), 512, 0)[0][1]  # the one that holds the name
    for tenant, hits in (("acme", 0), ("", 0), (salt, 1)):
        prompt = vocabulary.system(), [ids], vocabulary.question("Why?"), 1
        asked = request(*prompt, recipe="full_reuse", tenant=tenant)
        replies = [reply async for reply in worker.generate(asked, Deadline.after(60))]
        assert sum(hit.chunks for hit in replies[-1].summary.hits) == hits
    settings = {"dtype": model.dtype, "layout": LAYOUT}
    # The worker stores what was asked for under the plain name; the gateway's own entries have another.
    names = {name: keys.namespace(model.fingerprint, settings, name) for name in ("acme", "bolt", salt)}
    assert await cache.delete(namespace=names["bolt"]) == 0
    path = [(keys.chunk_digest(vocabulary.system()), ()), (keys.chunk_digest(ids), ())]

    async def stored(name: str) -> bool:
        """Which the worker does in the background."""
        return all(hit.entry for hit in (await cache.lookup(names[name], path, timeout=20)).hits)

    await until(lambda: stored("acme"))
    await until(lambda: stored(salt))
    assert await cache.delete(namespace=names["acme"]) == len(path)
    await worker.close()


async def test_a_tenants_primer_is_made_of_its_own_chunks(services: Services, cache_client: Any) -> None:
    worker, cache = WorkerClient(services.worker.address), cache_client(services.cache)
    model = await worker.model()
    await worker.close()
    vocabulary, key = Vocabulary(model), (services.folder / "tenant.key").read_bytes()
    held: dict[str, set[bytes]] = {}
    for tenant, name in (("acme", "Hotel"), ("bolt", "India")):
        with services.client(tenant) as client:
            client.ingest("primed", "report", text(name, 0), media_type="text/plain")
            client.ask("primed", f"Report {name}0?", recipe="default", max_tokens=1)
        salt = hmac.new(key, tenant.encode(), hashlib.sha256).hexdigest()
        namespace = keys.namespace(model.fingerprint, {"dtype": model.dtype, "layout": LAYOUT}, salt)
        path = [(keys.primer_name(corpus_name(salt, "primed")), ())]
        (hit,) = (await cache.lookup(namespace, path, timeout=20)).hits
        data = bytearray(hit.entry.size)
        await cache.fetch(hit.entry, memoryview(data), timeout=20)
        digests = {keys.chunk_digest(ids) for _, ids in vocabulary.chunks(Document(text(name, 0)), 512, 0)}
        held[tenant] = {digest for digest in digests if digest in data}
    assert held["acme"]
    assert held["bolt"]
    assert held["acme"].isdisjoint(held["bolt"])


@pytest.mark.long
def test_a_miss_takes_as_long_whether_or_not_another_tenant_has_the_document(services: Services) -> None:
    """A signed-rank test over pairs that are asked in random order; the same test tells hits from misses.

    Where others keep the machine busy that takes more pairs.
    """
    order = random.Random(1)
    shared, alone, again = [], [], []
    with services.client("acme") as acme, services.client("bolt") as bolt:
        for round in range(MOST_ROUNDS):
            numbers = range(round * PAIRS, (round + 1) * PAIRS)
            for number in numbers:
                for name in ("Shared", "Alone"):
                    bolt.ingest("timing", f"{name}{number}", text(name, number), media_type="text/plain")
                acme.ingest("timing", f"Shared{number}", text("Shared", number), media_type="text/plain")
                assert found(acme, "timing", f"Report Shared{number}?") == {"missed": 1}
            bolt.ingest("timing", "warm", text("Warm", 0), media_type="text/plain")
            for _ in range(5):
                bolt.ask("timing", "Report Warm0?", top_k=1, max_tokens=1)
            for number in numbers:
                pair = [("Shared", shared), ("Alone", alone)]
                order.shuffle(pair)
                for name, seconds in pair:
                    seconds.append(first_token(bolt, f"Report {name}{number}?", misses=1))
                again.append(first_token(bolt, f"Report Shared{number}?", misses=0))
            if (control := likelihood(np.array(alone) - again)) < 1e-4:
                break
    unlike = likelihood(np.array(alone) - shared)
    figures = ", ".join(
        f"{name} {1e3 * statistics.median(seconds):.2f} ms"
        for name, seconds in (("had by the other", shared), ("had by nobody", alone), ("had by oneself", again))
    )
    print(f"{figures}; p = {unlike:.4f} between misses, {control:.6f} between hit and miss")
    assert control < 1e-4, f"hits can't be told from misses, so this proves nothing: {figures}"
    assert unlike > 1e-4, f"what another tenant has shows in the time of a miss: {figures}"


def first_token(client: Client, question: str, misses: int) -> float:
    """Seconds from asking to the first token, as the caller sees them."""
    began = time.perf_counter()
    seconds = 0.0
    for event in client.stream("timing", question, top_k=1, max_tokens=1):
        if isinstance(event, Token) and not seconds:
            seconds = time.perf_counter() - began
        elif isinstance(event, Summary):
            assert (event.chunks_missed, event.degraded) == (misses, False)
    return seconds


def likelihood(differences: Sequence[float] | np.ndarray, draws: int = 200_000) -> float:
    """How often differences of random sign have a signed-rank sum as far from 0 as these: two-sided p.

    By rank, so that a request which the machine delayed weighs no more than another.
    """
    differences = np.asarray(differences)
    ranks = np.argsort(np.argsort(np.abs(differences))) + 1.0
    signs = np.random.default_rng(0).choice([-1.0, 1.0], size=(draws, len(ranks)))
    seen = abs((np.sign(differences) * ranks).sum())
    return float((np.abs(signs @ ranks) >= seen).mean())
