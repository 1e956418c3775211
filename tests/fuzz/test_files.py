"""Files of a configuration: taken, or refused by the one error that says so, whatever they hold."""

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import jwt
import pytest
from hypothesis import strategies as st

from fusionkv.fusion_worker.quality.verdict import FILE, Verdict
from fusionkv.fusion_worker.transfer import signatures
from fusionkv.gateway.auth import tenants
from fusionkv.gateway.auth.access import Bearer, Role
from fusionkv.gateway.auth.verifiers import KeyFile, StaticTokens
from fusionkv.kvcache_service.tiers.sealed_disk import DiskKeys
from fusionkv.protos.runtime.errors import FailedPrecondition, PermissionDenied, Unauthenticated
from fusionkv.protos.runtime.watched import BadFile
from tests.fuzz.effort import fuzz
from tests.fuzz.wire import JSON
from tests.gateway.test_jwt import CLAIMS, Signer, coded, part

pytestmark = pytest.mark.hypothesis

PIECES = st.sampled_from(
    [
        "[[token]]", "[default]", "[tenants.a]", 'name = "a"', 'role = "app"', 'tenant = "a"', "tenant = 3", "a = 1",
        "requests_per_minute = 5", 'stored_bytes = "1GiB"', "tokens_per_minute = -1", "tokens_per_minute = true",
        f'sha256 = "{"0" * 64}"', 'sha256 = "zz"', "= ", "[", "0" * 64, "zz" * 32, "\ufeff",
        '{"keys": []}', '{"keys": [{"kty": "EC"}]}', "null", '{"recipes": {}, "fingerprint": ""}', '{"recipes": []}',
    ]
)  # fmt: skip
LINES = st.lists(PIECES, max_size=6).map(lambda lines: "\n".join(lines).encode())
CONTENTS = st.one_of(st.binary(max_size=80), LINES)
READERS: dict[str, Any] = {
    "tokens": StaticTokens,
    "quotas": lambda file: tenants.Quotas(file).of("a"),
    "jwks": KeyFile,
    "disk keys": DiskKeys,
    "signing keys": signatures.Signer,
    FILE: lambda file: Verdict.read(file.parent, b""),
}


@pytest.mark.parametrize("name", READERS)
def test_files(name: str, tmp_path: Path) -> None:
    file = tmp_path / name

    def configured_file(data: bytes) -> None:
        file.write_bytes(data)
        with contextlib.suppress(FailedPrecondition if name == FILE else BadFile):
            READERS[name](file)

    fuzz(configured_file, CONTENTS, 100)


def _signed(signer: Signer, claims: Any, headers: Any) -> str:
    """The issuer itself may sign nonsense."""
    said = f"{part({'alg': 'ES256', 'kid': signer.id, **headers})}.{part({**CLAIMS, 'exp': 1 << 40, **claims})}"
    return f"{said}.{coded(jwt.get_algorithm_by_name('ES256').sign(said.encode(), signer.key))}"


SIGNED_CLAIMS = st.fixed_dictionaries({}, optional=dict.fromkeys([*CLAIMS, "exp", "nbf", "iat", "jti"], JSON))
SIGNED_HEADERS = st.fixed_dictionaries({}, optional=dict.fromkeys(["alg", "kid", "typ", "crit", "b64", "cty"], JSON))


def test_bearer_tokens(bearer: Bearer, signer: Signer) -> None:
    good = signer.token()

    def bearer_token(given: list[str]) -> None:
        with contextlib.suppress(Unauthenticated, PermissionDenied):
            asyncio.run(bearer.admit(given, "/gateway.v1.GatewayService/List"))

    def signed_token(given: tuple[dict[str, Any], dict[str, Any]]) -> None:
        claims, headers = given
        with contextlib.suppress(Unauthenticated, PermissionDenied):
            caller = asyncio.run(bearer._verifiers[1].caller(_signed(signer, claims, headers)))
            assert caller is None or (caller.role in set(Role) and caller.tenant == {**CLAIMS, **claims}["tenant"])

    def changed(at: tuple[int, str]) -> str:
        place = at[0] % len(good)
        return good[:place] + at[1] + good[place + 1 :]

    values = st.one_of(
        st.tuples(st.integers(0, 1000), st.characters()).map(changed),
        st.text(max_size=200),
        st.sampled_from([good, good + ".", "a.b.c", "..", "\udcff", "e30.e30.", good.rpartition(".")[0] + "."]),
        st.builds(_signed, st.just(signer), SIGNED_CLAIMS, SIGNED_HEADERS),
    )
    bearer_token(["Bearer \udcff"])  # a byte of a header that is no UTF-8
    schemes = st.sampled_from(["Bearer ", "bearer ", "Basic ", ""])
    fuzz(bearer_token, st.lists(st.tuples(schemes, values).map("".join), max_size=2), 150)
    fuzz(signed_token, st.tuples(SIGNED_CLAIMS, SIGNED_HEADERS), 100)
