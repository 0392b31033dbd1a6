"""Talk to `urank serve` from Python: `Client`, and `AsyncClient` for programs that run on asyncio.

    with urank.Client("http://127.0.0.1:8000") as client:
        ranking = client.rank(candidates, query_id="q1")
        client.click(ranking, ranking.ids[0])

What is asked and how an answer is read stands in `calls`, as functions that send nothing; when a request is repeated,
in `retries`; the two clients only send.
"""

from urank.client.client import AsyncClient, Client
from urank.client.errors import ServerError
from urank.client.schemas import (
    ExplainedItem,
    Explanation,
    ModelFacts,
    Order,
    RankedItem,
    Ranking,
    Reloaded,
    Shadow,
    SplitTest,
)

__all__ = [
    "AsyncClient",
    "Client",
    "ExplainedItem",
    "Explanation",
    "ModelFacts",
    "Order",
    "RankedItem",
    "Ranking",
    "Reloaded",
    "ServerError",
    "Shadow",
    "SplitTest",
]
