"""Python clients of `urank serve`: `Client`, and `AsyncClient` for asyncio.

    with urank.Client("http://127.0.0.1:8000") as client:
        ranking = client.rank(candidates, query_id="q1")
        client.click(ranking, ranking.ids[0])

`transport` builds requests, reads answers and decides on retries without any I/O; the two clients only send.
`wire_schemas` holds the answers, and the server describes its API with the same classes.
"""

from urank.client.client import AsyncClient, Client
from urank.client.transport import ServerError
from urank.client.wire_schemas import (
    ExplainedItem,
    Explanation,
    ItemsStored,
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
    "ItemsStored",
    "ModelFacts",
    "Order",
    "RankedItem",
    "Ranking",
    "Reloaded",
    "ServerError",
    "Shadow",
    "SplitTest",
]
