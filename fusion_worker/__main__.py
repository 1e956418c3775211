"""`python -m fusionkv.fusion_worker`: one fusion worker process."""

import argparse
import asyncio
import sys
from pathlib import Path

from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.cores import cores
from fusionkv.protos import rpc, settings, telemetry
from fusionkv.protos.errors import ServiceError


def main() -> int:
    parser = argparse.ArgumentParser(prog="fusionkv-worker", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; its table [worker] is read")
    settings.add_flags(parser, WorkerConfig)
    flags = vars(parser.parse_args())
    try:
        config = settings.load(WorkerConfig, "worker", file=flags.pop("config"), flags=flags)
        telemetry.attach("fusionkv-worker", config.metrics_listen)
        asyncio.run(_serve(config))
    except (settings.SettingsError, ServiceError, OSError, ValueError) as error:
        print(f"fusionkv-worker: {error}", file=sys.stderr)
        return 1
    finally:
        telemetry.detach()
    return 0


async def _serve(config: WorkerConfig) -> None:
    import torch

    from fusionkv.fusion_worker import models, verdict
    from fusionkv.fusion_worker.servicer import SERVICE, FusionServicer

    torch.set_num_threads(config.threads or cores())
    model = models.load(config.model, config.device, config.dtype, config.max_prompt_tokens)
    # On the CPU, whose threads are idle while a GPU works.
    auxiliary = models.load(Path(config.auxiliary), device="cpu") if config.auxiliary else None
    servicer = FusionServicer(config, model, auxiliary, verdict.read(config.model, model.fingerprint))
    handler = rpc.handlers(SERVICE, servicer)
    await rpc.serve(
        "fusionkv-worker",
        config.listen,
        {SERVICE.full_name: handler},
        drain_seconds=config.drain_seconds,
        on_drain=servicer.close,
        tls=config.server_tls,
    )


if __name__ == "__main__":
    sys.exit(main())
