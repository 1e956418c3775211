"""The readable output of `fusionkv stats`: rates and units instead of raw counters."""

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from rich.filesize import decimal

Values = Mapping[str, Any]


def gateway(s: Values) -> dict[str, str]:
    return {
        "version": s["version"],
        "model": s["model"] or "no worker is reachable",
        "uptime": _time(s["uptime_seconds"]),
        "requests": f"{s['requests']:,} ({s['requests_failed']:,} failed, {s['requests_degraded']:,} degraded)",
        "corpora": f"{s['documents']:,} documents, {s['chunks']:,} chunks",
    }


def worker(s: Values) -> dict[str, str]:
    """Figures of a worker: its recipes with the verdicts of `fusionkv check`, if it was run."""
    verdicts = {v["recipe"]: v["verdict"] for v in s["verdicts"]}
    recipes = [
        f"{r['name']}, {r['ratio']:.0%} recomputed" + (f": {verdicts[r['name']]}" if r["name"] in verdicts else "")
        for r in s["recipes"]
    ]
    return {
        "address": s["address"],
        "model": f"{s['name']} ({s['family']}, {s['dtype']} on {s['device']})",
        "KV": f"{decimal(s['kv_bytes_per_token'])} per token, prompts of up to {s['max_tokens']:,} tokens",
        "recipes": "\n".join(recipes),
        "modifiers": ", ".join(s["modifiers"]),
    }


def cache(s: Values) -> dict[str, str]:
    hits, missed = s["hits_exact"] + s["hits_alternative"], s["misses"]
    rate = f"{hits / (hits + missed):.0%} of {hits + missed:,} chunks" if hits + missed else "no lookups yet"
    tiers = {
        t["tier"]: f"{t['entries']:,} entries, {decimal(t['used_bytes'])} of {decimal(t['capacity_bytes'])}"
        for t in s["tiers"]
    }
    return {
        "address": s["address"],
        "uptime": _time(s["uptime_seconds"]),
        "hit rate": f"{rate} ({s['hits_exact']:,} exact, {s['hits_alternative']:,} alternative)",
        "puts": f"{s['puts']:,} ({s['puts_existing']:,} already stored, {s['puts_refused']:,} refused)",
        "transferred": f"{decimal(s['bytes_put'])} put, {decimal(s['bytes_fetched'])} fetched",
        "damaged": f"{s['checksum_failures']:,} checksum failures",
        **tiers,
    }


def _time(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
