"""Ordered read-ahead under one byte budget. See README.md in this folder."""

from penstock.fetch.budget import Budget, BudgetStatistics, process_budget, set_process_budget, set_process_budget_once
from penstock.fetch.chunk import Chunk
from penstock.fetch.plan import PlanItem, Request, coalesce, cut
from penstock.fetch.read_ahead import FetchStatistics, ReadAhead
from penstock.fetch.requests import ObjectRead, PartRequest
from penstock.fetch.scheduler import PARTS_PER_REQUEST

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
    "coalesce",
    "cut",
    "process_budget",
    "set_process_budget",
    "set_process_budget_once",
]
