"""`python -m fusionkv.fusion_worker`: one fusion worker process."""

import argparse
import asyncio
import logging
import sys
from dataclasses import replace
from pathlib import Path

from fusionkv.fusion_worker.config import WorkerConfig, cache_address, configured
from fusionkv.fusion_worker.library import lean
from fusionkv.protos.observe import handshakes, telemetry
from fusionkv.protos.runtime import folders, process, rpc, settings
from fusionkv.protos.runtime.errors import ServiceError, printable

log = logging.getLogger(__name__)


def main() -> int:
    process.open_streams()
    process.end_when_told()
    process.end_when_interrupted()
    folders.settle()
    parser = argparse.ArgumentParser(prog="fusionkv-worker", description=__doc__)
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file; its table [worker] is read")
    settings.add_flags(parser, WorkerConfig)
    # Passed by rank 0 to the other ranks, which it starts.
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--pipes", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--parent", type=int, help=argparse.SUPPRESS)
    flags = vars(parser.parse_args())
    rank, meeting, pipes, parent = (flags.pop(name) for name in ("rank", "meeting", "pipes", "parent"))
    try:
        if rank:  # before the imports, which take seconds
            process.end_with_parent(parent=parent)
        config = configured(flags.pop("config"), flags)
        if rank:
            from fusionkv.fusion_worker.tensor_parallel import start

            start.follow(config, rank, meeting, pipes)
            return 0
        process.share_heaps()
        config.check_ports()
        telemetry.attach("fusionkv-worker", config.metrics_listen)
        if config.tls_cert or config.tls_ca:
            handshakes.attach()
        asyncio.run(_serve(replace(config, cache=cache_address(config.cache))))
    except (settings.SettingsError, ServiceError, OSError, ValueError) as error:
        print(f"fusionkv-worker: {error}", file=sys.stderr)
        return 1
    finally:
        telemetry.detach()
    return 0


async def _serve(config: WorkerConfig) -> None:
    with lean.uncompiled(ranks=config.tensor_parallel):
        from fusionkv.fusion_worker import meters, models
        from fusionkv.fusion_worker.quality.verdict import Verdict
        from fusionkv.fusion_worker.servicer import SERVICE, FusionServicer, handler
        from fusionkv.fusion_worker.tensor_parallel import start

    if config.tensor_parallel > 1:
        models.check_shareable(config.model, config.tensor_parallel)
    async with start.started(config.tensor_parallel, sys.argv[1:]) as ranks:
        with lean.uncompiled(ranks=config.tensor_parallel):
            model, tp = await ranks.lead(config)
            # On the CPU, which is idle while a GPU computes.
            auxiliary = models.load(Path(config.auxiliary), device="cpu") if config.auxiliary else None
        judged = Verdict.read(config.model, model.fingerprint, auxiliary.fingerprint if auxiliary else b"")
        for line in judged.lines():
            log.info("fusionkv check: %s", printable(line))
        servicer = FusionServicer(config, model, auxiliary, judged, tp)
        admission = servicer.answerer.admission
        meters.observe(lambda: (admission.waiting, admission.running), servicer.pool)
        returning = asyncio.create_task(process.return_memory())
        services = {SERVICE.full_name: handler(servicer)}
        await rpc.serve("fusionkv-worker", config, rpc.Served(services, failure=ranks.lost, on_drain=servicer.close))
        returning.cancel()


if __name__ == "__main__":
    sys.exit(main())
