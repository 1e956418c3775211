"""`python -m fusionkv.gateway`: one gateway process."""

import argparse
import asyncio
import sys
from pathlib import Path

from fusionkv.gateway.config import GatewayConfig
from fusionkv.protos import rpc, settings, telemetry


def main() -> int:
    parser = argparse.ArgumentParser(prog="fusionkv-gateway", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; its table [gateway] is read")
    settings.add_flags(parser, GatewayConfig)
    flags = vars(parser.parse_args())
    try:
        config = settings.load(GatewayConfig, "gateway", file=flags.pop("config"), flags=flags)
        telemetry.attach("fusionkv-gateway")
        asyncio.run(_serve(config))
    except (settings.SettingsError, OSError) as error:
        print(f"fusionkv-gateway: {error}", file=sys.stderr)
        return 1
    finally:
        telemetry.detach()
    return 0


async def _serve(config: GatewayConfig) -> None:
    from fusionkv.gateway.retrieval.embedded import EmbeddedRetrieval
    from fusionkv.gateway.servicer import SERVICE, GatewayServicer
    from fusionkv.gateway.workers import WorkerPool

    retrieval = await EmbeddedRetrieval.open(config.data_dir)
    servicer = GatewayServicer(config, retrieval, WorkerPool(config.workers, config.client_tls()))
    await rpc.serve(
        "fusionkv-gateway",
        config.listen,
        {SERVICE.full_name: rpc.handlers(SERVICE, servicer)},
        drain_seconds=config.drain_seconds,
        on_drain=servicer.close,
        tls=config.server_tls,
    )


if __name__ == "__main__":
    sys.exit(main())
