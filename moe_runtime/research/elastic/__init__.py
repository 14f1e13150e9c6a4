"""A generation service that grows and shrinks while it generates (ElasticMoE)."""

from moe_runtime.research.elastic.member import ElasticRequest
from moe_runtime.research.elastic.service import (
    ChangeReport,
    ElasticService,
    run_worker,
    start_local_workers,
)

__all__ = ["ChangeReport", "ElasticRequest", "ElasticService", "run_worker", "start_local_workers"]
