"""Ordered read-ahead under one byte budget. See README.md in this folder."""

from penstock.fetch.budget import Budget, BudgetStatistics, configure_process_budget, process_budget, set_process_budget
from penstock.fetch.plan import PlanItem, Request, coalesce, requests_count
from penstock.fetch.read_ahead import ReadAhead, SingleRead
from penstock.fetch.requests import ObjectRead, PartRequest
from penstock.fetch.scheduler import PARTS_PER_REQUEST, FetchStatistics
from penstock.types import Chunk

__all__ = [
    "PARTS_PER_REQUEST",
    "Budget",
    "BudgetStatistics",
    "Chunk",
    "FetchStatistics",
    "ObjectRead",
    "PartRequest",
    "PlanItem",
    "ReadAhead",
    "Request",
    "SingleRead",
    "coalesce",
    "configure_process_budget",
    "process_budget",
    "requests_count",
    "set_process_budget",
]
