"""How a worker's ranks start: each reads its part of the model; rank 0 gets a crew, the others follow it."""

from pathlib import Path

import torch

from fusionkv.fusion_worker import models
from fusionkv.fusion_worker.config import WorkerConfig
from fusionkv.fusion_worker.cores import cores
from fusionkv.fusion_worker.models import Model
from fusionkv.fusion_worker.tensor_parallel import lane
from fusionkv.fusion_worker.tensor_parallel.crew import Crew
from fusionkv.fusion_worker.tensor_parallel.lane import Joined
from fusionkv.fusion_worker.tensor_parallel.leader import Leader
from fusionkv.fusion_worker.tensor_parallel.member import Member
from fusionkv.fusion_worker.tensor_parallel.processes import Processes


async def lead(config: WorkerConfig, processes: Processes) -> tuple[Model, Crew]:
    """Rank 0's model and crew. Raises as `models.load` does, and RankLost when another rank can't start."""
    set_threads(config)
    if config.tensor_parallel == 1:
        return models.load(config.model, config.device, config.dtype, config.max_prompt_tokens), Crew()
    model, joined = await processes.beside(lambda: _join(config, 0, processes.meeting))
    return model, Leader(joined, processes.report)


def follow(config: WorkerConfig, rank: int, meeting: Path) -> None:
    """Another rank's life. Ends when rank 0 says so, or the process with status 1."""
    set_threads(config)
    model, joined = _join(config, rank, meeting)
    Member(config, model, joined).run()
    lane.leave()


def set_threads(config: WorkerConfig) -> None:
    """The rank's share of the CPU threads."""
    torch.set_num_threads(max(1, (config.threads or cores()) // config.tensor_parallel))


def _join(config: WorkerConfig, rank: int, meeting: Path) -> tuple[Model, Joined]:
    device = models.rank_device(config.device, rank)
    joined = lane.join(rank, config.tensor_parallel, meeting, device, config.rank_timeout)
    model = models.load(config.model, str(device), config.dtype, config.max_prompt_tokens, joined.ranks)
    lane.all_here()
    return model, joined
