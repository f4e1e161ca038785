"""What operators and monitoring ask: is it up, what does it do, and what does its cache hold."""

import asyncio
from dataclasses import asdict, replace

from starlette.responses import Response

from bough.cache.explain import Loss
from bough.cache.extent import salt_key
from bough.server.api import Api, Call, Endpoint, Json
from bough.server.openai import error
from bough.server.schema import Either, Listed, Record, Text, Whole


async def health(call: Call) -> Response:
    closing = call.service.closing
    return Json({"status": "closing" if closing else "ready", "model": call.service.name}, 503 if closing else 200)


async def metrics(call: Call) -> Response:
    text = await asyncio.to_thread(call.service.metrics.text)
    return Response(text, media_type="text/plain; version=0.0.4")


async def tree(call: Call) -> Response:
    """The nodes. Where keys have caches of their own, each sees its own."""
    rows = await asyncio.to_thread(call.service.engine.cache.describe, call.query.get("most", 1000))
    if call.context.tenant is not None:
        own = salt_key(call.salt()).hex()
        rows = [row for row in rows if own.startswith(row["salt"])]
    return Json(rows)


async def stats(call: Call) -> Response:
    return Json(await asyncio.to_thread(call.service.engine.cache.stats))


async def explain(call: Call) -> Response:
    prompt = await call.service.plain_prompt(call.body["prompt"])
    salt = call.salt(call.body.get("cache_salt"))
    told = await asyncio.to_thread(call.service.engine.cache.explain, prompt.tokens, salt)
    if call.context.tenant is not None:  # what others have asked is not for this one to know
        losses = [_unseen(loss) if loss.reason == "salted" else loss for loss in told.losses]
        told = replace(told, losses=losses)
    return Json(asdict(told))


def _unseen(loss: Loss) -> Loss:
    return replace(loss, reason="never seen", detail="no earlier request went on like this")


EXPLAIN = Record(
    {
        "prompt": Either(
            (Text(least=1), Listed(Whole(0, 2**31 - 1), least=1)), "text or a list of token ids, and not empty"
        ),
        "cache_salt": Text(about="of the request that is asked about"),
    },
    needed=("prompt",),
)
MOST = Record({"most": Whole(1, 100_000, about="nodes to tell of")})

API = Api(
    "operations",
    ("/health", "/metrics", "/cache"),
    error,
    (
        Endpoint("GET", "/health", health, "Whether the server is ready, or closing"),
        Endpoint("GET", "/metrics", metrics, "Counters for Prometheus", media_type="text/plain"),
        Endpoint("GET", "/cache", tree, "The nodes of the prefix cache, parents before children", query=MOST),
        Endpoint("GET", "/cache/stats", stats, "Counters of the cache, and the bytes that each tier holds"),
        Endpoint("POST", "/cache/explain", explain, "How much of a prompt is known, and why no more", EXPLAIN),
    ),
)
